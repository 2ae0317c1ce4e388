"""Many sessions under one roof: an actor costs 125 MB, so one supervises them all."""

import asyncio
from collections.abc import Mapping

from campaign.clock import Clock
from campaign.cloud.base import Provider
from campaign.errors import CampaignError, ProviderError
from campaign.fleet.budget import BudgetPort
from campaign.fleet.reconcile import Reconciled, Reconciler, Scope
from campaign.fleet.snapshot import SessionSnapshot
from campaign.fleet.supervisor import TICK_S, SessionJob, SessionResult, Supervisor


class SupervisorPool:
    """Starts supervisors as tasks of one event loop and keeps their results."""

    def __init__(
        self, budget: BudgetPort, providers: Mapping[str, Provider], clock: Clock, tick_s: float = TICK_S
    ) -> None:
        self._budget, self._providers, self._clock, self._tick_s = budget, dict(providers), clock, tick_s
        self._supervisors: dict[str, Supervisor] = {}
        self._tasks: dict[str, asyncio.Task[SessionResult]] = {}

    async def start(self, job: SessionJob) -> None:
        """Begin a session; returns at once."""
        provider = self._providers[job.node.provider]
        supervisor = Supervisor(job, self._budget, provider, self._clock, self._tick_s)
        self._supervisors[job.plan.name] = supervisor
        self._tasks[job.plan.name] = asyncio.create_task(supervisor.run())

    async def snapshots(self) -> tuple[SessionSnapshot, ...]:
        """Every session that was started."""
        return tuple(s.snapshot() for s in self._supervisors.values())

    async def results(self) -> tuple[SessionResult, ...]:
        """Sessions that have ended since the last call."""
        ended = [name for name, task in self._tasks.items() if task.done()]
        return tuple(_outcome(name, self._tasks.pop(name)) for name in ended)

    def active(self) -> frozenset[str]:
        """Sessions whose supervisor is at work: their leases are theirs."""
        return frozenset(name for name, task in self._tasks.items() if not task.done())

    async def reconcile(self, scope: Scope) -> Reconciled:
        """One pass over leases and listings; what supervisors hold is left to them."""
        return await Reconciler(self._budget, self._providers, scope, self._clock, self.active).run()

    async def add(self, session: str, data: bytes) -> None:
        """Run an addition on the node of a session that is held. Raises ProviderError."""
        supervisor = self._supervisors.get(session)
        if supervisor is None or session not in self.active():
            raise ProviderError("refused", f"session {session} is not at work")
        await supervisor.add(data)

    async def stop(self, why: str, gate: str | None = None) -> None:
        """Stop every session at the next token."""
        for supervisor in list(self._supervisors.values()):
            await supervisor.stop(why, gate)


def _outcome(name: str, task: asyncio.Task[SessionResult]) -> SessionResult:
    try:
        return task.result()
    except CampaignError as error:
        return SessionResult(name, "failed", str(error), error_exit=error.exit_code)
    except Exception as error:
        return SessionResult(name, "failed", repr(error), error_exit=70)
