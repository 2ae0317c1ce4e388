"""Several client processes as one client, for load that one core cannot read.

One process is the rule. How many are needed is decided once a session by `processes_needed`, from what its
self-check read per CPU second; each request goes to the process with the fewest in flight.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from campaign.client.base import Client, Job, Outcome


def processes_needed(per_cpu_s: float, chunks_per_s: float, *, share: float = 0.5) -> int:
    """Load processes for an expected chunk rate, each to use at most `share` of its core."""
    return max(1, -(-int(chunks_per_s) // max(1, int(per_cpu_s * share))))


class SplitClient:
    """Implements `campaign.client.base.Client` over one or more others, made by `make`."""

    def __init__(self, make: Callable[[], Client], *, first: Client | None = None) -> None:
        self._make = make
        self._clients: list[Client] = [first if first is not None else make()]
        self._in_flight = [0]
        self._first_is_ours = first is None

    @property
    def processes(self) -> int:
        """How many there are."""
        return len(self._clients)

    async def scale(self, processes: int, cpus: Sequence[int] = ()) -> None:
        """Have so many, each pinned to `cpus` where there are some; only while nothing is in flight."""
        while len(self._clients) < processes:
            self._clients.append(self._make())
            self._in_flight.append(0)
        pins = [
            client.pin(tuple(cpus))  # type: ignore[attr-defined]  # what `make` gives has it
            for client in self._clients[0 if self._first_is_ours else 1 :]
            if cpus
        ]
        await asyncio.gather(*pins)

    async def run(self, job: Job) -> Outcome:
        """As `Client.run`; the files of a second process lie in a folder of its own beside the first's."""
        index = min(range(len(self._clients)), key=self._in_flight.__getitem__)
        if index and job.sidecar_dir is not None:
            job = replace(job, sidecar_dir=f"{job.sidecar_dir}/p{index}")
        self._in_flight[index] += 1
        try:
            return await self._clients[index].run(job)
        finally:
            self._in_flight[index] -= 1

    async def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """As `Client.fetch`."""
        return await self._clients[0].fetch(url, timeout_s)

    async def selfcheck(self) -> dict[str, Any]:
        """The check of the first process."""
        check: Callable[[], Awaitable[dict[str, Any]]] = self._clients[0].selfcheck  # type: ignore[attr-defined]
        return await check()

    async def cancel(self) -> None:
        """As `Client.cancel`, in every process."""
        await asyncio.gather(*(client.cancel() for client in self._clients))

    async def close(self) -> None:
        """As `Client.close`, every process, whatever befalls one of them."""
        results = await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
