"""One exchange over a plain socket, read by the poller with kernel stamps.

The connection stands before the request is due; the request is written at its moment by the pacer's thread,
or at once. Kernel stamps are put on CLOCK_MONOTONIC by the offset sampled before; a step of CLOCK_REALTIME
until the end is reported. Where a single read lacks its kernel stamp, all stamps are those of user space.
"""

import asyncio
import contextlib
import errno
import gc
import operator
import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from campaign.client import stamps
from campaign.client.http1 import Response, Target, parse_steps, restamp
from campaign.client.pacer import Pacer, prompt
from campaign.client.poller import Conn, Poller, nobody
from campaign.client.probe import SocketProbe
from campaign.client.reader import End, Exchange

T = TypeVar("T")

_YOUNG = 20_000
"""New objects before the collector looks at them while requests are read: most are gone by themselves."""


class Direct:
    """The poller, the pacer and the probe of one client; its requests share them."""

    def __init__(self, *, kernel_stamps: bool = True, probes: bool = True) -> None:
        self.kernel_stamps = kernel_stamps
        self.keeper = stamps.Keeper()
        self.poller, self.pacer = Poller(batched=kernel_stamps and sys.platform == "linux"), Pacer()
        self.probe = SocketProbe(self.poller, None if kernel_stamps else self.pacer) if probes else None
        self._open = 0
        self._threshold = gc.get_threshold()
        self._kept: dict[tuple[str, int], list[tuple[socket.socket, int | None]]] = {}

    def keep(self, where: Target, sock: socket.socket) -> None:
        """Take a connection whose response is over, for a later request."""
        self._kept.setdefault((where.host, where.port), []).append((sock, stamps.segments_in(sock)))

    def kept(self, where: Target) -> tuple[socket.socket, int | None] | None:
        """A kept connection that the server has not closed, and the segments it has received."""
        held = self._kept.get((where.host, where.port), [])
        while held:
            sock, segments = held.pop()
            try:
                sock.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return sock, segments
            except OSError:
                pass
            # The server closed it, or sent what nobody asked for.
            sock.close()
        return None

    def acquire(self, offset: stamps.Offset) -> None:
        """A request begins; undone by one `release`."""
        if self.probe is not None:
            self.probe.offset_ns = offset.ns
            self.probe.acquire()
        self._open += 1
        if self._open == 1:
            # What is there now need not be looked at by the collector while requests are read.
            gc.freeze()
            self._threshold = gc.get_threshold()
            gc.set_threshold(_YOUNG, *self._threshold[1:])
            # Who holds the interpreter's lock must not lose its core while the reading thread waits for it.
            prompt()

    def release(self) -> None:
        """A request is over."""
        self._open -= 1
        if not self._open:
            gc.unfreeze()
            gc.set_threshold(*self._threshold)
            prompt(0)
        if self.probe is not None:
            self.probe.release()

    async def between_reads(self, steps: Generator[None, None, T]) -> T:
        """Run `steps` on the reading thread, between reads."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]  # None only where T is None

        def work() -> Generator[None, None, None]:
            result, error = None, None
            try:
                result = yield from steps
            except Exception as problem:
                error = problem
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(tell, result, error)

        self.poller.idle(work())
        return await done

    def close(self) -> None:
        """End both threads."""
        self.pacer.close()
        self.poller.close()
        self.keeper.close()
        for held in self._kept.values():
            for sock, _ in held:
                sock.close()
        self._kept.clear()


class Flight:
    """One request. `stop` ends it from outside at any moment."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.end: End | None = None
        self.end_ns = 0
        self.detail = ""
        self.sent_ns = self.sent_utc_ns = 0
        self.unsent: bytes | None = None
        """What is left to write; None before the first write."""
        self.conn: Conn | None = None
        self.looked = self.looking = 0
        """Reads after which the response has been, or will be, tried for its end."""
        self.found: tuple[Exchange, Any] | None = None
        """The whole exchange and what was made of it: put here by the reading thread."""
        self.failed: Exception | None = None
        self.segments_before: int | None = None
        """What a kept connection had received before."""

    def ring(self) -> None:
        """Wake the request's coroutine; from any thread."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._event.set)

    async def rung(self) -> None:
        """Wait until something happened."""
        await self._event.wait()
        self._event.clear()

    def stop(self, end: End, ns: int | None = None) -> None:
        """End now: what comes later is not read."""
        if self.end is None:
            self.end, self.end_ns = end, time.monotonic_ns() if ns is None else ns
            self._event.set()

    def send(self, conn: Conn, request: bytes) -> None:
        """Write the request now; the stamp is taken just before."""
        if self.end is not None:
            return
        self.sent_ns, self.sent_utc_ns = time.monotonic_ns(), time.time_ns()
        try:
            self.unsent = request[conn.sock.send(request) :]
        except BlockingIOError:
            self.unsent = request
        except OSError as error:
            self.unsent = b""
            conn.finish("reset", time.monotonic_ns(), str(error))
        if self.unsent:
            self.ring()


async def exchange(
    direct: Direct,
    flight: Flight,
    where: Target,
    request: bytes,
    timeout_s: float,
    then: Callable[[Exchange, Response], Generator[None, None, T]],
    start_ns: int | None = None,
    *,
    reuse: bool = False,
) -> tuple[Exchange, T]:
    """Connect, write at the moment planned, read to the end, and do `then` with what came, between reads.

    `timeout_s` counts from the moment the request is due. Never raises for what the server does.
    """
    if direct.kernel_stamps:
        await direct.keeper.ready()
    before = stamps.offset()
    flight.sent_ns, flight.sent_utc_ns = time.monotonic_ns(), time.time_ns()
    wait_s = 0.0 if start_ns is None else max(0.0, (start_ns - flight.sent_ns) / 1e9)
    direct.acquire(before)
    try:
        async with asyncio.timeout(timeout_s + wait_s):
            sock = await _connected(direct, flight, where, reuse=reuse)
            if sock is not None:
                conn = flight.conn = Conn(sock)
                conn.notify = _watcher(direct, flight, conn, before, then, start_ns, where if reuse else None)
                direct.poller.watch(conn)
                if start_ns is None:
                    flight.send(conn, request)
                else:
                    direct.pacer.at(start_ns, lambda: flight.send(conn, request))
                await _read(flight, conn)
    except TimeoutError:
        flight.stop("timeout")
    finally:
        segments = _let_go(direct, flight)
        if flight.end is None:
            flight.stop("cancelled")
        direct.release()
    if flight.failed is not None:
        raise flight.failed
    if flight.found is not None and flight.end == "complete":
        return flight.found

    def rest() -> Generator[None, None, tuple[Exchange, T]]:
        seen, at = _stamped(direct, flight, before, segments, start_ns, flight.end or "cancelled")
        response = yield from parse_steps(list(enumerate([data for _, data in seen.reads])))
        return seen, (yield from then(seen, restamp(response, at)))

    return await direct.between_reads(rest())


def _watcher(
    direct: Direct,
    flight: Flight,
    conn: Conn,
    before: stamps.Offset,
    then: Callable[[Exchange, Response], Generator[None, None, Any]],
    start_ns: int | None,
    keep: Target | None,
) -> Callable[[], None]:
    """What the reading thread calls when a connection may be at the end of its response, or is over."""

    def look() -> Generator[None, None, None]:
        looked = flight.looking
        try:
            response = yield from parse_steps(list(enumerate(conn.data[:looked])))
            if response.complete:
                segments = _segments(flight, conn)
                kept = partial(direct.keep, keep) if keep is not None and response.keeps else None
                direct.poller.drop(conn, ring=False, keep=kept)
                seen, at = _stamped(direct, flight, before, segments, start_ns, "complete")
                flight.found = seen, (yield from then(seen, restamp(response, at)))
        except Exception as error:
            flight.failed = error
        flight.looked = looked
        if flight.looking > looked and flight.found is None:
            direct.poller.here(look())
        flight.ring()

    def notify() -> None:
        pending = flight.looking > flight.looked
        if conn.maybe > flight.looking:
            flight.looking = conn.maybe
            if not pending:
                direct.poller.here(look())
        elif not pending:
            flight.ring()

    return notify


def _let_go(direct: Direct, flight: Flight) -> int | None:
    """Drop the connection, unless the reading thread has; the segments it received."""
    conn = flight.conn
    if conn is None:
        return None
    # Who is told holds the connection, and all that it has read.
    conn.notify = nobody
    if flight.found is not None:
        return None
    segments = _segments(flight, conn)
    direct.poller.drop(conn)
    return segments


def _segments(flight: Flight, conn: Conn) -> int | None:
    """Segments of this request alone."""
    found = stamps.segments_in(conn.sock)
    return None if found is None else found - (flight.segments_before or 0)


async def _connected(direct: Direct, flight: Flight, where: Target, *, reuse: bool) -> socket.socket | None:
    """A standing connection; None where there is none, and the flight says why."""
    held = direct.kept(where) if reuse else None
    if held is not None:
        sock, flight.segments_before = held
        return sock
    problems: list[OSError] = []
    try:
        found = await _addresses(flight, where)
    except OSError as error:
        found, problems = None, [error]
    for family, kind, proto, _, address in found or ():
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, proto)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if direct.kernel_stamps:
                stamps.enable(sock)
            await _begin(flight, sock, address)
        except OSError as error:
            problems.append(error)
            sock.close()
            continue
        except BaseException:
            sock.close()
            raise
        if flight.end is None:
            return sock
        sock.close()
        return None
    if flight.end is None:
        flight.detail = "; ".join(map(str, problems))
        refused = any(error.errno == errno.ECONNREFUSED for error in problems)
        flight.stop("refused" if refused else "unreachable")
    return None


async def _addresses(flight: Flight, where: Target) -> Any:
    """What getaddrinfo says. Raises OSError."""
    try:
        # A number needs no resolver, and no thread to wait for one.
        flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
        return socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=flags)
    except OSError:
        loop = asyncio.get_running_loop()
        return await _ended_or(flight, loop.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM))


async def _begin(flight: Flight, sock: socket.socket, address: Any) -> None:
    """Connect, or return early where the flight is ended. Raises OSError."""
    code = sock.connect_ex(address)
    if code == errno.EINPROGRESS and not _stands(sock):
        await _ended_or(flight, _connect(sock))
    elif code not in {0, errno.EINPROGRESS}:
        raise OSError(code, os.strerror(code))


async def _connect(sock: socket.socket) -> None:
    """Wait until a connection that is under way stands. Raises OSError."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_writer(sock.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(sock.fileno())
    code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _stands(sock: socket.socket) -> bool:
    """Whether the connection stands already, as one to this machine does."""
    try:
        sock.getpeername()
    except OSError:
        return False
    return True


