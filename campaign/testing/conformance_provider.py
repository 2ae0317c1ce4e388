"""What every Provider promises; run against each implementation (docs/CONTRACTS.md)."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import pytest

from campaign.cloud.base import LaunchIntent, Provider
from campaign.errors import ProviderError
from campaign.spec.models import AttachNode, LocalNode, Node, SkyNode


@dataclass(frozen=True, slots=True)
class ProviderRig:
    """One implementation, ready to launch `intent`."""

    provider: Provider
    intent: LaunchIntent
    wrong_node: Node
    """A node of another provider."""
    settle: Callable[[], Awaitable[None]]
    """Let what is under way come to its end."""


class ProviderConformance:
    """Subclass it and give it a fixture `rig`."""

    async def test_quote_is_a_usable_price(self, rig: ProviderRig) -> None:
        quote = await rig.provider.quote(rig.intent.node)
        assert type(quote.usd_per_hour) is int
        assert quote.usd_per_hour > 0 or quote.free_allowed
        assert quote.granularity_s >= 1
        assert min(quote.dead_man_s, quote.teardown_s) >= 0
        assert not quote.ours or len(quote.dead_men) >= 2

    async def test_node_of_another_provider_is_refused(self, rig: ProviderRig) -> None:
        with pytest.raises(ProviderError):
            await rig.provider.quote(rig.wrong_node)

    async def test_expected_names_what_launch_gives(self, rig: ProviderRig) -> None:
        before = rig.provider.expected(rig.intent)
        assert before == rig.provider.expected(rig.intent)
        handle = await rig.provider.launch(rig.intent)
        assert handle.node_id == before.node_id
        assert handle.lease == rig.intent.lease
        assert handle.ours == before.ours
        await rig.provider.down(handle)

    async def test_another_lease_has_another_name_where_the_node_is_ours(self, rig: ProviderRig) -> None:
        mine = rig.provider.expected(rig.intent)
        other = rig.provider.expected(replace(rig.intent, lease="other.1"))
        assert not mine.ours or mine.node_id != other.node_id

    async def test_launched_node_is_up_listed_and_ends(self, rig: ProviderRig) -> None:
        handle = await rig.provider.launch(rig.intent)
        assert await rig.provider.observe(handle) == "up"
        if handle.ours:
            assert len(set(handle.dead_men)) >= 2
            listed = await rig.provider.list_ours(rig.intent.install_id)
            assert handle.node_id in {h.node_id for h in listed}
            assert not (await rig.provider.prove_down(handle)).gone
        await rig.provider.down(handle)
        await rig.settle()
        proof = await rig.provider.prove_down(handle)
        assert proof.gone
        assert proof.how
        assert proof.check_by_hand
        listed = await rig.provider.list_ours(rig.intent.install_id)
        assert handle.node_id not in {h.node_id for h in listed} or not handle.ours

    async def test_down_is_idempotent_and_works_without_the_answer_of_the_launch(
        self, rig: ProviderRig
    ) -> None:
        await rig.provider.launch(rig.intent)
        handle = rig.provider.expected(rig.intent)
        await rig.provider.down(handle)
        await rig.provider.down(handle)
        await rig.settle()
        assert (await rig.provider.prove_down(handle)).gone

    async def test_node_that_never_was_is_proven_gone(self, rig: ProviderRig) -> None:
        handle = rig.provider.expected(replace(rig.intent, lease="never.1"))
        await rig.provider.down(handle)
        assert (await rig.provider.prove_down(handle)).gone

    async def test_nothing_of_others_is_listed(self, rig: ProviderRig) -> None:
        handle = await rig.provider.launch(rig.intent)
        assert not await rig.provider.list_ours("fedcba987654")
        await rig.provider.down(handle)


def local_node() -> LocalNode:
    """A local node."""
    return LocalNode.model_validate({"provider": "local", "usd_per_hour": 0.6, "max_hours": 0.5})


def sky_node() -> SkyNode:
    """A rented node."""
    return SkyNode.model_validate(
        {"provider": "sky", "accelerators": "B200:4", "max_usd_per_hour": 30, "max_hours": 0.5}
    )


def attach_node(**more: object) -> AttachNode:
    """A node somebody has."""
    return AttachNode.model_validate(
        {"provider": "attach", "ssh": "me@host", "usd_per_hour": 0, "max_hours": 0.5, **more}
    )


def intent_for(node: Node, run_dir: str, deadline_utc_ns: int) -> LaunchIntent:
    """An intent like those of the supervisor."""
    return LaunchIntent("run", "conformance", "0123456789ab", "s", "s.1", "n", node, deadline_utc_ns, run_dir)
