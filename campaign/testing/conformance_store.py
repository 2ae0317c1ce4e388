"""What every Store must do; run it against each implementation.

::

    class TestMyStore(StoreConformance):
        @pytest.fixture
        def reopen(self, tmp_path):
            return lambda: MyStore(...)      # the same run, as a new process would open it
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from campaign.errors import StoreError
from campaign.store.base import CellWriter, Store
from campaign.store.row import RequestRow

Reopen = Callable[[], Store]

CELL = "ladder.depth/depth=3/chat/c1/b0"
"""A name with everything the file system has to stand: `/`, `=` and `.`."""


def make_row(slot: int = 0, **changes: Any) -> RequestRow:
    """A whole, valid row; `slot` also orders it in time."""
    base = RequestRow(
        run="r",
        campaign="c",
        session="s",
        lease="s/0",
        node="n",
        gpu_set="cpu",
        boot_id="s/ladder.depth/r0/depth=3@0",
        boot_index=0,
        boot_attempt=0,
        arm="depth=3",
        arm_hash="0123456789abcdef",
        group="ladder.depth",
        cell=CELL,
        phase="measure",
        workload="chat",
        concurrency=1,
        block=f"s{slot}",
        round=0,
        order=slot,
        half="p0",
        slot=slot,
        seed=9_007_199_254_740_993 + slot,
        attempt=0,
        sent_ns=10**15 + slot,
        first_ns=10**15 + slot + 1,
        sent_utc_ns=1_790_000_000_000_000_001 + slot,
        ttft_ms=118.5,
        state="ok",
        accept_pos=(3, 2, 1),
        text_sha256="é",
        reasons=("first_chunk_assumed_one",),
    )
    return replace(base, **changes)


def identity(row: RequestRow) -> dict[str, Any]:
    """What is known of a row before it is sent."""
    names = ("session", "cell", "boot_attempt", "phase", "slot", "seed", "attempt", "order", "round")
    return {name: getattr(row, name) for name in names}


def record(writer: CellWriter, *rows: RequestRow) -> None:
    """Begin and finish each row."""
    for row in rows:
        writer.begin(identity(row))
        writer.finish(row)


def cell(store: Store, row: RequestRow | None = None) -> CellWriter:
    """The writer of a row's cell."""
    row = row or make_row()
    return store.open_cell(row.session, row.cell, row.boot_attempt)