async def _ended_or(flight: Flight, work: Any) -> Any:
    """Await `work`, or None as soon as the flight is ended from outside."""
    task = asyncio.ensure_future(work)
    bell = asyncio.ensure_future(flight.rung())
    try:
        await asyncio.wait({task, bell}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for future in (task, bell):
            future.cancel()
        await asyncio.gather(task, bell, return_exceptions=True)


async def _read(flight: Flight, conn: Conn) -> None:
    """Wait for the end."""
    loop = asyncio.get_running_loop()
    while flight.end is None:
        await flight.rung()
        if flight.unsent:
            rest, flight.unsent = flight.unsent, b""
            try:
                await loop.sock_sendall(conn.sock, rest)
            except OSError as error:
                conn.finish("reset", time.monotonic_ns(), str(error))
        if flight.end is not None or flight.failed is not None:
            return
        if flight.found is not None:
            flight.stop("complete", flight.found[0].end_ns)
        elif conn.end is not None and conn.maybe == flight.looked:
            flight.detail = conn.error
            flight.stop("eof" if conn.end == "eof" else "reset", conn.end_ns)


def _stamped(
    direct: Direct,
    flight: Flight,
    before: stamps.Offset,
    segments: int | None,
    start_ns: int | None,
    end: End,
) -> tuple[Exchange, list[int]]:
    """The exchange with every read on CLOCK_MONOTONIC, and those stamps alone."""
    conn = flight.conn
    data = list(conn.data) if conn is not None else []
    real = stamps.realtimes_ns(conn.kernel[: len(data)]) if conn is not None else []
    user = conn.user[: len(data)].tolist() if conn is not None else []
    after = stamps.offset()
    kernel = bool(data) and 0 not in real
    offset = before.ns
    at = [ns - offset for ns in real] if kernel else user
    probed: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    if direct.probe is not None:
        probed = direct.probe.lags_ns(flight.sent_ns, at[-1] if end == "complete" else flight.end_ns)
    user_lags = tuple(map(operator.sub, user, at)) if kernel else probed[1]
    seen = Exchange(
        sent_ns=flight.sent_ns,
        sent_utc_ns=flight.sent_utc_ns,
        reads=tuple(zip(at, data, strict=True)),
        end=end,
        end_ns=at[-1] if end == "complete" else flight.end_ns,
        detail=flight.detail,
        stamp_source="kernel" if kernel else "user",
        segments=segments,
        clock_step=kernel and stamps.stepped(before, after),
        planned_ns=start_ns,
        user_ns=tuple(user) if kernel else (),
        lags_ns=probed[0] if kernel else probed[1],
        user_lags_ns=user_lags,
    )
    return seen, at
