"""The canonical form of an event: what is checked, stored and hashed."""

import hashlib
import json
from typing import Any, Final

from campaign.errors import LedgerError
from campaign.ledger.events import PAYLOADS, SCHEMA_VERSION, Event, NewEvent

GENESIS: Final = "0" * 64
"""`prev_hash` of the first event."""


def canonical(value: Any) -> str:
    """Canonical JSON: keys sorted, no spaces, ASCII escapes, no NaN. Equal values give equal text.

    Raises ValueError or TypeError for what is not JSON.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256(text: str) -> str:
    """SHA-256 of ASCII text, hex."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def hash_of(event: Event) -> str:
    """The hash `event` must carry: SHA-256 over the canonical JSON of its other fields.

    `prev_hash` is among them, which makes the chain.
    """
    fields = {
        "seq": event.seq,
        "utc_ns": event.utc_ns,
        "type": event.type,
        "source": event.source,
        "source_seq": event.source_seq,
        "session": event.session,
        "payload": event.payload,
        "prev_hash": event.prev_hash,
    }
    return sha256(canonical(fields))


def check(event: NewEvent) -> str:
    """The canonical payload of an event that may be stored. Raises LedgerError for one that may not.

    Its type must be known, its payload must carry every key of that type, and money and times must be
    whole numbers (or None where unknown).
    """
    required = PAYLOADS.get(event.type)
    if required is None:
        raise LedgerError(f"event type {event.type!r} is not one of version {SCHEMA_VERSION} of the ledger")
    missing = sorted(required - event.payload.keys())
    if missing:
        raise LedgerError(f"event {event.type} lacks {', '.join(missing)}")
    for key, value in event.payload.items():
        if key.endswith(("_micro", "_ns")) and value is not None and type(value) is not int:
            raise LedgerError(f"event {event.type}: {key} = {value!r} must be a whole number or None")
        if key.endswith("_micro") and value is not None and value < 0:
            raise LedgerError(f"event {event.type}: {key} = {value!r} must not be negative")
    if event.source_seq is not None and (type(event.source_seq) is not int or event.source_seq < 0):
        raise LedgerError(f"event {event.type}: source_seq = {event.source_seq!r} is not a sequence number")
    try:
        return canonical(event.payload)
    except (ValueError, TypeError) as error:
        raise LedgerError(f"event {event.type}: its payload is not JSON: {error}") from error
