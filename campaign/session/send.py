"""One request on the wire: counters before and after, its price, its row on disk, and what its end means."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from campaign.budget.machine import errors_trip
from campaign.client.base import Job, Outcome
from campaign.engines.api import TRIES, backoff_s, retry_after_s, tokens_usd_micro
from campaign.engines.base import Counters
from campaign.engines.registry import get as get_engine
from campaign.errors import EngineError
from campaign.money import MicroUsd
from campaign.plan.cost import request_tokens_usd
from campaign.plan.model import GroupPlan, RequestPlan, RoundPlan
from campaign.session.boots import Boots
from campaign.session.context import SessionContext
from campaign.session.request import Measured, gpu_fields, identity_fields, make_job, make_row
from campaign.session.tally import Tally
from campaign.store.row import Phase, RequestRow

T = TypeVar("T")


class Sender:
    """Sends the requests of one round."""

    def __init__(
        self, ctx: SessionContext, group: GroupPlan, round_: RoundPlan, boots: Boots, tally: Tally
    ) -> None:
        self._ctx, self._group, self._round, self._boots, self._tally = ctx, group, round_, boots, tally
        self._workload = ctx.spec.workloads[group.workload]

    async def send(
        self, request: RequestPlan, phase: Phase, *, alone: bool = True, start_ns: int | None = None
    ) -> None:
        """Send one request, keep its row and judge it. Raises Stopped, Tripped or EngineError.

        `alone`: nothing else is in flight on its server. `start_ns`: when it is due, on the monotonic clock.
        """
        ctx = self._ctx
        phase = "warmup" if request.cut else phase
        ctx.check()
        boot = self._boots.at_work[request.arm]
        engine = get_engine(boot.arm.config.engine or "")
        fields = identity_fields(ctx.who, self._group, self._round, boot, request, phase)
        prompts = ctx.prompts[self._group.workload]
        if request.slot < len(prompts.items):
            prompt = prompts.items[request.slot]
        else:
            # Warm-up has a prompt of its own; a pack that is used whole has none to spare.
            prompt = prompts.warmup or prompts.items[0]
        ctx.progress.state, ctx.progress.cell, ctx.progress.phase = "measuring", boot.cell, phase
        # Only a request that is alone on its server may claim the server's counters.
        before = await self._counters(boot.record.boot_id) if alone else None
        ctx.check()
        writer = self._boots.writers[request.arm]
        for refused in range(1, TRIES + 1):
            await self._on_disk(writer.begin, fields)
            outcome = await self._ask(
                make_job(
                    fields,
                    boot,
                    self._workload,
                    prompt,
                    engine.request_extras(boot.arm.config),
                    ctx.spec.gates.request_timeout.total_seconds(),
                    writer.sidecar_dir,
                    start_ns if refused == 1 else None,
                    ctx.spec.client,
                )
            )
            self._bill_tokens(boot, outcome)
            endpoint = boot.arm.config.api
            if endpoint is None or outcome.http_status != 429 or refused == TRIES:
                break
            # Its row is kept, void; the pause lies between requests, and the next try is a request of its own.
            row = make_row(fields, boot, prompt, outcome, None)
            await self._on_disk(writer.finish, row)
            await self._pause(backoff_s(endpoint, refused, retry_after_s(outcome.retry_after)))
            fields = {**fields, "attempt": refused}
        after = await ctx.ports.host.counters(boot.record.boot_id) if alone else None
        ctx.progress.last_counters[boot.record.boot_id] = after
        fields = {**fields, **await self._on_gpus(boot, outcome, alone=alone)}
        row = make_row(fields, boot, prompt, outcome, engine.steps(boot.arm.config, before, after, outcome))
        await self._on_disk(writer.finish, row)
        self._tally.add(request.arm, row, outcome, measured=phase != "warmup")
        await self._judge(row, boot)

    async def _ask(self, job: Job) -> Outcome:
        """Send a request; a stop drops it, however late it came."""
        run = asyncio.ensure_future(self._ctx.ports.client.run(job))
        try:
            if await self._ctx.stopped_before(run):
                await self._ctx.ports.client.cancel()
            return await run
        finally:
            run.cancel()

    async def _on_gpus(self, boot: Measured, outcome: Outcome, *, alone: bool) -> dict[str, float | None]:
        """What the boot's GPUs did during a request; nothing where it has none."""
        end_ns = outcome.done_ns or outcome.last_ns
        if not boot.plan.gpus or end_ns is None:
            return {}
        window = await self._ctx.ports.telemetry.window(outcome.sent_ns, end_ns)
        return gpu_fields(boot.plan.gpus, window, alone=alone and self._group.design != "duet")

    async def _pause(self, seconds: float) -> None:
        """Wait between requests; a stop ends it."""
        waited = 0.0
        while waited < seconds:
            self._ctx.check()
            await self._ctx.clock.sleep(min(0.2, seconds - waited))
            waited += 0.2
        self._ctx.check()

    def _bill_tokens(self, boot: Measured, outcome: Outcome) -> None:
        """Put the price of a request's tokens into the ledger; where it is unknown, the most it can be."""
        endpoint = boot.arm.config.api
        if endpoint is None:
            return
        usage = outcome.usage
        prompt, completion = (usage.prompt_tokens, usage.completion_tokens) if usage else (None, None)
        unknown = prompt is None or completion is None
        if unknown and outcome.http_status != 200 and outcome.first_ns is None:
            return  # refused before anything was generated
        if prompt is None or completion is None:
            usd = request_tokens_usd(boot.arm.config, self._workload)
        else:
            usd = MicroUsd(tokens_usd_micro(endpoint, prompt, completion))
        self._ctx.emit(
            "tokens_billed",
            lease=self._ctx.who.lease,
            usd_micro=usd,
            prompt_tokens=prompt,
            completion_tokens=completion,
            arm=boot.arm.name,
        )

    async def _on_disk(self, write: Callable[[T], None], what: T) -> None:
        # An fsync in the event loop would delay the stamps of other requests in flight.
        await asyncio.get_running_loop().run_in_executor(self._ctx.disk, write, what)

    async def _counters(self, name: str) -> Counters | None:
        # What the last scrape said still holds: nothing else talks to this server.
        known = self._ctx.progress.last_counters.get(name)
        return known if known is not None else await self._ctx.ports.host.counters(name)

    async def _judge(self, row: RequestRow, boot: Measured) -> None:
        progress = self._ctx.progress
        self._ctx.check()
        progress.done += 1
        progress.tok_s = row.decode_tok_s if row.decode_tok_s is not None else progress.tok_s
        if row.state in {"ok", "short", "empty"}:
            progress.errors_in_a_row = 0
            return
        progress.errors_in_a_row += 1
        # Asking whether it lives sends it a token: its counters move.
        progress.last_counters.pop(boot.record.boot_id, None)
        if not await self._ctx.ports.host.alive(boot.record.boot_id):
            kind, tail = await self._ctx.ports.host.why_dead(boot.record.boot_id)
            raise EngineError(kind, f"{boot.record.boot_id}: the server is gone ({kind}): {tail}")
        if "timeout" in row.reasons:
            limit = self._ctx.spec.gates.request_timeout.total_seconds()
            raise EngineError("hung", f"{boot.record.boot_id}: no answer within {limit:g} s")
        trip = errors_trip(progress.errors_in_a_row, self._ctx.limits, self._ctx.who.session)
        self._ctx.gate(
            trip
            and replace(trip, detail=f"{trip.detail}; the last: {row.error or row.error_code or row.state}")
        )
