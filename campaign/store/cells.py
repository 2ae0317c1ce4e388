"""A cell's request journal: JSON lines `open`, `begin`, `finish`, each durable when written.

The first line says which cell it is; a `begin` holds the fields known before a request is sent, a `finish`
the whole row.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from campaign.errors import StoreError
from campaign.store.jsonl import Scan, parse
from campaign.store.layout import RunDir, flat
from campaign.store.records import to_record, to_row
from campaign.store.row import SCHEMA_VERSION, RequestRow

SIDECARS: Final = {"chunks.jsonl": "chunks", "text.jsonl": "text"}
"""File the client writes while a cell is open -> folder of the run it is sealed into."""


@dataclass(frozen=True, slots=True)
class CellName:
    """One cell of one boot attempt, and where its files are."""

    session: str
    cell: str
    boot_attempt: int

    @property
    def group(self) -> str:
        """Partition: the first part of the cell's name."""
        return self.cell.partition("/")[0]

    def journal(self, run_dir: RunDir) -> Path:
        return run_dir.cell_journals / f"{flat(f'{self.session}/{self.cell}')}@{self.boot_attempt}.jsonl"

    def sidecars(self, run_dir: RunDir) -> Path:
        """Folder of the client's files while the cell is open."""
        return run_dir.chunks / flat(f"{self.session}/{self.cell}@{self.boot_attempt}")

    def sealed(self, run_dir: RunDir, kind: str = "rows", ext: str = "parquet") -> Path:
        folder = run_dir.root / kind / f"session={flat(self.session)}" / f"group={flat(self.group)}"
        return folder / f"{flat(self.cell)}@{self.boot_attempt}.{ext}"


@dataclass(frozen=True, slots=True)
class CellContent:
    """What a journal holds."""

    name: CellName | None
    """None where not even the first line was finished: then nothing was sent."""
    rows: tuple[RequestRow, ...]
    possibly_spent: tuple[dict[str, Any], ...]
    torn_bytes: int


def header(name: CellName) -> dict[str, Any]:
    """First line of a journal."""
    return {
        "k": "open",
        "schema_version": SCHEMA_VERSION,
        "session": name.session,
        "cell": name.cell,
        "boot_attempt": name.boot_attempt,
    }


def begin(identity: dict[str, Any]) -> dict[str, Any]:
    """Line of a request about to be sent."""
    return {"k": "begin", "identity": identity}


def finish(row: RequestRow) -> dict[str, Any]:
    """Line of a finished request."""
    return {"k": "finish", "row": to_record(row)}


def read(path: Path) -> CellContent | None:
    """Read a journal without touching it; None where it is gone (sealed meanwhile). Raises StoreError."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    return content(parse(data, str(path)), path)


def content(scan: Scan, path: Path) -> CellContent:
    """Sort the lines of a journal. Raises StoreError naming the line that cannot be understood."""
    if not scan.records:
        return CellContent(None, (), (), scan.torn_bytes)
    rows: list[RequestRow] = []
    begun: list[dict[str, Any]] = []
    name = None
    for number, record in enumerate(scan.records, start=1):
        place = f"{path}, record {number}"
        try:
            match record["k"]:
                case "open":
                    name = CellName(record["session"], record["cell"], record["boot_attempt"])
                case "begin":
                    begun.append(record["identity"])
                case "finish":
                    rows.append(to_row(record["row"], place))
                case other:
                    raise StoreError(f"{place}: unknown kind {other!r}")
        except (KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{place}: not a record of a cell journal: {error!r}") from error
    if name is None:
        raise StoreError(f"{path}: no first line that says which cell it is")
    return CellContent(name, tuple(rows), unanswered(begun, rows), scan.torn_bytes)


def unanswered(begun: Iterable[dict[str, Any]], rows: Iterable[RequestRow]) -> tuple[dict[str, Any], ...]:
    """Begins without a finish: each row answers the first open begin whose fields it equals."""
    left = list(begun)
    for row in rows:
        record = to_record(row)
        for index, identity in enumerate(left):
            if all(record[k] == v for k, v in identity.items() if k in record):
                del left[index]
                break
    return tuple(left)
