"""The session agent: runs one session's plan inside one lease, and needs no live controller.

It journals what it does, stops when it is told to, when a gate trips or when its lease is over, and
leaves nothing running. The same class runs in this process, in a Ray actor, and on a rented node.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from campaign.analysis.drift import Past, judge
from campaign.analysis.forecast import UNSEEN_BOOT_SD, forecast_json, foresee, none_can_win
from campaign.analysis.looks import Stop, at_quad, decide
from campaign.analysis.model import AnchorResult
from campaign.budget.machine import Trip
from campaign.engines import models, runtimes
from campaign.errors import CampaignError, EngineError
from campaign.plan.model import GroupPlan, RoundPlan
from campaign.plan.power import Prior
from campaign.session import added
from campaign.session.added import MARGIN_S
from campaign.session.instrument import self_check, share_load
from campaign.session.ports import Command, Control
from campaign.session.round import Look, RoundRunner, SessionContext, Stopped, Tripped
from campaign.spec.storage import models_of
from campaign.store import ballast
from campaign.store.row import RequestRow

State = Literal["done", "stopped", "tripped", "failed"]

POLL_S = 0.2
HEARTBEAT_S = 10.0
MAX_ATTEMPTS = 2
"""A round whose engine dies or hangs is done again once: twice in a row is not chance."""
NO_RETRY = frozenset({"config", "missing_model", "not_effective", "port_owned_by_other", "oom"})

AdmitRound = Callable[[GroupPlan, RoundPlan], Awaitable[Trip | None]]
"""None admits the round; a trip says why not."""


class SessionAgent:
    """One session, from its first boot to its last."""

    def __init__(
        self,
        ctx: SessionContext,
        control: Control,
        admit: AdmitRound,
        *,
        deadline_utc_ns: int,
        attempts: Mapping[str, int],
        done: frozenset[str],
        prior: Prior | None = None,
        past: Past | None = None,
    ) -> None:
        self._ctx, self._control, self._admit = ctx, control, admit
        self._deadline, self._attempts, self._done = deadline_utc_ns, dict(attempts), done
        self._prior, self._past = prior, past
        self._stopped: set[str] = set()
        """Groups that a look or a forecast ended in this run of the agent."""
        rounds = [r for g in ctx.plan.groups for r in g.rounds]
        ctx.progress.total = sum(map(_requests, rounds))
        ctx.progress.done = sum(_requests(r) for r in rounds if r.id in done)

    async def run(self) -> State:
        """Run every round that is not done yet. Returns how it ended; the journal says the same."""
        ctx = self._ctx
        ctx.emit("session_started", lease=ctx.who.lease, plan_sha256=None)
        watcher = asyncio.create_task(self._watch())
        state: State = "failed"
        reason = "interrupted"
        exit_code: int | None = None
        try:
            state, reason, exit_code = await self._outcome(self._whole)
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            ctx.progress.state = state
            ctx.disk.shutdown()
            self._beat()
            ctx.emit("session_finished", state=state, reason=reason, exit_code=exit_code)
        return state

    async def _outcome(self, work: Callable[[], Awaitable[None]]) -> tuple[State, str, int | None]:
        """How the work ended: state, reason, exit code."""
        try:
            await work()
        except Stopped as stop:
            return ("tripped" if stop.command.gate else "stopped"), stop.command.why, None
        except Tripped as error:
            self._trip(error.trip)
            return "tripped", error.trip.why, None
        except CampaignError as error:
            ballast.give_back(self._ctx.run_dir, error)
            return "failed", str(error), error.exit_code
        return "done", "", None

    async def _whole(self) -> None:
        ctx = self._ctx
        self._mark("setup")
        node = await ctx.ports.telemetry.start(str(ctx.run_dir.telemetry / f"{ctx.who.session}.jsonl"))
        ctx.store.put_json("provenance", f"{ctx.who.session}/node-{ctx.who.lease}", node)
        await self._require_telemetry()
        await self._install()
        checked = await self_check(ctx.ports)
        ctx.store.put_json("provenance", f"{ctx.who.session}/selfcheck-{ctx.who.lease}", checked)
        shared = await share_load(ctx.ports, checked, ctx.plan, ctx.spec, ctx.cpus)
        ctx.store.put_json("provenance", f"{ctx.who.session}/client-{ctx.who.lease}", shared)
        await self._groups()
        await self._hold()

    async def _groups(self) -> None:
        for group in self._ctx.plan.groups:
            await self._group(group)

    # --- what is added

    async def _hold(self) -> None:
        """Keep the node, inside the lease, for what is added. The plan is done: a plain stop ends this well."""
        ctx = self._ctx
        if ctx.plan.hold_s <= 0:
            return
        until = min(ctx.clock.utc_ns() + int(ctx.plan.hold_s * 1e9), self._deadline - int(MARGIN_S * 1e9))
        ctx.emit("session_held", lease=ctx.who.lease, until_utc_ns=until)
        self._idle()
        while ctx.clock.utc_ns() < until:
            command = ctx.progress.command
            if command is not None and command.gate is None:
                return
            ctx.check()
            data = await self._control.added()
            if data is None:
                await ctx.clock.sleep(POLL_S)
            else:
                await self._add(added.load(data))
                self._idle()

    def _idle(self) -> None:
        self._ctx.progress.state = "held"
        self._mark("idle")

    async def _add(self, what: added.Added) -> None:
        """Run an addition beside our own telemetry and watcher; how it ends is its own affair."""
        ctx = replace(
            self._ctx,
            who=replace(self._ctx.who, session=what.plan.name),
            plan=what.plan,
            spec=what.spec,
            prompts=what.prompts,
        )
        ctx.progress.state = "measuring"
        agent = SessionAgent(
            ctx,
            self._control,
            self._admit,
            deadline_utc_ns=self._deadline,
            attempts={},
            done=frozenset(),
            prior=self._prior,
            past=self._past,
        )
        ctx.emit("session_started", lease=ctx.who.lease, plan_sha256=None)
        state: State = "failed"
        reason, exit_code = "interrupted", None
        try:
            state, reason, exit_code = await agent._outcome(agent._installed)
        finally:
            ctx.emit("session_finished", state=state, reason=reason, exit_code=exit_code)

    async def _installed(self) -> None:
        await self._install()
        await self._groups()

    # --- set-up

    async def _require_telemetry(self) -> None:
        """Trip where a reading that the spec requires is not there: before weights load, not after."""
        wanted = self._ctx.spec.gates.require_telemetry
        if not wanted:
            return
        now = self._ctx.clock.monotonic_ns()
        window = await self._ctx.ports.telemetry.window(now - 60_000_000_000, now)
        there = {re.sub(r"^gpu\d+_", "gpu_", name) for name, value in window.items() if value is not None}
        for name in wanted:
            if name not in there:
                self._gate(
                    "missing_input", "not there", f"require_telemetry: {name}", "telemetry of the node"
                )

    async def _install(self) -> None:
        """Put the engines onto the node, each version into a venv of its own, before the first anchor."""
        ctx = self._ctx
        for name, runtime, patches in runtimes.needed(
            (a.config for a in ctx.plan.arms.values()), ctx.spec.runtimes
        ):
            ctx.check()
            ctx.progress.state = f"installing {name}"
            done = await asyncio.to_thread(runtimes.install, runtime, name, patches=patches)
            record = {"runtime": name, "packages": dict(done.packages), "seconds": done.seconds}
            suffix = f"-{runtimes.folder(runtime, patches=patches).name}" if patches else ""
            ctx.store.put_json("provenance", f"{ctx.who.session}/runtime-{name}{suffix}", record)
        await self._weights()

    async def _weights(self) -> None:
        """Put the weights onto the node, and hash them where the spec asks, before the first anchor."""
        ctx = self._ctx

        def say(what: str) -> None:
            ctx.progress.state = what

        for name in models_of(a.config for a in ctx.plan.arms.values()):
            model = ctx.spec.models.get(name)
            # Without a mirror or a pin there is nothing to do: the engine finds or fetches them.
            if model is None or (model.cache is None and model.verify == "size" and model.sha256 is None):
                continue
            ctx.check()
            done = await asyncio.to_thread(models.prepare, name, model, say)
            ctx.store.put_json("provenance", f"{ctx.who.session}/model-{name}", done.to_json())

    # --- rounds

    async def _group(self, group: GroupPlan) -> None:
        begun = group.name in self._stopped or any(r.id in self._done for r in group.rounds)
        if group.forecast and not begun:
            self._foresee(group)
        for round_ in group.rounds:
            if round_.id in self._done or group.name in self._stopped:
                continue
            if round_.index in group.looks:
                why = self._decided(group, Stop(round_.index))
                if why is not None:
                    self._ctx.emit("group_stopped", **self._stop(group, Stop(round_.index), why))
                    self._ended(group, Stop(round_.index))
                    break
            await self._round(group, round_)
        if group.kind == "anchor":
            self._anchor(group)

    def _valid(self) -> list[RequestRow]:
        ctx = self._ctx
        return [r for r in ctx.store.rows() if r.session == ctx.who.session and r.validity == "valid"]

    def _decided(self, group: GroupPlan, stop: Stop, more: Sequence[RequestRow] = ()) -> str | None:
        """A look that the spec named: why the rest of the group need not run, by the rows alone; None: go on."""
        stats = self._ctx.spec.statistics
        rows = [r for r in self._valid() if r.group == group.name]
        rows += [r for r in more if r.validity == "valid"]
        return decide(
            rows,
            group,
            self._ctx.plan.comparisons,
            stop,
            level=stats.confidence,
            declared=stats.boot_sd,
            prior=self._prior,
        )

    def _stop(self, group: GroupPlan, stop: Stop, why: str) -> dict[str, Any]:
        """What the ledger says of a stop."""
        left = [r for r in group.rounds if r.index >= stop.rounds + bool(stop.quads)]
        said = {"group": group.name, "look": stop.rounds, "why": why, "skipped": [r.id for r in left]}
        return said | ({"quads": stop.quads} if stop.quads else {})

    def _ended(self, group: GroupPlan, stop: Stop) -> None:
        """The stop is on record: what it left out is not waited for."""
        self._stopped.add(group.name)
        cut = stop.cut(group)
        self._ctx.progress.total -= sum(map(_requests, group.rounds)) - sum(map(_requests, cut.rounds))

    def _look(self, group: GroupPlan, round_: RoundPlan) -> Look | None:
        """Looks inside a round, where the spec names some."""
        if not group.look_quads:
            return None

        def at(quads: int, rows: Sequence[RequestRow]) -> dict[str, Any] | None:
            stop = Stop(round_.index, quads)
            if at_quad(group, round_.index, quads) not in group.look_quads:
                return None
            why = self._decided(group, stop, rows)
            return None if why is None else self._stop(group, stop, why)

        return at

    def _foresee(self, group: GroupPlan) -> None:
        """Write down what the arms that have not run will give; leave them out where none can win."""
        ctx = self._ctx
        arms = ctx.plan.arms
        family = [g for g in ctx.plan.groups if g.ladder == group.ladder]
        names = dict.fromkeys(a for g in family for a in g.arms)
        rows = [r for r in self._valid() if r.group in {g.name for g in family} and r.phase == "measure"]
        drafting = {n: arms[n].config.speculation for n in names}
        said, best = foresee(
            rows, drafting, group.forecast, boot_sd=ctx.spec.statistics.boot_sd.get("step_ms", UNSEEN_BOOT_SD)
        )
        stop = None if best is None else none_can_win(said, best)
        ctx.emit(
            "forecast_made",
            group=group.name,
            workload=group.workload,
            method=next((s.method for n in group.forecast if (s := arms[n].config.speculation)), None),
            best_tok_s=best,
            stop=stop,
            forecasts=[{"arm": a, **forecast_json(f)} for a, f in zip(group.forecast, said, strict=True)],
        )
        if stop:
            later = [g for g in family if set(g.forecast) <= set(group.forecast) and g.forecast]
            for g in later:
                ctx.emit("group_stopped", **self._stop(g, Stop(0), "forecast"))
                self._ended(g, Stop(0))

    async def _round(self, group: GroupPlan, round_: RoundPlan) -> None:
        first = self._attempts.get(round_.id, 0)
        for attempt in range(first, first + MAX_ATTEMPTS):
            self._ctx.check()
            refused = await self._admit(group, round_)
            if refused is not None and refused.gate == "stop":
                # A person asked: the round was refused before the word itself arrived.
                raise Stopped(Command(stop=True, why=refused.detail))
            if refused is not None:
                self._trip(refused)
                raise Stopped(Command(stop=True, why=refused.why, gate=refused.gate))
            done_before = self._ctx.progress.done
            try:
                look = self._look(group, round_)
                runner = RoundRunner(self._ctx, group, round_, attempt, self._mark, look)
                await runner.run()
            except EngineError as error:
                if error.kind in NO_RETRY or attempt == first + MAX_ATTEMPTS - 1:
                    raise
                self._ctx.progress.done = done_before
            else:
                # Only with the commit: a round that fails after its look is done again, and may then go on.
                if runner.stopped is not None:
                    self._ended(group, Stop.of(runner.stopped))
                return

    # --- anchors

    def _anchor(self, group: GroupPlan) -> None:
        ctx = self._ctx
        rows: dict[str, list[RequestRow]] = {}
        for row in ctx.store.rows():
            if row.session == ctx.who.session and row.phase == "anchor" and row.validity == "valid":
                rows.setdefault(row.group.removeprefix("anchor."), []).append(row)
        position = group.name.removeprefix("anchor.")
        declared = ctx.spec.statistics.boot_sd.get("step_ms")
        result = judge(
            position,
            rows,
            session=ctx.who.session,
            anchor=ctx.spec.anchor,
            declared_boot_sd=declared,
            prior_boot_sd=None if self._prior is None else self._prior.boot_sd.get("step_ms"),
            planned=sum(g.kind == "anchor" for g in ctx.plan.groups),
            past=self._past,
        )
        ctx.emit(
            "anchor_judged",
            position=position,
            step_ms=result.step_ms,
            reference_ms=result.reference_ms,
            drift=result.drift,
            lo=result.lo,
            hi=result.hi,
            ok=result.ok,
            reasons=list(result.reasons),
        )
        if result.step_ms is None:
            self._gate("anchor_quality", "no valid step time", "a number", ", ".join(result.reasons))
        elif result.ok is False:
            self._gate(
                "anchor_drift", _percent(result), f"{ctx.spec.anchor.drift_delta:.1%}", f"anchor {position}"
            )

    def _gate(self, gate: str, value: str, limit: str, detail: str) -> None:
        if gate in self._ctx.overrides:
            return
        trip = Trip(gate, value, limit, detail, self._ctx.who.session)
        self._trip(trip)
        raise Stopped(Command(stop=True, why=trip.why, gate=gate))

    def _trip(self, trip: Trip) -> None:
        self._ctx.emit(
            "gate_tripped",
            gate=trip.gate,
            value=trip.value,
            limit=trip.limit,
            detail=trip.detail,
            lease=self._ctx.who.lease,
        )

    # --- time

    def _mark(self, phase: str, group: str | None = None) -> None:
        ctx = self._ctx
        ctx.progress.phase = phase
        ctx.emit("phase_started", lease=ctx.who.lease, phase=phase, at_utc_ns=ctx.clock.utc_ns(), group=group)

    async def _watch(self) -> None:
        """Poll for a stop, keep the lease's end, and say that we are alive. What fails here stops the session."""
        try:
            command = await self._until_stopped()
        except Exception as error:
            # A session that nobody can stop any more must not go on.
            command = Command(stop=True, why=f"the watcher failed: {error!r}", gate="missing_input")
        self._ctx.progress.command = command
        self._ctx.stopping.set()
        await self._ctx.ports.client.cancel()
        if command.gate == "lease_time":
            lease = self._ctx.who.lease
            self._trip(
                Trip("lease_time", "deadline reached", "the lease", f"lease {lease}", self._ctx.who.session)
            )

    def _beat(self) -> None:
        progress = self._ctx.progress
        self._ctx.emit("agent_heartbeat", cell=progress.cell, done=progress.done, total=progress.total)

    async def _until_stopped(self) -> Command:
        ctx = self._ctx
        every_s = min(HEARTBEAT_S, ctx.spec.gates.heartbeat.total_seconds() / 3)
        beat = ctx.clock.monotonic_ns()
        while True:
            command = await self._control.poll()
            if command is not None and command.stop:
                return command
            if ctx.clock.utc_ns() >= self._deadline:
                return Command(stop=True, why=f"lease {ctx.who.lease} is over", gate="lease_time")
            if ctx.clock.monotonic_ns() - beat >= every_s * 1e9:
                beat = ctx.clock.monotonic_ns()
                self._beat()
            await ctx.clock.sleep(POLL_S)


def _percent(result: AnchorResult) -> str:
    return "unknown" if result.drift is None else f"{result.drift:+.1%}"


def _requests(round_: RoundPlan) -> int:
    return len(round_.warmup) + len(round_.sequence)
