"""The socket reader: one thread, one epoll, one `recvmsg` a read, stamped by the kernel.

A read is kept as (kernel stamp, user stamp, bytes) and nothing looks into it but for the few bytes that may
end a response. What is to be done with a finished response is given to `idle` as a generator: its steps run
between reads, so that parsing one response does not delay the reads of another. A thread of its own, since
kernel stamps make its moment unimportant, and since it then reads the same under asyncio and uvloop.
"""

import contextlib
import os
import re
import select
import socket
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from campaign.client import stamps
from campaign.client.pacer import READING, prompt

_READ_BYTES = 1 << 18
_LINGER_S = 1.0
"""The thread ends when it has had nothing to read for so long."""
_OVER = object()
_IN = 1
_EVENTS = _IN | 0x2000 | 1 << 31
"""EPOLLIN, EPOLLRDHUP, EPOLLET: an event for what arrives, none for what is merely still there."""
_ROOM = stamps.ANCILLARY
_now, _NONE = time.monotonic_ns, stamps.NONE
_PAUSE_NS = 2_000_000
_SHARE = 5
_WORTH_NS = 100_000
_WINDOW_NS = 50_000_000
_SWITCH_S = 0.0002
"""How long a thread that has work may be kept from the interpreter by another."""
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*\r\n", re.IGNORECASE)
_HEAD_END = b"\r\n\r\n"
_LAST_CHUNK = b"\r\n0\r\n\r\n"


def nobody() -> None:
    """Nobody is told."""


class Readable(Protocol):
    """What the poller reads: a `Conn`, or a probe."""

    sock: socket.socket
    end: str | None
    quick: "Quick | None"

    def take(self, view: memoryview, *, drain: bool) -> None:
        """Read once, into this buffer, or until nothing is left; the socket is readable."""
        ...

    def look(self, data: bytes) -> None:
        """Look at a read that `quick` took."""
        ...

    def finish(self, end: str, ns: int, error: str = "") -> None:
        """It is over."""
        ...


Quick = tuple[
    Callable[[tuple[memoryview], int], tuple[int, list[tuple[int, int, bytes]], int, Any]],
    Callable[[bytes], None],
    Callable[[int], None],
    Callable[[bytes], None],
]
"""`recvmsg_into`, and where the kernel's stamp, the user's stamp and the bytes go."""


class Conn:
    """One connection being read. Only the poller's thread appends; `notify` is mostly called from it."""

    __slots__ = (
        "_data",
        "_head_seen",
        "_kernel",
        "_needed",
        "_receive",
        "_total",
        "_user",
        "data",
        "end",
        "end_ns",
        "error",
        "kernel",
        "maybe",
        "notify",
        "quick",
        "sock",
        "user",
    )

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.notify: Callable[[], None] = nobody
        """Called where the response may be whole, or the connection is over."""
        # A million reads are two million bytes objects, and nothing the collector must visit.
        self.kernel: list[bytes] = []
        """The kernel's stamp of each read as it came; `stamps.realtimes_ns` says what they mean."""
        self.user = array("q")
        """CLOCK_MONOTONIC ns right after the read."""
        self.data: list[bytes] = []
        """Bytes of each read; appended last."""
        self.end: str | None = None
        """`eof` or `reset`, once that came."""
        self.end_ns = 0
        self.error = ""
        self.maybe = 0
        """Reads after which the response may have been complete."""
        self._total = 0
        self._needed: int | None = None
        self._head_seen = False
        self._receive = sock.recvmsg_into
        self._kernel, self._user, self._data = self.kernel.append, self.user.append, self.data.append
        self.quick: Quick | None = None
        """What a read needs once only the last chunk can end the response; None while the end is looked for with
        care: in the head, and where the length is announced."""

    def take(self, view: memoryview, *, drain: bool) -> None:
        """One read, stamped before anything is looked at; with `drain`, until nothing is left."""
        while True:
            try:
                size, ancillary, _, _ = self._receive((view,), _ROOM)
                user_ns = _now()
            except BlockingIOError:
                return
            except OSError as error:
                self.finish("reset", time.monotonic_ns(), str(error))
                return
            if not size:
                self.finish("eof", user_ns)
                return
            data = view[:size].tobytes()
            # Nothing else is asked for, so nothing else comes.
            self._kernel(ancillary[0][2] if ancillary else _NONE)
            self._user(user_ns)
            self._data(data)
            self.look(data)
            if not drain and size < _READ_BYTES:
                # Edge-triggered: the queue was empty now, so the next byte rings again.
                return

    def finish(self, end: str, ns: int, error: str = "") -> None:
        """The connection is over."""
        if self.end is None:
            self.end_ns, self.error, self.end = ns, error, end
            self.notify()

    def look(self, data: bytes) -> None:
        """Tell where this read may have ended the response."""
        if self._may_end(data):
            self.maybe = len(self.data)
            self.notify()

    def _may_end(self, data: bytes) -> bool:
        """Two cheap looks. What they miss (chunk trailers) ends when the server closes."""
        if self.quick is not None:
            # A read has a byte at least, so these hold the last chunk if anything does.
            return b"".join(self.data[-len(_LAST_CHUNK) :]).endswith(_LAST_CHUNK)
        self._total += len(data)
        if not self._head_seen:
            head = b"".join(self.data)
            cut = head.find(_HEAD_END)
            if cut < 0:
                return False
            self._head_seen = True
            length = _LENGTH.search(head, 0, cut + 2)
            if length is not None:
                self._needed = cut + len(_HEAD_END) + int(length[1])
            if self._needed is None:
                self.quick = (self._receive, self._kernel, self._user, self._data)
        if self._needed is not None:
            return self._total >= self._needed
        return b"".join(self.data[-len(_LAST_CHUNK) :]).endswith(_LAST_CHUNK)


