"""Reading a run, with our own reader and with the tools people have."""

import subprocess
import sys
from dataclasses import asdict

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import campaign
from campaign.errors import RunNotFound, StoreError
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.store.folder import FolderStore
from campaign.store.jsonl import JsonLines
from campaign.store.layout import RunDir
from campaign.store.row import RequestRow
from campaign.store.run import open_run
from campaign.store.schema import ARROW_SCHEMA
from campaign.testing.clock import VirtualClock
from campaign.testing.conformance_store import cell, identity, make_row, record

PLAIN = "ladder.depth/plain/chat/c1/b0"


@pytest.fixture
def run_dir(tmp_path):
    return RunDir(tmp_path / "results" / "r")


def commit(ledger, number, files, attempt=0):
    cells = [{"cell": "x", "attempt": attempt, "files": [asdict(f) for f in files]}]
    payload = {"round_id": f"ladder.depth/r{number}", "attempt": attempt}
    ledger.append(
        NewEvent("round_started", payload, "s"), NewEvent("round_committed", {**payload, "cells": cells}, "s")
    )


@pytest.fixture
def run(run_dir):
    """A committed round (with a void row), a superseded one, a sealed but uncommitted one, and an open cell."""
    store = FolderStore(run_dir)
    spec = [make_row(s) for s in range(3)]
    plain = [
        make_row(10 + s, cell=PLAIN, arm="plain", accept_pos=None, accept_len=None, seed=7) for s in range(3)
    ]
    plain[2] = make_row(12, cell=PLAIN, arm="plain", validity="void", seed=7)
    record(cell(store, spec[0]), *spec)
    record(cell(store, plain[0]), *plain)
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        commit(ledger, 0, [*cell(store, spec[0]).seal(), *cell(store, plain[0]).seal()])
    for attempt, validity in ((1, "superseded"), (2, None)):
        row = make_row(20 + attempt, boot_attempt=attempt)
        record(cell(store, row), row)
        cell(store, row).seal(validity)
    late = make_row(30, boot_attempt=3)
    record(cell(store, late), late)
    cell(store, late).begin(identity(make_row(31, boot_attempt=3)))
    run_dir.canonical.write_text("{}")
    return open_run(run_dir.root)


def test_valid_rows_are_those_of_committed_files(run):
    requests = run.requests()
    assert [r.slot for r in requests.rows()] == [0, 1, 2, 10, 11]
    assert len(requests) == 5
    assert all(isinstance(r, RequestRow) for r in requests.rows())


def test_everything_includes_what_is_open(run):
    rows = run.requests(valid_only=False).rows()
    assert [r.slot for r in rows] == [0, 1, 2, 10, 11, 12, 21, 22, 30]
    assert rows == list(FolderStore(run.dir).rows())


def test_reading_takes_no_lock_and_repairs_nothing(run):
    (path,) = run.dir.cell_journals.glob("*.jsonl")
    with path.open("ab") as file:
        file.write(b'{"k":"fin')
    before = path.read_bytes()
    with JsonLines(path.with_name("other")) as other:
        other.append({"k": 1})
        assert len(run.requests(valid_only=False)) == 9
    assert path.read_bytes() == before


def test_a_cell_seen_in_both_forms_counts_once(run):
    """As after a kill between the rename of the sealed file and the end of its journal."""
    (path,) = run.dir.cell_journals.glob("*.jsonl")
    data = path.read_bytes()
    store = FolderStore(run.dir)
    store.open_cell("s", make_row().cell, 3)
    path.unlink()
    path.write_bytes(data)  # a new inode: the fixture's writer holds the old one
    cell(store, make_row(30, boot_attempt=3)).seal()
    path.write_bytes(data)
    assert [r.slot for r in run.requests(valid_only=False).rows()] == [0, 1, 2, 10, 11, 12, 21, 22, 30]
    assert len(store.rows()) == 9


def test_a_changed_file_is_found(run):
    path = next(run.dir.rows.rglob("*plain*.parquet"))
    FolderStore(run.dir).open_cell("s", PLAIN, 0).seal("superseded")
    with pytest.raises(StoreError, match="changed afterwards"):
        run.requests()
    path.unlink()
    with pytest.raises(StoreError, match="cannot read"):
        run.requests()


def test_a_file_outside_the_run_is_refused(run_dir, tmp_path):
    store = FolderStore(run_dir)
    record(cell(store), make_row(0))
    (sealed,) = cell(store).seal()
    (tmp_path / "x.parquet").write_bytes((run_dir.root / sealed.path).read_bytes())
    with Ledger.open(run_dir, VirtualClock(), create=True) as ledger:
        commit(ledger, 0, [type(sealed)("rows/../../../x.parquet", sealed.sha256, 1)])
    with pytest.raises(StoreError, match="outside the run"):
        open_run(run_dir.root).requests()


def test_arrow(run):
    table = run.requests().arrow()
    assert table.schema.names == ARROW_SCHEMA.names
    assert table.schema.types == ARROW_SCHEMA.types
    assert table.column("seed").to_pylist()[:3] == [9_007_199_254_740_993 + s for s in range(3)]
    empty = open_run(run.dir.root)
    assert empty.requests().arrow().num_rows == 5


def test_pandas_keeps_whole_numbers(run):
    frame = run.requests().pandas()
    assert frame["seed"].tolist()[:3] == [9_007_199_254_740_993 + s for s in range(3)]
    assert str(frame["last_ns"].dtype) == "Int64"
    assert frame["last_ns"].isna().all()
    assert frame.groupby("arm")["ttft_ms"].median().to_dict() == {"depth=3": 118.5, "plain": 118.5}


