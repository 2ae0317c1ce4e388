"""Supervises one session: lease, node, agent, and the way back, whatever happens in between.

Intent before act, proof after it: the lease is in the ledger before the node is asked for, and it bills
until the provider's own listing shows the node gone.
"""

import asyncio
import contextlib
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from campaign.budget.machine import Trip
from campaign.clock import Clock
from campaign.cloud import deadmen
from campaign.cloud.base import AgentJob, AgentRun, LaunchIntent, LeaseTerms, NodeHandle, Provider, Quote
from campaign.errors import CampaignError, ProviderError
from campaign.fleet.budget import BudgetPort, LeaseGrant
from campaign.fleet.snapshot import SessionSnapshot
from campaign.ledger.events import NewEvent
from campaign.ledger.model import RunState
from campaign.plan.model import SessionPlan
from campaign.session.round import Progress
from campaign.spec.models import Node
from campaign.store import ballast
from campaign.store.layout import RunDir, flat

Ending = Literal["done", "refused", "stopped", "tripped", "failed", "unreachable", "preempted", "bad_draw"]

DOWN_TRIES = 5
DOWN_PAUSE_S = 2.0
"""Doubled from try to try."""
STOP_GRACE_S = 60.0
"""For an agent to drop its requests, void its round and stop its engines."""
TICK_S = 1.0
"""Between two looks at what time alone can trip."""
OBSERVE_S = 30.0
FIRST_WORD_S = 600.0
"""An agent that was started and has said nothing for so long is taken for dead; later on the heartbeat gate judges."""
WAIT_FIRST_S, WAIT_MOST_S = 30.0, 600.0
"""Pauses between launches while there is no capacity."""
NEVER_BEGAN = frozenset({"capacity", "quota", "credentials", "refused"})
"""Launch errors after which an empty listing means that no node ever was: nothing is billed."""
DEAD_MEN_NEEDED = deadmen.NEEDED


@dataclass(frozen=True, slots=True)
class SessionJob:
    """What a supervisor is given."""

    run: str
    campaign: str
    install_id: str
    run_dir: str
    plan: SessionPlan
    node: Node
    spec_json: str
    attempts: Mapping[str, int]
    done: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    wait_for_capacity_s: float = 0.0
    stored: bool = False
    """Rows come through an object store: what a node that is gone had shipped can still be fetched."""


@dataclass(frozen=True, slots=True)
class SessionResult:
    """How a session ended. `error_exit` is the exit code its error asks for."""

    session: str
    ending: Ending
    reason: str
    error_exit: int | None = None
    gate: str | None = None


