"""Crash-safe JSON lines: one object a line, fsynced; a torn tail is repaired, damage before it refused.

What a crash can leave behind, and what happens to it:

- the last line cut anywhere (inside JSON, inside a UTF-8 character, or never-written zeros): it is
  *torn*. Readers leave it out. The next writer overwrites it with a repair record that keeps the torn
  bytes (base64), so that what may have been spent stays on record;
- a last line that is whole but lacks its newline: it counts. The next writer adds the newline and a
  repair record;
- a line before the last that is not a JSON object: no crash does that. StoreError; nothing is written.

The repair record is longer than the bytes it replaces and is written over them in one go, so a crash in
the middle of a repair leaves a torn tail again, never a gap that looks clean.
"""

import base64
import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from campaign.errors import StoreError

REPAIR: Final = "_repair"
"""The one key of a repair record; its value holds `torn_bytes`, `newline_added` and `tail_b64`."""

_ADVICE: Final = {
    errno.ENOSPC: "the disk is full; free some space and resume",
    errno.EDQUOT: "the disk quota is used up; free some space and resume",
    errno.EROFS: "the file system is read-only; write results to another folder",
    errno.EACCES: "permission denied; check who owns the folder",
    errno.EPERM: "permission denied; check who owns the folder",
    errno.EIO: "the disk reports an I/O error; copy the run folder elsewhere before going on",
}


@dataclass(frozen=True, slots=True)
class Repair:
    """One torn tail."""

    torn_bytes: int
    """Bytes that were cut off; 0 where only a newline was missing."""
    newline_added: bool
    tail: bytes
    """The bytes themselves."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What a file holds."""

    records: tuple[dict[str, Any], ...]
    """Whole rows in order, repair records left out."""
    repairs: tuple[Repair, ...]
    """Repairs already on record."""
    pending: Repair | None
    """The torn tail that is still there, if any."""
    good_bytes: int
    """Length of the whole rows; a torn tail begins here."""

    @property
    def torn_bytes(self) -> int:
        """All bytes ever torn off: repaired ones and the pending tail."""
        return sum(r.torn_bytes for r in self.repairs) + (self.pending.torn_bytes if self.pending else 0)


def describe(error: OSError, path: Path) -> str:
    """One sentence a user can act on."""
    advice = _ADVICE.get(error.errno or 0, error.strerror or str(error))
    return f"cannot write {path}: {advice}"


def parse(data: bytes, name: str = "journal") -> Scan:
    """Read the bytes of a journal. Raises StoreError for damage before the tail, naming the line."""
    end = data.rfind(b"\n") + 1
    records: list[dict[str, Any]] = []
    repairs: list[Repair] = []
    for number, line in enumerate(_lines(data[:end]), start=1):
        record = _object(line)
        if record is None:
            raise StoreError(
                f"{name}:{number}: not a JSON object, and not the last line, so no crash explains it; "
                "nothing more is written or spent. Restore the file from a copy, or move it aside."
            )
        _sort_in(record, records, repairs)
    tail = data[end:]
    if not tail:
        return Scan(tuple(records), tuple(repairs), None, end)
    record = _object(tail)
    if record is None:
        return Scan(tuple(records), tuple(repairs), Repair(len(tail), newline_added=False, tail=tail), end)
    _sort_in(record, records, repairs)
    return Scan(tuple(records), tuple(repairs), Repair(0, newline_added=True, tail=b""), len(data))


