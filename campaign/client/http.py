"""The load client: one request on one connection, read to its end, judged afterwards.

A new connection for every request is the declared default: a kept one (`Job.connection`) lets an earlier
request's state (slow-start window, a server's idle close) into the next measurement. `sent_ns` is taken when
the connection stands, so TTFT holds no connect time. Nothing is retried, redirected or compressed.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from campaign.client.base import Job, Outcome
from campaign.client.direct import Direct, Flight
from campaign.client.direct import exchange as direct_exchange
from campaign.client.http1 import Response, Target, get, parse_response, payload_of, post, target
from campaign.client.interpret import Interpreted, conclude, conclude_steps
from campaign.client.pacer import prompt
from campaign.client.probe import LoopProbe
from campaign.client.reader import Exchange, Wire, exchange
from campaign.client.sidecar import Sidecars

if TYPE_CHECKING:
    from campaign.client.kept import Kept, KeptFlight


def _pin(cpus: Sequence[int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), cpus)


class HttpClient:
    """Implements `campaign.client.base.Client`: plain HTTP with kernel stamps, TLS and proxies through aiohttp.

    `kernel_stamps=False` stamps in user space; `probes=False` measures no lag.
    """

    def __init__(self, *, kernel_stamps: bool = True, probes: bool = True) -> None:
        self._direct = Direct(kernel_stamps=kernel_stamps, probes=probes)
        self._flights: set[Flight | KeptFlight] = set()
        self._kept: Kept | None = None
        self._sidecars = Sidecars()
        self._disk = ThreadPoolExecutor(1, "sidecars", initializer=prompt)
        """Ahead of ordinary work like every thread here that may hold the interpreter's lock."""
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, job: Job) -> Outcome:
        """Send one request and read it to its end.

        Never raises for what the server or the network does. Raises ValueError for a job that cannot be
        sent (URL, header, NaN in the body) and StoreError where the sidecar files cannot be written.
        """
        where = target(job.base_url, job.path)
        request = post(where, job.body, job.headers, keep=job.connection == "reuse")
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        try:
            over = self._over_kept if where.tls or job.proxy else self._over_socket
            seen, read = await over(job, where, request)
            if job.sidecar_dir is not None:
                # Off the loop: it waits for the disk.
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._disk, self._sidecars.write, job.sidecar_dir, seen, read)
        finally:
            self._running.discard(task)
        return read.outcome

    async def _over_socket(self, job: Job, where: Target, request: bytes) -> tuple[Exchange, Interpreted]:
        flight = Flight()
        self._flights.add(flight)

        def then(seen: Exchange, response: Response) -> Generator[None, None, Interpreted]:
            return conclude_steps(job.request_id, seen, response, job.expect_tokens)

        try:
            return await direct_exchange(
                self._direct,
                flight,
                where,
                request,
                job.timeout_s,
                then,
                job.start_ns,
                reuse=job.connection == "reuse",
            )
        finally:
            self._flights.discard(flight)

    async def _over_kept(self, job: Job, where: Target, _request: bytes) -> tuple[Exchange, Interpreted]:
        from campaign.client.kept import Kept, KeptFlight

        if self._kept is None:
            self._kept = Kept()
        if job.start_ns is not None:
            await asyncio.sleep((job.start_ns - time.monotonic_ns()) / 1e9)
        session = self._kept.session(reuse=job.connection == "reuse")
        flight, probe = KeptFlight(), LoopProbe(self._direct.pacer)
        self._flights.add(flight)
        try:
            seen, response = await flight.run(
                session, where, payload_of(job.body), job.headers, job.timeout_s, job.proxy
            )
        finally:
            self._flights.discard(flight)
            probe.stop()
        lags = tuple(probe.lags_ns)
        seen = replace(seen, planned_ns=job.start_ns, lags_ns=lags, user_lags_ns=lags)
        # Off the loop: parsing thousands of events here would delay the stamps of requests in flight.
        return seen, await asyncio.to_thread(conclude, job.request_id, seen, response, job.expect_tokens)

    async def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        """GET a page: (status, body). Raises TimeoutError, or ConnectionError where no whole answer came."""
        where: Target = target(url)
        seen = await exchange(Wire(), where, get(where), timeout_s)
        response = parse_response(seen.reads)
        if response.status is not None and response.error is None:
            closed = seen.end == "eof" and not response.framed
            if response.complete or closed:
                return response.status, response.body
        if seen.end == "timeout":
            raise TimeoutError(f"GET {url}: no answer within {timeout_s:g} s")
        raise ConnectionError(f"GET {url}: {response.error or seen.detail or seen.end}")

    async def selfcheck(self) -> dict[str, Any]:
        """How good the stamps of this process are: `campaign selfcheck`, shortened to 2 s."""
        from campaign.client.selfcheck import check

        return (await check(quick=True)).to_json()

    async def pin(self, cpus: Sequence[int]) -> None:
        """Keep this process, every thread of it, to these cores; where that is not allowed, nothing happens."""
        _pin(cpus)

    async def cancel(self) -> None:
        """Drop every request in flight at once; their state is `cancelled`. Later ones run."""
        for flight in tuple(self._flights):
            flight.stop("cancelled")

    async def close(self) -> None:
        """Drop what is in flight and release sockets and files. Idempotent."""
        await self.cancel()
        me = asyncio.current_task()
        left = [task for task in self._running if task is not me]
        if left:
            await asyncio.wait(left)
        if self._kept is not None:
            await self._kept.close()
        await asyncio.to_thread(self._direct.close)
        self._disk.shutdown()
        self._sidecars.close()
