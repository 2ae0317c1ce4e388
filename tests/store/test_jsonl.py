import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign.errors import StoreError
from campaign.store import jsonl
from campaign.store.jsonl import JsonLines, follow, parse, read

CASES = Path(__file__).parents[1] / "data" / "cases"
EXPECT = json.loads((CASES / "31_torn_ledger.expect.json").read_text())["expect"]

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
rows = st.dictionaries(
    st.text(), st.recursive(scalars, lambda v: st.lists(v, max_size=3), max_leaves=5), max_size=4
)


def case(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    path.write_bytes((CASES / name).read_bytes())
    return path


@pytest.mark.parametrize(
    "name", ["31_torn_ledger.json", "31_torn_ledger_utf8.json", "31_whole_no_newline.json"]
)
def test_a_torn_tail_is_repaired_and_noted(tmp_path: Path, name: str) -> None:
    path = case(tmp_path, name)
    before = path.read_bytes()
    scan = read(path)
    assert len(scan.records) == EXPECT[name]["rows"]
    assert path.read_bytes() == before, "reading never writes"

    with JsonLines(path) as journal:
        journal.append({"seq": 9})
    after = read(path)
    assert after.records == (*scan.records, {"seq": 9})
    assert after.pending is None
    assert path.read_bytes().endswith(b'\n{"seq":9}\n')
    assert after.repairs == (scan.pending,)
    torn = before[before.rfind(b"\n") + 1 :]
    whole = name == "31_whole_no_newline.json"
    assert after.repairs[0] == jsonl.Repair(0 if whole else len(torn), whole, b"" if whole else torn)
    assert after.torn_bytes == (0 if whole else len(torn))


def test_damage_before_the_tail_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = case(tmp_path, "31_bad_middle.json")
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"31_bad_middle\.json:2: not a JSON object"):
        read(path)
    with pytest.raises(StoreError, match="nothing more is written or spent"):
        JsonLines(path).append({"seq": 4})
    assert path.read_bytes() == before


@given(st.lists(rows, min_size=1, max_size=5), st.data())
def test_a_cut_at_any_byte_loses_no_whole_row(tmp_path_factory, written, data) -> None:
    path = tmp_path_factory.mktemp("cut") / "j.jsonl"
    ends = []
    with JsonLines(path) as journal:
        for row in written:
            journal.append(row)
            ends.append(path.stat().st_size)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    survivors = [row for row, end in zip(written, ends, strict=True) if end - 1 <= cut]
    assert list(read(path).records) == survivors
    with JsonLines(path) as journal:
        journal.append({"new": 1})
    # A second crash, inside the repair or the new row, loses nothing either.
    again = path.read_bytes()
    cut2 = data.draw(st.integers(cut, len(again)))
    path.write_bytes(again[:cut2])
    assert list(read(path).records)[: len(survivors)] == survivors
    with JsonLines(path) as journal:
        journal.append({"newer": 1})
    assert list(read(path).records)[-1] == {"newer": 1}


def test_a_crash_inside_the_repair_keeps_the_tail_torn(tmp_path: Path) -> None:
    torn = b'{"a":1}\n{"seq":3,"ev":"cel'
    path = tmp_path / "j.jsonl"
    path.write_bytes(torn)
    with JsonLines(path) as journal:
        journal.open()
    repaired = path.read_bytes()
    start = torn.rfind(b"\n") + 1
    assert len(repaired) > len(torn)
    for cut in range(start, len(repaired)):
        path.write_bytes(repaired[:cut] + torn[cut:])
        scan = read(path)
        assert scan.records == ({"a": 1},)
        assert scan.torn_bytes > 0


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        scan = parse(data)
    except StoreError:
        return
    assert 0 <= scan.good_bytes <= len(data)


def test_zeros_after_a_power_loss_are_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"a":1}\n' + b"\0" * 4096)
    with JsonLines(path) as journal:
        assert journal.open().records == ({"a": 1},)
        assert journal.repaired is not None
        assert journal.repaired.torn_bytes == 4096


def test_carriage_returns_nan_and_lists_are_not_rows() -> None:
    for line in (b'{"a":NaN}', b"[1]", b"", b"3", b"[" * 100_000):
        with pytest.raises(StoreError):
            parse(line + b"\n{}\n")


