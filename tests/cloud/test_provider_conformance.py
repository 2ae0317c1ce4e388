"""One suite, every provider that runs without a cloud; the rented one runs it on the lab (tests/skylab)."""

from pathlib import Path

import pytest

from campaign.budget.machine import Limits
from campaign.cloud.base import AgentJob, AgentRun, NodeHandle
from campaign.cloud.local import LocalProvider
from campaign.money import micro
from campaign.testing.clock import VirtualClock
from campaign.testing.cloud import SimCloud, SimulatedProvider
from campaign.testing.conformance_provider import (
    ProviderConformance,
    ProviderRig,
    intent_for,
    local_node,
    sky_node,
)

LIMITS = Limits(micro(100), 60 * 10**9, 3, 0.2, 0.1)


async def no_agent(handle: NodeHandle, job: AgentJob) -> AgentRun:
    raise AssertionError("no agent is started here")


class TestLocal(ProviderConformance):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> ProviderRig:
        async def settle() -> None: ...

        clock = VirtualClock()
        intent = intent_for(local_node(), str(tmp_path), clock.utc_ns() + 10**12)
        return ProviderRig(LocalProvider(no_agent), intent, sky_node(), settle)


class TestSimulated(ProviderConformance):
    @pytest.fixture
    async def rig(self, tmp_path: Path) -> ProviderRig:
        clock = VirtualClock()

        async def settle() -> None:
            await clock.sleep(30)

        intent = intent_for(sky_node(), str(tmp_path), clock.utc_ns() + 1800 * 10**9)
        return ProviderRig(SimulatedProvider(SimCloud(clock), LIMITS), intent, local_node(), settle)
