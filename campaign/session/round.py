"""One round: boot what is resident together, warm up, send the sequence, commit or void.

A round is the unit of commitment. Whatever interrupts it, its rows are in the cell journals already and
the round is done again as a whole under the next attempt.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from typing import Any, Literal, Protocol, TypeVar

from campaign.budget.machine import Limits, Trip, errors_trip, limits, void_share_trip
from campaign.budget.rules import finite, telemetry_trip
from campaign.client.base import Job, Outcome
from campaign.clock import Clock
from campaign.engines.api import TRIES, backoff_s, retry_after_s, tokens_usd_micro
from campaign.engines.base import BootOrder, BootRecord, Counters
from campaign.engines.registry import get as get_engine
from campaign.errors import EngineError
from campaign.ledger.events import NewEvent
from campaign.money import MicroUsd
from campaign.plan.cost import request_tokens_usd
from campaign.plan.model import BootPlan, GroupPlan, RequestPlan, RoundPlan, SessionPlan
from campaign.redact import REDACTOR
from campaign.session.cell import CellWindow, asked, show_loading, whole
from campaign.session.instrument import CellLag
from campaign.session.ports import Command, Journal, Ports
from campaign.session.request import (
    Identity,
    Measured,
    boot_id,
    cell_name,
    gpu_fields,
    identity_fields,
    make_job,
    make_row,
)
from campaign.spec.models import Spec
from campaign.store.base import CellWriter, Store
from campaign.store.layout import RunDir, flat
from campaign.store.row import Phase, RequestRow
from campaign.workloads.packs import Prompts

T = TypeVar("T")
Look = Callable[[int, Sequence[RequestRow]], Mapping[str, Any] | None]
"""After so many whole quads of the round, with its rows so far: what the ledger says of the stop, or None to go on."""

LEAD_S = 0.25
"""A connection is made so long before its request is due."""


INERT_DRAFTS = 200
"""Drafts of a round after which acceptance of exactly 1 is not believed."""


class Stopped(Exception):
    """The controller, a gate or the lease said stop; the round is not committed."""

    def __init__(self, command: Command) -> None:
        self.command = command
        super().__init__(command.why)


class Tripped(Exception):
    """The data left a gate; the round is void."""

    def __init__(self, trip: Trip) -> None:
        self.trip = trip
        super().__init__(trip.why)


class Marker(Protocol):
    """Says which phase the lease's dollars belong to from now on."""

    def __call__(self, phase: str, group: str | None = None) -> None:
        """Record the mark in the journal."""
        ...


