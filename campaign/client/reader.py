"""The socket reader: every read is stamped once, before anything looks at its bytes.

It keeps (stamp, bytes) of each read and finds the end of the response; it knows no events and no tokens.
Everything else happens after the request. Stamps are CLOCK_MONOTONIC of user space, taken in the callback
that the event loop makes with the bytes of one `recv`; a reader with kernel stamps can replace this one.
Under TLS a read is what the TLS layer hands over.
"""

import asyncio
import errno
import re
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Literal, cast

from campaign.client.http1 import Target, parse_response
from campaign.store.row import StampSource

End = Literal["complete", "eof", "reset", "refused", "unreachable", "timeout", "cancelled"]

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as it went over the wire."""

    sent_ns: int
    """Before the first byte was written; the connection stood already."""
    sent_utc_ns: int
    reads: tuple[tuple[int, bytes], ...]
    """(CLOCK_MONOTONIC ns, bytes) of each read, HTTP framing included."""
    end: End
    end_ns: int
    detail: str = ""
    stamp_source: StampSource = "user"
    """Whose stamps `reads` and `end_ns` hold; `sent_ns` is always taken in user space."""
    segments: int | None = None
    """TCP data segments received on the connection (TCP_INFO), where the kernel says."""
    clock_step: bool = False
    """CLOCK_REALTIME was set meanwhile: kernel stamps of this exchange mean nothing."""
    planned_ns: int | None = None
    """When it should have been sent, where that was planned."""
    user_ns: tuple[int, ...] = ()
    """User stamp of each read, where `reads` hold the kernel's."""
    lags_ns: tuple[int, ...] = ()
    """Lag of the stamp used, of each probe sent while this request was in flight."""
    user_lags_ns: tuple[int, ...] = ()
    """User stamp minus kernel stamp of each read; where stamps are the user's, the lag of probes."""


class Wire(asyncio.Protocol):
    """One connection, one request. `stop` ends it from outside at any moment."""

    def __init__(self) -> None:
        self.done: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.reads: list[tuple[int, bytes]] = []
        self.end_ns = 0
        self.detail = ""
        self._transport: asyncio.Transport | None = None
        self._last = b""
        self._total = 0
        self._needed: int | None = None
        self._head_seen = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are of no asyncio class.
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in {socket.AF_INET, socket.AF_INET6}:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.done.done():
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        stamp = time.monotonic_ns()
        self.reads.append((stamp, data))
        if self._ended(data):
            self._finish("complete", stamp)

    def eof_received(self) -> None:
        self._finish("eof", time.monotonic_ns())

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self.detail = str(exc) or type(exc).__name__
        self._finish("eof" if exc is None else "reset", time.monotonic_ns())

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def stop(self, end: End) -> None:
        """End now: later bytes are not read."""
        self._finish(end, time.monotonic_ns())
        self.close()

    def close(self) -> None:
        """Drop the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, end: End, ns: int) -> None:
        if not self.done.done():
            self.end_ns = ns
            self.done.set_result(end)

    def _ended(self, data: bytes) -> bool:
        """Whether this read may have ended the response: two cheap looks, then one parse that decides.

        A response that ends in a way these looks miss (chunk trailers) ends when the server closes.
        """
        self._total += len(data)
        self._last = (self._last + data)[-len(_LAST_CHUNK) :]
        if not self._head_seen:
            head = b"".join(part for _, part in self.reads)
            cut = head.find(_HEAD_END)
            if cut < 0:
                return False
            self._head_seen = True
            length = _LENGTH.search(head, 0, cut + 2)
            if length is not None:
                self._needed = cut + len(_HEAD_END) + int(length[1])
        by_length = self._needed is not None and self._total >= self._needed
        return (by_length or self._last == _LAST_CHUNK) and parse_response(self.reads).complete


async def exchange(wire: Wire, where: Target, request: bytes, timeout_s: float) -> Exchange:
    """Connect, stamp, write, and read to the end. Never raises for what the network or the server does."""
    loop = asyncio.get_running_loop()
    sent_ns, sent_utc_ns = time.monotonic_ns(), time.time_ns()
    context = ssl.create_default_context() if where.tls else None
    connecting = loop.create_task(loop.create_connection(lambda: wire, where.host, where.port, ssl=context))
    try:
        async with asyncio.timeout(timeout_s):
            waiting: set[asyncio.Future[Any]] = {connecting, wire.done}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not wire.done.done():
                await connecting
                sent_ns, sent_utc_ns = time.monotonic_ns(), time.time_ns()
                wire.write(request)
            # Not `await wire.done`: a timeout would cancel the future that says how it ended.
            await asyncio.wait({wire.done})
    except TimeoutError:
        wire.stop("timeout")
    except OSError as error:
        wire.detail = str(error)
        # With several addresses asyncio folds the errors into one text.
        refused = isinstance(error, ConnectionRefusedError) or f"Errno {errno.ECONNREFUSED}" in str(error)
        wire.stop("refused" if refused else "unreachable")
    finally:
        connecting.cancel()
        wire.close()
        await asyncio.gather(connecting, return_exceptions=True)
    return Exchange(sent_ns, sent_utc_ns, tuple(wire.reads), wire.done.result(), wire.end_ns, wire.detail)
