"""The Store contract: where rows, chunk times, text and provenance of a run live.

Rules every implementation keeps (one conformance suite in `campaign.testing.conformance_store`):

1. `begin` is durable before the request is sent; `finish` is durable when it returns (fsync).
2. A `begin` without `finish` is *possibly spent*; it is reported by `recover`, never dropped.
3. `seal` is atomic: a reader sees no sealed file, or the whole one. It returns its hash and row count.
4. Sealing twice gives the same bytes' meaning and one file; rows are never duplicated.
5. A torn tail of a journal is cut off, kept aside and reported; damage before the tail raises StoreError.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from campaign.store.row import RequestRow, Validity


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A finished file: path relative to the run folder, SHA-256 (hex) of its bytes, rows in it."""

    path: str
    sha256: str
    rows: int


@dataclass(frozen=True, slots=True)
class Recovered:
    """What `recover` found in one cell's journal."""

    session: str
    cell: str
    boot_attempt: int
    rows: tuple[RequestRow, ...]
    possibly_spent: tuple[dict[str, Any], ...]
    """`begin` records without a `finish`."""
    torn_bytes: int


@runtime_checkable
class CellWriter(Protocol):
    """Writes one cell of one boot attempt."""

    @property
    def sidecar_dir(self) -> str | None:
        """Folder for the client's chunk times and raw text (`Job.sidecar_dir`); sealed with the cell."""
        ...

    def begin(self, identity: dict[str, Any]) -> None:
        """Record that a request is about to be sent. Durable on return.

        `identity` holds fields of the row to come, at least `phase`, `slot`, `seed` and `attempt`: a finished
        row answers the first open `begin` whose fields it equals.
        """
        ...

    def finish(self, row: RequestRow) -> None:
        """Record a finished request. Durable on return."""
        ...

    def seal(self, validity: Validity | None = None) -> tuple[SealedFile, ...]:
        """Write the Parquet form; `validity` overrides that of every row (`superseded`, `void`)."""
        ...


@runtime_checkable
class Store(Protocol):
    """One run's data."""

    def open_cell(self, session: str, cell: str, boot_attempt: int) -> CellWriter:
        """Open (or reopen) the journal of a cell."""
        ...

    def recover(self) -> Sequence[Recovered]:
        """Repair and read every journal that has not been sealed."""
        ...

    def rows(self) -> Sequence[RequestRow]:
        """Every row: sealed ones, and those of open journals. Order: sent_utc_ns."""
        ...

    def put_json(self, kind: str, name: str, value: Any) -> SealedFile:
        """Write `KIND/NAME.json` atomically, e.g. provenance of a boot."""
        ...

    def sealed(self) -> Iterable[SealedFile]:
        """Every sealed file of the run."""
        ...
