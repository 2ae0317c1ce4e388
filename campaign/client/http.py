"""The load client: one request on one new connection, read to its end, judged afterwards.

A new connection for every request is the declared default: a kept one would let an earlier request's
state (slow-start window, a server's idle close) into the next measurement. `sent_ns` is taken when the
connection stands, so TTFT holds no connect time. Nothing is retried, redirected, proxied or compressed.
"""

import asyncio

from campaign.client.base import Job, Outcome
from campaign.client.http1 import Target, get, parse_response, post, target
from campaign.client.interpret import interpret
from campaign.client.reader import Exchange, Wire, exchange
from campaign.client.sidecar import Sidecars


class HttpClient:
    """Implements `campaign.client.base.Client` over asyncio sockets. Stamps are user-space."""

    def __init__(self) -> None:
        self._wires: set[Wire] = set()
        self._sidecars = Sidecars()

    async def run(self, job: Job) -> Outcome:
        """Send one request and read it to its end.

        Never raises for what the server or the network does. Raises ValueError for a job that cannot be
        sent (URL, header, NaN in the body) and StoreError where the sidecar files cannot be written.
        """
        where = target(job.base_url, job.path)
        request = post(where, job.body, job.headers)
        wire = Wire()
        self._wires.add(wire)
        try:
            seen = await exchange(wire, where, request, job.timeout_s)
        finally:
            self._wires.discard(wire)
        # Off the loop: parsing thousands of events here would delay the stamps of requests in flight.
        return await asyncio.to_thread(self._conclude, job, seen)

    def _conclude(self, job: Job, seen: Exchange) -> Outcome:
        read = interpret(job.request_id, seen, job.expect_tokens)
        if job.sidecar_dir is not None:
            self._sidecars.write(job.sidecar_dir, seen, read)
        return read.outcome

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

    async def cancel(self) -> None:
        """Drop every request in flight at once; their state is `cancelled`. Later ones run."""
        for wire in tuple(self._wires):
            wire.stop("cancelled")

    async def close(self) -> None:
        """Drop what is in flight and release sockets and files. Idempotent."""
        await self.cancel()
        self._sidecars.close()
