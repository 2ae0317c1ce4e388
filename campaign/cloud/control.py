"""Signed control records: what the controller may tell a node, and nobody else.

A record is one JSON file, `NUMBER.json`, numbered 1, 2, ... and signed with HMAC-SHA256 under a key made for one
lease. A record that is unsigned, altered, of another lease or out of order is not obeyed. Silence never extends.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

_KINDS: Final = frozenset({"stop", "extend", "kill", "add"})


@dataclass(frozen=True, slots=True)
class Record:
    """One thing a node is told."""

    lease: str
    seq: int
    kind: Literal["stop", "extend", "kill", "add"]
    why: str = ""
    gate: str | None = None
    deadline_utc_ns: int | None = None
    worst_usd_micro: int | None = None
    sha256: str | None = None
    """Of `add/SHA256.json`, what is to be run while the session is held."""


def sign(record: Record, key: str) -> bytes:
    """The file's bytes."""
    body = _body(asdict(record))
    return json.dumps({"record": asdict(record), "hmac": _mac(body, key)}).encode()


def verify(data: bytes, key: str, lease: str) -> Record | None:
    """The record, or None for what nobody with the key has written for this lease."""
    try:
        outer = json.loads(data)
        record, mac = outer["record"], outer["hmac"]
        if not isinstance(mac, str) or not hmac.compare_digest(mac, _mac(_body(record), key)):
            return None
        found = Record(**record)
    except (ValueError, KeyError, TypeError):
        return None
    return found if found.lease == lease and found.kind in _KINDS else None


def _body(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":")).encode()


def _mac(body: bytes, key: str) -> str:
    return hmac.new(bytes.fromhex(key), body, hashlib.sha256).hexdigest()
