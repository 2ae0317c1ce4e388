"""The ledger of a run: an append-only, hash-chained journal in SQLite, with one writer.

WAL with `synchronous=FULL`: an event is on disk when `append` returns, and readers never wait. WAL needs
shared memory, so a results folder on NFS, SMB or another network file system is not supported for a
running campaign; copy a finished run there instead.

The chain: `hash` is the SHA-256 over the canonical JSON of the event's other fields, `prev_hash` among
them. It shows that what is there was not edited since; it does not show that nobody rewrote the whole
file. Keep the head hash elsewhere for that (docs/LEDGER.md).
"""

import json
import os
import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from campaign.clock import Clock
from campaign.errors import LedgerError
from campaign.ledger.canon import GENESIS, check, hash_of
from campaign.ledger.events import SCHEMA_VERSION, Event, NewEvent
from campaign.ledger.lock import RunLock, Signature
from campaign.store.jsonl import describe
from campaign.store.layout import RunDir

_APPLICATION_ID: Final = 0x63616D70
"""`camp` in the SQLite header: tells a ledger from any other database."""

_SCHEMA: Final = """
CREATE TABLE events (
  seq        INTEGER PRIMARY KEY,
  utc_ns     INTEGER NOT NULL,
  type       TEXT NOT NULL,
  source     TEXT NOT NULL,
  source_seq INTEGER NOT NULL,
  session    TEXT,
  payload    TEXT NOT NULL,
  prev_hash  TEXT NOT NULL,
  hash       TEXT NOT NULL,
  UNIQUE (source, source_seq)
) STRICT;
CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events BEGIN SELECT RAISE(ABORT, 'append-only'); END;
"""

_COLUMNS: Final = "seq, utc_ns, type, source, source_seq, session, payload, prev_hash, hash"


