"""Chunk times and raw text of each request, in files of their own beside the rows.

A cell's folder holds two journals of JSON lines, one record a request; sealing the cell turns them into
`chunks/...jsonl.zst` and `text/...jsonl.zst`. Times are nanoseconds after `sent_ns`.

chunks: `{request_id, sent_ns, sent_utc_ns, stamp_source, end, read_ns: [..], read_user_ns: [..], read_bytes: [..],
read_events: [..], event_ns: [..], event_tokens: [..], event_chars: [..]}`. `read_bytes` counts HTTP framing too; an event
here is one that carried generated text (`read_events` counts all events that each read of the body
completed), and `event_tokens` its running usage (null where it has none).

text: `{request_id, state, content, reasoning, tool_call, tail_b64, body, body_b64}`. `body` is the raw
response body, so that every number re-derives; bytes that are not UTF-8 stand in `body_b64` instead.
Generated text is hostile: it is only ever JSON-escaped here, never a file name, never markup.
"""

import base64
import threading
from pathlib import Path
from typing import Any

from campaign.client.interpret import Interpreted
from campaign.client.reader import Exchange
from campaign.store.cells import SIDECARS
from campaign.store.jsonl import JsonLines

CHUNKS, TEXT = SIDECARS


def chunk_record(exchange: Exchange, read: Interpreted) -> dict[str, Any]:
    """When what arrived."""
    zero = exchange.sent_ns
    return {
        "request_id": read.outcome.request_id,
        "sent_ns": zero,
        "sent_utc_ns": exchange.sent_utc_ns,
        "stamp_source": read.outcome.stamp_source,
        "end": exchange.end,
        "read_ns": [ns - zero for ns, _ in exchange.reads],
        "read_user_ns": [ns - zero for ns in exchange.user_ns],
        "read_bytes": [len(data) for _, data in exchange.reads],
        "read_events": read.reading.read_events,
        "event_ns": [ns - zero for ns in read.reading.at],
        "event_tokens": read.reading.tokens,
        "event_chars": list(map(len, read.reading.texts)),
    }


def text_record(read: Interpreted) -> dict[str, Any]:
    """What arrived."""
    body = read.response.body
    try:
        plain, coded = body.decode("utf-8"), None
    except UnicodeDecodeError:
        plain, coded = None, base64.b64encode(body).decode("ascii")
    tail = read.reading.tail
    return {
        "request_id": read.outcome.request_id,
        "state": read.outcome.state,
        "content": read.reading.channel("content"),
        "reasoning": read.reading.channel("reasoning"),
        "tool_call": read.reading.channel("tool_call"),
        "tail_b64": base64.b64encode(tail).decode("ascii") if tail else None,
        "body": plain,
        "body_b64": coded,
    }


class Sidecars:
    """Writers by folder. Thread-safe; a folder that a seal took away is begun anew."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[JsonLines, JsonLines]] = {}
        self._lock = threading.Lock()

    def write(self, folder: str, exchange: Exchange, read: Interpreted) -> None:
        """Append one request to both files. Raises StoreError."""
        with self._lock:
            chunks, text = self._writers(folder)
            chunks.append(chunk_record(exchange, read))
            text.append(text_record(read))

    def close(self) -> None:
        """Release every file. Idempotent."""
        with self._lock:
            for folder in list(self._open):
                self._drop(folder)

    def _writers(self, folder: str) -> tuple[JsonLines, JsonLines]:
        for known in list(self._open):
            if not all(journal.path.exists() for journal in self._open[known]):
                self._drop(known)
        if folder not in self._open:
            self._open[folder] = (JsonLines(Path(folder) / CHUNKS), JsonLines(Path(folder) / TEXT))
        return self._open[folder]

    def _drop(self, folder: str) -> None:
        for journal in self._open.pop(folder):
            journal.close()
