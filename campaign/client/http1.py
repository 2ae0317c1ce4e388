"""HTTP/1.1 as bytes: the request to write, and the response parsed after it was read.

No proxy from the environment, no compression, no redirect, no retry, and by default one new connection a
request: what is timed is one exchange with one server. llhttp (through httptools) reads the response.
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httptools

T = TypeVar("T")

_STEP_READS = 64
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_OURS = frozenset({"host", "content-length", "transfer-encoding", "connection", "accept-encoding"})


@dataclass(frozen=True, slots=True)
class Target:
    """Where a URL leads."""

    host: str
    port: int
    tls: bool
    path: str
    """Path and query, as sent."""


def target(url: str, path: str = "") -> Target:
    """Split `url` + `path`. Raises ValueError for anything but http(s)://host[:port]/..."""
    parts = urlsplit(url.rstrip("/") + path if path else url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"not an http(s) URL: {url!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("a URL must not carry a user or a password; put the key in a header")
    tls = parts.scheme == "https"
    query = f"?{parts.query}" if parts.query else ""
    line = (parts.path or "/") + query
    if re.search(r"[\x00-\x20\x7f]", line):
        raise ValueError(f"not a usable path: {line!r}")
    return Target(parts.hostname, parts.port or (443 if tls else 80), tls, line)


def payload_of(body: Mapping[str, Any]) -> bytes:
    """A JSON body. Raises ValueError for NaN."""
    return json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def post(where: Target, body: Mapping[str, Any], headers: Mapping[str, str], *, keep: bool = False) -> bytes:
    """A whole POST of a JSON body. Raises ValueError for NaN, or a header that could end its line.

    `keep` asks the server to keep the connection.
    """
    payload = payload_of(body)
    own = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(payload)),
    }
    return _head("POST", where, own, headers, keep=keep) + payload


def get(where: Target) -> bytes:
    """A whole GET."""
    return _head("GET", where, {"Accept": "*/*"}, {})


def _head(
    method: str, where: Target, own: Mapping[str, str], extra: Mapping[str, str], *, keep: bool = False
) -> bytes:
    host = f"[{where.host}]" if ":" in where.host else where.host
    lines = [f"{method} {where.path} HTTP/1.1", f"Host: {host}:{where.port}"]
    taken = {name.lower() for name in extra}
    lines += [f"{name}: {value}" for name, value in own.items() if name.lower() not in taken]
    for name, value in extra.items():
        if not _HEADER_NAME.fullmatch(name) or re.search(r"[\r\n\x00]", value):
            raise ValueError(f"not a usable header: {name!r}")
        if name.lower() in _OURS:
            raise ValueError(f"the client sets {name} itself")
        lines.append(f"{name}: {value}")
    lines += ["Accept-Encoding: identity", f"Connection: {'keep-alive' if keep else 'close'}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


class Piece(NamedTuple):
    """Body bytes that one read brought."""

    ns: int
    """Stamp of that read."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Response:
    """A response, as far as it came."""

    status: int | None
    content_type: str
    pieces: tuple[tuple[int, bytes], ...]
    """A `Piece` for each read that brought body bytes; plain tuples where there are many."""
    framed: bool
    """Whether its length is known from HTTP (chunked or content-length), so that a cut shows."""
    complete: bool
    """HTTP says that all of it arrived."""
    complete_ns: int | None
    """Stamp of the read that completed it."""
    error: str | None
    """Why the bytes are not HTTP."""
    retry_after: str | None = None
    """The Retry-After header."""
    keeps: bool = False
    """The server will keep the connection, and nothing of another response has come on it."""

    @property
    def body(self) -> bytes:
        return b"".join([data for _, data in self.pieces])


class _Collector:
    """Callbacks of llhttp. Those of every chunk are methods of lists: no frame of Python's for each."""

    def __init__(self) -> None:
        self.parser: httptools.HttpResponseParser | None = None
        self.headers: dict[str, str] = {}
        self.status: int | None = None
        self.body: list[bytes] = []
        self.on_body = self.body.append
        self.between: list[bool] = []
        """Not empty where the last chunk is over and no byte of the next has come."""
        self.on_chunk_header = self.between.clear
        self.on_chunk_complete = partial(self.between.append, True)  # noqa: FBT003 -- any element will do
        self.complete = False
        self.kept = 0
        """Body parts of this read that belong to the message."""
        self.keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        self.status = self.parser.get_status_code()

    def on_message_complete(self) -> None:
        if self.status is not None and 100 <= self.status < 200:
            # An interim response; the real one follows on the same bytes.
            self.headers, self.status = {}, None
            return
        if not self.complete:
            assert self.parser is not None
            self.complete, self.kept = True, len(self.body)
            # Asked later, llhttp would speak of a message that has not begun.
            self.keeps = self.parser.should_keep_alive()


def parse_response(reads: Sequence[tuple[int, bytes]]) -> Response:
    """Parse the reads (stamp in ns, bytes) of one response. Never raises."""
    return finish(parse_steps(reads))


def finish(steps: Generator[None, None, T]) -> T:
    """Run a generator to its end, for its value."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        value: T = end.value
        return value


def restamp(response: Response, stamps: Sequence[int]) -> Response:
    """A response whose reads were numbered 0, 1, ... instead of stamped, with their stamps."""
    done = response.complete_ns
    return replace(
        response,
        pieces=tuple([(stamps[number], data) for number, data in response.pieces]),
        complete_ns=None if done is None else stamps[done],
    )


def _size_line(length: int) -> bytes:
    """The size line of the HTTP chunk that is so long with its framing; empty where there is none."""
    for digits in range(1, 8):
        size = length - digits - 4
        if size > 0 and len(line := b"%x\r\n" % size) == digits + 2:
            return line
    return b""


def parse_steps(reads: Sequence[tuple[int, bytes]]) -> Generator[None, None, Response]:
    """As `parse_response`, in steps short enough to go between the reads of other requests.

    A read that is exactly one chunk, as nearly every read of a stream is, need not be shown to llhttp, which
    stands between two chunks before it and after it.
    """
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    collector.parser = parser
    body, between = collector.body, collector.between
    lines: dict[int, bytes] = {}
    numbers: list[int] = []
    parts: list[bytes] = []
    complete_ns: int | None = None
    error: str | None = None
    number = -1
    for number, (ns, data) in enumerate(reads):
        if number % _STEP_READS == _STEP_READS - 1:
            yield
        if between:
            line = lines.get(len(data))
            if line is None:
                line = lines[len(data)] = _size_line(len(data))
            if line and data.startswith(line) and data.endswith(b"\r\n"):
                numbers.append(ns)
                parts.append(data[len(line) : -2])
                continue
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as problem:
            # Bytes after a complete message are not ours to judge.
            error = None if collector.complete else str(problem) or type(problem).__name__
        if collector.complete:
            del body[collector.kept :]
            complete_ns = ns
        if body:
            numbers.append(ns)
            parts.append(body[0] if len(body) == 1 else b"".join(body))
            body.clear()
        if collector.complete or error is not None:
            break
        del between[1:]
    headers = collector.headers
    framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
    return Response(
        status=collector.status,
        content_type=headers.get("content-type", "").partition(";")[0].strip().lower(),
        pieces=tuple(zip(numbers, parts, strict=True)),
        framed=framed,
        complete=collector.complete,
        complete_ns=complete_ns,
        error=error,
        retry_after=headers.get("retry-after"),
        keeps=collector.keeps and number == len(reads) - 1,
    )
