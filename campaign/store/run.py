"""Reading a run: `campaign.open_run(path).requests()`."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign.errors import StoreError
from campaign.store.base import SealedFile
from campaign.store.layout import RunDir, find_run
from campaign.store.row import RequestRow

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

    from campaign.ledger.events import Event
    from campaign.ledger.state import RunState
    from campaign.plan.model import CampaignPlan
    from campaign.spec.models import Spec


class Requests:
    """Request rows of a run, as they were when this was made. Order: `sent_utc_ns`."""

    def __init__(self, table: "pa.Table") -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def rows(self) -> list[RequestRow]:
        """As `RequestRow`; columns of a newer campaign are left out."""
        from campaign.store.records import to_row
        from campaign.store.schema import ARROW_SCHEMA

        records = self._table.select(ARROW_SCHEMA.names).to_pylist()
        return [to_row(r, f"request {n}") for n, r in enumerate(records, start=1)]

    def arrow(self) -> "pa.Table":
        """As one Arrow table under the fixed schema (columns of a newer campaign come last)."""
        return self._table

    def pandas(self) -> "pd.DataFrame":
        """As a data frame: whole numbers are nullable Int64, so a missing value rounds nothing."""
        import pandas as pd
        import pyarrow as pa

        kinds: dict[Any, Any] = {pa.int64(): pd.Int64Dtype(), pa.bool_(): pd.BooleanDtype()}
        frame: pd.DataFrame = self._table.to_pandas(types_mapper=kinds.get)
        return frame


class Run:
    """A run folder, read-only; each call reads what is there now."""

    def __init__(self, run_dir: RunDir) -> None:
        self.dir = run_dir

    def __repr__(self) -> str:
        return f"Run({str(self.dir.root)!r})"

    @property
    def name(self) -> str:
        return self.dir.name

    def requests(self, valid_only: bool = True) -> Requests:  # noqa: FBT001, FBT002 -- a public contract
        """Request rows; also while the run goes on.

        `valid_only`: rows whose own validity is `valid`, in files whose hash the ledger committed; every
        such file is hashed again, and one that is missing or changed is a StoreError. Otherwise every row
        there is: sealed ones and those of open cells, none twice, void and superseded ones included.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        if not valid_only:
            return self._sorted(self._everything())
        committed = self.committed().arrow()
        return Requests(committed.filter(pc.equal(committed.column("validity"), pa.scalar("valid"))))

    def committed(self) -> Requests:
        """Rows of committed rounds, void ones among them: what analysis judges. Raises like `requests`."""
        return self._sorted(self._committed())

    def _sorted(self, tables: "Sequence[pa.Table]") -> Requests:
        from campaign.store import parquet

        table = parquet.concat(tables)
        order = [(name, "ascending") for name in ("sent_utc_ns", "sent_ns", "cell", "slot", "seed")]
        return Requests(table.sort_by(order))

    def events(self) -> "list[Event]":
        """Every event of the ledger, its chain verified."""
        from campaign.ledger.journal import read_events

        return read_events(self.dir.ledger)

    def state(self) -> "RunState":
        """What the ledger adds up to."""
        from campaign.ledger.state import fold

        return fold(self.events())

    def plan(self) -> "CampaignPlan":
        """The plan that was admitted. Raises StoreError where it cannot be read."""
        from campaign.plan import codec

        try:
            return codec.load(self._bytes(self.dir.plan))
        except ValueError as error:
            raise StoreError(f"{self.dir.plan} is not a plan: {error}") from error

    def spec(self) -> "Spec":
        """The resolved spec."""
        from campaign.spec.load import parse_canonical

        return parse_canonical(self._bytes(self.dir.canonical))

    @cached_property
    def _root(self) -> Path:
        return self.dir.root.resolve()

    def _bytes(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error

    def _committed(self) -> "Sequence[pa.Table]":
        from campaign.store import parquet

        tables, seen = [], set()
        for file in self.state().files.values():
            if not file.path.startswith("rows/"):
                continue
            loaded = parquet.load(self._inside(file))
            if loaded.sha256 != file.sha256:
                raise StoreError(
                    f"{loaded.path} is not the file the ledger committed (SHA-256 {loaded.sha256[:12]}... "
                    f"against {file.sha256[:12]}...): it was changed afterwards. Fix: restore it from a copy"
                )
            for row in loaded.rows():
                if row.key in seen:
                    raise StoreError(f"{loaded.path}: row {row.key} stands in another committed file too")
                seen.add(row.key)
            tables.append(loaded.table)
        return tables

    def _inside(self, file: SealedFile) -> Path:
        path = (self._root / file.path).resolve()
        if not path.is_relative_to(self._root):
            raise StoreError(f"the ledger names a file outside the run: {file.path}")
        return path

    def _everything(self) -> "Sequence[pa.Table]":
        from campaign.store import parquet
        from campaign.store.folder import journal_rows, row_files

        # Journals first: a cell that is sealed in between is then seen twice, never not at all.
        open_rows = {row.key: row for row in journal_rows(self.dir)}
        tables = []
        for path in row_files(self.dir):
            loaded = parquet.load(path)
            for row in loaded.rows():
                open_rows.pop(row.key, None)
            tables.append(loaded.table)
        return [*tables, parquet.to_table(list(open_rows.values()))]


def open_run(path: str | Path | None = None, results: Path = Path("results")) -> Run:
    """Open a run: a folder, a name under `results`, or the newest one; also while it goes on.

    Raises RunNotFound (what there is to open instead).
    """
    return Run(find_run(None if path is None else str(path), results))
