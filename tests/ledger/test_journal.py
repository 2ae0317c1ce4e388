import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.errors import LedgerError, LedgerLocked
from campaign.ledger.canon import GENESIS, canonical, hash_of
from campaign.ledger.events import PAYLOADS, NewEvent
from campaign.ledger.journal import Ledger, read_events
from campaign.ledger.lock import holder
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock


def beat(n: int, **more) -> NewEvent:
    return NewEvent("agent_heartbeat", {"cell": "c", "done": n, "total": 9}, session="main", **more)


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def test_events_are_numbered_chained_and_read_back(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        assert ledger.head() == (GENESIS, 0)
        first = ledger.append(beat(1), beat(2))
        second = ledger.append(beat(3))
        assert [e.seq for e in (*first, *second)] == [1, 2, 3]
        assert [e.source_seq for e in (*first, *second)] == [1, 2, 3]
        assert first[0].prev_hash == GENESIS
        assert second[0].prev_hash == first[1].hash == hash_of(first[1])
        assert ledger.head() == (second[0].hash, 3)
        ledger.verify()
        assert ledger.events() == [*first, *second] == read_events(run_dir.ledger)
    with Ledger.open(run_dir, VirtualClock()) as ledger:
        assert ledger.append(beat(4))[0].seq == 4


def test_the_chain_can_be_checked_with_the_standard_library_alone(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(beat(1), beat(2, source="agent:main", source_seq=1))
        head = ledger.head()
    page = (Path(__file__).parents[2] / "docs" / "LEDGER.md").read_text()
    script = page.split("```python\n")[1].split("```")[0]
    out = subprocess.run(
        [sys.executable, "-c", script, str(run_dir.ledger)], capture_output=True, text=True, check=True
    )
    assert out.stdout.split() == [str(head[1]), head[0]]


def test_settings_that_make_it_durable(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        assert ledger._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert ledger._db.execute("PRAGMA synchronous").fetchone() == (2,)


def test_merging_is_idempotent_by_source_and_number(run_dir: RunDir) -> None:
    agent = [beat(n, source="agent:main", source_seq=n) for n in (1, 2, 3)]
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        assert len(ledger.append(*agent[:2])) == 2
        assert [e.source_seq for e in ledger.append(*agent)] == [3]
        assert ledger.append(*agent) == ()
        assert ledger.append(
            beat(4, source="agent:main", source_seq=4), beat(4, source="agent:main", source_seq=4)
        )
        assert len(ledger.events()) == 4
    with Ledger.open(run_dir, VirtualClock()) as ledger:
        assert ledger.append(*agent) == ()
        with pytest.raises(LedgerError, match="two writers used one number"):
            ledger.append(beat(99, source="agent:main", source_seq=2))
        with pytest.raises(LedgerError, match="event 6 came after 4"):
            ledger.append(beat(6, source="agent:main", source_seq=6))
        assert len(ledger.events()) == 4


@pytest.mark.parametrize(
    ("event", "why"),
    [
        (NewEvent("lease_begun", {}), "not one of version 1"),
        (NewEvent("stop_asked", {"by": "me"}), "lacks why"),
        (
            NewEvent(
                "lease_settled", {"lease": "l", "settled_usd_micro": 1.0, "until_utc_ns": 1, "proof": ""}
            ),
            "whole",
        ),
        (
            NewEvent(
                "lease_settled", {"lease": "l", "settled_usd_micro": True, "until_utc_ns": 1, "proof": ""}
            ),
            "whole",
        ),
        (
            NewEvent(
                "lease_settled", {"lease": "l", "settled_usd_micro": -1, "until_utc_ns": 1, "proof": ""}
            ),
            "negative",
        ),
        (NewEvent("stop_asked", {"by": "me", "why": float("nan")}), "not JSON"),
        (NewEvent("stop_asked", {"by": "me", "why": {1, 2}}), "not JSON"),
    ],
)
def test_what_may_not_be_stored_is_refused_and_nothing_of_its_batch_is_kept(run_dir, event, why) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        with pytest.raises(LedgerError, match=why):
            ledger.append(beat(1), event)
        assert ledger.events() == []
        assert ledger.append(beat(1))[0].seq == 1


def test_a_failure_in_the_middle_of_a_batch_keeps_none_of_it(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(beat(1))
        with pytest.raises(LedgerError, match="came after"):
            ledger.append(beat(2), beat(7, source="agent:main", source_seq=7))
        assert len(ledger.events()) == 1
        ledger.append(beat(2))
        ledger.verify()


def test_a_second_controller_is_refused_with_the_holder_named(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        with pytest.raises(
            LedgerLocked, match=rf"held by pid {os.getpid()} on .* since 2026-.*campaign stop run"
        ):
            Ledger.open(run_dir, VirtualClock())
        ledger.append(beat(1))
        found = holder(run_dir.lock)
        assert found is not None
        assert set(found) == {"pid", "host", "started", "command"}
    assert holder(run_dir.lock) is None
    Ledger.open(run_dir, VirtualClock()).close()


def test_reading_takes_no_lock_and_sees_a_run_in_progress(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(beat(1))
        assert len(read_events(run_dir.ledger)) == 1
        ledger.append(beat(2))
        assert len(read_events(run_dir.ledger)) == 2


def test_reading_a_finished_run_leaves_nothing_behind(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(beat(1))
    before = sorted(run_dir.root.iterdir())
    assert len(read_events(run_dir.ledger)) == 1
    assert sorted(run_dir.root.iterdir()) == before


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (
            "UPDATE events SET payload = replace(payload, '2', '7') WHERE seq = 2",
            r"event 2 \(agent_heartbeat\) was changed",
        ),
        ("UPDATE events SET utc_ns = utc_ns + 1 WHERE seq = 3", "event 3 .* was changed"),
        ("DELETE FROM events WHERE seq = 2", r"event 2 is missing \(the next is 3\)"),
        (
            "UPDATE events SET hash = prev_hash, prev_hash = hash WHERE seq = 1",
            "event 1 does not follow event 0",
        ),
        ("UPDATE events SET payload = '{' WHERE seq = 1", "not JSON any more"),
    ],
)
def test_the_first_bad_event_is_named(run_dir: RunDir, sql: str, why: str) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(*(beat(n) for n in (1, 2, 3, 4)))
    db = sqlite3.connect(run_dir.ledger)
    with pytest.raises(sqlite3.IntegrityError, match="append-only"):
        db.execute(sql)
    db.executescript("DROP TRIGGER events_no_update; DROP TRIGGER events_no_delete;")
    db.execute(sql)
    db.commit()
    db.close()
    with pytest.raises(LedgerError, match=why):
        read_events(run_dir.ledger)
    with pytest.raises(LedgerError, match=why):
        Ledger.open(run_dir, VirtualClock())
    assert holder(run_dir.lock) is None, "a ledger that does not verify leaves no lock behind"


def test_missing_foreign_damaged_and_newer_files_say_what_to_do(run_dir: RunDir, tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledger at .* Fix: `ls"):
        read_events(run_dir.ledger)
    with pytest.raises(LedgerError, match="no ledger at"):
        Ledger.open(run_dir, VirtualClock())
    text = tmp_path / "ledger.db"
    text.write_text("not a database at all, only some text that is long enough" * 20)
    with pytest.raises(LedgerError, match="damaged or not a ledger"):
        read_events(text)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE t (x)")
    db.close()
    with pytest.raises(LedgerError, match="is not a ledger of campaign"):
        read_events(foreign)
    Ledger.open(run_dir, VirtualClock(), create=True).close()
    with sqlite3.connect(run_dir.ledger) as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(LedgerError, match=r"version 99; this campaign reads up to 1\. Upgrade"):
        read_events(run_dir.ledger)


def test_create_does_not_write_over_a_run(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(beat(1))
    with pytest.raises(LedgerError, match="holds 1 events already: go on with `campaign resume`"):
        Ledger.open(run_dir, VirtualClock(), create=True)
    Ledger.open(run_dir, VirtualClock()).close()


def test_a_full_disk_is_one_sentence_and_leaves_the_chain_whole(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(beat(1))
        pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
        ledger._db.execute(f"PRAGMA max_page_count={pages}")
        big = NewEvent("stop_asked", {"by": "x" * 100_000, "why": ""})
        with pytest.raises(LedgerError, match="the disk is full; free some space, then `campaign resume`"):
            ledger.append(beat(2), big)
        ledger._db.execute("PRAGMA max_page_count=1000000")
        assert [e.seq for e in ledger.append(beat(2))] == [2]
        ledger.verify()


def test_a_read_only_ledger_says_so(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger._db.execute("PRAGMA query_only=1")
        with pytest.raises(LedgerError, match="it is read-only"):
            ledger.append(beat(1))


def test_a_results_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(LedgerError, match="cannot write"):
        Ledger.open(RunDir(tmp_path / "results" / "run"), VirtualClock(), create=True)


def test_kill_9_loses_no_acknowledged_event(run_dir: RunDir) -> None:
    code = (
        "import sys, pathlib\n"
        "from campaign.clock import SystemClock\n"
        "from campaign.ledger.events import NewEvent\n"
        "from campaign.ledger.journal import Ledger\n"
        "from campaign.store.layout import RunDir\n"
        "run = RunDir(pathlib.Path(sys.argv[1]))\n"
        "ledger = Ledger.open(run, SystemClock(), create=not run.ledger.exists())\n"
        "while True:\n"
        "    n = len(ledger.append(*[NewEvent('agent_heartbeat', {'cell': 'c', 'done': 1, 'total': 2})] * 3))\n"
        "    print(ledger.head()[1], flush=True)\n"
    )
    for _ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", code, str(run_dir.root)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        seen = [int(child.stdout.readline()) for _ in range(10)]
        child.send_signal(signal.SIGKILL)
        seen += [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        assert len(read_events(run_dir.ledger)) >= max(seen), "a dead controller's WAL is read too"
        with Ledger.open(run_dir, VirtualClock()) as ledger:
            assert ledger.head()[1] >= max(seen)
            assert ledger.head()[1] % 3 == 0, "a batch is whole or not there"


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(), v, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.text(), values, max_size=4))
def test_the_canonical_form_is_a_fixed_point(payload) -> None:
    text = canonical(payload)
    assert canonical(json.loads(text)) == text


def test_every_type_of_the_contract_can_be_stored(run_dir: RunDir) -> None:
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        ledger.append(*(NewEvent(t, dict.fromkeys(keys)) for t, keys in PAYLOADS.items()))
        assert len(ledger.events()) == len(PAYLOADS)
