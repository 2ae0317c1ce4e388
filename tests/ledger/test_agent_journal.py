import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.errors import LedgerError
from campaign.ledger.agent import AgentJournal, follow, read
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.session.ports import Journal
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock

CASES = Path(__file__).parents[1] / "data" / "cases"


def stop(why: str) -> NewEvent:
    return NewEvent("stop_asked", {"by": "ü", "why": why}, session="main")


def journal(path: Path) -> AgentJournal:
    return AgentJournal(path, "agent:main", VirtualClock())


def test_events_get_the_source_and_numbers_that_go_on(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "main.jsonl"
    port: Journal
    with journal(path) as port:
        assert port.append(stop("a")).source_seq == 1
        assert port.append(stop("b")).source_seq == 2
    with journal(path) as again:
        third = again.append(stop("c"))
    assert (third.source, third.source_seq, third.session) == ("agent:main", 3, "main")
    assert [e.payload["why"] for e in read(path, "agent:main")] == ["a", "b", "c"]
    with pytest.raises(LedgerError, match="belongs to agent:main"):
        AgentJournal(path, "agent:other", VirtualClock())


def test_every_append_is_synced(tmp_path: Path, monkeypatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    with journal(tmp_path / "j.jsonl") as j:
        before = len(synced)
        j.append(stop("a"))
        j.append(stop("b"))
        assert len(synced) == before + 2


@given(cut=st.integers(0, 10_000), whys=st.lists(st.text(), min_size=1, max_size=4))
def test_a_cut_at_any_byte_is_repaired_and_numbers_have_no_gap(
    tmp_path_factory, cut: int, whys: list[str]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "j.jsonl"
    ends = []
    with journal(path) as j:
        for why in whys:
            j.append(stop(why))
            ends.append(path.stat().st_size)
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    whole = sum(1 for end in ends if end - 1 <= cut)
    assert [e.payload["why"] for e in read(path)] == whys[:whole]
    with journal(path) as j:
        torn = min(cut, len(data)) not in {0, *ends}
        assert (j.repaired is not None) == torn
        assert j.append(stop("after")).source_seq == whole + 1
    assert [e.source_seq for e in read(path)] == list(range(1, whole + 2))


@pytest.mark.parametrize("name", ["31_bad_middle.json", "31_torn_ledger.json"])
def test_foreign_or_damaged_journals_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes((CASES / name).read_bytes())
    with pytest.raises(LedgerError):
        journal(path)
    with pytest.raises(LedgerError):
        read(path)


def test_damage_in_the_middle_is_refused_before_anything_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with journal(path) as j:
        for why in "abc":
            j.append(stop(why))
    lines = path.read_bytes().splitlines(keepends=True)
    for bad in (b"".join([lines[0], lines[1][:20] + b"\n", lines[2]]), lines[0] + lines[2]):
        path.write_bytes(bad)
        with pytest.raises(LedgerError, match=r":2: not a JSON object|event 2 is missing"):
            journal(path)
        assert path.read_bytes() == bad


def test_following_merges_each_event_once_whatever_the_interruptions(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    run = RunDir(tmp_path / "run")
    with journal(path) as j, Ledger.open(run, VirtualClock(), create=True) as ledger:
        j.append(stop("a"))
        events, offset = follow(path)
        assert len(ledger.append(*events)) == 1
        j.append(stop("b"))
        j.append(stop("c"))
        events, offset = follow(path, offset)
        assert [e.source_seq for e in events] == [2, 3]
        # The controller dies before it remembers the offset, and starts again from 0.
        ledger.append(*events)
        assert ledger.append(*follow(path)[0]) == ()
        assert follow(path, offset) == ([], offset)
        assert len(ledger.events()) == 3


def test_kill_9_keeps_every_acknowledged_event(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys, pathlib\n"
        "from campaign.clock import SystemClock\n"
        "from campaign.ledger.agent import AgentJournal\n"
        "from campaign.ledger.events import NewEvent\n"
        "j = AgentJournal(pathlib.Path(sys.argv[1]), 'agent:main', SystemClock())\n"
        "while True:\n"
        "    print(j.append(NewEvent('stop_asked', {'by': 'me', 'why': 'x' * 3000})).source_seq, flush=True)\n"
    )
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(15)]
        child.kill()
        seen += [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        assert len(read(path)) >= max(seen)
