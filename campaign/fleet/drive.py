"""Puts a run together and drives it: in this process, or with Ray actors around the same classes."""

import asyncio
import os
import platform
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import cast

from campaign.clock import SystemClock
from campaign.cloud.base import Provider
from campaign.cloud.local import LocalProvider
from campaign.fleet.actors import Remote, spawn
from campaign.fleet.additions import FolderInbox
from campaign.fleet.budget import BudgetController, BudgetPort
from campaign.fleet.cluster import Cluster
from campaign.fleet.controller import Controller, Ending, PoolPort
from campaign.fleet.create import install_id, state_folder
from campaign.fleet.local_agent import LocalAgentFactory
from campaign.fleet.parts import PortsFactory, inline_ports, ray_ports
from campaign.fleet.pool import SupervisorPool
from campaign.fleet.reconcile import Scope
from campaign.fleet.snapshot import Snapshot
from campaign.fleet.supervisor import SessionJob
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.lock import Signature
from campaign.plan import codec
from campaign.plan.model import CampaignPlan
from campaign.spec.models import Spec
from campaign.store import atomic
from campaign.store.layout import RunDir

RECONCILE_S = 1800.0
"""Deadline of a reconcile: it waits for providers."""
CALL_S = 120.0
"""Deadline of a call to the budget or the supervisors: they only ever wait for the disk."""
_BUDGET_DEADLINES = dict.fromkeys(("settle", "observe", "record", "close"), CALL_S)


@dataclass(frozen=True, slots=True)
class Drive:
    """What is to be driven."""

    run_dir: RunDir
    spec: Spec
    plan: CampaignPlan
    jobs: Sequence[SessionJob]
    opening: Sequence[NewEvent]
    """Events that come before anything else: `run_created`, overrides, what recovery found."""
    create: bool


@dataclass(frozen=True, slots=True)
class Fleet:
    """The two things the controller talks to."""

    budget: BudgetPort
    pool: PoolPort


def make_budget(run_dir: RunDir, spec: Spec, *, create: bool) -> BudgetController:
    """The ledger's one writer, with the budget around it."""
    clock = SystemClock()
    return BudgetController(Ledger.open(run_dir, clock, create=create), clock, spec)


def make_providers(budget: BudgetPort, ports: PortsFactory) -> dict[str, Provider]:
    """Where nodes can come from."""
    return {"local": LocalProvider(LocalAgentFactory(budget, ports, SystemClock())), **remote_providers()}


def remote_providers() -> dict[str, Provider]:
    """Providers of nodes that are not this machine: they need no budget and no ports of ours."""
    from campaign.cloud.attach import AttachProvider
    from campaign.cloud.sky import SkyProvider

    clock, wheels = SystemClock(), state_folder() / "wheels"
    return {"sky": SkyProvider(clock, wheels), "attach": AttachProvider(clock, wheels)}


def scope_of(run_dir: RunDir, spec: Spec) -> Scope:
    """What to reconcile of a run."""
    providers = {node.provider for node in spec.nodes.values()} - {"local"}
    return Scope(
        run=run_dir.name,
        campaign=spec.campaign,
        install_id=install_id(),
        run_dir=str(run_dir.root),
        nodes=spec.nodes,
        providers=tuple(sorted(providers)),
    )


class GrownPlan:
    """A plan with more sessions, written beside the one in force until the ledger names it."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def begin(self, plan: CampaignPlan) -> str:
        """Write it; returns the hash that `sessions_added` registers."""
        atomic.write(self._run_dir.next_plan, codec.dump(plan))
        return codec.plan_hash(plan)

    def commit(self) -> None:
        """The ledger names it: it is the plan in force."""
        self._run_dir.next_plan.replace(self._run_dir.plan)


class _BudgetActor(BudgetController):
    def __init__(self, run_dir: RunDir, spec: Spec, create: bool, signature: Signature) -> None:  # noqa: FBT001  # Ray passes it by position
        clock = SystemClock()
        super().__init__(Ledger.open(run_dir, clock, create=create, signature=signature), clock, spec)


class _PoolActor(SupervisorPool):
    def __init__(self, budget_actor: object) -> None:
        budget = cast(BudgetPort, Remote(budget_actor, _BUDGET_DEADLINES))
        super().__init__(budget, make_providers(budget, ray_ports), SystemClock())


@asynccontextmanager
async def fleet(drive: Drive) -> AsyncIterator[Fleet]:
    """The budget controller and the supervisors, wherever the spec puts them."""
    if drive.spec.ray.mode == "inline":
        budget = make_budget(drive.run_dir, drive.spec, create=drive.create)
        try:
            yield Fleet(budget, SupervisorPool(budget, make_providers(budget, inline_ports), SystemClock()))
        finally:
            await budget.close()
        return
    with Cluster(drive.spec.ray.address):
        actor = spawn(_BudgetActor, drive.run_dir, drive.spec, drive.create, Signature.mine())
        remote = Remote(actor, _BUDGET_DEADLINES)
        # The ledger is opened before anything is started: another controller is refused here.
        await remote.ready()
        pool = Remote(spawn(_PoolActor, actor), {"reconcile": RECONCILE_S})
        try:
            yield Fleet(cast(BudgetPort, remote), cast(PoolPort, pool))
        finally:
            await remote.close()


async def drive_run(drive: Drive, show: Callable[[Snapshot], None]) -> Ending:
    """Run to the end; the ledger says how it ended before this returns."""
    async with fleet(drive) as parts:
        started = NewEvent(
            "controller_started", {"pid": os.getpid(), "host": platform.node(), "mode": drive.spec.ray.mode}
        )
        await parts.budget.record(*drive.opening, started)
        controller = Controller(
            drive.run_dir,
            drive.plan,
            drive.jobs,
            parts.budget,
            parts.pool,
            SystemClock(),
            show,
            scope=scope_of(drive.run_dir, drive.spec),
            plan_file=GrownPlan(drive.run_dir),
            inbox=FolderInbox(drive.run_dir),
        )
        with _signals(controller):
            ending = await controller.run()
            closing = [
                NewEvent("controller_stopped", {"reason": ending.reason, "exit_code": ending.exit_code})
            ]
            if ending.exit_code == 0:
                closing.append(NewEvent("run_finished", {"exit_code": 0, "reason": ""}))
            await parts.budget.record(*closing)
        return ending


@contextmanager
def _signals(controller: Controller) -> Iterator[None]:
    """Ctrl-C, TERM and a closed terminal stop at the next token and settle; the third no longer waits for that."""
    loop = asyncio.get_running_loop()
    count = 0

    def on_signal(name: str) -> None:
        nonlocal count
        count += 1
        controller.ask_stop(name)
        if count > 2:
            raise KeyboardInterrupt

    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}
    for number, name in names.items():
        loop.add_signal_handler(number, on_signal, name)
    try:
        yield
    finally:
        for number in names:
            loop.remove_signal_handler(number)