class StoreConformance:
    """Inherit, and provide the fixture `reopen`."""

    @pytest.fixture
    def reopen(self) -> Reopen:
        raise NotImplementedError

    def test_it_is_a_store(self, reopen: Reopen) -> None:
        store = reopen()
        assert isinstance(store, Store)
        assert isinstance(cell(store), CellWriter)

    def test_an_empty_run(self, reopen: Reopen) -> None:
        store = reopen()
        assert list(store.rows()) == []
        assert list(store.recover()) == []
        assert list(store.sealed()) == []

    def test_rows_come_back_as_they_were(self, reopen: Reopen) -> None:
        """Every type, nulls and integers beyond 2^53 included, open and sealed, in order of sending."""
        rows = [make_row(2), make_row(0, accept_pos=None, ttft_ms=None, reasons=()), make_row(1)]
        store = reopen()
        record(cell(store), *rows)
        expected = sorted(rows, key=lambda r: r.sent_utc_ns)
        assert list(store.rows()) == expected
        files = cell(store).seal()
        assert list(store.rows()) == expected
        assert list(reopen().rows()) == expected
        assert files[0].rows == 3

    def test_a_finished_request_outlives_its_writer(self, reopen: Reopen) -> None:
        record(cell(reopen()), make_row(0), make_row(1))
        store = reopen()
        assert [r.slot for r in store.rows()] == [0, 1]
        (found,) = store.recover()
        assert (found.session, found.cell, found.boot_attempt) == ("s", CELL, 0)
        assert [r.slot for r in found.rows] == [0, 1]
        assert found.possibly_spent == ()
        assert found.torn_bytes == 0

    def test_a_begin_without_a_finish_is_possibly_spent(self, reopen: Reopen) -> None:
        writer = cell(reopen())
        record(writer, make_row(0))
        writer.begin(identity(make_row(1)))
        for _ in range(2):
            (found,) = reopen().recover()
            assert [r.slot for r in found.rows] == [0]
            assert [b["slot"] for b in found.possibly_spent] == [1]

    def test_finishes_answer_begins_in_any_order(self, reopen: Reopen) -> None:
        """Above concurrency 1 several requests are open at once."""
        writer = cell(reopen())
        for slot in range(3):
            writer.begin(identity(make_row(slot)))
        writer.finish(make_row(2))
        writer.finish(make_row(0))
        (found,) = reopen().recover()
        assert [b["slot"] for b in found.possibly_spent] == [1]

    def test_a_sealed_cell_is_not_recovered(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0))
        cell(store).seal()
        assert list(reopen().recover()) == []

    def test_sealing_names_hash_and_rows(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0), make_row(1))
        files = cell(store).seal()
        known = {f.path: f for f in store.sealed()}
        assert all(known[f.path] == f for f in files)
        assert all(len(f.sha256) == 64 for f in files)
        assert not any(f.path.startswith("/") or ".." in f.path for f in files)

    def test_sealing_twice_is_sealing_once(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0), make_row(1))
        first = cell(store).seal()
        assert cell(store).seal() == first
        assert cell(reopen()).seal() == first
        assert len(store.rows()) == 2

    def test_a_sealed_cell_can_be_relabelled(self, reopen: Reopen) -> None:
        """Rounds that were sealed and not committed are superseded as a whole."""
        store = reopen()
        record(cell(store), make_row(0), make_row(1))
        first = cell(store).seal()
        second = cell(reopen()).seal("superseded")
        assert {r.validity for r in store.rows()} == {"superseded"}
        assert [f.path for f in second] == [f.path for f in first]
        assert second[0].sha256 != first[0].sha256

    def test_sealing_with_a_validity_overrides_every_row(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0), make_row(1, validity="void"))
        cell(store).seal("superseded")
        assert [r.validity for r in store.rows()] == ["superseded", "superseded"]

    def test_sealing_keeps_the_validity_of_each_row(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0), make_row(1, validity="void"))
        cell(store).seal()
        assert [r.validity for r in store.rows()] == ["valid", "void"]

    def test_rows_after_a_seal_join_the_file(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0))
        cell(store).seal()
        record(cell(store), make_row(1))
        assert [r.slot for r in store.rows()] == [0, 1]
        assert cell(store).seal()[0].rows == 2
        assert [r.slot for r in reopen().rows()] == [0, 1]

    def test_a_request_is_recorded_once(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0))
        with pytest.raises(StoreError):
            cell(store).finish(make_row(0))
        cell(store).seal()
        with pytest.raises(StoreError):
            cell(reopen()).finish(make_row(0))
        assert len(store.rows()) == 1

    def test_a_row_of_another_cell_is_refused(self, reopen: Reopen) -> None:
        with pytest.raises(StoreError):
            cell(reopen()).finish(make_row(0, boot_attempt=1))

    def test_nan_is_refused_before_anything_is_written(self, reopen: Reopen) -> None:
        store = reopen()
        with pytest.raises(ValueError, match="JSON"):
            cell(store).finish(make_row(0, ttft_ms=float("nan")))
        assert list(store.rows()) == []

    def test_text_that_utf8_cannot_hold_does_not_lose_the_cell(self, reopen: Reopen) -> None:
        store = reopen()
        record(cell(store), make_row(0, state="failed", error="a\ud83cb"), make_row(1))
        cell(store).seal()
        assert [r.error for r in store.rows()] == ["a\ufffdb", None]

    def test_cells_and_attempts_keep_apart(self, reopen: Reopen) -> None:
        rows = [
            make_row(0),
            make_row(0, boot_attempt=1),
            make_row(0, cell="ladder.depth/depth=3/chat/c1/b1"),
            make_row(0, session="t"),
            make_row(0, cell="anchor.first/base/chat/c1/b0", group="anchor.first"),
        ]
        store = reopen()
        for row in rows:
            record(cell(store, row), row)
        assert len(store.recover()) == len(rows)
        paths = {cell(store, row).seal()[0].path for row in rows}
        assert len(paths) == len(rows)
        assert {r.key for r in reopen().rows()} == {r.key for r in rows}

    def test_documents(self, reopen: Reopen) -> None:
        store = reopen()
        first = store.put_json("provenance", "s/ladder.depth/r0/a@0", {"b": 1, "a": "é"})
        again = store.put_json("provenance", "s/ladder.depth/r0/a@0", {"a": "é", "b": 1})
        assert first == again
        other = store.put_json("provenance", "s/ladder.depth/r0/a@0", {"b": 2})
        assert other.path == first.path
        assert [f for f in store.sealed() if f.path == first.path] == [other]
        with pytest.raises(ValueError, match="JSON"):
            store.put_json("provenance", "x", {"a": float("inf")})

    @pytest.mark.parametrize("kind", ["..", "rows", "a/b", "", ".hidden"])
    def test_documents_stay_in_folders_of_their_own(self, reopen: Reopen, kind: str) -> None:
        with pytest.raises(ValueError, match=r"folder|name"):
            reopen().put_json(kind, "x", {})

    def test_what_is_kept_is_json(self, reopen: Reopen) -> None:
        """`begin` takes any JSON identity and gives it back."""
        told = {"phase": "measure", "slot": 1, "seed": 2**60, "attempt": 0, "note": {"a": [1, None, "é"]}}
        writer = cell(reopen())
        writer.begin(told)
        (found,) = reopen().recover()
        assert json.loads(json.dumps(found.possibly_spent)) == [told]
