"""One round: boot what is resident together, warm up, send the sequence, commit or void.

A round is the unit of commitment. Whatever interrupts it, its rows are in the cell journals already and
the round is done again as a whole under the next attempt.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, Literal, Protocol

from campaign.budget.machine import void_share_trip
from campaign.budget.rules import finite, telemetry_trip
from campaign.engines.base import Counters
from campaign.errors import EngineError
from campaign.plan.model import GroupPlan, RequestPlan, RoundPlan
from campaign.session.boots import Boots
from campaign.session.cell import growth
from campaign.session.context import Progress, SessionContext, Stopped, Tripped, together
from campaign.session.send import Sender
from campaign.session.tally import INERT_DRAFTS, Tally, inert
from campaign.store.row import Phase, RequestRow

__all__ = [
    "INERT_DRAFTS",
    "LEAD_S",
    "Look",
    "Marker",
    "Progress",
    "RoundRunner",
    "SessionContext",
    "Stopped",
    "Tripped",
    "inert",
]

Look = Callable[[int, Sequence[RequestRow]], Mapping[str, Any] | None]
"""After so many whole quads of the round, with its rows so far: what the ledger says of the stop, or None to go on."""

LEAD_S = 0.25
"""A connection is made so long before its request is due."""


class Marker(Protocol):
    """Says which phase the lease's dollars belong to from now on."""

    def __call__(self, phase: str, group: str | None = None) -> None:
        """Record the mark in the journal."""
        ...