def test_nan_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "j.jsonl") as journal, pytest.raises(ValueError, match="JSON compliant"):
        journal.append({"a": 1}, {"b": float("nan")})
    assert read(tmp_path / "j.jsonl").records == ()


def test_lone_surrogates_survive(tmp_path: Path) -> None:
    with JsonLines(tmp_path / "j.jsonl") as journal:
        journal.append({"text": "\ud83d"})
    assert read(tmp_path / "j.jsonl").records == ({"text": "\ud83d"},)


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    with JsonLines(path) as first:
        first.append({"a": 1})
        with pytest.raises(StoreError, match="another process"):
            JsonLines(path).append({"a": 2})
    JsonLines(path).append({"a": 3})
    assert read(path).records == ({"a": 1}, {"a": 3})


def test_follow_yields_each_row_once(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    assert follow(path) == ([], 0)
    with JsonLines(path) as journal:
        journal.append({"a": 1}, {"a": 2})
        got, offset = follow(path)
        assert got == [{"a": 1}, {"a": 2}]
        assert follow(path, offset) == ([], offset)
        journal.append({"a": 3})
    with path.open("ab") as file:
        file.write(b'{"a":4}')
    got, offset = follow(path, offset)
    assert got == [{"a": 3}], "a line without its newline may still grow"
    with JsonLines(path) as journal:
        journal.append({"a": 5})
    got, offset = follow(path, offset)
    assert got == [{"a": 4}, {"a": 5}]
    path.write_bytes(b"")
    with pytest.raises(StoreError, match="shrank"):
        follow(path, offset)


def test_a_full_disk_says_so_and_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j.jsonl"
    real = os.pwrite
    with JsonLines(path) as journal:
        journal.append({"a": 1})

        def full(fd: int, data: bytes, at: int) -> int:
            if len(data) > 3:
                return real(fd, data[:3], at)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(StoreError, match="the disk is full; free some space and resume"):
                journal.append({"a": 12345})
        journal.append({"a": 2})
    assert path.read_bytes() == b'{"a":1}\n{"a":2}\n'


def test_a_read_only_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def readonly(*args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", readonly)
        with pytest.raises(StoreError, match="read-only; write results to another folder"):
            JsonLines(tmp_path / "j.jsonl").append({"a": 1})


def test_the_kernel_refusing_to_grow_the_file_leaves_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys, pathlib, resource, signal\n"
        "from campaign.store.jsonl import JsonLines\n"
        "from campaign.errors import StoreError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "j = JsonLines(pathlib.Path(sys.argv[1]))\n"
        "try:\n"
        "    for n in range(1000): j.append({'n': n, 'pad': 'x' * 50})\n"
        "except StoreError as e: print(n, e)\n"
    )
    out = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert "cannot write" in out.stdout
    assert len(read(path).records) == int(out.stdout.split()[0]) > 0
    assert path.read_bytes().endswith(b"}\n")


def test_after_a_failed_fsync_the_writer_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(fd: int) -> None:
        raise OSError(errno.EIO, "io")

    with JsonLines(tmp_path / "j.jsonl") as journal:
        journal.append({"a": 1})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", bad)
            with pytest.raises(StoreError, match="I/O error"):
                journal.append({"a": 2})
        with pytest.raises(StoreError, match="check the disk"):
            journal.append({"a": 3})


def test_kill_9_loses_no_acknowledged_row(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    code = (
        "import sys, pathlib\n"
        "from campaign.store.jsonl import JsonLines\n"
        "with JsonLines(pathlib.Path(sys.argv[1])) as j:\n"
        "    n = 0\n"
        "    while True:\n"
        "        j.append({'n': n, 'pad': 'x' * 5000})\n"
        "        print(n, flush=True)\n"
        "        n += 1\n"
    )
    last = -1
    for _ in range(2):
        child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
        assert child.stdout is not None
        for _ in range(20):
            acknowledged = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split()
        child.wait()
        child.stdout.close()
        last += 1 + max([acknowledged, *map(int, rest)])
        with JsonLines(path) as journal:
            kept = journal.open().records
        assert len(kept) >= last + 1
        last = len(kept) - 1
    assert [r["n"] for r in kept].count(0) == 2
