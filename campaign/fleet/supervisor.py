"""Supervises one session: lease, node, agent, and the way back, whatever happens in between.

Intent before act, proof after it: the lease is in the ledger before the node is asked for, and it bills
until the provider's own listing shows the node gone.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from campaign.budget.machine import Trip
from campaign.clock import Clock
from campaign.cloud.base import AgentJob, AgentRun, LaunchIntent, NodeHandle, Provider
from campaign.errors import CampaignError, ProviderError
from campaign.fleet.budget import BudgetPort, LeaseGrant
from campaign.fleet.snapshot import SessionSnapshot
from campaign.ledger.events import NewEvent
from campaign.plan.model import SessionPlan
from campaign.session.round import Progress
from campaign.spec.models import Node

Ending = Literal["done", "refused", "stopped", "tripped", "failed", "unreachable"]

DOWN_TRIES = 5
DOWN_PAUSE_S = 2.0


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

    def __init__(self, job: SessionJob, budget: BudgetPort, provider: Provider, clock: Clock) -> None:
        self._job, self._budget, self._provider, self._clock = job, budget, provider, clock
        self._agent: AgentRun | None = None
        self._stop: tuple[str, str | None] | None = None
        self._state = "waiting"
        self._deadline: int | None = None

    # --- asked from outside

    async def stop(self, why: str, gate: str | None = None) -> None:
        """Stop at the next token; the first reason given is the one that counts."""
        self._stop = self._stop or (why, gate)
        if self._agent is not None:
            await self._agent.stop(why, gate)

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
        """Lease to settlement. Never raises: whatever happened is in the result and in the ledger."""
        name = self._job.plan.name
        if self._stop is not None:
            return SessionResult(name, "stopped", self._stop[0])
        quote = await self._provider.quote(self._job.node)
        asked_ns = int(self._job.plan.worst_seconds * 1e9)
        grant = await self._budget.admit_lease(
            session=name,
            node=self._job.plan.node,
            provider=self._provider.name,
            quote=quote,
            max_ns=asked_ns,
            tokens_usd=self._job.plan.tokens_usd,
        )
        if not isinstance(grant, LeaseGrant):
            return SessionResult(name, "refused", grant.why, gate=grant.trip.gate)
        self._deadline = grant.deadline_utc_ns
        handle: NodeHandle | None = None
        try:
            self._state = "launching"
            handle = await self._provider.launch(self._intent(grant))
            for trip in await self._budget.lease_opened(grant.lease, handle):
                await self._tripped(trip)
            self._state = "running"
            result = await self._measure(grant, handle)
        except CampaignError as error:
            result = SessionResult(name, "failed", str(error), error_exit=error.exit_code)
        except Exception as error:
            result = SessionResult(name, "failed", repr(error), error_exit=70)
        return await self._teardown(grant, handle, result)

    async def _measure(self, grant: LeaseGrant, handle: NodeHandle) -> SessionResult:
        job = AgentJob(
            intent=self._intent(grant),
            plan=self._job.plan,
            spec_json=self._job.spec_json,
            attempts=dict(self._job.attempts),
            done=self._job.done,
            overrides=self._job.overrides,
        )
        self._agent = await self._provider.run_agent(handle, job)
        if self._stop is not None:
            await self._agent.stop(*self._stop)
        ticker = asyncio.create_task(self._tick())
        last: NewEvent | None = None
        try:
            async for event in self._agent.events():
                last = event if event.type == "session_finished" else last
                for trip in await self._budget.observe([event]):
                    await self._tripped(trip)
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
        return self._result(last)

    def _result(self, last: NewEvent | None) -> SessionResult:
        name = self._job.plan.name
        if last is None:
            return SessionResult(name, "failed", "the session agent ended without a word", error_exit=4)
        state, reason = last.payload["state"], last.payload["reason"]
        gate = self._stop[1] if self._stop else last.payload.get("gate")
        return SessionResult(name, state, reason, error_exit=last.payload.get("exit_code"), gate=gate)

    async def _tick(self) -> None:
        """Time passes: cost, deadline and silence are judged without waiting for the agent."""
        while True:
            for trip in await self._budget.tick():
                if trip.session in {None, self._job.plan.name}:
                    await self._tripped(trip)
            await self._clock.sleep(1.0)

    async def _tripped(self, trip: Trip) -> None:
        # A stop that a person asked for is in the ledger like a trip, but is none.
        await self.stop(trip.why, None if trip.gate == "stop" else trip.gate)

    # --- the way back

    async def _teardown(
        self, grant: LeaseGrant, handle: NodeHandle | None, result: SessionResult
    ) -> SessionResult:
        self._state = "tearing down"
        await self._budget.mark_phase(grant.lease, "teardown")
        asked = {"lease": grant.lease, "why": result.reason or result.ending}
        await self._budget.record(NewEvent("lease_down_asked", asked, self._job.plan.name))
        how, by_hand = "nothing was launched", ""
        for _ in range(DOWN_TRIES):
            if handle is None:
                break
            try:
                await self._provider.down(handle)
                proof = await self._provider.prove_down(handle)
                how, by_hand = proof.how, proof.check_by_hand
                if proof.gone:
                    break
            except ProviderError as error:
                how = str(error)
            await self._clock.sleep(DOWN_PAUSE_S)
        else:
            await self._budget.record(
                NewEvent(
                    "lease_unreachable",
                    {"lease": grant.lease, "why": how, "check_by_hand": by_hand},
                    self._job.plan.name,
                )
            )
            return SessionResult(
                self._job.plan.name, "unreachable", f"{how}; check by hand: {by_hand}", error_exit=4
            )
        await self._budget.settle(grant.lease, self._clock.utc_ns(), how)
        self._state = result.ending
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
