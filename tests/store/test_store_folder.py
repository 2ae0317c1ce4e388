"""The folder store: the conformance suite, torn tails, sidecars, full disks and kills."""

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from campaign.errors import StoreError
from campaign.store import jsonl, parquet
from campaign.store.folder import FolderStore, read_zst
from campaign.store.layout import RunDir
from campaign.testing.conformance_store import (
    CELL,
    StoreConformance,
    cell,
    identity,
    make_row,
    record,
)


class TestFolderStore(StoreConformance):
    @pytest.fixture
    def reopen(self, tmp_path):
        stores = []

        def open_anew():
            # A process that died holds no locks.
            for old in stores:
                for writer in old._open.values():
                    writer.close()
            stores.append(FolderStore(RunDir(tmp_path)))
            return stores[-1]

        return open_anew


@pytest.fixture
def store(tmp_path):
    return FolderStore(RunDir(tmp_path))


def journal_path(root):
    (path,) = (root / "journal" / "cells").glob("*.jsonl")
    return path


@pytest.mark.parametrize("tail", [b'{"k":"finish","row":{"run":"\xc3', b"\x00\x00\x00", b'{"k":"fin'])
def test_a_torn_tail_is_counted_and_its_request_possibly_spent(store, tmp_path, tail):
    record(cell(store), make_row(0))
    cell(store).begin(identity(make_row(1)))
    cell(store).close()
    with journal_path(tmp_path).open("ab") as file:
        file.write(tail)
    assert [r.slot for r in store.rows()] == [0]  # readers leave it alone
    (found,) = store.recover()
    assert found.torn_bytes == len(tail)
    assert [b["slot"] for b in found.possibly_spent] == [1]
    assert [r.slot for r in found.rows] == [0]
    cell(store).seal("superseded")
    note = parquet.load(next(tmp_path.rglob("*.parquet"))).note
    assert note.torn_bytes == len(tail)
    assert [b["slot"] for b in note.possibly_spent] == [1]


def test_damage_in_the_middle_is_refused(store, tmp_path):
    record(cell(store), make_row(0))
    cell(store).close()
    path = journal_path(tmp_path)
    path.write_bytes(path.read_bytes() + b"not json\n" + b'{"k":"begin","identity":{}}\n')
    for act in (store.recover, store.rows, lambda: cell(store).begin({})):
        with pytest.raises(StoreError, match=r"jsonl:4"):
            act()


@pytest.mark.parametrize(
    "line",
    [{"k": "what"}, {"x": 1}, {"k": "finish", "row": {"schema_version": 1}}, {"k": "finish", "row": 3}],
)
def test_a_record_that_makes_no_sense_is_named(store, tmp_path, line):
    record(cell(store), make_row(0))
    cell(store).close()
    with journal_path(tmp_path).open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(StoreError, match="record 4"):
        store.recover()


def test_a_journal_without_its_first_line_meant_nothing(store, tmp_path):
    folder = tmp_path / "journal" / "cells"
    folder.mkdir(parents=True)
    (folder / "s~x@0.jsonl").write_bytes(b'{"k":"op')
    assert store.recover() == []
    assert list(folder.iterdir()) == []


def test_a_second_writer_is_refused(store, tmp_path):
    record(cell(store), make_row(0))
    with pytest.raises(StoreError, match="another process"):
        cell(FolderStore(RunDir(tmp_path))).begin({})


def test_files_are_where_the_layout_says(store, tmp_path):
    record(cell(store), make_row(0))
    store.put_json("provenance", "a/b", {})
    (sealed,) = cell(store).seal()
    assert sealed.path == "rows/session=s/group=ladder.depth/ladder.depth~depth=3~chat~c1~b0@0.parquet"
    files = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file())
    assert files == ["provenance/a~b.json", sealed.path]
    meta = pq.read_metadata(tmp_path / sealed.path)
    assert meta.metadata[b"campaign.schema_version"] == b"1"
    assert meta.row_group(0).column(0).compression == "ZSTD"
    ((name, file),) = store.sealed_cells()
    assert (name.session, name.cell, name.boot_attempt, file) == ("s", CELL, 0, sealed)


def sidecar(folder, *ids):
    for name in ("chunks.jsonl", "text.jsonl"):
        with jsonl.JsonLines(Path(folder) / name) as journal:
            for i in ids:
                journal.append({"request_id": i, "content": "<script>\u2028\ud83c"})


def test_sidecars_are_sealed_with_their_cell(store, tmp_path):
    writer = cell(store)
    record(writer, make_row(0))
    sidecar(writer.sidecar_dir, "r0", "r1")
    rows, chunks, text = writer.seal()
    assert (rows.rows, chunks.rows, text.rows) == (1, 2, 2)
    assert chunks.path == "chunks/session=s/group=ladder.depth/ladder.depth~depth=3~chat~c1~b0@0.jsonl.zst"
    assert text.path.startswith("text/session=s/")
    assert not Path(writer.sidecar_dir).exists()
    lines = [json.loads(line) for line in read_zst(tmp_path / text.path).splitlines()]
    assert [line["request_id"] for line in lines] == ["r0", "r1"]
    assert lines[0]["content"] == "<script>\u2028\ud83c"
    # Repeating the seal changes nothing, and later records join.
    assert writer.seal() == (rows, chunks, text)
    sidecar(writer.sidecar_dir, "r1", "r2")
    assert writer.seal()[2].rows == 3
    assert {f.path for f in store.sealed()} == {rows.path, chunks.path, text.path}


