"""HTTP/1.1 as bytes: the request to write, and the response parsed after it was read.

No proxy from the environment, no compression, no redirect, no retry, and by default one new connection a
request: what is timed is one exchange with one server. llhttp (through httptools) reads the response.
"""

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
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


def post(where: Target, body: Mapping[str, Any], headers: Mapping[str, str]) -> bytes:
    """A whole POST of a JSON body. Raises ValueError for NaN, or a header that could end its line."""
    payload = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")
    own = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "Content-Length": str(len(payload)),
    }
    return _head("POST", where, own, headers) + payload


def get(where: Target) -> bytes:
    """A whole GET."""
    return _head("GET", where, {"Accept": "*/*"}, {})


def _head(method: str, where: Target, own: Mapping[str, str], extra: Mapping[str, str]) -> bytes:
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
    lines += ["Accept-Encoding: identity", "Connection: close"]
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
    pieces: tuple[Piece, ...]
    """One for each read that brought body bytes."""
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

    @property
    def body(self) -> bytes:
        return b"".join(piece.data for piece in self.pieces)


class _Collector:
    """Callbacks of llhttp."""

    def __init__(self) -> None:
        self.parser: httptools.HttpResponseParser | None = None
        self.headers: dict[str, str] = {}
        self.status: int | None = None
        self.body: list[bytes] = []
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if not self.complete:
            self.body.append(data)

    def on_message_complete(self) -> None:
        if self.status is not None and 100 <= self.status < 200:
            # An interim response; the real one follows on the same bytes.
            self.headers, self.status = {}, None
            return
        self.complete = True


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
        pieces=tuple(Piece(stamps[piece.ns], piece.data) for piece in response.pieces),
        complete_ns=None if done is None else stamps[done],
    )


def parse_steps(reads: Sequence[tuple[int, bytes]]) -> Generator[None, None, Response]:
    """As `parse_response`, in steps short enough to go between the reads of other requests."""
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    collector.parser = parser
    pieces: list[Piece] = []
    complete_ns: int | None = None
    error: str | None = None
    for number, (ns, data) in enumerate(reads):
        if number % _STEP_READS == _STEP_READS - 1:
            yield
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as problem:
            # Bytes after a complete message are not ours to judge.
            error = None if collector.complete else str(problem) or type(problem).__name__
        if collector.body:
            pieces.append(Piece(ns, b"".join(collector.body)))
            collector.body.clear()
        if collector.complete:
            complete_ns = ns
            break
        if error is not None:
            break
    headers = collector.headers
    framed = "content-length" in headers or "chunked" in headers.get("transfer-encoding", "").lower()
    return Response(
        status=collector.status,
        content_type=headers.get("content-type", "").partition(";")[0].strip().lower(),
        pieces=tuple(pieces),
        framed=framed,
        complete=collector.complete,
        complete_ns=complete_ns,
        error=error,
        retry_after=headers.get("retry-after"),
    )