@dataclass(slots=True)
class Progress:
    """How far the session is; read by whoever displays it."""

    state: str = "waiting"
    phase: str = "setup"
    cell: str = ""
    done: int = 0
    total: int = 0
    tok_s: float | None = None
    errors_in_a_row: int = 0
    command: Command | None = None
    last_counters: dict[str, Counters | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionContext:
    """Everything a round needs, none of it created here."""

    who: Identity
    spec: Spec
    plan: SessionPlan
    prompts: Mapping[str, Prompts]
    run_dir: RunDir
    ports: Ports
    store: Store
    journal: Journal
    clock: Clock
    cpus: tuple[int, ...]
    """Cores the engines are pinned to; empty where there are too few to set apart."""
    progress: Progress
    disk: Executor
    """One worker: writes of request journals, in order."""
    stopping: asyncio.Event
    """Set once the session has been told to stop."""
    overrides: frozenset[str]
    """Gates that a person has overridden, on record."""

    @property
    def limits(self) -> Limits:
        """What the spec's gates allow."""
        return limits(self.spec)

    def emit(self, type_: str, **payload: Any) -> None:
        """Append to the session's journal; durable on return."""
        self.journal.append(NewEvent(type=type_, payload=payload, session=self.who.session))

    def check(self) -> None:
        """Raise Stopped where the session has been told to stop."""
        if self.progress.command is not None:
            raise Stopped(self.progress.command)


def inert(drafts: int, refused_tokens: int) -> bool:
    """Whether so many drafts without one refused token cannot be chance."""
    return drafts >= INERT_DRAFTS and refused_tokens == 0


def growth(before: Counters | None, after: Counters | None) -> dict[str, int] | None:
    """What a server's counters gained between two scrapes of one process; None where either is missing.

    A counter that was absent before and is there now stood at zero (SGLang makes it at the first draft).
    """
    if before is None or after is None or before.started != after.started:
        return None
    out = {}
    for name in ("drafts", "drafted", "accepted", "verify_steps", "generated", "cached_tokens"):
        first, last = getattr(before, name), getattr(after, name)
        if last is not None:
            out[name] = int(last - (first or 0))
    return out


def shares_gpus(round_: RoundPlan) -> bool:
    """Whether two boots of a round are on one GPU."""
    all_gpus = [g for boot in round_.boots for g in boot.gpus]
    return len(all_gpus) > len(set(all_gpus))


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
        self._measured: list[RequestRow] = []
        self.stopped: Mapping[str, Any] | None = None
        """Set where a look ended the group inside this round."""
        self._workload = ctx.spec.workloads[group.workload]
        self._boots: dict[str, Measured] = {}
        self._writers: dict[str, CellWriter] = {}
        self._rows: dict[str, list[bool]] = {}
        """Arm -> of each measured request, whether its row is valid."""
        self._lags: dict[str, CellLag] = {}
        self._before: dict[str, Counters | None] = {}
        """Arm -> its server's counters after warm-up, where no request can claim them for itself."""
        self._drafting: dict[str, tuple[int, int]] = {}
        """Arm -> drafts so far, and drafted tokens that were refused."""
        self._windows: dict[str, list[CellWindow]] = {}
        """Arm -> its waves above concurrency 1, where no request can claim the server's counters."""
        self._open: dict[str, CellWindow] = {}
        self._settled: dict[str, dict[str, Any] | None] = {}
        """Arm -> how its server was drained and its cache reset after warm-up."""

    async def run(self) -> None:
        """Do the round and commit it. Raises Stopped, Tripped or EngineError; never commits half."""
        ctx = self._ctx
        ctx.emit("round_started", round_id=self._round.id, attempt=self._attempt)
        try:
            self._mark("load", self._group.name)
            await self._boot_all()
            self._mark("warmup", self._group.name)
            for _, wave in groupby(self._round.warmup, key=lambda request: request.arm):
                await self._warm(list(wave))
            if self._group.concurrency > 1:
                self._before = {arm: await self._scraped(boot) for arm, boot in self._boots.items()}
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
            await self._stop_all()

    # --- boots

    async def _boot_all(self) -> None:
        # Engines with GPUs of their own load side by side; on shared cores they would slow each other.
        if shares_gpus(self._round):
            await self._boot_shared()
        elif all(boot.gpus for boot in self._round.boots):
            results = await asyncio.gather(*map(self._boot, self._round.boots), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException):
                    raise result
        else:
            for boot in self._round.boots:
                self._ctx.check()
                await self._boot(boot)

    async def _boot_shared(self) -> None:
        """In order of places: each start finds the memory that those before it have left."""
        stagger = getattr(self._ctx.spec.nodes[self._ctx.plan.node], "boot_stagger", None)
        if stagger is None:
            for boot in self._round.boots:
                self._ctx.check()
                await self._boot(boot)
            return

        async def late(index: int, boot: BootPlan) -> None:
            pause = asyncio.ensure_future(self._ctx.clock.sleep(index * stagger.total_seconds()))
            try:
                await self._stopped_before(pause)
            finally:
                pause.cancel()
            self._ctx.check()
            await self._boot(boot)

        await self._all(late(i, boot) for i, boot in enumerate(self._round.boots))

    async def _boot(self, boot: BootPlan) -> None:
        ctx = self._ctx
        arm = ctx.plan.arms[boot.arm]
        name = boot_id(ctx.who.session, self._round, boot, self._attempt)
        ctx.progress.state, ctx.progress.cell = "booting", cell_name(self._group, boot)
        ctx.emit("boot_started", boot_id=name, arm=arm.name, arm_hash=arm.hash, place=boot.place, port=None)
        order = BootOrder(
            boot_id=name,
            arm=arm.name,
            arm_hash=arm.hash,
            config=arm.config,
            models=dict(ctx.spec.models),
            place=boot.place,
            gpus=boot.gpus,
            # Two engines at work at once must not share the cores that one is pinned to.
            cpus=() if self._group.design == "duet" else ctx.cpus,
            log_path=str(ctx.run_dir.logs / f"{flat(name)}.log"),
            boot_timeout_s=ctx.spec.gates.boot_timeout.total_seconds(),
            runtime=ctx.spec.runtimes.get(arm.config.runtime or ""),
            shared=shares_gpus(self._round),
        )
        try:
            record = await self._unless_stopped(order)
        except EngineError as error:
            ctx.emit(
                "boot_failed", boot_id=name, kind=error.kind, error=str(error), log_tail=_tail(order.log_path)
            )
            raise
        self._ready(boot, name, record)

    async def _unless_stopped(self, order: BootOrder) -> BootRecord:
        # A boot may take ten minutes at $50 an hour: a stop does not wait for it.
        ctx = self._ctx
        boot = asyncio.ensure_future(ctx.ports.host.boot(order))
        shown = asyncio.ensure_future(show_loading(ctx.ports.host, order.boot_id, ctx.clock, ctx.progress))
        try:
            if await self._stopped_before(boot):
                boot.cancel()
                await ctx.ports.host.stop(order.boot_id)
                ctx.emit("boot_stopped", boot_id=order.boot_id)
                ctx.check()
            return await boot
        finally:
            shown.cancel()
            boot.cancel()

    async def _stopped_before(self, work: "asyncio.Future[Any]") -> bool:
        """Wait for the work or a stop, whichever is first; True where the stop was."""
        stop = asyncio.ensure_future(self._ctx.stopping.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
        return not work.done()

    async def _ask(self, job: Job) -> Outcome:
        """Send a request; a stop drops it, however late it came."""
        run = asyncio.ensure_future(self._ctx.ports.client.run(job))
        try:
            if await self._stopped_before(run):
                await self._ctx.ports.client.cancel()
            return await run
        finally:
            run.cancel()

    def _ready(self, boot: BootPlan, name: str, record: BootRecord) -> None:
        ctx, arm = self._ctx, self._ctx.plan.arms[boot.arm]
        sealed = ctx.store.put_json(
            "provenance", name, {"boot_id": name, "arm": arm.name, **record.provenance}
        )
        ctx.emit("boot_ready", boot_id=name, boot_ns=record.boot_ns, provenance=asdict(sealed))
        cell = cell_name(self._group, boot)
        self._boots[boot.arm] = Measured(boot, arm, record, self._attempt, cell)
        self._writers[boot.arm] = ctx.store.open_cell(ctx.who.session, cell, self._attempt)

    async def _stop_all(self) -> None:
        for boot in self._boots.values():
            await self._ctx.ports.host.stop(boot.record.boot_id)
            self._ctx.progress.last_counters.pop(boot.record.boot_id, None)
            self._ctx.emit("boot_stopped", boot_id=boot.record.boot_id)

    # --- requests

    async def _sequence(self, phase: Phase) -> None:
        await self._settle()
        if self._group.concurrency == 1 and self._group.design != "duet":
            quad = 2 * len(self._group.arms)
            for i, request in enumerate(self._round.sequence, start=1):
                await self._send(request, phase)
                if self._look is not None and i % quad == 0 and i < len(self._round.sequence):
                    self.stopped = self._look(i // quad, self._measured)
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
            await self._send(request, "warmup")

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
            await self._send(request, phase, alone=alone, start_ns=start_ns)
        except BaseException:
            # The rest of the wave must not each run into the timeout of a server that is gone.
            failed.append(True)
            await self._ctx.ports.client.cancel()
            raise

    async def _all(self, work: Iterable[Coroutine[Any, Any, None]]) -> None:
        results = await asyncio.gather(*work, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _wave(self, wave: Sequence[RequestPlan], phase: Phase) -> None:
        limits = {arm: asyncio.Semaphore(self._group.concurrency) for arm in self._boots}

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
        host = self._ctx.ports.host
        self._open = {arm: CellWindow(await host.counters(self._boots[arm].record.boot_id)) for arm in arms}
        await self._all(work)
        for arm, window in self._open.items():
            window.after = await host.counters(self._boots[arm].record.boot_id)
            if phase != "warmup":
                self._windows.setdefault(arm, []).append(window)
        self._open = {}

    async def _settle(self) -> None:
        """No request of the warm-up runs on, and nothing of it is kept where the engine can forget it."""
        for arm, boot in self._boots.items():
            name = boot.record.boot_id
            self._settled[arm] = await asked(self._ctx.ports.host, "settle", name)
            self._ctx.progress.last_counters.pop(name, None)

    async def _send(
        self, request: RequestPlan, phase: Phase, *, alone: bool = True, start_ns: int | None = None
    ) -> None:
        ctx = self._ctx
        phase = "warmup" if request.cut else phase
        ctx.check()
        boot = self._boots[request.arm]
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
        writer = self._writers[request.arm]
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
        if request.arm in self._open:
            self._open[request.arm].add(row.completion_tokens, finished=row.state in {"ok", "short"})
        if row.drafts and row.drafted and row.accepted is not None:
            drafts, refused_tokens = self._drafting.get(request.arm, (0, 0))
            self._drafting[request.arm] = (drafts + row.drafts, refused_tokens + row.drafted - row.accepted)
        if phase != "warmup":
            self._rows.setdefault(request.arm, []).append(row.validity == "valid")
            if self._look is not None:
                self._measured.append(row)
            self._lags.setdefault(request.arm, CellLag(self._requested())).add(outcome, row.step_ms)
        await self._judge(row, boot)

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
        self._gate(
            trip
            and replace(trip, detail=f"{trip.detail}; the last: {row.error or row.error_code or row.state}")
        )

    def _gate(self, trip: Trip | None) -> None:
        if trip is not None and trip.gate not in self._ctx.overrides:
            raise Tripped(trip)

    # --- the end

    async def _commit(self, start_ns: int, end_ns: int) -> None:
        await self._alone()
        self._drafters_are_real()
        for arm, valid in self._rows.items():
            trip = void_share_trip(valid.count(False), len(valid), self._ctx.limits, self._ctx.who.session)
            self._gate(trip and replace(trip, detail=f"{self._boots[arm].cell}: {trip.detail}"))
        servers = {arm: await self._unchanged(arm) for arm in self._writers}
        grown = {
            arm: growth(before, await self._scraped(self._boots[arm])) for arm, before in self._before.items()
        }
        read = await self._ctx.ports.telemetry.window(start_ns, end_ns)
        telemetry = {name: finite(value) for name, value in read.items()}
        slow = telemetry_trip(telemetry, self._ctx.limits, self._ctx.who.session)
        self._gate(slow and replace(slow, detail=f"{self._round.id}: {slow.detail}"))
        cells = [
            {
                "cell": self._boots[arm].cell,
                "attempt": self._attempt,
                "files": [asdict(f) for f in writer.seal(self._late(arm))],
                "telemetry": telemetry,
                "client": self._lags[arm].to_json() if arm in self._lags else None,
                "server": servers[arm],
                **self._overlapping(arm),
                "counters": grown.get(arm),
            }
            for arm, writer in self._writers.items()
        ]
        # One event for both: a crash between them would leave a short round in a group that goes on.
        stop = {} if self.stopped is None else {"group_stopped": dict(self.stopped)}
        self._ctx.emit("round_committed", round_id=self._round.id, attempt=self._attempt, cells=cells, **stop)

    async def _unchanged(self, arm: str) -> dict[str, Any] | None:
        """The server's pages again; raises EngineError where what is in force is not what it was at boot."""
        boot = self._boots[arm]
        found = await asked(self._ctx.ports.host, "recheck", boot.record.boot_id)
        if found is None:
            return None
        if found["effective"]:
            why = f"{boot.record.boot_id}: changed while it was measured: {'; '.join(found['effective'])}"
            raise EngineError("not_effective", why)
        return {"settled": self._settled.get(arm), "changed": found["pages"]}

    def _overlapping(self, arm: str) -> dict[str, Any]:
        """Steps and acceptance of the cell and of its waves, where requests overlap; nothing else."""
        windows = self._windows.get(arm)
        if not windows:
            return {}
        spec = self._boots[arm].arm.config.speculation
        depth = spec.depth if spec else None
        return {
            "overlapping": whole(windows).to_json(depth),
            "waves": [window.to_json(depth) for window in windows],
        }

    async def _scraped(self, boot: Measured) -> Counters | None:
        return await self._ctx.ports.host.counters(boot.record.boot_id)

    def _requested(self) -> float | None:
        return self._group.load.rate if self._group.load is not None else None

    def _late(self, arm: str) -> Literal["void"] | None:
        """`void` for a cell whose stamps are not small against its steps."""
        lag = self._lags.get(arm)
        if lag is None or lag.verdict != "void":
            return None
        p99, rows = lag.to_json()["lag_p99_us"], len(self._rows[arm])
        trip = void_share_trip(rows, rows, self._ctx.limits, self._ctx.who.session)
        self._gate(trip and replace(trip, detail=f"{self._boots[arm].cell}: client_lag, p99 {p99:.0f} us"))
        return "void"

    def _drafters_are_real(self) -> None:
        """Every draft accepted, hundreds of times, is a drafter that nothing checks: the arm is invalid."""
        for arm, (drafts, refused) in self._drafting.items():
            spec = self._boots[arm].arm.config.speculation
            if spec is not None and spec.simulated_acceptance is None and inert(drafts, refused):
                why = f"{arm}: all of {drafts} drafts were accepted whole: the drafter is inert"
                raise EngineError("not_effective", why)

    async def _alone(self) -> None:
        """A stranger on the GPUs of a cell makes its times somebody else's: the round is void."""
        look = getattr(self._ctx.ports.host, "foreign", None)
        for boot in self._boots.values():
            if look is None or not boot.plan.gpus:
                continue
            found = await look(boot.record.boot_id)
            if found:
                raise EngineError("died", f"{boot.record.boot_id}: another process is on its GPUs: {found}")

    def _void(self, reason: str) -> None:
        for writer in self._writers.values():
            writer.seal("void")
        self._ctx.emit("round_voided", round_id=self._round.id, attempt=self._attempt, reason=reason)


def _tail(path: str, lines: int = 5) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123  # the path crossed a process as text
            return REDACTOR.text("".join(file.readlines()[-lines:]))
    except OSError:
        return ""
