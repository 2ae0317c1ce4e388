"""This machine as a node: declared price, never taken down, only our own processes ended."""

import hashlib
import platform
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Literal

from campaign.cloud.base import AgentJob, AgentRun, LaunchIntent, NodeHandle, Proof, Quote
from campaign.errors import ProviderError
from campaign.ledger.events import NewEvent
from campaign.money import micro
from campaign.spec.models import LocalNode, Node

AgentFactory = Callable[[NodeHandle, AgentJob], Awaitable[AgentRun]]

TEARDOWN_S = 5


def machine_id() -> str:
    """A stable name of this machine: a hash, since the raw id identifies it to others."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text:
            return "local-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    return "local-" + hashlib.sha256(platform.node().encode()).hexdigest()[:12]


class LocalProvider:
    """`provider: local`. The agent runs where the factory puts it: in this process or in Ray actors."""

    name = "local"

    def __init__(self, agent_factory: AgentFactory) -> None:
        self._make_agent = agent_factory
        self._agents: dict[str, AgentRun] = {}

    async def quote(self, node: Node) -> Quote:
        if not isinstance(node, LocalNode):
            raise ProviderError("price", f"not a local node: {node.provider}")
        return Quote(
            usd_per_hour=micro(node.usd_per_hour),
            granularity_s=1,
            source="declared",
            free_allowed=True,
            dead_man_s=0,
            teardown_s=TEARDOWN_S,
        )

    async def launch(self, intent: LaunchIntent) -> NodeHandle:
        return self.expected(intent)

    def expected(self, intent: LaunchIntent) -> NodeHandle:
        if not isinstance(intent.node, LocalNode):
            raise ProviderError("price", f"not a local node: {intent.node.provider}")
        return NodeHandle(
            lease=intent.lease,
            node_id=machine_id(),
            usd_per_hour=micro(intent.node.usd_per_hour),
            granularity_s=1,
            price_source="declared",
            dead_men=(),
            ours=False,
            data={},
        )

    async def observe(self, handle: NodeHandle) -> Literal["up", "gone", "unreachable", "preempted"]:  # noqa: ARG002  # contract
        return "up"

    async def run_agent(self, handle: NodeHandle, job: AgentJob) -> AgentRun:
        agent = await self._make_agent(handle, job)
        self._agents[handle.lease] = agent
        return agent

    async def fetch(self, handle: NodeHandle, run_dir: str) -> Sequence[NewEvent]:  # noqa: ARG002  # contract
        """Nothing to do: the agent writes into the run folder itself."""
        return ()

    async def down(self, handle: NodeHandle) -> None:
        agent = self._agents.pop(handle.lease, None)
        if agent is not None:
            await agent.kill()

    async def prove_down(self, handle: NodeHandle) -> Proof:
        gone = handle.lease not in self._agents
        return Proof(
            gone=gone,
            how="the session's processes have ended; the machine is not ours to end",
            check_by_hand="ps",
        )

    async def list_ours(self, install_id: str) -> Sequence[NodeHandle]:  # noqa: ARG002  # contract
        """Local leases do not outlive the process that holds them."""
        return ()