class Ledger:
    """The one writer. Open it with `Ledger.open`; close it, or use it as a context manager."""

    def __init__(self, path: Path, db: sqlite3.Connection, lock: RunLock, clock: Clock) -> None:
        self.path = path
        self._db, self._lock, self._clock = db, lock, clock
        self._mutex = threading.Lock()
        events = verify_chain(_select(db, path), path)
        self._seq = events[-1].seq if events else 0
        self._hash = events[-1].hash if events else GENESIS
        self._last: dict[str, int] = {}
        for event in events:
            self._last[event.source] = max(event.source_seq, self._last.get(event.source, 0))

    @classmethod
    def open(
        cls, run_dir: RunDir, clock: Clock, *, create: bool = False, signature: Signature | None = None
    ) -> Self:
        """Take `run.lock` and open the ledger; its whole chain is verified first.

        Raises LedgerLocked, naming the holder, where another controller has the run, and LedgerError
        where the ledger is missing (or, with `create`, holds events already), foreign, damaged, of a
        newer version, or cannot be written.
        """
        path = run_dir.ledger
        if create:
            try:
                run_dir.root.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise LedgerError(describe(error, run_dir.root)) from error
        elif not path.is_file():
            raise LedgerError(_missing(path))
        lock = RunLock(run_dir.lock, clock, signature)
        db: sqlite3.Connection | None = None
        try:
            db = _open_db(path)
            ledger = cls(path, db, lock, clock)
            _refuse_unless(
                not (create and ledger._seq),
                f"{path} holds {ledger._seq} events already: go on with `campaign resume`",
            )
        except BaseException:
            if db is not None:
                db.close()
            lock.release()
            raise
        return ledger

    @classmethod
    def over(cls, db: sqlite3.Connection, clock: Clock) -> Self:
        """The ledger in an open database, without a file of its own and without a lock: for simulations."""
        if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
        return cls(Path(":memory:"), db, _NoLock(), clock)

    def append(self, *events: NewEvent) -> tuple[Event, ...]:
        """Store events in one transaction: all of them, durable on return, or none (LedgerError).

        An event without `source_seq` gets its source's next number. One whose (source, source_seq) is
        stored already is skipped and not returned; if it says something else than the stored one, or if
        numbers of its source are missing before it, LedgerError.
        """
        checked = [(event, check(event)) for event in events]
        with self._mutex:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                stored = self._insert(checked)
                self._db.execute("COMMIT")
            except BaseException as error:
                self._rollback()
                if isinstance(error, sqlite3.Error):
                    raise LedgerError(_say(error, self.path)) from error
                raise
            for event in stored:
                self._seq, self._hash = event.seq, event.hash
                self._last[event.source] = event.source_seq
            return tuple(stored)

    def events(self) -> list[Event]:
        """Every event, in order."""
        with self._mutex:
            return _select(self._db, self.path)

    def verify(self) -> None:
        """Check every hash and number. Raises LedgerError naming the first bad seq."""
        verify_chain(self.events(), self.path)

    def head(self) -> tuple[str, int]:
        """(hash, seq) of the last event; of no event: 64 zeros and 0."""
        return self._hash, self._seq

    def close(self) -> None:
        """Close the file, then let go of the run. Idempotent."""
        with self._mutex:
            self._db.close()
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _insert(self, checked: list[tuple[NewEvent, str]]) -> list[Event]:
        stored: list[Event] = []
        seq, prev, last = self._seq, self._hash, dict(self._last)
        for new, payload in checked:
            known = last.get(new.source)
            number = new.source_seq if new.source_seq is not None else (known or 0) + 1
            if known is not None and number <= known:
                self._same(new, payload, number, stored)
                continue
            if number > (known if known is not None else 0) + 1:
                raise LedgerError(
                    f"{new.source}: event {number} came after {known or 0}; those between are missing"
                )
            seq, last[new.source] = seq + 1, number
            utc_ns = self._clock.utc_ns()
            value: dict[str, Any] = json.loads(payload)
            event = Event(seq, utc_ns, new.type, new.source, number, new.session, value, prev, hash="")
            event = replace(event, hash=hash_of(event))
            self._db.execute(
                f"INSERT INTO events ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)",  # noqa: S608  # constant columns
                (seq, utc_ns, new.type, new.source, number, new.session, payload, prev, event.hash),
            )
            prev = event.hash
            stored.append(event)
        return stored

    def _same(self, new: NewEvent, payload: str, number: int, batch: list[Event]) -> None:
        """An event merged before must say what it said then."""
        row = self._db.execute(
            "SELECT type, session, payload FROM events WHERE source = ? AND source_seq = ?",
            (new.source, number),
        ).fetchone()
        if row is None:
            known = sum(1 for e in batch if e.source == new.source)
            raise LedgerError(f"{new.source}: event {number} was never stored ({known} of this batch were)")
        if row != (new.type, new.session, payload):
            raise LedgerError(
                f"{new.source}: event {number} is {row[0]} in the ledger, but {new.type} with other contents in "
                "the journal: two writers used one number. Nothing was merged."
            )

    def _rollback(self) -> None:
        try:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        except sqlite3.Error:  # the connection is gone; nothing was committed
            return


class _NoLock(RunLock):
    """Nobody else can open a database that is only in this process."""

    def __init__(self) -> None:
        pass

    def release(self) -> None:
        """Nothing to let go of."""


def read_events(path: Path) -> list[Event]:
    """Every event of a ledger, its chain verified. Takes no lock; usable while a run goes on.

    Raises LedgerError for a missing, foreign, damaged or newer file.
    """
    if not path.is_file():
        raise LedgerError(_missing(path))
    wal = path.with_name(path.name + "-wal")
    if not wal.exists():
        # Nobody writes: read without leaving files of SQLite's behind, also in a read-only folder.
        try:
            return _read(path, "immutable=1")
        except LedgerError:
            if not wal.exists():
                raise
            # A writer came in between: read it as a run that goes on.
    return _read(path, "mode=ro")


