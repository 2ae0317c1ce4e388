"""A run's data in a folder: request journals while cells are open, Parquet once they are sealed."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from campaign.errors import StoreError
from campaign.store import atomic, cells, jsonl
from campaign.store.base import Recovered, SealedFile
from campaign.store.cells import SIDECARS, CellName
from campaign.store.jsonl import JsonLines
from campaign.store.layout import RunDir, flat
from campaign.store.row import RequestRow, Validity

_OURS = frozenset({"rows", "chunks", "text", "journal", "telemetry", "logs"})
"""Folders that `put_json` may not write to."""


class FolderCell:
    """Implements `campaign.store.base.CellWriter`. One writer a cell; a second one gets StoreError."""

    def __init__(self, run_dir: RunDir, name: CellName) -> None:
        self.name = name
        self._run_dir = run_dir
        self._journal = JsonLines(name.journal(run_dir))
        self._keys: set[tuple[Any, ...]] | None = None

    @property
    def sidecar_dir(self) -> str | None:
        return str(self.name.sidecars(self._run_dir))

    def begin(self, identity: dict[str, Any]) -> None:
        self._ready()
        self._journal.append(cells.begin(identity))

    def finish(self, row: RequestRow) -> None:
        """Record a finished request. Durable on return. Raises StoreError for one that is there already."""
        keys = self._ready()
        if (row.session, row.cell, row.boot_attempt) != self._identity() or row.group != self.name.group:
            raise StoreError(f"row {row.key} does not belong to cell {self._identity()}")
        if row.key in keys:
            raise StoreError(f"row {row.key} is in the journal already: a request is recorded once")
        self._journal.append(cells.finish(row))
        keys.add(row.key)

    def seal(self, validity: Validity | None = None) -> tuple[SealedFile, ...]:
        """Write the Parquet form and the compressed sidecars; then the journal goes.

        Works from the journal, from what was sealed before, or from both, so it may be repeated, also
        with another `validity`, and after a crash at any point of an earlier call.
        """
        from campaign.store import parquet

        target = self.name.sealed(self._run_dir)
        old = parquet.load(target) if target.exists() else None
        old_rows = old.rows() if old is not None else []
        old_note = old.note if old is not None else None
        now = self._content()
        known = {row.key for row in old_rows}
        rows = [*old_rows, *(row for row in now.rows if row.key not in known)]
        if validity is not None:
            rows = [replace(row, validity=validity) for row in rows]
        spent = list(old_note.possibly_spent) if old_note is not None else []
        spent += [identity for identity in now.possibly_spent if identity not in spent]
        torn = max(now.torn_bytes, old_note.torn_bytes if old_note is not None else 0)
        note = parquet.CellNote(*self._identity(), tuple(spent), torn)
        files = self._seal_sidecars()
        if old is not None and rows == old_rows and note == old_note:
            sha256 = old.sha256
        else:
            sha256 = parquet.write(target, rows, note)
        self._journal.close()
        self._keys = None
        atomic.remove(self._journal.path)
        return (SealedFile(self._relative(target), sha256, len(rows)), *files)

    def close(self) -> None:
        """Release the journal; the next call opens it again."""
        self._journal.close()
        self._keys = None

    def _identity(self) -> tuple[str, str, int]:
        return (self.name.session, self.name.cell, self.name.boot_attempt)

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._run_dir.root).as_posix()

    def _content(self) -> cells.CellContent:
        if not self._journal.path.exists():
            return cells.CellContent(self.name, (), (), 0)
        return cells.content(self._journal.open(), self._journal.path)

    def _ready(self) -> set[tuple[Any, ...]]:
        """Keys on record; opens, repairs and heads the journal where that has not been done."""
        if self._keys is None:
            from campaign.store import parquet

            target = self.name.sealed(self._run_dir)
            keys = {row.key for row in parquet.load(target).rows()} if target.exists() else set()
            found = cells.content(self._journal.open(), self._journal.path)
            if found.name is None:
                self._journal.append(cells.header(self.name))
            elif found.name != self.name:
                raise StoreError(f"{self._journal.path} is the journal of {found.name}, not of {self.name}")
            self._keys = keys | {row.key for row in found.rows}
        return self._keys

    def _seal_sidecars(self) -> list[SealedFile]:
        import pyarrow as pa

        folder = self.name.sidecars(self._run_dir)
        files = []
        for source, kind in SIDECARS.items():
            target = self.name.sealed(self._run_dir, kind, "jsonl.zst")
            data = read_zst(target) if target.exists() else b""
            have = {json.loads(line)["request_id"] for line in data.splitlines()}
            parts = [folder / source, *sorted(folder.glob(f"*/{source}"))]  # of further client processes
            new = [r for part in parts for r in jsonl.read(part).records if r.get("request_id") not in have]
            if new or any(part.exists() for part in parts):
                data += b"".join(json.dumps(r, separators=(",", ":")).encode() + b"\n" for r in new)
                atomic.write(target, pa.Codec("zstd").compress(data, asbytes=True))
            if target.exists():
                files.append(_described(target, self._run_dir))
            for part in parts:
                atomic.remove(part)
        for own in sorted(folder.glob("*/")):
            with atomic.writing(own):
                own.rmdir()
        if folder.is_dir():
            with atomic.writing(folder):
                folder.rmdir()
        return files


class FolderStore:
    """Implements `campaign.store.base.Store` on a local file system. Used by one process at a time."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        self._open: dict[CellName, FolderCell] = {}

    def open_cell(self, session: str, cell: str, boot_attempt: int) -> FolderCell:
        """Open (or reopen) the journal of a cell: the same writer while this store lives."""
        name = CellName(session, cell, boot_attempt)
        if name not in self._open:
            self._open[name] = FolderCell(self.run_dir, name)
        return self._open[name]

    def recover(self) -> Sequence[Recovered]:
        """Repair and read every journal that has not been sealed; what a kill left half-written goes.

        Raises StoreError for damage that no crash explains, and for a journal that a live process writes.
        """
        self._sweep()
        for writer in self._open.values():
            writer.close()
        found = []
        for path in sorted(self.run_dir.cell_journals.glob("*.jsonl")):
            with JsonLines(path) as journal:
                seen = cells.content(journal.open(), path)
            if seen.name is None:
                # Not even its first line: no request was sent under it.
                atomic.remove(path)
                continue
            name = seen.name
            found.append(
                Recovered(
                    name.session,
                    name.cell,
                    name.boot_attempt,
                    seen.rows,
                    seen.possibly_spent,
                    seen.torn_bytes,
                )
            )
        return found

    def rows(self) -> Sequence[RequestRow]:
        """Every row: sealed ones, and those of open journals, none twice. Order: sent_utc_ns."""
        return all_rows(self.run_dir)

    def put_json(self, kind: str, name: str, value: Any) -> SealedFile:
        """Write `KIND/NAME.json` atomically. Raises ValueError for NaN or a name that leaves the run."""
        if kind in _OURS or "/" in kind or kind.startswith("."):
            raise ValueError(f"not a folder for documents: {kind!r}")
        path = self.run_dir.root / flat(kind) / f"{flat(name)}.json"
        data = json.dumps(value, allow_nan=False, indent=1, sort_keys=True).encode("ascii") + b"\n"
        atomic.write(path, data)
        return _described(path, self.run_dir)

    def sealed(self) -> Iterable[SealedFile]:
        """Every sealed file of the run: rows, chunks, text, then documents."""
        root = self.run_dir.root
        for pattern in ("rows/**/*.parquet", "chunks/**/*.jsonl.zst", "text/**/*.jsonl.zst"):
            for path in sorted(root.glob(pattern)):
                yield _described(path, self.run_dir)
        for path in sorted(root.glob("*/*.json")):
            if path.parent.name not in _OURS:
                yield _described(path, self.run_dir)

    def sealed_cells(self) -> Iterable[tuple[CellName, SealedFile]]:
        """Every sealed file of rows with the cell it holds; `open_cell(...).seal(...)` relabels one."""
        from campaign.store import parquet

        for path in row_files(self.run_dir):
            loaded = parquet.load(path)
            if loaded.note is not None:
                name = CellName(loaded.note.session, loaded.note.cell, loaded.note.boot_attempt)
                relative = path.relative_to(self.run_dir.root).as_posix()
                yield name, SealedFile(relative, loaded.sha256, loaded.table.num_rows)

    def _sweep(self) -> None:
        for kind in ("rows", "chunks", "text"):
            for path in (self.run_dir.root / kind).rglob(f".*{atomic.TEMP_SUFFIX}"):
                atomic.remove(path)


