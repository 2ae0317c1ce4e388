"""Time, as something that is passed in.

Durations come from a monotonic clock, times of day are UTC. Code that waits takes a `Clock`, so that
tests and the simulator run days in milliseconds (`campaign.testing.clock.VirtualClock`).
"""

import asyncio
import time
from datetime import UTC, datetime
from typing import Protocol, runtime_checkable


@runtime_checkable
class Clock(Protocol):
    """What every waiting class is given."""

    def monotonic_ns(self) -> int:
        """Nanoseconds from an arbitrary origin; never goes back. For durations."""
        ...

    def utc_ns(self) -> int:
        """Nanoseconds since 1970-01-01 UTC. For records; may step."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait. A virtual clock returns as soon as nothing else can run."""
        ...


class SystemClock:
    """The machine's own clocks: CLOCK_MONOTONIC and CLOCK_REALTIME."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def utc_ns(self) -> int:
        return time.time_ns()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def iso(utc_ns: int) -> str:
    """ISO 8601 UTC with microseconds, e.g. `2026-12-01T09:30:00.000000Z`."""
    stamp = datetime.fromtimestamp(utc_ns // 1_000_000_000, UTC)
    return f"{stamp:%Y-%m-%dT%H:%M:%S}.{utc_ns % 1_000_000_000 // 1000:06d}Z"
