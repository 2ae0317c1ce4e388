"""A server that plays given bytes over a real socket: exact cuts, exact ends.

For tests of clients and engines. It speaks just enough HTTP/1.1 to be read, and knows nothing of models.
Times are those of the script times `scale`; a test asserts order and content, never milliseconds.
"""

import asyncio
import contextlib
import json
import socket
import ssl
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Framing = Literal["chunked", "length", "close"]
Close = Literal["clean", "rst", "cut", "hang"]

_REASONS = {200: "OK", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}


@dataclass(frozen=True, slots=True)
class Script:
    """One answer: what is sent when, and how it ends."""

    feed: tuple[tuple[float, bytes], ...]
    """(ms after the request, body bytes): one write each."""
    status: int = 200
    content_type: str = "text/event-stream"
    framing: Framing = "chunked"
    close: Close = "clean"
    """`clean`: a proper end; `rst`: a TCP reset; `cut`: FIN without the end HTTP announced; `hang`: never."""
    headers: Mapping[str, str] = field(default_factory=dict)
    raw: bytes | None = None
    """Sent as is before the feed, in place of status line and headers."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One request the server got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)


class ScriptServer:
    """`async with ScriptServer(script) as server: ... server.url`; answers every request with the script.

    `scripts` maps paths to answers where one is not enough; a path it lacks gets 404.
    """

    def __init__(
        self,
        script: Script | Mapping[str, Script],
        *,
        scale: float = 0.05,
        gap_s: float = 0.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.scripts = script
        self.scale = scale
        self.gap_s = gap_s
        """Least time between two writes, so that each arrives by itself."""
        self.tls = tls
        self.seen: list[Seen] = []
        self.hangs = asyncio.Semaphore(0)
        """Released once by every answer that has come to its `hang`."""
        self._server: asyncio.Server | None = None
        self._release = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """http://127.0.0.1:PORT; https with `tls`."""
        assert self._server is not None
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._release.set()
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await self._answer(reader, writer)
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen = await _request(reader)
        self.seen.append(seen)
        if isinstance(self.scripts, Script):
            script = self.scripts
        else:
            missing = Script(((0, b"no such page"),), status=404, content_type="text/plain")
            script = self.scripts.get(seen.path, missing)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        writer.write(_head(script))
        now = 0.0
        for at_ms, data in script.feed:
            await writer.drain()
            await asyncio.sleep(max(self.gap_s, (at_ms - now) * self.scale / 1000))
            now = max(now, at_ms)
            writer.write(b"%x\r\n%b\r\n" % (len(data), data) if script.framing == "chunked" else data)
        await writer.drain()
        await self._end(script, writer, sock)

    async def _end(self, script: Script, writer: asyncio.StreamWriter, sock: socket.socket) -> None:
        if script.close == "hang":
            self.hangs.release()
            await self._release.wait()
        elif script.close == "rst":
            # Give the peer time to take what was sent: a reset may overtake it.
            await asyncio.sleep(0.05)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif script.close == "clean" and script.framing == "chunked":
            writer.write(b"0\r\n\r\n")
            await writer.drain()


async def _request(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    method, path, _ = first.split(" ", 2)
    pairs = [line.partition(":") for line in lines if line]
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    return Seen(method, path, headers, await reader.readexactly(int(headers.get("content-length", "0"))))


def _head(script: Script) -> bytes:
    if script.raw is not None:
        return script.raw
    lines = [f"HTTP/1.1 {script.status} {_REASONS.get(script.status, 'Status')}"]
    lines.append(f"Content-Type: {script.content_type}")
    if script.framing == "chunked":
        lines.append("Transfer-Encoding: chunked")
    elif script.framing == "length":
        extra = 1 if script.close in {"cut", "rst", "hang"} else 0
        lines.append(f"Content-Length: {sum(len(data) for _, data in script.feed) + extra}")
    lines += [f"{name}: {value}" for name, value in script.headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