def test_sidecars_of_further_client_processes_are_sealed_with_the_first_s(store, tmp_path):
    writer = cell(store)
    record(writer, make_row(0))
    sidecar(Path(writer.sidecar_dir), "r0", "r2")
    sidecar(Path(writer.sidecar_dir) / "p1", "r1")
    _, chunks, text = writer.seal()
    lines = [json.loads(line)["request_id"] for line in read_zst(tmp_path / chunks.path).splitlines()]
    assert lines == ["r0", "r2", "r1"]
    assert (chunks.rows, text.rows) == (3, 3)
    assert not Path(writer.sidecar_dir).exists()


def test_a_cell_name_cannot_leave_the_run(store):
    # `/` becomes `~`, so dots have nothing to climb.
    writer = store.open_cell("..", "../../x", 0)
    assert "/../" not in writer.sidecar_dir
    with pytest.raises(ValueError):
        writer.seal()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_disk_that_fails_is_one_clear_sentence(store, tmp_path, monkeypatch, code, call):
    record(cell(store), make_row(0))

    def fail(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(StoreError, match="cannot write") as caught:
            cell(store).seal()
        with pytest.raises(StoreError, match="cannot write"):
            store.put_json("provenance", "x", {})
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert isinstance(caught.value.__cause__, OSError)
    assert list(tmp_path.rglob("*.parquet")) == []
    assert list(tmp_path.rglob("*.tmp")) == []
    # Nothing is lost: with room again, a new process seals.
    cell(store).close()
    assert FolderStore(RunDir(tmp_path)).open_cell("s", CELL, 0).seal()[0].rows == 1


def test_a_disk_that_really_is_full(tmp_path):
    """A file system of 64 KiB; where this process may not mount one, /dev/full stands in."""
    room = tmp_path / "room"
    room.mkdir()
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", room], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        if mounted:
            writer = cell(FolderStore(RunDir(room)))
            kept = 0

            def fill():
                nonlocal kept
                for slot in range(1000):
                    record(writer, make_row(slot))
                    kept += 1

            with pytest.raises(StoreError, match="disk is full"):
                fill()
            assert kept > 5
            writer.close()
            assert len(FolderStore(RunDir(room)).rows()) == kept
        else:
            link = tmp_path / ".x.parquet.tmp"
            link.symlink_to("/dev/full")
            with pytest.raises(StoreError, match="disk is full"):
                parquet.write(tmp_path / "x.parquet", [make_row(0)], parquet.CellNote("s", CELL, 0))
            assert not (tmp_path / "x.parquet").exists()
    finally:
        if mounted:
            subprocess.run(["umount", room], check=True)


WRITER = """
import sys
from pathlib import Path
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.testing.conformance_store import identity, make_row

store = FolderStore(RunDir(Path(sys.argv[1])))
attempt = int(sys.argv[2])
for n in range(10_000):
    name = f"ladder.depth/depth=3/chat/c1/b{n}"
    writer = store.open_cell("s", name, attempt)
    for slot in range(3):
        row = make_row(slot, cell=name, boot_attempt=attempt)
        writer.begin(identity(row))
        print("begun", n, slot, flush=True)
        writer.finish(row)
        print("finished", n, slot, flush=True)
    writer.seal()
    print("sealed", n, flush=True)
"""


def test_kill_9_at_any_moment_loses_and_duplicates_nothing(tmp_path):
    finished, sealed = set(), set()
    for attempt, lines in enumerate((1, 8, 15, 22)):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(attempt)], stdout=subprocess.PIPE, text=True
        )
        out = [process.stdout.readline() for _ in range(lines)]
        process.send_signal(signal.SIGKILL)
        out += process.stdout.readlines()
        process.wait()
        process.stdout.close()
        for line in out:
            word, *numbers = line.split()
            if word == "finished":
                finished.add((f"ladder.depth/depth=3/chat/c1/b{numbers[0]}", attempt, int(numbers[1])))
            elif word == "sealed":
                sealed.add((numbers[0], attempt))
        # Whatever carries the name of a data file is whole.
        for path in tmp_path.rglob("*.parquet"):
            if not path.name.startswith("."):
                rows = parquet.load(path).rows()
                assert len(rows) == 3 or {r.validity for r in rows} <= {"superseded"}
        store = FolderStore(RunDir(tmp_path))
        rows = [(r.cell, r.boot_attempt, r.slot) for r in store.rows()]
        assert len(rows) == len(set(rows))
        assert finished <= set(rows)
        # At most the one row whose `finished` was not printed yet is new to us.
        assert len(set(rows) - finished) <= 1
        finished |= set(rows)
        found = store.recover()
        assert len(found) <= 1
        for left in found:
            assert len(left.rows) + len(left.possibly_spent) <= 3
            store.open_cell(left.session, left.cell, left.boot_attempt).seal("superseded")
        assert sorted((r.cell, r.boot_attempt, r.slot) for r in store.rows()) == sorted(rows)
        assert list(tmp_path.rglob("*.tmp")) == []
        assert list((tmp_path / "journal" / "cells").iterdir()) == []
    assert sealed