class RoundRunner:
    """Runs one round of one group."""

    def __init__(
        self,
        ctx: SessionContext,
        group: GroupPlan,
        round_: RoundPlan,
        attempt: int,
        mark: Marker,
        look: Look | None = None,
    ) -> None:
        self._ctx, self._group, self._round, self._attempt, self._mark = ctx, group, round_, attempt, mark
        self._look = look
        self.stopped: Mapping[str, Any] | None = None
        """Set where a look ended the group inside this round."""
        self._boots = Boots(ctx, group, round_, attempt)
        self._tally = Tally(group.load.rate if group.load is not None else None, keep_rows=look is not None)
        self._sender = Sender(ctx, group, round_, self._boots, self._tally)
        self._before: dict[str, Counters | None] = {}
        """Arm -> its server's counters after warm-up, where no request can claim them for itself."""

    async def run(self) -> None:
        """Do the round and commit it. Raises Stopped, Tripped or EngineError; never commits half."""
        ctx = self._ctx
        ctx.emit("round_started", round_id=self._round.id, attempt=self._attempt)
        try:
            self._mark("load", self._group.name)
            await self._boots.start()
            self._mark("warmup", self._group.name)
            for _, wave in groupby(self._round.warmup, key=lambda request: request.arm):
                await self._warm(list(wave))
            if self._group.concurrency > 1:
                self._before = {arm: await self._boots.scraped(arm) for arm in self._boots.at_work}
            self._mark("anchor" if self._group.kind == "anchor" else "measure", self._group.name)
            # A GPU that waits for weights is neither hot nor slow: the boot would dilute what is held against limits.
            start_ns = ctx.clock.monotonic_ns()
            await self._sequence("anchor" if self._group.kind == "anchor" else "measure")
            await self._commit(start_ns, ctx.clock.monotonic_ns())
        except (EngineError, Tripped) as error:
            self._void(str(error))
            raise
        finally:
            self._mark("idle", self._group.name)
            await self._boots.stop()

    # --- requests

    async def _sequence(self, phase: Phase) -> None:
        await self._boots.settle()
        if self._group.concurrency == 1 and self._group.design != "duet":
            quad = 2 * len(self._group.arms)
            for i, request in enumerate(self._round.sequence, start=1):
                await self._sender.send(request, phase)
                if self._look is not None and i % quad == 0 and i < len(self._round.sequence):
                    self.stopped = self._look(i // quad, self._tally.measured)
                    if self.stopped is not None:
                        return
            return
        if self._group.load is not None:
            for _, run in groupby(self._round.sequence, key=lambda request: request.arm):
                await self._run(list(run), phase)
            return
        # A wave is the slot set run once: its requests are in flight together, and nothing else is.
        duet, single = self._group.design == "duet", self._group.concurrency == 1

        def wave_of(request: RequestPlan) -> tuple[int, str]:
            if duet:
                return (request.order if single else request.wave, "")
            return (request.wave, request.arm)

        # In a duet at concurrency 1 each request is alone on its own server.
        for _, wave in groupby(self._round.sequence, key=wave_of):
            await self._wave(list(wave), phase)

    async def _warm(self, wave: Sequence[RequestPlan]) -> None:
        """One arm's warm-up: above concurrency 1 as many in flight as will be measured."""
        if len(wave) > 1:
            await self._wave(wave, "warmup")
            return
        for request in wave:
            await self._sender.send(request, "warmup")

    async def _run(self, run: Sequence[RequestPlan], phase: Phase) -> None:
        """One arm's steady or open loop: no barrier between slot sets."""
        if run[0].at_ns is None:
            await self._wave(run, phase)
            return
        clock, limit = self._ctx.clock, asyncio.Semaphore(self._group.concurrency)
        start_ns = clock.monotonic_ns() + int(2 * LEAD_S * 1e9)

        async def one(request: RequestPlan) -> None:
            due = start_ns + (request.at_ns or 0)
            await clock.sleep(max(0.0, (due - clock.monotonic_ns()) / 1e9 - LEAD_S))
            async with limit:
                await self._unless_failed(failed, request, phase, alone=False, start_ns=due)

        failed: list[bool] = []
        await self._counted(run, phase, (one(request) for request in run))

    async def _unless_failed(
        self,
        failed: list[bool],
        request: RequestPlan,
        phase: Phase,
        *,
        alone: bool,
        start_ns: int | None = None,
    ) -> None:
        if failed:
            return
        try:
            await self._sender.send(request, phase, alone=alone, start_ns=start_ns)
        except BaseException:
            # The rest of the wave must not each run into the timeout of a server that is gone.
            failed.append(True)
            await self._ctx.ports.client.cancel()
            raise

    async def _wave(self, wave: Sequence[RequestPlan], phase: Phase) -> None:
        limits = {arm: asyncio.Semaphore(self._group.concurrency) for arm in self._boots.at_work}

        async def one(request: RequestPlan) -> None:
            async with limits[request.arm]:
                await self._unless_failed(failed, request, phase, alone=self._group.concurrency == 1)

        failed: list[bool] = []
        await self._counted(wave, phase, (one(request) for request in wave))

    async def _counted(
        self, wave: Sequence[RequestPlan], phase: Phase, work: Iterable[Coroutine[Any, Any, None]]
    ) -> None:
        """Run a wave between two scrapes of each server, where requests overlap on it."""
        arms = list(dict.fromkeys(r.arm for r in wave)) if self._group.concurrency > 1 else []
        self._tally.open_waves({arm: await self._boots.scraped(arm) for arm in arms})
        await together(work)
        for arm in arms:
            self._tally.close_wave(arm, await self._boots.scraped(arm), measured=phase != "warmup")

    # --- the end

    async def _commit(self, start_ns: int, end_ns: int) -> None:
        ctx, boots, tally = self._ctx, self._boots, self._tally
        await boots.alone()
        tally.drafters_are_real(ctx.plan.arms)
        for arm, valid in tally.valid.items():
            trip = void_share_trip(valid.count(False), len(valid), ctx.limits, ctx.who.session)
            ctx.gate(trip and replace(trip, detail=f"{boots.at_work[arm].cell}: {trip.detail}"))
        servers = {arm: await boots.unchanged(arm) for arm in boots.writers}
        grown = {arm: growth(before, await boots.scraped(arm)) for arm, before in self._before.items()}
        read = await ctx.ports.telemetry.window(start_ns, end_ns)
        telemetry = {name: finite(value) for name, value in read.items()}
        slow = telemetry_trip(telemetry, ctx.limits, ctx.who.session)
        ctx.gate(slow and replace(slow, detail=f"{self._round.id}: {slow.detail}"))
        cells = [
            {
                "cell": boots.at_work[arm].cell,
                "attempt": self._attempt,
                "files": [asdict(f) for f in writer.seal(self._late(arm))],
                "telemetry": telemetry,
                "client": tally.lags[arm].to_json() if arm in tally.lags else None,
                "server": servers[arm],
                **tally.overlapping(boots.at_work[arm].arm),
                "counters": grown.get(arm),
            }
            for arm, writer in boots.writers.items()
        ]
        # One event for both: a crash between them would leave a short round in a group that goes on.
        stop = {} if self.stopped is None else {"group_stopped": dict(self.stopped)}
        ctx.emit("round_committed", round_id=self._round.id, attempt=self._attempt, cells=cells, **stop)

    def _late(self, arm: str) -> Literal["void"] | None:
        """`void` for a cell whose stamps are not small against its steps."""
        lag = self._tally.lags.get(arm)
        if lag is None or lag.verdict != "void":
            return None
        p99, rows = lag.to_json()["lag_p99_us"], len(self._tally.valid[arm])
        trip = void_share_trip(rows, rows, self._ctx.limits, self._ctx.who.session)
        self._ctx.gate(
            trip and replace(trip, detail=f"{self._boots.at_work[arm].cell}: client_lag, p99 {p99:.0f} us")
        )
        return "void"

    def _void(self, reason: str) -> None:
        for writer in self._boots.writers.values():
            writer.seal("void")
        self._ctx.emit("round_voided", round_id=self._round.id, attempt=self._attempt, reason=reason)