class Supervisor:
    """One session, once."""

    def __init__(
        self, job: SessionJob, budget: BudgetPort, provider: Provider, clock: Clock, tick_s: float = TICK_S
    ) -> None:
        self._job, self._budget, self._provider, self._clock = job, budget, provider, clock
        self._tick_s = tick_s
        self._agent: AgentRun | None = None
        self._stop: tuple[str, str | None] | None = None
        self._gone: str | None = None
        self._heard = False
        self._state = "waiting"
        self._deadline: int | None = None

    # --- asked from outside

    async def stop(self, why: str, gate: str | None = None) -> None:
        """Stop at the next token; the first reason given is the one that counts."""
        self._stop = self._stop or (why, gate)
        if self._agent is not None:
            await self._agent.stop(why, gate)

    async def add(self, data: bytes) -> None:
        """Run an addition while the session is held. Raises ProviderError where that cannot be."""
        add = getattr(self._agent, "add", None)
        if self._stop is not None or self._gone is not None or add is None:
            raise ProviderError("refused", "nothing can be added to this session any more")
        await add(data)

    def snapshot(self) -> SessionSnapshot:
        """How far it is."""
        progress = getattr(self._agent, "progress", None) or Progress()
        state = progress.state if self._state == "running" and progress.state != "waiting" else self._state
        return SessionSnapshot(
            name=self._job.plan.name,
            node=self._job.plan.node,
            state=state,
            phase=progress.phase,
            cell=progress.cell,
            done=progress.done,
            total=progress.total,
            tok_s=progress.tok_s,
            deadline_utc_ns=self._deadline,
        )

    # --- the session

    async def run(self) -> SessionResult:
        """Lease to settlement, waiting for capacity where the spec allows it.

        Whatever happened is in the result and in the ledger.
        """
        started, pause = self._clock.monotonic_ns(), WAIT_FIRST_S
        while True:
            result, kind = await self._once()
            waited = (self._clock.monotonic_ns() - started) / 1e9
            if result.ending != "failed" or kind != "capacity":
                return result
            if self._stop is not None:
                return SessionResult(result.session, "stopped", self._stop[0])
            if waited + pause > self._job.wait_for_capacity_s:
                return result
            # Its lease is settled at nothing: while it waits, nothing bills and nothing is reserved.
            self._state = "waiting"
            await self._clock.sleep(pause)
            pause = min(2 * pause, WAIT_MOST_S)

    async def _once(self) -> tuple[SessionResult, str | None]:
        """One lease. Returns how it ended, and the kind of the launch error if that is why."""
        name = self._job.plan.name
        if self._stop is not None:
            return SessionResult(name, "stopped", self._stop[0]), None
        try:
            quote = await self._provider.quote(self._job.node)
            missing = too_few_dead_men(quote.dead_men, ours=quote.ours)
            if missing is not None:
                return SessionResult(name, "refused", missing, gate="dead_man"), None
            grant = await self._grant(quote)
        except Exception as error:
            return self._failed(error), None
        if not isinstance(grant, LeaseGrant):
            return grant, None
        self._deadline = grant.deadline_utc_ns
        intent = self._intent(grant)
        kind: str | None = None
        handle = self._provider.expected(intent)
        try:
            self._state = "launching"
            handle = await self._provider.launch(intent)
            trips = await self._budget.lease_opened(grant.lease, handle)
            missing = too_few_dead_men(handle.dead_men, ours=handle.ours)
            if missing is not None:
                trips = [*trips, Trip("dead_man", ", ".join(handle.dead_men) or "none", "2", missing, name)]
            for trip in trips:
                await self._tripped(trip)
            if self._stopped() is not None:
                # A price or a dead-man that is not what was promised: down at once, nothing is started.
                why, gate = self._stopped() or ("", None)
                result = SessionResult(name, "tripped" if gate else "stopped", why, gate=gate)
            else:
                self._state = "running"
                result = await self._bad_draw(await self._measure(intent, handle), handle)
        except ProviderError as error:
            kind = error.kind
            ending: Ending = "preempted" if kind == "preempted" else "failed"
            result = SessionResult(name, ending, str(error), error_exit=error.exit_code)
        except Exception as error:
            result = self._failed(error)
        return await self._teardown(grant, handle, result, never=kind in NEVER_BEGAN), kind

    def _failed(self, error: Exception) -> SessionResult:
        name = self._job.plan.name
        if isinstance(error, CampaignError):
            return SessionResult(name, "failed", str(error), error_exit=error.exit_code)
        # Our bug: what a person needs to report it stays with the run.
        path = Path(self._job.run_dir) / "logs" / f"bug-{flat(name)}.txt"
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        return SessionResult(name, "failed", f"our bug: {error!r}; details in {path}", error_exit=70)

    def _stopped(self) -> tuple[str, str | None] | None:
        return self._stop

    async def _grant(self, quote: Quote) -> LeaseGrant | SessionResult:
        grant = await self._budget.admit_lease(
            session=self._job.plan.name,
            node=self._job.plan.node,
            provider=self._provider.name,
            quote=quote,
            max_ns=int(self._job.plan.worst_seconds * 1e9),
            tokens_usd=self._job.plan.tokens_usd,
        )
        if isinstance(grant, LeaseGrant):
            return grant
        return SessionResult(self._job.plan.name, "refused", grant.why, gate=grant.trip.gate)

    async def _measure(self, intent: LaunchIntent, handle: NodeHandle) -> SessionResult:
        state, name = await self._budget.state(), self._job.plan.name
        job = AgentJob(
            intent=intent,
            plan=self._job.plan,
            spec_json=self._job.spec_json,
            # What the ledger says now, not what it said when the job was made: no attempt is numbered twice.
            attempts={**self._job.attempts, **state.attempts(name)},
            done=tuple(dict.fromkeys([*self._job.done, *state.done(name)])),
            overrides=self._job.overrides,
            terms=_terms(state, name, intent.lease),
        )
        self._agent = await self._provider.run_agent(handle, job)
        if self._stop is not None:
            await self._agent.stop(*self._stop)
        watchers = [
            asyncio.create_task(self._tick()),
            asyncio.create_task(self._watch(handle, self._agent)),
            asyncio.create_task(self._end_the_deaf(self._agent)),
            asyncio.create_task(self._first_word()),
        ]
        last: NewEvent | None = None
        try:
            async for event in self._agent.events():
                self._heard = True
                mine = event.session == self._job.plan.name
                last = event if mine and event.type == "session_finished" else last
                for trip in await self._budget.observe([event]):
                    # What was added to a held session may trip a gate of its own; the agent ends that alone.
                    if trip.session in {None, self._job.plan.name}:
                        await self._tripped(trip)
        except ProviderError:
            if self._gone is None and await self._provider.observe(handle) in {"gone", "preempted"}:
                self._gone = "the node was taken away"
            if self._gone is None:
                raise
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        return self._result(last)

    def _result(self, last: NewEvent | None) -> SessionResult:
        name = self._job.plan.name
        if last is None:
            if self._stop is not None:
                ending: Ending = "tripped" if self._stop[1] else "stopped"
                return SessionResult(name, ending, self._stop[0], gate=self._stop[1])
            if self._gone is not None:
                return SessionResult(name, "preempted", self._gone, error_exit=4)
            return SessionResult(name, "failed", "the session agent ended without a word", error_exit=4)
        state, reason = last.payload["state"], last.payload["reason"]
        gate = self._stop[1] if self._stop else last.payload.get("gate")
        return SessionResult(name, state, reason, error_exit=last.payload.get("exit_code"), gate=gate)

    async def _bad_draw(self, result: SessionResult, handle: NodeHandle) -> SessionResult:
        """A rented node that is proven slower than the reference at its first anchor, before anything was paired."""
        if not handle.ours or result.gate != "anchor_drift":
            return result
        name = self._job.plan.name
        state = await self._budget.state()
        anchors = {r.id for g in self._job.plan.groups if g.kind == "anchor" for r in g.rounds}
        slower = any(
            a.session == name and a.position == "first" and a.data.get("ok") is False for a in state.anchors
        )
        if slower and set(state.done(name)) <= anchors:
            return replace(result, ending="bad_draw")
        return result

    async def _tick(self) -> None:
        """Time passes: cost, deadline and silence are judged without waiting for the agent."""
        try:
            while True:
                for trip in await self._budget.tick():
                    if trip.session in {None, self._job.plan.name}:
                        await self._tripped(trip)
                await self._clock.sleep(self._tick_s)
        except CampaignError as error:
            # A budget that cannot be asked is a budget that is spent.
            await self.stop(f"the budget cannot be judged: {error}", "missing_input")

    async def _first_word(self) -> None:
        """The ledger knows no session whose agent never spoke, so its heartbeat gate does not see that one."""
        await self._clock.sleep(FIRST_WORD_S)
        if not self._heard and "heartbeat" not in self._job.overrides:
            await self.stop(f"the agent has not said a word within {FIRST_WORD_S:g} s", "heartbeat")

    async def _end_the_deaf(self, agent: AgentRun) -> None:
        """An agent that was told to stop has `STOP_GRACE_S` to do so; then it is ended."""
        while self._stop is None:
            await self._clock.sleep(self._tick_s)
        await self._clock.sleep(STOP_GRACE_S)
        await agent.kill()

    async def _watch(self, handle: NodeHandle, agent: AgentRun) -> None:
        """Ask the provider whether the node is still there, and end the wait for one that is not."""
        while True:
            await self._clock.sleep(OBSERVE_S)
            try:
                seen = await self._provider.observe(handle)
            except ProviderError:
                continue  # unreachable: the heartbeat gate decides
            if seen in {"gone", "preempted"}:
                self._gone = "the node was taken away"
                await agent.kill()
                return

    async def _tripped(self, trip: Trip) -> None:
        # A stop that a person asked for is in the ledger like a trip, but is none.
        await self.stop(trip.why, None if trip.gate == "stop" else trip.gate)

    # --- the way back

    async def _teardown(
        self, grant: LeaseGrant, handle: NodeHandle, result: SessionResult, *, never: bool
    ) -> SessionResult:
        # The node comes first: a ledger that fails must not keep it alive.
        self._state, name = "tearing down", self._job.plan.name
        asked = NewEvent(
            "lease_down_asked", {"lease": grant.lease, "why": result.reason or result.ending}, name
        )
        unwritten = await self._write(lambda: self._budget.mark_phase(grant.lease, "teardown"))
        unwritten = await self._write(lambda: self._budget.record(asked)) or unwritten
        if self._agent is not None and (self._gone is None or self._job.stored):
            result = await self._fetch(handle, result)
        # Asked before anything is ended: after a `down` every listing is empty.
        never = never and await _nothing_listed(self._provider, handle)
        proof = await take_down(self._provider, handle, self._clock)
        if not proof.gone:
            payload = {"lease": grant.lease, "why": proof.how, "check_by_hand": proof.by_hand}
            await self._write(lambda: self._budget.record(NewEvent("lease_unreachable", payload, name)))
            words = f"{proof.how}; it bills on in the ledger; check by hand: {proof.by_hand}"
            return SessionResult(name, "unreachable", words, error_exit=4)
        until, how = self._clock.utc_ns(), proof.how
        if never:
            until = (await self._budget.state()).leases[grant.lease].billing_from_utc_ns
            how = f"never began: {result.reason}; {proof.how}"
        unwritten = await self._write(lambda: self._budget.settle(grant.lease, until, how)) or unwritten
        self._state = result.ending
        if unwritten is not None:
            return SessionResult(
                name, "failed", f"{unwritten}; the node is gone", error_exit=unwritten.exit_code
            )
        return result

    async def _write(self, write: Callable[[], Awaitable[object]]) -> CampaignError | None:
        """Write to the ledger; on a full disk once more, with the reserve given back. The error, if it stays."""
        try:
            await write()
        except CampaignError as error:
            if not ballast.give_back(RunDir(Path(self._job.run_dir)), error):
                return error
        else:
            return None
        try:
            await write()
        except CampaignError as error:
            return error
        return None

    async def _fetch(self, handle: NodeHandle, result: SessionResult) -> SessionResult:
        """Bring what is still on the node, before it is ended. The node is ended all the same."""
        try:
            events = await self._provider.fetch(handle, self._job.run_dir)
            await self._budget.observe(events)
        except Exception as error:
            # A full disk or a torn archive too: whatever fails here, the node is still to be ended.
            if result.ending == "done":
                return replace(
                    result, ending="failed", reason=f"rows were not brought: {error}", error_exit=4
                )
            return result
        last = events[-1] if events else None
        ours = last is not None and last.session == self._job.plan.name
        if result.ending == "failed" and last is not None and ours and last.type == "session_finished":
            return self._result(last)  # the line was cut; the agent had gone on to its end
        return result

    def _intent(self, grant: LeaseGrant) -> LaunchIntent:
        return LaunchIntent(
            run=self._job.run,
            campaign=self._job.campaign,
            install_id=self._job.install_id,
            session=self._job.plan.name,
            lease=grant.lease,
            node_name=self._job.plan.node,
            node=self._job.node,
            deadline_utc_ns=grant.deadline_utc_ns,
            run_dir=self._job.run_dir,
        )