def _read(path: Path, mode: str) -> list[Event]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=10)) as db:
            _identify(db, path)
            return verify_chain(_select(db, path), path)
    except sqlite3.Error as error:
        raise LedgerError(_say(error, path)) from error


def verify_chain(events: list[Event], path: Path) -> list[Event]:
    """The same events. Raises LedgerError naming the first whose number, link or hash is wrong."""
    prev = GENESIS
    for index, event in enumerate(events, start=1):
        wrong = None
        if event.seq != index:
            wrong = f"event {index} is missing (the next is {event.seq})"
        elif event.prev_hash != prev:
            wrong = f"event {index} does not follow event {index - 1}: the chain is broken there"
        elif hash_of(event) != event.hash:
            wrong = f"event {index} ({event.type}) was changed after it was written"
        if wrong is not None:
            raise LedgerError(f"{path}: {wrong}. Nothing more is spent on it; restore it from a copy.")
        prev = event.hash
    return events


def _open_db(path: Path) -> sqlite3.Connection:
    db: sqlite3.Connection | None = None
    try:
        db = sqlite3.connect(path, isolation_level=None, timeout=10, check_same_thread=False)
        fresh = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not fresh:
            _identify(db, path)
        mode = db.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        _refuse_unless(
            mode == "wal", f"{path}: this file system does not support SQLite's WAL; use a local folder"
        )
        db.execute("PRAGMA synchronous=FULL")
        if fresh:
            db.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
            db.executescript(f"BEGIN;{_SCHEMA}COMMIT;")
            _sync_folder(path.parent)
    except sqlite3.Error as error:
        if db is not None:
            db.close()
        raise LedgerError(_say(error, path)) from error
    except LedgerError:
        if db is not None:
            db.close()
        raise
    return db


def _identify(db: sqlite3.Connection, path: Path) -> None:
    if db.execute("PRAGMA application_id").fetchone()[0] != _APPLICATION_ID:
        raise LedgerError(f"{path} is not a ledger of campaign. Name the run folder, e.g. results/RUN")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version > SCHEMA_VERSION:
        raise LedgerError(
            f"{path} is of ledger version {version}; this campaign reads up to {SCHEMA_VERSION}. Upgrade campaign"
        )


def _select(db: sqlite3.Connection, path: Path) -> list[Event]:
    try:
        rows = db.execute(f"SELECT {_COLUMNS} FROM events ORDER BY seq").fetchall()  # noqa: S608  # constant columns
        return [_event(row) for row in rows]
    except sqlite3.Error as error:
        raise LedgerError(_say(error, path)) from error
    except ValueError as error:
        raise LedgerError(
            f"{path}: a payload is not JSON any more ({error}); restore it from a copy"
        ) from error


def _event(row: tuple[Any, ...]) -> Event:
    seq, utc_ns, type_, source, source_seq, session, payload, prev_hash, digest = row
    return Event(seq, utc_ns, type_, source, source_seq, session, json.loads(payload), prev_hash, digest)


def _refuse_unless(good: bool, message: str) -> None:  # noqa: FBT001  # reads as a sentence at its two calls
    if not good:
        raise LedgerError(message)


def _missing(path: Path) -> str:
    return f"no ledger at {path}. Fix: `ls {path.parent.parent}` shows the runs there are"


def _say(error: sqlite3.Error, path: Path) -> str:
    text = str(error)
    if "full" in text:
        return f"cannot write {path}: the disk is full; free some space, then `campaign resume`"
    if "readonly" in text:
        return f"cannot write {path}: it is read-only; check the folder's owner and permissions"
    if "unable to open" in text:
        return f"cannot open {path}: check that the folder exists and may be written"
    if "not a database" in text or "malformed" in text or "no such" in text:
        return f"{path} is damaged or not a ledger ({text}); restore it from a copy"
    if "locked" in text:
        return f"{path} is locked by another program; close it and try again"
    return f"cannot use {path}: {text}; check the disk, then `campaign resume`"


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
