"""Supervisors and the controller on a virtual clock, over a real ledger and a scripted provider."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from campaign.cloud.base import AgentJob, LaunchIntent, NodeHandle, Proof, Quote
from campaign.errors import LedgerError, ProviderError, StoreError
from campaign.fleet.budget import BudgetController
from campaign.fleet.controller import Controller
from campaign.fleet.pool import SupervisorPool
from campaign.fleet.start import make_jobs
from campaign.fleet.supervisor import SessionJob
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import RunState
from campaign.money import MicroUsd, micro
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import CampaignPlan
from campaign.spec.load import Loaded, load
from campaign.spec.models import Node
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock

ROOT = Path(__file__).parents[2]


@dataclass
class ScriptedAgent:
    """Plays events at times; a stop ends it at its next event."""

    clock: VirtualClock
    session: str
    lease: str
    script: Sequence[tuple[float, NewEvent]]
    stopped: tuple[str, str | None] | None = None
    killed: bool = False
    deaf: bool = False
    """Does not listen: only killing ends it."""
    seq: int = 0

    def _number(self, type_: str, payload: dict[str, Any]) -> NewEvent:
        self.seq += 1
        return NewEvent(type_, payload, self.session, f"agent:{self.session}", self.seq)

    async def events(self) -> AsyncIterator[NewEvent]:
        yield self._number("session_started", {"lease": self.lease, "plan_sha256": None})
        for wait_s, event in self.script:
            left = wait_s
            while left > 0 and self.stopped is None and not self.killed:
                await self.clock.sleep(min(1.0, left))
                left -= 1.0
            if self.killed:
                return
            if self.stopped is not None:
                break
            yield self._number(event.type, event.payload)
        state = "done" if self.stopped is None else "tripped" if self.stopped[1] else "stopped"
        yield self._number(
            "session_finished", {"state": state, "reason": self.stopped[0] if self.stopped else ""}
        )

    async def stop(self, why: str, gate: str | None = None) -> None:
        if not self.deaf:
            self.stopped = self.stopped or (why, gate)

    async def kill(self) -> None:
        self.killed = True


@dataclass
class ScriptedProvider:
    """A provider that does what the test says, and writes down the order of calls."""

    clock: VirtualClock
    script: Sequence[tuple[float, NewEvent]] = ()
    launch_error: ProviderError | None = None
    real_price: MicroUsd = field(default_factory=lambda: micro("0.60"))
    downs_that_fail: int = 0
    deaf: bool = False
    calls: list[str] = field(default_factory=list)
    agents: list[ScriptedAgent] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    name: str = "local"

    async def quote(self, node: Node) -> Quote:
        assert node.provider == "local"
        return Quote(micro(node.usd_per_hour), 1, "declared", False, 0, 5)

    def expected(self, intent: LaunchIntent) -> NodeHandle:
        return NodeHandle(intent.lease, "node-1", self.real_price, 1, "declared", (), False, {})

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        self.calls.append(f"launch {intent.lease}")
        await self.clock.sleep(10)
        if self.launch_error is not None:
            raise self.launch_error
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        return self.expected(intent)

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:
        return "up"

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> ScriptedAgent:
        agent = ScriptedAgent(self.clock, job.intent.session, handle.lease, self.script, deaf=self.deaf)
        self.agents.append(agent)
        return agent

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:
        return ()

    async def down(self, handle: NodeHandle) -> None:
        self.calls.append(f"down {handle.lease}")
        self.running = max(0, self.running - 1)

    async def prove_down(self, handle: NodeHandle) -> Proof:
        self.downs_that_fail -= 1
        return Proof(self.downs_that_fail < 0, "listing", "sky status")

    async def list_ours(self, install_id: str) -> Sequence[NodeHandle]:
        return ()


def beat(done: int = 1) -> NewEvent:
    return NewEvent("agent_heartbeat", {"cell": "c", "done": done, "total": 10})


def quickstart(*sets: str) -> tuple[Loaded, CampaignPlan]:
    loaded = load(ROOT / "experiments.yaml", sets)
    return loaded, build(loaded.spec, declared_prices(loaded.spec))


@dataclass
class Rig:
    controller: Controller
    budget: BudgetController
    ledger: Ledger
    provider: ScriptedProvider

    @property
    def state(self) -> RunState:
        return self.budget._state


def rig(
    tmp_path: Path,
    clock: VirtualClock,
    provider: ScriptedProvider,
    *sets: str,
    copies: int = 1,
    nodes: Sequence[str] = ("here",),
) -> Rig:
    loaded, plan = quickstart(*sets)
    run_dir = RunDir(tmp_path / "run")
    ledger = Ledger.open(run_dir, clock, create=True)
    created = {
        "run": "run", "campaign": "quickstart", "spec_sha256": "", "canonical_sha256": "", "plan_sha256": "",
        "cap_usd_micro": plan.cap_usd, "gates": {}, "rules": {}, "version": "0", "install_id": "i", "simulated": True,
    }  # fmt: skip
    ledger.append(
        NewEvent("run_created", created),
        NewEvent("controller_started", {"pid": 1, "host": "h", "mode": "inline"}),
    )
    budget = BudgetController(ledger, clock, loaded.spec)
    pool = SupervisorPool(budget, {"local": provider}, clock)
    (main,) = plan.sessions
    jobs = [
        SessionJob(
            "run", "quickstart", "i", str(run_dir.root), replace(main, name=f"s{n}", node=nodes[n % len(nodes)]),
            # Nodes with GPUs of their own may work side by side.
            loaded.spec.nodes["here"].model_copy(update={"gpus": (n,) if len(nodes) > 1 else ()}), loaded.canonical.decode(), {}, (),
        )
        for n in range(copies)
    ]  # fmt: skip
    return Rig(Controller(run_dir, plan, jobs, budget, pool, clock), budget, ledger, provider)


def types(ledger: Ledger) -> list[str]:
    return [e.type for e in ledger.events()]


async def test_lease_is_on_record_before_the_launch_and_settled_after_the_proof(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(5.0, beat())]))
    ending = await it.controller.run()
    assert ending.exit_code == 0
    order = types(it.ledger)
    assert order.index("lease_intent") < order.index("lease_opened") < order.index("session_started")
    assert order.index("session_finished") < order.index("lease_down_asked") < order.index("lease_settled")
    (lease,) = it.state.leases.values()
    # 10 s of launching are billed: money runs from before the call.
    assert lease.settled_usd is not None
    assert lease.settled_usd >= 15 * 600_000 // 3600
    it.ledger.verify()


async def test_failed_launch_settles_and_exits_4(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(
        tmp_path, clock, ScriptedProvider(clock, launch_error=ProviderError("capacity", "none to be had"))
    )
    ending = await it.controller.run()
    assert (ending.exit_code, ending.reason) == (4, "none to be had")
    assert not it.state.open_leases
    # The answer of a launch may be lost while the node is there: it is taken down and looked for all the same.
    assert it.provider.calls == ["launch s0.1", "down s0.1"]
    (lease,) = it.state.leases.values()
    assert lease.settled_usd == 0  # there was no capacity and nothing is listed: it never began


async def test_dearer_node_than_the_cap_allows_is_stopped_at_once(tmp_path: Path) -> None:
    clock = VirtualClock()
    provider = ScriptedProvider(clock, [(3600.0, beat())], real_price=micro(60))
    it = rig(tmp_path, clock, provider)
    ending = await it.controller.run()
    assert ending.exit_code == 3
    assert "cost" in ending.reason
    (lease,) = it.state.leases.values()
    assert lease.settled_usd is not None
    # Billed at the real price, for seconds and not for the hour the script would have taken.
    assert lease.settled_usd < micro("0.50")


async def test_silent_agent_trips_the_heartbeat(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(600.0, beat())]))
    ending = await it.controller.run()
    assert ending.exit_code == 3
    assert "heartbeat" in ending.reason
    assert clock.monotonic_ns() < 120e9


async def test_node_that_cannot_be_proven_gone_keeps_billing_and_says_what_to_check(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(5.0, beat())], downs_that_fail=99))
    ending = await it.controller.run()
    assert ending.exit_code == 4
    assert "sky status" in ending.reason
    (lease,) = it.state.open_leases
    assert lease.unreachable_since_utc_ns is not None


async def test_stop_ends_the_session_and_settles(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(20.0, beat(n)) for n in range(50)]))

    async def press() -> None:
        await clock.sleep(60)
        it.controller.ask_stop("Ctrl-C")

    task = asyncio.create_task(press())
    ending = await it.controller.run()
    await task
    assert ending.exit_code == 130
    assert it.state.sessions["s0"].state == "stopped"
    assert not it.state.open_leases
    assert clock.monotonic_ns() < 90e9


async def test_stop_file_is_read(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(20.0, beat(n)) for n in range(50)]))
    RunDir(tmp_path / "run").stop_file.write_text('{"by": "me", "why": "lunch"}')
    ending = await it.controller.run()
    assert (ending.exit_code, ending.reason) == (130, "campaign stop: lunch")


@pytest.mark.parametrize(("nodes", "together"), [(("here",), 1), (("here", "there"), 2)])
async def test_one_session_a_node_at_a_time(tmp_path: Path, nodes: tuple[str, ...], together: int) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(5.0, beat())]), copies=2, nodes=nodes)
    ending = await it.controller.run()
    assert ending.exit_code == 0
    assert it.provider.most_running == together
    assert {r.session for r in ending.results} == {"s0", "s1"}


async def test_session_the_cap_refuses_waits_for_money_to_settle(tmp_path: Path) -> None:
    clock = VirtualClock()
    # The cap holds one worst case, and what one session really costs beside it.
    _, plan = quickstart()
    cap = float(plan.sessions[0].usd_worst) / 1e6 * 1.2
    it = rig(
        tmp_path,
        clock,
        ScriptedProvider(clock, [(5.0, beat())]),
        f"budget.cap_usd={cap:.6f}",
        copies=2,
        nodes=("a", "b"),
    )
    ending = await it.controller.run()
    assert ending.exit_code == 0
    assert [r.ending for r in ending.results] == ["done", "done"]
    assert it.provider.most_running == 1
    assert it.state.refused


async def test_nothing_fits_exits_3(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock), "budget.cap_usd=0.001")
    ending = await it.controller.run()
    assert ending.exit_code == 3
    assert it.provider.calls == []


async def test_agent_that_does_not_listen_is_ended_and_the_spend_stays_within_the_cap(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(20.0, beat(n)) for n in range(10_000)], deaf=True))
    ending = await it.controller.run()
    assert ending.exit_code == 3
    assert "lease_time" in ending.reason
    (agent,) = it.provider.agents
    assert agent.killed
    (lease,) = it.state.leases.values()
    assert lease.settled_usd is not None
    assert lease.settled_usd < micro("0.50")
    assert not it.state.open_leases


async def test_ledger_that_cannot_be_written_does_not_keep_the_node_alive(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, ScriptedProvider(clock, [(20.0, beat(n)) for n in range(10)]))
    real = it.ledger.append

    def append(*events: NewEvent) -> Any:
        if clock.monotonic_ns() > 60e9:
            raise LedgerError("the disk is gone")
        return real(*events)

    it.ledger.append = append  # type: ignore[method-assign]  # a disk that fails from some moment on
    ending = await it.controller.run()
    assert ending.exit_code == 4
    assert "the disk is gone" in ending.reason
    assert it.provider.running == 0
    assert any(call.startswith("down") for call in it.provider.calls)


async def test_nothing_overtakes_a_session_that_waits_for_money(tmp_path: Path) -> None:
    clock = VirtualClock()
    _, plan = quickstart()
    cap = float(plan.sessions[0].usd_worst) / 1e6 * 1.5
    provider = ScriptedProvider(clock, [(5.0, beat())])
    it = rig(tmp_path, clock, provider, f"budget.cap_usd={cap:.6f}", copies=3, nodes=("a", "b", "a"))
    ending = await it.controller.run()
    assert ending.exit_code == 0
    # s2 is on the node that becomes free first, and still comes after s1, which was refused at first.
    assert [c for c in provider.calls if c.startswith("launch")] == [
        "launch s0.1",
        "launch s1.1",
        "launch s2.1",
    ]


class NoRoom(ScriptedProvider):
    """What is brought cannot be written here."""

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:
        raise OSError(28, "No space left on device")


async def test_rows_that_cannot_be_written_here_do_not_keep_the_node_alive(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, NoRoom(clock, [(5.0, beat())]))
    ending = await it.controller.run()
    assert ending.exit_code == 4
    assert "No space left" in ending.reason
    assert it.provider.running == 0
    assert not it.state.open_leases


async def test_a_failed_launch_that_left_a_node_is_billed(tmp_path: Path) -> None:
    """No capacity, says the error; the listing shows a node all the same, until it is taken down."""
    clock = VirtualClock()
    provider = ScriptedProvider(
        clock, launch_error=ProviderError("capacity", "none to be had"), downs_that_fail=1
    )
    it = rig(tmp_path, clock, provider)
    assert (await it.controller.run()).exit_code == 4
    (lease,) = it.state.leases.values()
    assert lease.settled_usd is not None
    assert lease.settled_usd >= 10 * 600_000 // 3600


class FirstIsTaken(ScriptedProvider):
    """The node of the first session is taken away as it starts."""

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        handle = await super().launch(intent)
        if intent.session == "s0":
            raise ProviderError("preempted", "taken away")
        return handle


async def test_a_redraw_that_cannot_be_written_down_leaves_the_others_running(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(
        tmp_path, clock, FirstIsTaken(clock, [(20.0, beat(n)) for n in range(9)]), copies=2, nodes=("a", "b")
    )

    class FullDisk:
        def begin(self, plan: CampaignPlan) -> str:
            raise StoreError("the disk is full")

        def commit(self) -> None:
            raise AssertionError

    it.controller._plan_file = FullDisk()
    ending = await it.controller.run()
    assert ending.exit_code == 4
    assert {r.session: r.ending for r in ending.results} == {"s0": "preempted", "s1": "done"}
    assert not it.state.open_leases


@pytest.mark.parametrize(("said", "kept"), [("a" * 12, True), ("i", False), (None, False)])
def test_nodes_of_a_run_keep_the_name_of_the_installation_that_made_it(
    tmp_path: Path, said: str | None, kept: bool
) -> None:
    loaded, plan = quickstart()
    (job,) = make_jobs(
        RunDir(tmp_path / "run"), loaded.canonical, plan.sessions, loaded.spec, {"install_id": said},
        done={}, attempts={}, overrides=(),
    )  # fmt: skip
    assert (job.install_id == said) is kept
    assert len(job.install_id) == 12


class Mute(ScriptedProvider):
    """Its agents never say a word."""

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> ScriptedAgent:
        agent = await super().run_agent(handle, job)

        async def nothing() -> AsyncIterator[NewEvent]:
            while not agent.killed:
                await self.clock.sleep(3.0)
            for event in ():
                yield event

        agent.events = nothing  # type: ignore[method-assign]  # this one agent only
        return agent


async def test_an_agent_that_never_says_a_word_does_not_bill_to_the_end_of_its_lease(tmp_path: Path) -> None:
    clock = VirtualClock()
    it = rig(tmp_path, clock, Mute(clock))
    lease_s = quickstart()[1].sessions[0].worst_seconds
    ending = await it.controller.run()
    assert ending.exit_code == 3
    assert "not said a word" in ending.reason
    assert ending.results[0].gate == "heartbeat"
    assert not it.state.open_leases
    assert clock.monotonic_ns() / 1e9 < min(800, lease_s)
