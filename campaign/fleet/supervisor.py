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
from campaign.cloud.base import AgentJob, AgentRun, LaunchIntent, NodeHandle, Proof, Provider
from campaign.errors import CampaignError
from campaign.fleet.budget import BudgetPort, LeaseGrant
from campaign.fleet.snapshot import SessionSnapshot
from campaign.ledger.events import NewEvent
from campaign.plan.model import SessionPlan
from campaign.session.round import Progress
from campaign.spec.models import Node
from campaign.store import ballast
from campaign.store.layout import RunDir, flat

Ending = Literal["done", "refused", "stopped", "tripped", "failed", "unreachable"]

DOWN_TRIES = 5
DOWN_PAUSE_S = 2.0
STOP_GRACE_S = 60.0
"""For an agent to drop its requests, void its round and stop its engines."""


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
        """Lease to settlement. Never raises: whatever happened is in the result, and in the ledger if it can be."""
        name = self._job.plan.name
        if self._stop is not None:
            return SessionResult(name, "stopped", self._stop[0])
        try:
            quote = await self._provider.quote(self._job.node)
            grant = await self._budget.admit_lease(
                session=name,
                node=self._job.plan.node,
                provider=self._provider.name,
                quote=quote,
                max_ns=int(self._job.plan.worst_seconds * 1e9),
                tokens_usd=self._job.plan.tokens_usd,
            )
        except Exception as error:
            return self._failed(error)
        if not isinstance(grant, LeaseGrant):
            return SessionResult(name, "refused", grant.why)
        self._deadline = grant.deadline_utc_ns
        handle: NodeHandle | None = None
        try:
            self._state = "launching"
            handle = await self._provider.launch(self._intent(grant))
            for trip in await self._budget.lease_opened(grant.lease, handle):
                await self._tripped(trip)
            self._state = "running"
            result = await self._measure(grant, handle)
        except Exception as error:
            result = self._failed(error)
        return await self._teardown(grant, handle, result)

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
        watchers = [asyncio.create_task(self._tick()), asyncio.create_task(self._end_the_deaf(self._agent))]
        last: NewEvent | None = None
        try:
            async for event in self._agent.events():
                last = event if event.type == "session_finished" else last
                for trip in await self._budget.observe([event]):
                    await self._tripped(trip)
        finally:
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        return self._result(last)

    def _result(self, last: NewEvent | None) -> SessionResult:
        name = self._job.plan.name
        if last is None and self._stop is not None:
            return SessionResult(name, "tripped" if self._stop[1] else "stopped", self._stop[0])
        if last is None:
            return SessionResult(name, "failed", "the session agent ended without a word", error_exit=4)
        return SessionResult(
            name, last.payload["state"], last.payload["reason"], error_exit=last.payload.get("exit_code")
        )

    async def _tick(self) -> None:
        """Time passes: cost, deadline and silence are judged without waiting for the agent."""
        try:
            while True:
                for trip in await self._budget.tick():
                    if trip.session in {None, self._job.plan.name}:
                        await self._tripped(trip)
                await self._clock.sleep(1.0)
        except CampaignError as error:
            # A budget that cannot be asked is a budget that is spent.
            await self.stop(f"the budget cannot be judged: {error}", "missing_input")

    async def _end_the_deaf(self, agent: AgentRun) -> None:
        """An agent that was told to stop has `STOP_GRACE_S` to do so; then it is ended."""
        while self._stop is None:
            await self._clock.sleep(1.0)
        await self._clock.sleep(STOP_GRACE_S)
        await agent.kill()

    async def _tripped(self, trip: Trip) -> None:
        # A stop that a person asked for is in the ledger like a trip, but is none.
        await self.stop(trip.why, None if trip.gate == "stop" else trip.gate)

    # --- the way back

    async def _teardown(
        self, grant: LeaseGrant, handle: NodeHandle | None, result: SessionResult
    ) -> SessionResult:
        """Take the node down and settle. The node comes first: a ledger that fails must not keep it alive."""
        self._state = "tearing down"
        name = self._job.plan.name
        asked = NewEvent(
            "lease_down_asked", {"lease": grant.lease, "why": result.reason or result.ending}, name
        )
        unwritten = await self._write(lambda: self._budget.mark_phase(grant.lease, "teardown"))
        unwritten = await self._write(lambda: self._budget.record(asked)) or unwritten
        proof = Proof(gone=True, how="nothing was launched", check_by_hand="")
        if handle is not None:
            proof = await self._take_down(handle)
        if not proof.gone:
            words = f"{proof.how}; it bills on in the ledger; check by hand: {proof.check_by_hand}"
            event = {"lease": grant.lease, "why": proof.how, "check_by_hand": proof.check_by_hand}
            await self._write(lambda: self._budget.record(NewEvent("lease_unreachable", event, name)))
            return SessionResult(name, "unreachable", words, error_exit=4)
        until = self._clock.utc_ns()
        unwritten = await self._write(lambda: self._budget.settle(grant.lease, until, proof.how)) or unwritten
        self._state = result.ending
        if unwritten is not None:
            return SessionResult(
                name, "failed", f"{unwritten}; the node is gone", error_exit=unwritten.exit_code
            )
        return result

    async def _take_down(self, handle: NodeHandle) -> Proof:
        proof = Proof(gone=False, how="", check_by_hand=f"look for node {handle.node_id}")
        for _ in range(DOWN_TRIES):
            try:
                await self._provider.down(handle)
                proof = await self._provider.prove_down(handle)
            except Exception as error:
                proof = replace(proof, gone=False, how=str(error) or repr(error))
            if proof.gone:
                break
            await self._clock.sleep(DOWN_PAUSE_S)
        return proof

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
