"""How late are the stamps right now: bytes of our own, sent at known moments, read by the same reader.

A probe is one byte over loopback TCP, sent while requests are in flight, at most one every 10 ms: with kernel
stamps by the reading thread itself when it is awake, since a stamp of the kernel is the same whoever sends and
a thread to wake costs more than the probe; with user stamps by the pacer, as a stranger would. A probe whose
sender was interrupted between its own stamp and the end of its send says nothing and is dropped.
Where there is no kernel stamp, and under TLS, what is probed is the event loop.
"""

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from campaign.client import stamps
from campaign.client.pacer import Pacer
from campaign.client.poller import Poller, Quick

PERIOD_NS: Final = 10_000_000
CLEAN_NS: Final = 100_000
"""Longest send of a probe whose sender is taken not to have been interrupted."""
_KEPT: Final = 1 << 15


class Sample:
    """One probe."""

    __slots__ = ("kernel_ns", "sent_ns", "took_ns", "user_ns")

    def __init__(self, sent_ns: int) -> None:
        self.sent_ns = sent_ns
        self.took_ns = 0
        """Length of the send call; 0 until it has returned."""
        self.kernel_ns: int | None = None
        """Kernel stamp minus send."""
        self.user_ns: int | None = None
        """User stamp minus send."""

    @property
    def clean(self) -> bool:
        return 0 < self.took_ns <= CLEAN_NS


class _Ear:
    """Where the probes of one period arrive: a connection of the poller."""

    def __init__(self, sock: socket.socket, heard: Callable[[int, int, int], None]) -> None:
        self.sock = sock
        self.end: str | None = None
        self.quick: Quick | None = None
        self._heard = heard

    def take(self, view: memoryview, *, drain: bool) -> None:
        """Read what came; called by the poller."""
        if drain:
            self.end = "eof"
            return
        try:
            size, ancillary, _, _ = self.sock.recvmsg_into((view,), stamps.ANCILLARY)
            now = time.monotonic_ns()
        except BlockingIOError:
            return
        except OSError:
            size, ancillary, now = 0, [], 0
        if not size:
            self.end = "eof"
            return
        self._heard(size, stamps.realtime_ns(ancillary), now)

    def look(self, data: bytes) -> None:
        """Nothing: it has no `quick`."""

    def finish(self, end: str, ns: int, error: str = "") -> None:  # noqa: ARG002 -- as a connection has it
        """The poller ends."""
        self.end = end


class SocketProbe:
    """Probes of a poller."""

    def __init__(self, poller: Poller, pacer: Pacer | None) -> None:
        self._poller, self._pacer = poller, pacer
        self._due_ns = 0
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._flying: deque[Sample] = deque()
        self._users = 0
        self._out: socket.socket | None = None
        self._ear: _Ear | None = None
        self.offset_ns = 0
        """CLOCK_REALTIME minus CLOCK_MONOTONIC; kept up to date by whoever samples it."""

    def acquire(self) -> None:
        """Probe from now on; each call is undone by one `release`."""
        self._users += 1
        if self._users == 1:
            with socket.create_server(("127.0.0.1", 0), backlog=1) as server:
                self._out = socket.create_connection(server.getsockname())
                sock, _ = server.accept()
            for end in (self._out, sock):
                end.settimeout(0)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stamps.enable(sock)
            # Samples of its own: a byte of the period before may still be read.
            self._flying = deque()
            self._ear = _Ear(sock, partial(self._heard, self._flying))
            self._poller.watch(self._ear)
            if self._pacer is not None:
                self._pacer.at(time.monotonic_ns(), self._send)
            else:
                self._poller.tick = self._tick

    def release(self) -> None:
        """Stop probing, once nobody probes any more."""
        self._users -= 1
        if self._users == 0:
            self._poller.tick = None
            out, self._out = self._out, None
            if out is not None:
                out.close()
            if self._ear is not None:
                self._poller.drop(self._ear)

    def lags_ns(self, start_ns: int, end_ns: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(kernel lags, user lags) of the clean probes sent in a window of CLOCK_MONOTONIC."""
        inside: list[Sample] = []
        with contextlib.suppress(IndexError):  # the oldest may be dropped meanwhile
            for i in range(len(self._samples) - 1, -1, -1):
                sample = self._samples[i]
                if sample.sent_ns < start_ns:
                    break
                if sample.sent_ns <= end_ns and sample.clean:
                    inside.append(sample)
        return (
            tuple(s.kernel_ns for s in inside if s.kernel_ns is not None),
            tuple(s.user_ns for s in inside if s.user_ns is not None),
        )

    def _tick(self, now: int) -> None:
        if now >= self._due_ns:
            self._due_ns = now + PERIOD_NS
            self._send()

    def _send(self) -> None:
        out = self._out
        if out is None:
            return
        flying = self._flying
        sample = Sample(time.monotonic_ns())
        flying.append(sample)
        try:
            out.send(b".")
            sample.took_ns = time.monotonic_ns() - sample.sent_ns
        except OSError:
            return
        if self._pacer is not None:
            self._pacer.at(sample.sent_ns + PERIOD_NS, self._send)

    def _heard(self, flying: deque[Sample], size: int, real: int, now: int) -> None:
        for left in range(size - 1, -1, -1):
            if not flying:
                return
            sample = flying.popleft()
            sample.user_ns = now - sample.sent_ns
            if real and not left:
                # Several bytes in one read share the stamp of the last.
                sample.kernel_ns = real - self.offset_ns - sample.sent_ns
            self._samples.append(sample)


class LoopProbe:
    """Lag of an event loop: from the moment a callback is due to the moment it runs."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer, self._loop = pacer, asyncio.get_running_loop()
        self._on = True
        self.lags_ns: list[int] = []
        pacer.at(time.monotonic_ns(), self._fire)

    def stop(self) -> None:
        """No more."""
        self._on = False

    def _fire(self) -> None:
        if not self._on:
            return
        sent = time.monotonic_ns()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(lambda: self.lags_ns.append(time.monotonic_ns() - sent))
            self._pacer.at(sent + PERIOD_NS, self._fire)
