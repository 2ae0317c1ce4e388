"""The Provider contract: where nodes come from, and how they are proven gone.

Money rules every implementation keeps: `launch` is called only after its intent is in the ledger;
`observe` and `prove_down` ask the provider, never a cache; what `list_ours` reports but the ledger does
not know is somebody's money. One conformance suite runs against all of them.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from campaign.ledger.events import NewEvent
from campaign.money import MicroUsd
from campaign.plan.model import SessionPlan
from campaign.spec.models import Node


@dataclass(frozen=True, slots=True)
class Quote:
    """What a node would cost."""

    usd_per_hour: MicroUsd
    granularity_s: int
    source: Literal["declared", "quoted", "cap"]
    free_allowed: bool
    """Zero is a price here (local and attach nodes declared free)."""
    dead_man_s: int
    """Worst granularity of the dead-men, counted in the worst case."""
    teardown_s: int
    """Time to take the node down and prove it, reserved beside the lease."""
    ours: bool = False
    """Whether we would have to end the node; then at least two `dead_men` are needed."""
    dead_men: tuple[str, ...] = ()
    """Dead-men that would be effective without our controller, by name (campaign.cloud.deadmen)."""


@dataclass(frozen=True, slots=True)
class LaunchIntent:
    """What is about to be launched; already in the ledger."""

    run: str
    campaign: str
    install_id: str
    session: str
    lease: str
    node_name: str
    node: Node
    deadline_utc_ns: int
    run_dir: str


@dataclass(frozen=True, slots=True)
class NodeHandle:
    """A node that was launched."""

    lease: str
    node_id: str
    usd_per_hour: MicroUsd
    granularity_s: int
    price_source: str
    dead_men: tuple[str, ...]
    """Effective dead-men, read back; empty on nodes that are not ours to end."""
    ours: bool
    """Whether we may take it down."""
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Proof:
    """Whether the provider's own listing shows the node gone."""

    gone: bool
    how: str
    check_by_hand: str
    """The exact command to run where it is not."""


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """One lease, as it was granted; goes to the node as JSON."""

    lease: str
    session: str
    node: str
    provider: str
    usd_per_hour_micro: int
    granularity_s: int
    billing_from_utc_ns: int
    deadline_utc_ns: int
    worst_usd_micro: int
    teardown_reserve_usd_micro: int


@dataclass(frozen=True, slots=True)
class AgentJob:
    """What the session agent is to do on the node."""

    intent: LaunchIntent
    plan: SessionPlan
    spec_json: str
    """The resolved spec, canonical JSON."""
    attempts: dict[str, int]
    """Round id -> attempt number of rounds that were begun before."""
    done: tuple[str, ...]
    """Round ids already committed."""
    overrides: tuple[str, ...] = ()
    """Gates a person has overridden, with the reason in the ledger."""
    terms: LeaseTerms | None = None
    """The lease as it stands after the launch, for an agent that keeps a budget of its own."""


@runtime_checkable
class AgentRun(Protocol):
    """A session agent at work."""

    def events(self) -> AsyncIterator[NewEvent]:
        """Events of the agent's journal, in order; ends when the agent has ended."""
        ...

    async def stop(self, why: str, gate: str | None = None) -> None:
        """Ask it to stop at the next token."""
        ...

    async def kill(self) -> None:
        """End it now; nothing of it survives."""
        ...


@runtime_checkable
class Provider(Protocol):
    """A source of nodes."""

    name: str

    async def quote(self, node: Node) -> Quote:
        """Price a node. Raises ProviderError('price') where none can be had."""
        ...

    def expected(self, intent: LaunchIntent) -> NodeHandle:
        """The handle of a launch whose answer never came: enough for observe, fetch, down and prove_down.

        Pure: it asks nobody. `node_id` is the name under which `launch` asks for the node.
        """
        ...

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        """Get the node. Raises ProviderError; a node may exist all the same, under `expected(intent)`.

        May be called once per intent. A price that is none is handed on as a negative one.
        """
        ...

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:
        """What the provider says now."""
        ...

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> AgentRun:
        """Start the session agent on the node."""
        ...

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:
        """Bring rows and journals to `run_dir`; returns the whole events of the agent's journal, for merging.

        Nothing to do, and nothing returned, where they are written there in the first place. Raises ProviderError where the node cannot be reached; what was brought so far stays whole.
        """
        ...

    async def down(self, handle: NodeHandle) -> None:
        """End the node, or only our processes where it is not ours. Idempotent."""
        ...

    async def prove_down(self, handle: NodeHandle) -> Proof:
        """Ask the provider's own listing."""
        ...

    async def list_ours(self, install_id: str) -> Sequence[NodeHandle]:
        """Nodes that carry our install id. Raises ProviderError where the provider cannot be asked.

        `data["deadline_utc_ns"]` is the deadline the node carries, None where it cannot be read.
        """
        ...