def _terms(state: RunState, session: str, lease: str) -> LeaseTerms | None:
    """The lease as it stands, or None where its price, worst case or deadline is not known."""
    held = state.leases[lease]
    if held.usd_per_hour is None or held.worst_usd is None or held.deadline_utc_ns is None:
        return None
    return LeaseTerms(
        lease=lease,
        session=session,
        node=held.node,
        provider=held.provider,
        usd_per_hour_micro=held.usd_per_hour,
        granularity_s=held.granularity_s,
        billing_from_utc_ns=held.billing_from_utc_ns,
        deadline_utc_ns=held.deadline_utc_ns,
        worst_usd_micro=held.worst_usd,
        teardown_reserve_usd_micro=held.teardown_reserve_usd or 0,
    )


@dataclass(frozen=True, slots=True)
class Ended:
    """What came of taking a node down."""

    gone: bool
    how: str
    by_hand: str


async def take_down(
    provider: Provider,
    handle: NodeHandle,
    clock: Clock,
    tries: int = DOWN_TRIES,
    pause_s: float = DOWN_PAUSE_S,
) -> Ended:
    """Take a node down until the provider's own listing shows it gone, at most `tries` times.

    A `down` that returns is no proof, and one that fails is no proof of the contrary: the listing decides.
    """
    how, by_hand = "", ""
    for attempt in range(tries):
        try:
            await provider.down(handle)
        except Exception as error:
            how = str(error) or repr(error)
        try:
            proof = await provider.prove_down(handle)
            by_hand = proof.check_by_hand or by_hand
            if proof.gone:
                return Ended(gone=True, how=proof.how, by_hand=by_hand)
            how = how or proof.how
        except Exception as error:
            how = str(error) or repr(error)
        if attempt < tries - 1:
            await clock.sleep(pause_s * 2**attempt)
    look = f"look for node {handle.node_id} of provider {provider.name}"
    return Ended(gone=False, how=how, by_hand=by_hand or look)


async def _nothing_listed(provider: Provider, handle: NodeHandle) -> bool:
    """Whether the provider's listing shows no such node; what it does not say counts as a node."""
    try:
        return (await provider.prove_down(handle)).gone
    except Exception:
        return False


def too_few_dead_men(dead_men: tuple[str, ...], *, ours: bool) -> str | None:
    """Why a node may not be used: nobody but us would end it. None where it may."""
    if not ours or len(set(dead_men)) >= DEAD_MEN_NEEDED:
        return None
    have = ", ".join(dead_men) or "none"
    return (
        f"only {have} would end this node if the controller died; {DEAD_MEN_NEEDED} effective dead-men are needed. "
        "`campaign doctor` shows them for every cloud"
    )