class Poller:
    """Reads every connection it is given until it is told to drop it."""

    def __init__(self, *, batched: bool = False) -> None:
        self.batched = batched
        self.tick: Callable[[int], None] | None = None
        """Called with the time after every look at the connections."""
        self._pause_ns = self._window_ns = self._reads = self._streams = 0
        self._lock = threading.Lock()
        self._conns: dict[int, Readable] = {}
        self._dropped: deque[tuple[Readable, Callable[[socket.socket], None] | None]] = deque()
        self._idle: deque[Iterator[None]] = deque()
        self._epoll: select.epoll | None = None
        self._wake = -1
        self._thread: threading.Thread | None = None
        self._closed = self._prompt = False
        self._view = memoryview(bytearray(_READ_BYTES))

    def watch(self, conn: Readable) -> None:
        """Read it from now on."""
        with self._lock:
            epoll = self._started()
            fd = conn.sock.fileno()
            self._conns[fd] = conn
            self._streams += isinstance(conn, Conn)
            if self._streams and not self._prompt and self._thread is not None:
                # Reading goes ahead of ordinary work where that is allowed; parsing alone does not.
                self._prompt = True
                prompt(READING, self._thread.native_id or 0)
            epoll.register(fd, _EVENTS)

    def drop(
        self, conn: Readable, *, ring: bool = True, keep: Callable[[socket.socket], None] | None = None
    ) -> None:
        """Read it no more, and close it or give it to `keep`. From any thread; done by the reading one.

        `ring` may be False on the reading thread, which need not be woken.
        """
        if not ring:
            self._dropped.append((conn, keep))
            return
        with self._lock:
            if self._thread is None:
                conn.sock.close()
                return
            self._dropped.append((conn, keep))
            self._ring()

    def here(self, work: Iterator[None]) -> None:
        """As `idle`, called on the reading thread."""
        self._idle.append(work)

    def idle(self, work: Iterator[None]) -> None:
        """Run the steps of `work` between reads. It must not raise."""
        with self._lock:
            self._started()
            self._idle.append(work)
            self._ring()

    def close(self) -> None:
        """Close every connection and end the thread. Idempotent; watching again starts anew."""
        with self._lock:
            thread = self._thread
            self._closed = True
            if thread is not None:
                self._ring()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _ring(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _started(self) -> select.epoll:
        if self._thread is None:
            self._closed = self._prompt = False
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            self._epoll = select.epoll()
            self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll.register(self._wake, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
            self._thread.start()
        assert self._epoll is not None
        return self._epoll

    def _run(self) -> None:
        epoll, idle = self._epoll, self._idle
        assert epoll is not None
        while True:
            if self._prompt and not self._streams:
                self._relax()
            ready = epoll.poll(0 if idle or self._pause_ns else _LINGER_S)
            self._take(ready)
            self._let_go()
            now = time.monotonic_ns()
            if (tick := self.tick) is not None:
                tick(now)
            until = now + self._pace(now, len(ready))
            while idle and (now < until or not ready):
                work = idle.popleft()
                if next(work, _OVER) is not _OVER:
                    idle.append(work)
                ready, now = ready or [(-1, 0)], time.monotonic_ns()
            if now < until:
                time.sleep((until - now) / 1e9)
            elif not ready or self._closed:
                with self._lock:
                    if self._closed or not (self._conns or idle or self._dropped):
                        self._end()
                        return

    def _relax(self) -> None:
        with self._lock:
            if not self._streams:
                prompt(0)
                self._prompt = False

    def _let_go(self) -> None:
        while self._dropped:
            conn, keep = self._dropped.popleft()
            self._forget(conn)
            if keep is not None and conn.end is None:
                keep(conn.sock)
            else:
                conn.sock.close()

    def _pace(self, now: int, reads: int) -> int:
        """Nanoseconds to leave before the next look.

        A kernel stamp does not move while its bytes wait, so many streams are read a batch at a time: after
        a fifth of the mean gap between two reads of one connection, at most 2 ms. Never with user stamps.
        """
        self._reads += reads
        if now - self._window_ns >= _WINDOW_NS:
            gap = (now - self._window_ns) * len(self._conns) / max(1, self._reads)
            pause = int(min(_PAUSE_NS, gap / _SHARE))
            worth = self._reads * pause >= 2 * (now - self._window_ns)
            self._pause_ns = pause if self.batched and worth and pause >= _WORTH_NS else 0
            self._window_ns, self._reads = now, 0
        return self._pause_ns

    def _take(self, ready: list[tuple[int, int]]) -> None:  # noqa: C901 -- the hot loop: calls cost
        """Read what is there; the usual read in this loop itself."""
        conns, view, room, now, none = self._conns, self._view, _ROOM, _now, _NONE
        views, last = (view,), _LAST_CHUNK
        for fd, events in ready:
            conn = conns.get(fd)
            if conn is None:
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(fd)
                continue
            quick = conn.quick
            if quick is None or events != _IN:
                conn.take(view, drain=events != _IN)
            else:
                receive, kernel, user, add = quick
                try:
                    size, ancillary, _, _ = receive(views, room)
                    user_ns = now()
                except BlockingIOError:
                    continue
                except OSError as error:
                    conn.finish("reset", now(), str(error))
                    size = 0
                if size:
                    data = view[:size].tobytes()
                    # Nothing but the stamp is asked for, so nothing else comes.
                    kernel(ancillary[0][2] if ancillary else none)
                    user(user_ns)
                    add(data)
                    if size < 7 or data.endswith(last):
                        conn.look(data)
                    if size == _READ_BYTES:
                        conn.take(view, drain=False)
                elif conn.end is None:
                    conn.finish("eof", user_ns)
            if conn.end is not None:
                self._forget(conn)

    def _forget(self, conn: Readable) -> None:
        fd = conn.sock.fileno()
        if fd >= 0 and self._conns.pop(fd, None) is not None:
            self._streams -= isinstance(conn, Conn)
            assert self._epoll is not None
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _end(self) -> None:
        for conn in [*self._conns.values(), *(conn for conn, _ in self._dropped)]:
            conn.finish("reset", time.monotonic_ns(), "the client was closed")
            conn.sock.close()
        while self._idle:
            for _ in self._idle.popleft():
                pass
        self._conns.clear()
        self._streams = 0
        self._dropped.clear()
        assert self._epoll is not None
        self._epoll.close()
        os.close(self._wake)
        self._epoll, self._wake, self._thread = None, -1, None
