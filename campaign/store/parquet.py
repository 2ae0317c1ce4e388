"""Parquet files of request rows: zstd, one fixed schema, whole or absent.

The columns `session` and `group` stand in the path alone (`session=S/group=G`), as Hive has it: DuckDB,
Polars, pandas and pyarrow then read a folder or a file as it is, where a column that stood in both would
be refused for its two types. The file's metadata holds their exact values, and `load` puts them back.
"""

import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from campaign.errors import StoreError
from campaign.store import atomic
from campaign.store.records import to_record, to_row
from campaign.store.row import RequestRow
from campaign.store.schema import ARROW_SCHEMA, check_version, conform

PARTITIONS: Final = ("session", "group")
"""Columns that the path carries."""

_CELL_KEY: Final = b"campaign.cell"


@dataclass(frozen=True, slots=True)
class CellNote:
    """What a sealed file says about its cell, in its metadata."""

    session: str
    cell: str
    boot_attempt: int
    possibly_spent: tuple[dict[str, Any], ...] = field(default=())
    """`begin` records that never finished."""
    torn_bytes: int = 0

    @property
    def group(self) -> str:
        """First part of the cell's name."""
        return self.cell.partition("/")[0]


@dataclass(frozen=True, slots=True)
class Loaded:
    """One file, read once: hash and rows are of the same bytes."""

    path: Path
    sha256: str
    table: pa.Table
    note: CellNote | None

    def rows(self) -> list[RequestRow]:
        """Its rows. Raises StoreError naming file and row."""
        known = self.table.select(ARROW_SCHEMA.names)
        return [to_row(r, f"{self.path}, row {n}") for n, r in enumerate(known.to_pylist(), start=1)]


def to_table(rows: Sequence[RequestRow]) -> pa.Table:
    """Rows under the fixed schema."""
    return pa.Table.from_pylist([to_record(row) for row in rows], schema=ARROW_SCHEMA)


def write(path: Path, rows: Sequence[RequestRow], note: CellNote) -> str:
    """Write a cell's file atomically; returns its SHA-256. Raises StoreError."""
    for row in rows:
        if (row.session, row.group) != (note.session, note.group):
            raise StoreError(f"row {row.key} of group {row.group!r} does not belong to {path}")
    told = {
        "session": note.session,
        "cell": note.cell,
        "boot_attempt": note.boot_attempt,
        "possibly_spent": list(note.possibly_spent),
        "torn_bytes": note.torn_bytes,
    }
    metadata = {**(ARROW_SCHEMA.metadata or {}), _CELL_KEY: json.dumps(told, sort_keys=True).encode()}
    sink = pa.BufferOutputStream()
    table = to_table(rows).drop_columns(list(PARTITIONS)).replace_schema_metadata(metadata)
    pq.write_table(table, sink, compression="zstd")
    data = sink.getvalue().to_pybytes()
    atomic.write(path, data)
    return hashlib.sha256(data).hexdigest()


def load(path: Path) -> Loaded:
    """Read one file. Raises StoreError for what is missing, damaged, foreign or of another version."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    try:
        # ParquetFile, not read_table: the latter would add columns from the folder names.
        table = pq.ParquetFile(io.BytesIO(data)).read()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path}: not a readable Parquet file: {error}") from error
    metadata = table.schema.metadata
    check_version(metadata, str(path))
    note = _note(metadata, str(path))
    if note is not None:
        for name in PARTITIONS:
            value = pa.array([getattr(note, name)] * table.num_rows, pa.string())
            table = table.append_column(name, value)
    return Loaded(path, hashlib.sha256(data).hexdigest(), conform(table, str(path)), note)


def concat(tables: Sequence[pa.Table]) -> pa.Table:
    """One table; columns that only some have are null elsewhere. Raises StoreError where types clash."""
    try:
        return pa.concat_tables([ARROW_SCHEMA.empty_table(), *tables], promote_options="default")
    except pa.ArrowException as error:
        raise StoreError(f"files of request rows do not fit together: {error}") from error


def _note(metadata: dict[bytes, bytes], place: str) -> CellNote | None:
    raw = metadata.get(_CELL_KEY)
    if raw is None:
        return None
    try:
        told = json.loads(raw)
        return CellNote(
            told["session"],
            told["cell"],
            told["boot_attempt"],
            tuple(told["possibly_spent"]),
            told["torn_bytes"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{place}: unreadable campaign.cell in its metadata: {error!r}") from error