def test_a_run_with_nothing_in_it(run_dir):
    Ledger.open(run_dir, VirtualClock(), create=True).close()
    run = open_run(run_dir.root)
    assert run.requests().rows() == run.requests(valid_only=False).rows() == []
    assert run.requests().arrow().schema.names == ARROW_SCHEMA.names
    assert len(run.requests().pandas()) == 0
    assert run.events() == []
    assert run.state().files == {}


def test_runs_are_found_by_folder_name_or_age(run, monkeypatch):
    results = run.dir.root.parent
    assert open_run("r", results).dir == run.dir
    assert open_run(None, results).dir == run.dir
    monkeypatch.chdir(results.parent)
    assert campaign.open_run("r").name == "r"
    with pytest.raises(RunNotFound, match="nope"):
        campaign.open_run("nope")


def test_a_missing_plan_or_spec_is_a_store_error(run):
    with pytest.raises(StoreError, match=r"plan\.json"):
        run.plan()
    run.dir.plan.write_text("{}")
    with pytest.raises(StoreError, match="not what the ledger registered"):
        run.plan()
    run.dir.canonical.unlink()
    with pytest.raises(StoreError, match=r"canonical\.json"):
        run.spec()


def test_importing_campaign_imports_no_pyarrow():
    code = "import campaign, sys; assert 'pyarrow' not in sys.modules; campaign.open_run; assert 'pyarrow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the tools people have: the commands of docs/DATA.md

SEALED = 8
"""Rows of sealed files: the open cell is not among them."""


def test_duckdb(run, monkeypatch):
    monkeypatch.chdir(run.dir.root)
    with duckdb.connect() as db:
        db.execute("CREATE VIEW requests AS FROM read_parquet('rows/**/*.parquet', hive_partitioning = true)")
        assert db.execute("SELECT count(*) FROM requests").fetchone() == (SEALED,)
        got = db.execute(
            "SELECT arm, count(*), median(ttft_ms) FROM requests WHERE validity = 'valid' GROUP BY arm ORDER BY arm"
        ).fetchall()
        assert got == [("depth=3", 4, 118.5), ("plain", 2, 118.5)]
        assert db.execute('SELECT DISTINCT session, "group" FROM requests').fetchall() == [
            ("s", "ladder.depth")
        ]
        assert db.execute("SELECT max(seed) FROM requests").fetchone() == (9_007_199_254_740_993 + 22,)
        assert (
            db.execute("SELECT make_timestamp_ns(min(sent_utc_ns)) FROM requests").fetchone()[0].year == 2026
        )


def test_polars(run, monkeypatch):
    monkeypatch.chdir(run.dir.root)
    frame = pl.scan_parquet("rows/**/*.parquet", hive_partitioning=True).filter(pl.col("validity") == "valid")
    got = frame.group_by("arm").agg(pl.len(), pl.col("ttft_ms").median()).sort("arm").collect()
    assert got.rows() == [("depth=3", 4, 118.5), ("plain", 2, 118.5)]
    whole = pl.read_parquet("rows")
    assert (whole.height, whole["session"].unique().to_list()) == (SEALED, ["s"])
    assert whole["seed"].max() == 9_007_199_254_740_993 + 22


def test_pandas_and_pyarrow_read_the_folder(run, monkeypatch):
    monkeypatch.chdir(run.dir.root)
    frame = pd.read_parquet("rows")
    assert len(frame) == SEALED
    assert set(frame["group"]) == {"ladder.depth"}
    (one,) = run.dir.rows.rglob("*plain*.parquet")
    assert len(pd.read_parquet(one)) == 3
    assert frame.loc[frame["validity"] == "valid"].groupby("arm")["ttft_ms"].median().to_dict() == {
        "depth=3": 118.5,
        "plain": 118.5,
    }
    table = ds.dataset("rows", partitioning="hive").to_table()
    assert table.num_rows == SEALED
    assert set(table.column("group").to_pylist()) == {"ladder.depth"}
    assert table.schema.field("seed").type == pa.int64()


def test_sidecars_open_in_duckdb_and_pandas(run, monkeypatch):
    monkeypatch.chdir(run.dir.root)
    store = FolderStore(run.dir)
    writer = store.open_cell("s", PLAIN, 9)
    for name in ("chunks.jsonl", "text.jsonl"):
        with JsonLines(type(run.dir.root)(writer.sidecar_dir) / name) as journal:
            journal.append(
                {"request_id": "a", "read_ns": [1, 5], "content": "x\u2028é"},
                {"request_id": "b", "read_ns": [2], "content": ""},
            )
    writer.seal()
    with duckdb.connect() as db:
        got = db.execute(
            "SELECT request_id, read_ns FROM read_json('chunks/**/*.jsonl.zst') ORDER BY 1"
        ).fetchall()
        assert got == [("a", [1, 5]), ("b", [2])]
        text = db.execute(
            "SELECT content FROM read_json('text/**/*.jsonl.zst') ORDER BY request_id"
        ).fetchall()
        assert text == [("x\u2028é",), ("",)]
    (path,) = run.dir.chunks.rglob("*.jsonl.zst")
    with pa.CompressedInputStream(pa.OSFile(str(path)), "zstd") as stream:
        frame = pd.read_json(stream, lines=True)
    assert frame["request_id"].tolist() == ["a", "b"]


def test_newest_run_is_found_beside_a_folder_that_is_none(tmp_path):
    from campaign.store.layout import find_run

    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "ledger.db").write_bytes(b"")
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "ledger.db").write_bytes(b"")
    (tmp_path / "real" / "canonical.json").write_text("{}")
    assert find_run(None, tmp_path).name == "real"
