"""The session agent's own journal: JSON lines, numbered and fsynced, merged by the controller.

It needs no controller and no database. A torn tail is repaired when the agent comes back, damage before
it stops everything (LedgerError): see `campaign.store.jsonl`.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from campaign.clock import Clock
from campaign.errors import LedgerError, StoreError
from campaign.ledger.canon import check
from campaign.ledger.events import NewEvent
from campaign.store import jsonl
from campaign.store.jsonl import JsonLines, Repair
from campaign.store.layout import RunDir, flat


def source_of(lease: str) -> str:
    """The source an agent writes as. One a lease: what a lost node had journalled is never numbered anew."""
    return f"agent:{lease}"


def journal_path(run_dir: RunDir, lease: str) -> Path:
    """Where the agent of a lease journals."""
    return run_dir.journals / f"{flat(lease)}.jsonl"


class AgentJournal:
    """Implements `campaign.session.ports.Journal`. Numbers go on where the file left off."""

    def __init__(self, path: Path, source: str, clock: Clock) -> None:
        self.path, self.source = path, source
        self._clock = clock
        self._lines = JsonLines(path)
        try:
            scan = self._lines.open()
        except StoreError as error:
            raise LedgerError(str(error)) from error
        self._seq = len(_events(scan.records, path, source))

    @property
    def repaired(self) -> Repair | None:
        """The torn tail found on opening: an event that may have been acted on, but is not on record."""
        return self._lines.repaired

    def append(self, event: NewEvent) -> NewEvent:
        """Durable on return; gives the event this source and its next number. Raises LedgerError."""
        numbered = replace(event, source=self.source, source_seq=self._seq + 1)
        check(numbered)
        record = {
            "source": self.source,
            "seq": numbered.source_seq,
            "utc_ns": self._clock.utc_ns(),
            "type": numbered.type,
            "session": numbered.session,
            "payload": numbered.payload,
        }
        try:
            self._lines.append(record)
        except StoreError as error:
            raise LedgerError(str(error)) from error
        self._seq += 1
        return numbered

    def close(self) -> None:
        """Release the file. Idempotent."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read(path: Path, source: str | None = None) -> list[NewEvent]:
    """Every whole event of a journal, numbered 1, 2, ... without gaps; a missing file has none.

    Raises LedgerError for damage, a gap, or an event of another source than `source`.
    """
    try:
        return _events(jsonl.read(path).records, path, source)
    except StoreError as error:
        raise LedgerError(str(error)) from error


def follow(path: Path, offset: int = 0) -> tuple[list[NewEvent], int]:
    """Events finished since byte `offset`, and the offset to go on from. Raises LedgerError."""
    try:
        records, end = jsonl.follow(path, offset)
    except StoreError as error:
        raise LedgerError(str(error)) from error
    return [_event(record, path) for record in records], end


def _events(records: Iterable[dict[str, Any]], path: Path, source: str | None) -> list[NewEvent]:
    events = [_event(record, path) for record in records]
    for number, event in enumerate(events, start=1):
        if event.source_seq != number:
            raise LedgerError(
                f"{path}: event {number} is missing (found {event.source_seq}); restore it from a copy"
            )
        if source is not None and event.source != source:
            raise LedgerError(f"{path} belongs to {event.source}, not to {source}")
    return events


def _event(record: dict[str, Any], path: Path) -> NewEvent:
    try:
        event = NewEvent(
            type=record["type"],
            payload=record["payload"],
            session=record["session"],
            source=record["source"],
            source_seq=record["seq"],
        )
        check(event)
    except (KeyError, TypeError, AttributeError) as error:
        raise LedgerError(f"{path}: not an event of ours: {record!r}") from error
    return event
