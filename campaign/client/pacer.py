"""Calls at exact times, from a thread of its own.

An event loop rounds its timers up to a millisecond and runs them when it comes to it; a thread that sleeps
until the moment is late by tens of microseconds. Used for planned send times and for the lag probe.
"""

import contextlib
import ctypes
import heapq
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_TIMERSLACK = 29
_IDLE_S = 1.0
PACING, READING = 3, 2
"""Levels of `prompt` for the threads that must not wait for the others of the client, which have 1."""


class Pacer:
    """Runs calls at times of CLOCK_MONOTONIC. The thread lives while there is something to wait for."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def at(self, due_ns: int, call: Callable[[], None]) -> None:
        """Run `call` at `due_ns`, or at once where that is past. It must be short and must not raise."""
        with self._wake:
            self._closed = False
            heapq.heappush(self._heap, (due_ns, next(self._number), call))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pacer", daemon=True)
                self._thread.start()
            elif self._heap[0][0] == due_ns:
                self._wake.notify()

    def close(self) -> None:
        """Forget what is planned and end the thread."""
        with self._wake:
            self._closed = True
            self._heap.clear()
            thread = self._thread
            self._wake.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        fine_timer()
        prompt(PACING)
        while True:
            with self._wake:
                now = time.monotonic_ns()
                if self._closed or (not self._heap and not self._wake.wait(_IDLE_S) and not self._heap):
                    self._thread = None
                    return
                if not self._heap or self._heap[0][0] > now:
                    if self._heap:
                        self._wake.wait((self._heap[0][0] - now) / 1e9)
                    continue
                call = heapq.heappop(self._heap)[2]
            call()


def prompt(level: int = 1, thread: int = 0) -> None:
    """Run a thread (native id; 0 is this one) ahead of ordinary ones, or at level 0 again among them, if allowed."""
    with contextlib.suppress(OSError, AttributeError):
        policy = os.SCHED_RR if level else os.SCHED_OTHER
        # Not for what this thread starts: an engine must not run ahead of everything.
        os.sched_setscheduler(thread, policy | os.SCHED_RESET_ON_FORK, os.sched_param(level))


def fine_timer() -> None:
    """Ask Linux not to round this thread's sleeps up by its usual 50 us."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
