"""A clock for tests: time passes only when nothing else can run.

The idea is trio's autojump clock: sleepers wait on futures, and when the event loop has had a few turns
with nothing to do, time jumps to the earliest deadline. Days of supervision run in milliseconds.
"""

import asyncio
import heapq

_IDLE_TURNS = 25
"""Turns of the event loop that count as idle: enough for chains of awaits inside one process."""


class VirtualClock:
    """A `campaign.clock.Clock` whose seconds cost nothing."""

    def __init__(self, utc_ns: int = 1_790_000_000_000_000_000, idle_turns: int = _IDLE_TURNS) -> None:
        self._now = 0
        self._idle_turns = idle_turns
        self._utc0 = utc_ns
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._jumper: asyncio.Task[None] | None = None

    def monotonic_ns(self) -> int:
        return self._now

    def utc_ns(self) -> int:
        return self._utc0 + self._now

    def advance(self, seconds: float) -> None:
        """Move time by hand, waking whoever is due."""
        self._now += int(seconds * 1e9)
        self._wake()

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        heapq.heappush(self._sleepers, (self._now + int(seconds * 1e9), self._count, future))
        if self._jumper is None or self._jumper.done():
            self._jumper = asyncio.get_running_loop().create_task(self._jump())
        await future

    def _wake(self) -> None:
        while self._sleepers and (self._sleepers[0][0] <= self._now or self._sleepers[0][2].done()):
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)

    async def _jump(self) -> None:
        while True:
            for _ in range(self._idle_turns):
                await asyncio.sleep(0)
            self._sleepers = [s for s in self._sleepers if not s[2].done()]
            heapq.heapify(self._sleepers)
            if not self._sleepers:
                return
            self._now = max(self._now, self._sleepers[0][0])
            self._wake()
