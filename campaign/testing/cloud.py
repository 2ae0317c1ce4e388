"""A cloud that is not there: nodes, bills and failures on a virtual clock, every failure on demand.

`SimCloud` is the world: it knows what was really created, until when it really billed, and what lies on each
node's disk. `SimulatedProvider` is the Provider that talks to it, and may be lied to. Numbers from here are
simulated, and nothing else.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from campaign.budget.rules import Limits
from campaign.clock import Clock
from campaign.cloud import deadmen, naming
from campaign.cloud.base import AgentJob, LaunchIntent, NodeHandle, Proof, Quote
from campaign.errors import ProviderError
from campaign.fleet.node_budget import NodeBudget
from campaign.ledger.agent import source_of
from campaign.ledger.events import NewEvent
from campaign.money import MicroUsd, bill, micro
from campaign.plan.model import GroupPlan, RoundPlan, SessionPlan
from campaign.session.added import MARGIN_S, Added
from campaign.session.added import load as load_added
from campaign.spec.models import Node, SkyNode

BEAT_S = 30.0
"""Between two heartbeats of a simulated agent."""

Fault = str
"""One of FAULTS[call], or None for none."""

FAULTS: Mapping[str, tuple[Fault, ...]] = {
    "quote": ("no_price",),
    "launch": (
        "capacity", "quota", "credentials", "setup", "answer_lost", "lost_before", "dearer", "price_nan",
        "one_dead_man", "slow",
    ),
    "observe": ("error", "stale_up"),
    "run_agent": ("error", "hung", "silent", "bad_draw"),
    "events": ("cut",),
    "fetch": ("error",),
    "down": ("error", "error_but_done", "silent"),
    "prove_down": ("error",),
    "list_ours": ("error",),
}  # fmt: skip
"""Call -> what can go wrong in it."""

Policy = Callable[[str], Fault | None]
"""Asked at every call; decides what goes wrong."""


@dataclass(slots=True)
class SimNode:
    """One machine that bills."""

    name: str
    lease: str
    install_id: str
    usd_per_hour: MicroUsd
    created_utc_ns: int
    deadline_utc_ns: int | None
    dead_man_s: tuple[float, ...] = ()
    """Seconds after the deadline at which each working dead-man ends it."""
    preempt_after_s: float | None = None
    unreachable: bool = False
    ended_utc_ns: int | None = None
    ended_by: str = ""
    journal: list[NewEvent] = field(default_factory=list)
    disk: dict[str, int] = field(default_factory=dict)
    """Path -> rows, of sealed files."""
    read: int = 0
    """Events of the journal that were brought."""
    tried: bool = False
    """Somebody tried to read it since, and could not."""
    held_until_utc_ns: int = 0
    added: list[Added] = field(default_factory=list)
    """Sent to a held session, and not begun."""
    stop: tuple[str, str | None] | None = None
    agent: asyncio.Task[None] | None = None
    watcher: asyncio.Task[None] | None = None


@dataclass(slots=True)
class SimCloud:
    """What is really there, whoever asks."""

    clock: Clock
    faults: Policy = lambda _: None
    usd_per_hour: MicroUsd = field(default_factory=lambda: micro(24))
    granularity_s: int = 1
    launch_s: float = 60.0
    round_s: Callable[[], float] = lambda: 20.0
    preempt_after_s: Callable[[], float | None] = lambda: None
    dead_man_s: Callable[[], tuple[float, ...]] = lambda: (60.0,)
    nodes: dict[str, SimNode] = field(default_factory=dict)
    fired: list[str] = field(default_factory=list)
    """Faults that happened, in order."""
    unread: dict[str, list[str]] = field(default_factory=dict)
    """Node -> rounds that were committed there and that nobody tried to bring before taking it down."""
    reachable: bool = True
    """Whether the provider's own interface answers at all."""

    def fault(self, call: str) -> Fault | None:
        """What goes wrong in this call."""
        if not self.reachable and call != "events":
            return "error"
        found = self.faults(call)
        if found is not None:
            self.fired.append(f"{call}:{found}")
        return found

    def create(self, node: SimNode) -> SimNode:
        """A machine begins to bill."""
        self.nodes[node.name] = node
        node.watcher = asyncio.create_task(self._life(node))
        return node

    def end(self, node: SimNode, by: str) -> None:
        """The machine is gone, and so is what runs on it."""
        if node.ended_utc_ns is None:
            node.ended_utc_ns, node.ended_by = self.clock.utc_ns(), by
            for task in (node.agent, node.watcher):
                if task is not None and task is not asyncio.current_task():
                    task.cancel()

    def down(self, node: SimNode) -> None:
        """Somebody asks for its end: what lies on it unread is lost."""
        left = [e.payload["round_id"] for e in node.journal[node.read :] if e.type == "round_committed"]
        if left and not node.tried and node.ended_utc_ns is None:
            self.unread[node.name] = left
        node.tried = (
            True  # the first word counts: what it does while `down` is repeated cannot all be brought
        )

    def cost(self, node: SimNode) -> MicroUsd:
        """What the cloud really charges for it so far."""
        until = self.clock.utc_ns() if node.ended_utc_ns is None else node.ended_utc_ns
        return bill(node.usd_per_hour, until - node.created_utc_ns, self.granularity_s)

    def foreign(
        self, name: str, install_id: str = "ffffffffffff", deadline_utc_ns: int | None = None
    ) -> SimNode:
        """Somebody else's node."""
        return self.create(
            SimNode(name, "?", install_id, self.usd_per_hour, self.clock.utc_ns(), deadline_utc_ns)
        )

    async def _life(self, node: SimNode) -> None:
        """Preemption and dead-men: they need nobody's help."""
        ends: list[tuple[float, str]] = []
        if node.preempt_after_s is not None:
            ends.append((node.preempt_after_s, "preempted"))
        if node.deadline_utc_ns is not None and node.dead_man_s:
            left = (node.deadline_utc_ns - self.clock.utc_ns()) / 1e9
            ends.append((left + min(node.dead_man_s), "dead_man"))
        if ends:
            after, by = min(ends)
            await self.clock.sleep(max(0.0, after))
            self.end(node, by)

    async def close(self) -> None:
        """End the tasks of the world."""
        tasks = [t for n in self.nodes.values() for t in (n.agent, n.watcher) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class SimAgent:
    """A session agent on a simulated node: admits by its own copy of the budget, journals, and stops at its lease.

    It measures nothing: a round takes time and leaves one file of rows.
    """

    def __init__(
        self, cloud: SimCloud, node: SimNode, job: AgentJob, limits: Limits, mode: Fault | None
    ) -> None:
        assert job.terms is not None
        self._cloud, self._node, self._job, self._mode = cloud, node, job, mode
        self._budget = NodeBudget(job.terms, limits, cloud.clock)
        self._deadline = job.intent.deadline_utc_ns

    async def run(self) -> None:
        """One session, told from its start to its end."""
        plan = self._job.plan
        self._emit(plan.name, "session_started", lease=self._node.lease, plan_sha256=None)
        if self._mode == "silent":
            return  # the process died at once: no word ever comes again
        state, reason, gate = await self._groups(plan, plan.name)
        if state == "done" and plan.hold_s:
            state, reason, gate = await self._hold(plan)
        self._emit(plan.name, "session_finished", state=state, reason=reason, exit_code=None, gate=gate)

    def _emit(self, session: str, type_: str, **payload: object) -> None:
        node = self._node
        event = NewEvent(type_, dict(payload), session, source_of(node.lease), len(node.journal) + 1)
        node.journal.append(event)
        self._budget.observe(event)

    async def _groups(self, plan: SessionPlan, name: str) -> tuple[str, str, str | None]:
        for group in plan.groups:
            for round_ in group.rounds:
                if name == self._job.plan.name and round_.id in self._job.done:
                    continue
                refused = self._budget.admit(group.seconds / max(1, len(group.rounds)))
                if self._node.stop is not None or refused is not None:
                    why, gate = self._node.stop or (
                        refused.why if refused else "",
                        refused.gate if refused else None,
                    )
                    return ("tripped" if gate else "stopped"), why, gate
                await self._round(name, group, round_)
            if group.kind == "anchor" and not self._anchor(name, group.name.removeprefix("anchor.")):
                return "tripped", "gate anchor_drift", "anchor_drift"
        return "done", "", None

    async def _round(self, name: str, group: GroupPlan, round_: RoundPlan) -> None:
        cloud, node, clock = self._cloud, self._node, self._cloud.clock
        attempt = self._job.attempts.get(round_.id, 0) if name == self._job.plan.name else 0
        self._emit(name, "round_started", round_id=round_.id, attempt=attempt)
        left = cloud.round_s()
        while left > 0 and node.stop is None and clock.utc_ns() < self._deadline:
            await clock.sleep(min(BEAT_S, left))
            left -= BEAT_S
            self._emit(self._job.plan.name, "agent_heartbeat", cell=round_.id, done=1, total=1)
            if self._mode == "hung":
                await clock.sleep(10**9)
        if left > 0:
            return
        path = f"rows/{name}/{round_.id}@{attempt}.parquet"
        node.disk[path] = len(round_.sequence)
        file = {"path": path, "sha256": f"{hash_of(path)}", "rows": len(round_.sequence)}
        cell = {"cell": f"{group.name}/x", "attempt": attempt, "files": [file]}
        self._emit(name, "round_committed", round_id=round_.id, attempt=attempt, cells=[cell])

    def _anchor(self, name: str, position: str) -> bool:
        bad = self._mode == "bad_draw" and position == "first"
        self._emit(
            name, "anchor_judged", position=position, step_ms=12.0 if bad else 10.0, reference_ms=10.0,
            drift=0.2 if bad else 0.0, lo=None, hi=None, ok=not bad, reasons=[],
        )  # fmt: skip
        return not bad

    async def _hold(self, plan: SessionPlan) -> tuple[str, str, str | None]:
        """Kept for what is added; a plain stop ends this well."""
        clock, node = self._cloud.clock, self._node
        until = min(clock.utc_ns() + int(plan.hold_s * 1e9), self._deadline - int(MARGIN_S * 1e9))
        self._emit(plan.name, "session_held", lease=node.lease, until_utc_ns=until)
        node.held_until_utc_ns = until
        while clock.utc_ns() < until:
            if node.stop is not None:
                why, gate = node.stop
                return ("tripped", why, gate) if gate else ("done", "", None)
            if node.added:
                added = node.added.pop(0)
                self._emit(added.plan.name, "session_started", lease=node.lease, plan_sha256=None)
                state, reason, gate = await self._groups(added.plan, added.plan.name)
                self._emit(
                    added.plan.name, "session_finished", state=state, reason=reason, exit_code=None, gate=gate
                )
                continue
            await clock.sleep(BEAT_S)
            self._emit(plan.name, "agent_heartbeat", cell="", done=1, total=1)
        return "done", "", None


def hash_of(path: str) -> str:
    """A stand-in for a file's hash."""
    from hashlib import sha256

    return sha256(path.encode()).hexdigest()


class SimAgentRun:
    """The controller's end of the agent: follows the journal on the node, brings files before their commit."""

    def __init__(self, provider: "SimulatedProvider", node: SimNode, poll_s: float) -> None:
        self._provider, self._node, self._poll_s = provider, node, poll_s
        self._killed = False

    async def events(self) -> AsyncIterator[NewEvent]:
        """Whole events, in order. Raises ProviderError where the node is gone or the line is cut."""
        cloud, node, seen = self._provider.cloud, self._node, 0
        while not self._killed:
            self._provider.step("events")
            if node.ended_utc_ns is not None:
                raise ProviderError("preempted", f"node {node.name} is gone")
            if cloud.fault("events") == "cut":
                raise ProviderError("unreachable", f"the line to {node.name} was cut")
            if not node.unreachable:
                for event in list(node.journal[seen:]):
                    seen += 1
                    if event.type == "round_committed":
                        self._provider.bring(node)
                    yield event
                    if event.type == "session_finished" and event.session == node.lease.rpartition(".")[0]:
                        return
            await cloud.clock.sleep(self._poll_s)

    async def stop(self, why: str, gate: str | None = None) -> None:
        self._provider.step("stop")
        if not self._node.unreachable:
            self._node.stop = self._node.stop or (why, gate)

    async def add(self, data: bytes) -> None:
        """Run an addition while the session is held."""
        self._provider.step("add")
        if self._node.unreachable or self._node.ended_utc_ns is not None:
            raise ProviderError("unreachable", f"node {self._node.name} cannot be told")
        self._node.added.append(load_added(data))

    async def kill(self) -> None:
        self._killed = True
        if self._node.agent is not None and not self._node.unreachable:
            self._node.agent.cancel()


class SimulatedProvider:
    """`Provider` over a SimCloud. `step` is called at both ends of every call: a crash may be raised there."""

    def __init__(
        self,
        cloud: SimCloud,
        limits: Limits,
        *,
        name: str = "sky",
        store: dict[str, int] | None = None,
        journals: dict[str, list[NewEvent]] | None = None,
        step: Callable[[str], None] = lambda _: None,
        poll_s: float = 5.0,
    ) -> None:
        self.name, self.cloud, self.step = name, cloud, step
        self.store: dict[str, int] = {} if store is None else store
        """What was brought to the controller: path -> rows."""
        self.journals: dict[str, list[NewEvent]] = {} if journals is None else journals
        """Agents' journals that were brought, by source."""
        self._limits, self._poll_s = limits, poll_s

    async def quote(self, node: Node) -> Quote:
        self.step("quote")
        if not isinstance(node, SkyNode):
            raise ProviderError("price", f"not a rented node: {node.provider}")
        if self.cloud.fault("quote") is not None:
            raise ProviderError("price", "no price can be had")
        return Quote(
            self.cloud.usd_per_hour, self.cloud.granularity_s, "quoted", free_allowed=False,
            dead_man_s=deadmen.DEAD_MAN_S, teardown_s=deadmen.TEARDOWN_S, ours=True,
            dead_men=(deadmen.AUTODOWN, deadmen.NODE_TIMER),
        )  # fmt: skip

    def expected(self, intent: LaunchIntent) -> NodeHandle:
        name = naming.node_name(intent.install_id, intent.run, intent.lease, intent.deadline_utc_ns)
        return self._handle(name, intent.lease, intent.deadline_utc_ns)

    def _handle(self, name: str, lease: str, deadline_utc_ns: int | None) -> NodeHandle:
        both = (deadmen.AUTODOWN, deadmen.NODE_TIMER)
        data = {"deadline_utc_ns": deadline_utc_ns}
        return NodeHandle(
            lease,
            name,
            self.cloud.usd_per_hour,
            self.cloud.granularity_s,
            "quoted",
            both,
            ours=True,
            data=data,
        )

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        self.step("launch")
        fault = self.cloud.fault("launch")
        handle = self.expected(intent)
        if fault in {"capacity", "quota", "credentials"}:
            await self.cloud.clock.sleep(self.cloud.launch_s / 4)
            raise ProviderError(fault, f"launch failed: {fault}")
        if fault in {"lost_before", "error"}:
            raise ProviderError("unreachable", "the request never arrived")
        price = self.cloud.usd_per_hour
        node = SimNode(
            handle.node_id, intent.lease, intent.install_id,
            MicroUsd(price * 3 // 2) if fault == "dearer" else price,
            self.cloud.clock.utc_ns(), intent.deadline_utc_ns, self.cloud.dead_man_s(), self.cloud.preempt_after_s(),
        )  # fmt: skip
        if node.name in self.cloud.nodes:
            raise ProviderError("refused", f"{node.name} exists already")
        self.cloud.create(node)
        self.step("created")
        await self.cloud.clock.sleep(self.cloud.launch_s * (10 if fault == "slow" else 1))
        self.step("launched")
        if fault == "answer_lost":
            raise ProviderError("unreachable", "the answer was lost; the node is there")
        if fault == "setup":
            raise ProviderError("setup", "the node was made, its set-up failed")
        if node.ended_utc_ns is not None:
            raise ProviderError("preempted", f"{node.name} was taken away while it was set up")
        said = MicroUsd(-1) if fault == "price_nan" else node.usd_per_hour
        dead_men = handle.dead_men[:1] if fault == "one_dead_man" else handle.dead_men
        return NodeHandle(
            intent.lease,
            node.name,
            said,
            self.cloud.granularity_s,
            "quoted",
            dead_men,
            ours=True,
            data=handle.data,
        )

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:
        self.step("observe")
        fault = self.cloud.fault("observe")
        if fault == "error":
            raise ProviderError("unreachable", "the provider does not answer")
        node = self.cloud.nodes.get(handle.node_id)
        if fault == "stale_up":
            return "up"
        if node is None or node.ended_utc_ns is not None:
            return "preempted" if node is not None and node.ended_by == "preempted" else "gone"
        return "unreachable" if node.unreachable else "up"

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> SimAgentRun:
        self.step("run_agent")
        fault = self.cloud.fault("run_agent")
        node = self.cloud.nodes.get(handle.node_id)
        if fault == "error" or node is None or node.ended_utc_ns is not None:
            raise ProviderError("unreachable", "the agent could not be started")
        node.agent = asyncio.create_task(SimAgent(self.cloud, node, job, self._limits, fault).run())
        return SimAgentRun(self, node, self._poll_s)

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:  # noqa: ARG002  # contract
        self.step("fetch")
        node = self.cloud.nodes.get(handle.node_id)
        if (
            self.cloud.fault("fetch") is not None
            or node is None
            or node.ended_utc_ns is not None
            or node.unreachable
        ):
            if node is not None:
                node.tried = True
            raise ProviderError("unreachable", "the node cannot be read")
        self.bring(node)
        return list(node.journal)

    def bring(self, node: SimNode) -> None:
        """Copy what is sealed on the node, and its journal."""
        self.store.update(node.disk)
        node.read, node.tried = len(node.journal), False
        if node.journal:
            self.journals[node.journal[0].source] = list(node.journal)

    async def down(self, handle: NodeHandle) -> None:
        self.step("down")
        fault = self.cloud.fault("down")
        node = self.cloud.nodes.get(handle.node_id)
        if node is not None:
            self.cloud.down(node)
        if fault == "error" or (node is not None and node.unreachable):
            raise ProviderError("unreachable", "down failed")
        await self.cloud.clock.sleep(5.0)
        if fault != "silent" and node is not None:
            self.cloud.end(node, "down")
        self.step("downed")
        if fault == "error_but_done":
            raise ProviderError("unreachable", "down failed, or so it says")

    async def prove_down(self, handle: NodeHandle) -> Proof:
        self.step("prove_down")
        if self.cloud.fault("prove_down") is not None:
            raise ProviderError("unreachable", "the listing does not answer")
        node = self.cloud.nodes.get(handle.node_id)
        gone = node is None or node.ended_utc_ns is not None
        said = f"{handle.node_id} is {'not ' if gone else ''}in the simulated listing"
        return Proof(gone, said, f"look for {handle.node_id} in the simulated cloud")

    async def list_ours(self, install_id: str) -> Sequence[NodeHandle]:
        self.step("list_ours")
        if self.cloud.fault("list_ours") is not None:
            raise ProviderError("unreachable", "the listing does not answer")
        found = []
        for node in self.cloud.nodes.values():
            said = naming.parse(node.name)
            ours = said is not None and said.install_id == install_id == node.install_id
            if ours and node.ended_utc_ns is None and said is not None:
                found.append(self._handle(node.name, "?", said.deadline_utc_ns))
        return found
