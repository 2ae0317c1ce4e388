"""The session agent on a rented node: `python -m campaign.fleet.node_agent FOLDER`.

The folder holds `order.json` (what to do, under which terms) and `run/` (spec, plan, prompts; rows go there too).
It needs no live controller: it admits rounds by its own copy of the budget, journals what it does, and reads
signed control records from `control/`.
"""

import asyncio
import contextlib
import hashlib
import json
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from campaign.budget.machine import Trip, limits
from campaign.clock import Clock, SystemClock
from campaign.cloud.base import LeaseTerms
from campaign.cloud.control import Record, verify
from campaign.errors import CampaignError
from campaign.fleet.cluster import Cluster
from campaign.fleet.create import read_prompts
from campaign.fleet.node_budget import NodeBudget
from campaign.fleet.parts import engine_cores, engine_threads, inline_ports, ray_ports
from campaign.fleet.shipper import shipping
from campaign.ledger.agent import AgentJournal, journal_path, source_of
from campaign.ledger.events import NewEvent
from campaign.plan import codec
from campaign.plan.model import GroupPlan, RoundPlan
from campaign.session.agent import SessionAgent
from campaign.session.ports import Command, Ports
from campaign.session.request import Identity
from campaign.session.round import Progress, SessionContext
from campaign.spec.load import parse_canonical
from campaign.spec.models import Spec
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir, flat


class FolderControl:
    """Control records of a folder, in order, each obeyed once; what is not signed for this lease is passed over."""

    def __init__(self, folder: Path, key: str, lease: str, budget: NodeBudget) -> None:
        self._folder, self._key, self._lease, self._budget = folder, key, lease, budget
        self._seen: set[int] = set()
        self._stop: Command | None = None
        self._added: list[str] = []

    async def poll(self) -> Command | None:
        for record in self._new():
            self._seen.add(record.seq)
            if record.kind == "extend" and record.deadline_utc_ns and record.worst_usd_micro is not None:
                self._budget.extend(record.deadline_utc_ns, record.worst_usd_micro)
            elif record.kind == "add" and record.sha256:
                self._added.append(record.sha256)
            elif record.kind in {"stop", "kill"}:
                self._stop = self._stop or Command(stop=True, why=record.why, gate=record.gate)
        return self._stop

    async def added(self) -> bytes | None:
        """The next addition whose bytes are those the signed record names; others are passed over."""
        while self._added:
            sha256 = self._added.pop(0)
            with contextlib.suppress(OSError):
                data = (self._folder.parent / "add" / f"{flat(sha256)}.json").read_bytes()
                if hashlib.sha256(data).hexdigest() == sha256:
                    return data
        return None

    def give(self, why: str) -> None:
        """A stop from this machine itself."""
        self._stop = self._stop or Command(stop=True, why=why, gate="lease_time")

    def _new(self) -> Iterator[Record]:
        for file in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError):
                record = verify(file.read_bytes(), self._key, self._lease)
                if record is not None and record.seq not in self._seen:
                    yield record


class BudgetedJournal:
    """A journal whose events the node's own budget sees as well."""

    def __init__(self, inner: AgentJournal, budget: NodeBudget) -> None:
        self._inner, self._budget = inner, budget

    def append(self, event: NewEvent) -> NewEvent:
        stored = self._inner.append(event)
        self._budget.observe(stored)
        return stored

    def close(self) -> None:
        self._inner.close()


async def work(folder: Path, order: dict[str, Any], spec: Spec, ports: Ports, clock: Clock) -> None:
    """Run the session to its end; whatever happens, nothing of it is left running."""
    run_dir = RunDir(folder / "run")
    plan = next(s for s in codec.load(run_dir.plan.read_bytes()).sessions if s.name == order["session"])
    terms = LeaseTerms(**order["terms"])
    budget = NodeBudget(terms, limits(spec), clock)
    control = FolderControl(folder / "control", order["key"], terms.lease, budget)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, control.give, "the node's lease is over")
    threads = engine_threads(arm.config for arm in plan.arms.values())
    for name in (run_dir.logs, run_dir.telemetry, run_dir.cell_journals, run_dir.chunks, run_dir.text):
        name.mkdir(parents=True, exist_ok=True)

    async def admit(group: GroupPlan, round_: RoundPlan) -> Trip | None:  # noqa: ARG001  # contract
        return budget.admit(group.seconds / max(1, len(group.rounds)))

    with AgentJournal(journal_path(run_dir, terms.lease), source_of(terms.lease), clock) as journal:
        ctx = SessionContext(
            who=Identity(
                run=order["run"],
                campaign=order["campaign"],
                session=plan.name,
                lease=terms.lease,
                node=order["node_id"],
            ),
            spec=spec,
            plan=plan,
            prompts=read_prompts(run_dir),
            run_dir=run_dir,
            ports=ports,
            store=FolderStore(run_dir),
            journal=BudgetedJournal(journal, budget),
            clock=clock,
            cpus=engine_cores(threads),
            progress=Progress(),
            disk=ThreadPoolExecutor(1, thread_name_prefix="journal"),
            stopping=asyncio.Event(),
            overrides=frozenset(order["overrides"]),
        )
        agent = SessionAgent(
            ctx,
            control,
            admit,
            deadline_utc_ns=terms.deadline_utc_ns,
            attempts=order["attempts"],
            done=frozenset(order["done"]),
        )
        try:
            await agent.run()
        finally:
            for part in (ports.host, ports.client, ports.telemetry):
                with contextlib.suppress(CampaignError):
                    await part.close()


def main(folder: Path) -> int:
    """The whole life of the agent's process."""
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    spec = parse_canonical((folder / "run" / "canonical.json").read_bytes())
    clock = SystemClock()
    try:
        with shipping(folder, spec.store):
            if spec.ray.mode == "inline":
                asyncio.run(work(folder, order, spec, inline_ports(), clock))
            else:
                with Cluster():
                    asyncio.run(work(folder, order, spec, ray_ports(), clock))
    except CampaignError as error:
        print(f"node_agent: {error}", file=sys.stderr)  # agent.log
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
