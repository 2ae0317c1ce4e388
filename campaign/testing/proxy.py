"""A TCP proxy on loopback that cuts and delays, in front of a real server."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True, slots=True)
class Trouble:
    """What befalls one connection."""

    delay_s: float = 0.0
    """Before its first byte is passed on."""
    cut_after: int | None = None
    """Bytes, in both directions together, after which it is reset; None: never."""


@dataclass(slots=True)
class _Seen:
    """Both directions of one connection together."""

    size: int = 0
    cut: bool = False


class Proxy:
    """Passes connections on to `port`; `trouble(n)` says what befalls connection n = 0, 1, ...

    `refuse = True` resets every connection at once, as a cut line does.
    """

    def __init__(self, port: int, trouble: Callable[[int], Trouble] = lambda _: Trouble()) -> None:
        self._to, self.trouble = port, trouble
        self.refuse = False
        self.connections = 0
        self.cut = 0
        """Connections that were reset."""
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        """Where it listens, on 127.0.0.1."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for writer in list(self._open):
            writer.transport.abort()
        await self._server.wait_closed()

    def abort(self) -> None:
        """Reset every open connection."""
        for writer in list(self._open):
            self.cut += 1
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.connections = self.connections, self.connections + 1
        if self.refuse:
            self.cut += 1
            writer.transport.abort()
            return
        what, seen = self.trouble(number), _Seen()
        self._open.add(writer)
        try:
            await asyncio.sleep(what.delay_s)
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            self._open.discard(writer)
            return
        self._open.add(up_writer)
        ends = [
            asyncio.ensure_future(self._pipe(reader, up_writer, what, seen)),
            asyncio.ensure_future(self._pipe(up_reader, writer, what, seen)),
        ]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        for one in (writer, up_writer):
            self._open.discard(one)
            one.transport.abort() if seen.cut else one.close()

    async def _pipe(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: Trouble, seen: "_Seen"
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                if seen.cut:
                    return  # the other direction was cut in this moment
                if what.cut_after is not None and seen.size + len(data) > what.cut_after:
                    writer.write(data[: what.cut_after - seen.size])
                    self.cut += 1
                    seen.cut = True
                    return
                seen.size += len(data)
                writer.write(data)
                await writer.drain()
