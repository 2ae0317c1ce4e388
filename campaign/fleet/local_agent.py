"""Makes the session agent of the local provider: the contract's parts, put together."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from campaign.budget.machine import Decision, Trip
from campaign.clock import Clock
from campaign.cloud.base import AgentJob, AgentRun, NodeHandle
from campaign.fleet.budget import BudgetPort
from campaign.fleet.create import read_prompts
from campaign.fleet.parts import PortsFactory, engine_cores, engine_threads
from campaign.fleet.past import for_session
from campaign.ledger.agent import AgentJournal, journal_path, source_of
from campaign.plan.model import GroupPlan, RoundPlan
from campaign.session.agent import AdmitRound, SessionAgent
from campaign.session.inprocess import FlagControl, InProcessAgent
from campaign.session.ports import Journal
from campaign.session.request import Identity
from campaign.session.round import Progress, SessionContext
from campaign.spec.load import parse_canonical
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir


class LocalAgentFactory:
    """Called by LocalProvider; one agent a lease."""

    def __init__(self, budget: BudgetPort, ports: PortsFactory, clock: Clock) -> None:
        self._budget, self._ports, self._clock = budget, ports, clock

    async def __call__(self, handle: NodeHandle, job: AgentJob) -> AgentRun:
        intent, spec = job.intent, parse_canonical(job.spec_json.encode())
        run_dir = RunDir(Path(intent.run_dir))
        ports, progress, stopping = self._ports(), Progress(), asyncio.Event()
        threads = engine_threads(arm.config for arm in job.plan.arms.values())
        who = Identity(
            run=intent.run,
            campaign=intent.campaign,
            session=intent.session,
            lease=intent.lease,
            node=handle.node_id,
        )

        # Read before the session: while it measures, nothing else reads the disk.
        known = await asyncio.to_thread(for_session, run_dir, job.plan)

        def make(journal: Journal, control: FlagControl) -> SessionAgent:
            ctx = SessionContext(
                who=who,
                spec=spec,
                plan=job.plan,
                prompts=read_prompts(run_dir),
                run_dir=run_dir,
                ports=ports,
                store=FolderStore(run_dir),
                journal=journal,
                clock=self._clock,
                cpus=engine_cores(threads),
                progress=progress,
                disk=ThreadPoolExecutor(1, thread_name_prefix="journal"),
                stopping=stopping,
                overrides=frozenset(job.overrides),
            )
            return SessionAgent(
                ctx,
                control,
                self._admit(intent.lease),
                deadline_utc_ns=intent.deadline_utc_ns,
                attempts=job.attempts,
                done=frozenset(job.done),
                prior=known.prior,
                past=known.anchors,
            )

        journal = AgentJournal(journal_path(run_dir, intent.lease), source_of(intent.lease), self._clock)
        return InProcessAgent(make, journal, ports, progress)

    def _admit(self, lease: str) -> AdmitRound:
        async def admit(group: GroupPlan, round_: RoundPlan) -> Trip | None:
            expected_s = group.seconds / max(1, len(group.rounds))
            decision: Decision = await self._budget.admit_round(lease, round_.id, expected_s)
            return decision.trip

        return admit