def read(path: Path) -> Scan:
    """Read a journal without touching it, also while another process writes. A missing file is empty."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Scan((), (), None, 0)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    return parse(data, str(path))


def follow(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Rows finished since byte `offset`, and the offset to go on from. A missing file has none yet.

    A last line without its newline is left for the next call. Raises StoreError for damage, or where the
    file is shorter than `offset`.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < offset:
                raise StoreError(f"{path} shrank from {offset} to {size} bytes: it was replaced or cut")
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        if offset:
            raise StoreError(f"{path} is gone after {offset} bytes of it were read") from None
        return [], 0
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
    end = data.rfind(b"\n") + 1
    scan = parse(data[:end], f"{path} from byte {offset}")
    return list(scan.records), offset + end


class JsonLines:
    """One writer's journal. Opened, locked and repaired at the first append; `read` never writes.

    A second writer on the same file, in this process or another, gets StoreError (flock).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.repaired: Repair | None = None
        """What this writer had to repair when it opened the file."""
        self._fd = -1
        self._size = 0
        self._broken: str | None = None

    def append(self, *records: dict[str, Any]) -> None:
        """Add rows, all in one write; durable on return.

        Raises StoreError (disk full, read-only, damaged, written by another process); then what the rows
        stand for must be taken as possibly spent. Raises ValueError or TypeError, before anything is written, for a value that
        is not JSON (NaN included).
        """
        if not records:
            return
        data = b"".join(_line(record) for record in records)
        self._ready()
        self._write(data, self._size)

    def open(self) -> Scan:
        """Lock and repair the file (created where missing), and return what it holds."""
        self._ready()
        return read(self.path)

    def read(self) -> Scan:
        """What the file holds now."""
        return read(self.path)

    def close(self) -> None:
        """Release the file. Idempotent; the next append opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _ready(self) -> None:
        if self._broken is not None:
            raise StoreError(self._broken)
        if self._fd < 0:
            self._open()

    def _open(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            created = not self.path.exists()
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if created:
                _sync_folder(self.path.parent)
        except BlockingIOError:
            self.close()
            raise StoreError(f"{self.path} is being written by another process") from None
        except OSError as error:
            self.close()
            raise StoreError(describe(error, self.path)) from error
        try:
            self._repair()
        except StoreError:
            self.close()
            raise

    def _repair(self) -> None:
        scan = read(self.path)
        self._size = scan.good_bytes
        if scan.pending is None:
            return
        self.repaired = scan.pending
        note = {
            "torn_bytes": scan.pending.torn_bytes,
            "newline_added": scan.pending.newline_added,
            "tail_b64": base64.b64encode(scan.pending.tail).decode("ascii"),
        }
        newline = b"\n" if scan.pending.newline_added else b""
        self._write(newline + _line({REPAIR: note}), self._size, undo=False)

    def _write(self, data: bytes, at: int, *, undo: bool = True) -> None:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._fd, data[done:], at + done)
        except OSError as error:
            if undo:
                # Half a row on a full disk: cut it off, so that the next row starts on its own line.
                try:
                    os.ftruncate(self._fd, at)
                except OSError:
                    self._broken = (
                        f"{self.path} could not be restored after a failed write; resume repairs it"
                    )
            raise StoreError(describe(error, self.path)) from error
        try:
            os.fsync(self._fd)
        except OSError as error:
            # After a failed fsync the kernel may have dropped the pages: nothing here can be trusted
            # until the file is read again by a new writer.
            self._broken = f"{self.path} could not be synced to disk; check the disk, then resume"
            raise StoreError(describe(error, self.path)) from error
        self._size = at + len(data)


def _lines(data: bytes) -> Iterable[bytes]:
    """Split on line feeds only: `bytes.splitlines` would also split on a bare carriage return."""
    return data.split(b"\n")[:-1]


def _line(record: dict[str, Any]) -> bytes:
    # ASCII escapes: a lone surrogate in generated text has no UTF-8 form, but must survive a round trip.
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line.decode("utf-8"), parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse(name: str) -> None:
    raise ValueError(name)


def _sort_in(record: dict[str, Any], records: list[dict[str, Any]], repairs: list[Repair]) -> None:
    note = record.get(REPAIR)
    if len(record) == 1 and isinstance(note, dict):
        try:
            tail = base64.b64decode(note["tail_b64"], validate=True)
            repairs.append(Repair(int(note["torn_bytes"]), bool(note["newline_added"]), tail))
        except (KeyError, ValueError, TypeError) as error:
            raise StoreError(f"unreadable repair record {record!r}: restore the file from a copy") from error
    else:
        records.append(record)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