def row_files(run_dir: RunDir) -> list[Path]:
    """Sealed files of request rows."""
    return sorted(run_dir.rows.glob("session=*/group=*/*.parquet"))


def journal_rows(run_dir: RunDir) -> list[RequestRow]:
    """Finished rows of cells that are still open. Takes no lock and repairs nothing."""
    found = (cells.read(path) for path in sorted(run_dir.cell_journals.glob("*.jsonl")))
    return [row for content in found if content is not None for row in content.rows]


def all_rows(run_dir: RunDir) -> list[RequestRow]:
    """Sealed and open rows, none twice, by `sent_utc_ns`; also while another process writes."""
    from campaign.store import parquet

    # Journals first: a cell that is sealed in between is then seen twice, never not at all.
    open_rows = journal_rows(run_dir)
    rows = {row.key: row for row in open_rows}
    for path in row_files(run_dir):
        for row in parquet.load(path).rows():
            rows[row.key] = row
    return sorted(rows.values(), key=lambda row: (row.sent_utc_ns, row.sent_ns, row.key))


def read_zst(path: Path) -> bytes:
    """Decompressed bytes of a sealed sidecar. Raises StoreError."""
    import pyarrow as pa

    try:
        with pa.CompressedInputStream(pa.OSFile(str(path)), "zstd") as stream:
            data = stream.read()
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    assert isinstance(data, bytes)
    return data


def _described(path: Path, run_dir: RunDir) -> SealedFile:
    """Hash and row count of a file; a JSON document counts as one row."""
    try:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    rows = 1
    if path.suffix == ".parquet":
        from campaign.store import parquet

        rows = parquet.load(path).table.num_rows
    elif path.suffix == ".zst":
        rows = read_zst(path).count(b"\n")
    return SealedFile(path.relative_to(run_dir.root).as_posix(), sha256, rows)
