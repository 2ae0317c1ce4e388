"""A program for tests/fleet/test_parallel_ray.py: actors of a process of its own are pickled by value."""

import asyncio
import json
import sys
from pathlib import Path

from campaign.clock import SystemClock
from campaign.fleet.actors import Remote, spawn
from campaign.fleet.budget import BudgetController
from campaign.fleet.cluster import Cluster
from campaign.fleet.controller import Controller
from campaign.fleet.pool import SupervisorPool
from campaign.fleet.supervisor import SessionJob
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.store.layout import RunDir
from campaign.testing import drill
from campaign.testing.cloud import SimCloud, SimulatedProvider


class BudgetActor(BudgetController):
    def __init__(self, root: str, spec) -> None:
        clock = SystemClock()
        super().__init__(Ledger.open(RunDir(Path(root)), clock, create=True), clock, spec)


class PoolActor(SupervisorPool):
    """Real time, a cloud whose nodes start in a tenth of a second and whose rounds take as long."""

    def __init__(self, budget, spec) -> None:
        clock = SystemClock()
        cloud = SimCloud(clock, launch_s=0.3, round_s=lambda: 0.3)
        provider = SimulatedProvider(cloud, drill.limits(spec), poll_s=0.05)
        super().__init__(Remote(budget), {"sky": provider}, clock, tick_s=0.1)


async def main(root: Path) -> None:
    spec, plan, canonical = drill._template()
    run_dir = RunDir(root)
    with Cluster():
        actor = spawn(BudgetActor, str(run_dir.root), spec)
        budget = Remote(actor)
        await budget.ready()
        created = {
            "run": "run", "campaign": "drill", "spec_sha256": "", "canonical_sha256": "", "plan_sha256": "",
            "cap_usd_micro": plan.cap_usd, "gates": {}, "rules": {}, "version": "0",
            "install_id": drill.INSTALL, "simulated": True,
        }  # fmt: skip
        await budget.record(
            NewEvent("run_created", created),
            NewEvent("controller_started", {"pid": 1, "host": "sim", "mode": "local"}),
        )
        jobs = [
            SessionJob(
                "run", "drill", drill.INSTALL, str(run_dir.root), s, spec.nodes[s.node], canonical, {}, ()
            )
            for s in plan.sessions
        ]
        pool = Remote(spawn(PoolActor, actor, spec))
        controller = Controller(run_dir, plan, jobs, budget, pool, SystemClock(), poll_s=0.1)
        async with asyncio.timeout(90):
            ending = await controller.run()
        await budget.close()
    print(json.dumps({"exit_code": ending.exit_code, "reason": ending.reason}))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
