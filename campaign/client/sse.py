"""Server-sent events from the bytes of a whole body (WHATWG HTML, section 9.2.6).

Only LF, CR and CRLF end a line: U+0085 and U+2028 are text. Bytes stay bytes here, so that a read that
ends inside a character, or between CR and LF, changes nothing. What the body was cut into while it was
read does not matter to the events; it only decides their times, through `Event.end`.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class Event(NamedTuple):
    """One dispatched event."""

    data: bytes
    """Its data lines, joined by LF."""
    type: str
    """`message` where the stream names none."""
    id: str | None
    end: int
    """Bytes of the body needed to complete it: it is timed by the read that brought the last of them."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What a body holds."""

    events: tuple[Event, ...]
    tail: bytes
    """Bytes of a last event that never ended; empty after a whole one. Comments are no event."""


def parse(body: bytes, *, first: bool = True) -> Stream:
    """Split a body into events. Never raises: whatever the bytes are, they are some stream.

    An event without a data line is not dispatched; a comment is dropped; one space after the colon is
    removed, further ones are data. `first` says that the stream starts here, where it may have a BOM.
    """
    return _plain(body) or _parse(body, first=first)


def _plain(body: bytes) -> Stream | None:
    """The usual body, of nothing but whole events of one data line and LF: six times as fast. Else None."""
    *blocks, rest = body.split(b"\n\n")
    if rest or b"\r" in body:
        return None
    events: list[Event] = []
    end = 0
    for block in blocks:
        end += len(block) + 2
        if block[:5] != b"data:" or b"\n" in block:
            return None
        events.append(Event(block[6:] if block[5:6] == b" " else block[5:], "message", None, end))
    return Stream(tuple(events), b"")


def _parse(body: bytes, *, first: bool) -> Stream:
    """Any body."""
    events: list[Event] = []
    data: list[bytes] = []
    kind = "message"
    last_id: str | None = None
    fields = False
    start = len(_BOM) if first and body.startswith(_BOM) else 0
    event_start = line_start = start
    for match in _LINE_END.finditer(body, start):
        line = body[line_start : match.start()]
        line_start = match.end()
        if not line:
            if data:
                # A lone CR ends the line; an LF that follows in a later read adds nothing.
                events.append(Event(b"\n".join(data), kind, last_id, match.start() + 1))
            data, kind, fields = [], "message", False
            event_start = line_start
            continue
        if line.startswith(b":"):
            continue
        fields = True
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
        elif name == b"event":
            kind = value.decode("utf-8", "replace") or "message"
        elif name == b"id" and b"\x00" not in value:
            last_id = value.decode("utf-8", "replace")
    rest = body[line_start:]
    cut = fields or (bool(rest) and not rest.startswith(b":"))
    return Stream(tuple(events), body[event_start:] if cut else b"")
