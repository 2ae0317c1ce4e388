"""Reported failures of clouds and Ray, rebuilt as inputs: autostop set late, two Ray heads, a job that looks alive."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from campaign.errors import LedgerLocked, RayError, UserError
from campaign.fleet.actors import Remote
from campaign.fleet.cluster import Cluster
from campaign.ledger.journal import Ledger
from campaign.store.layout import RunDir
from campaign.testing import drill
from campaign.testing.clock import VirtualClock
from campaign.testing.cloud import SimCloud, SimulatedProvider
from campaign.testing.conformance_provider import intent_for, sky_node

ROOT = Path(__file__).parents[2]
CASES = ROOT / "tests" / "data" / "cases"


def case(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CASES / f"{name}.json").read_text(encoding="utf-8"))
    return found


async def test_each_cluster_carries_its_own_timer_and_goes_by_itself() -> None:
    expect = case("19_autostop")["expect"]
    clock = VirtualClock()
    cloud = SimCloud(clock, launch_s=120.0)
    provider = SimulatedProvider(cloud, drill.limits(drill._template()[0]))
    intent = intent_for(sky_node(), "", clock.utc_ns() + 30 * 60 * 10**9)
    handle = await provider.launch(intent)
    # The timer is part of the launch: it is there, read back, before anything of another cluster is known.
    assert ("autodown" in handle.dead_men) is expect["timer_read_back"]
    await clock.sleep(198 * 60)  # the controller was killed at ten minutes; nobody looks
    (node,) = cloud.nodes.values()
    assert node.ended_by == "dead_man"
    assert node.ended_utc_ns is not None
    assert (node.ended_utc_ns - node.created_utc_ns) / 60e9 <= expect["max_A_minutes"]
    await cloud.close()


def test_launch_call_itself_sets_the_timer() -> None:
    """One call, with down and with a timer that does not wait for jobs; purge is nowhere."""
    text = (ROOT / "campaign" / "cloud" / "sky_calls.py").read_text(encoding="utf-8")
    call = text[text.index("request = sky.launch(") :].split(")\n", 1)[0]
    for words in ("idle_minutes_to_autostop=minutes", "down=True", "wait_for=AutostopWaitFor.NONE"):
        assert words in call
    for path in (ROOT / "campaign").rglob("*.py"):
        assert "purge=True" not in path.read_text(encoding="utf-8"), path


@pytest.mark.parametrize("given", case("24_ray_two_heads")["cases"], ids=lambda c: str(c["address"]))
def test_another_ray_on_the_node_is_not_joined_by_accident(given: dict[str, Any]) -> None:
    if given["expect"].startswith("refused") and given["address"] is not None:
        with pytest.raises(UserError, match=r"ray\.address"):
            Cluster(given["address"])
        return
    # Without an address a cluster of our own is started, which joins nobody's; with ours, that one is meant.
    assert Cluster(given["address"])._address == given["address"]


def test_nothing_is_stopped_globally() -> None:
    forbidden = [*case("24_ray_two_heads")["forbidden"][:1], "pkill", "killall"]
    for path in [*(ROOT / "campaign").rglob("*.py"), *(ROOT / "sky").glob("*.sh")]:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in forbidden if word in text], path


async def test_call_to_a_dead_actor_has_a_deadline() -> None:
    class Reference:
        def future(self) -> Any:
            import concurrent.futures

            return concurrent.futures.Future()

    class Method:
        def remote(self) -> Reference:
            return Reference()

    class Actor:
        poll = Method()

    with pytest.raises(RayError, match="did not answer within"):
        await Remote(Actor(), {"poll": 0.05}).poll()


def test_everything_that_may_befall_an_actor_is_one_kind_of_error() -> None:
    from ray import exceptions

    names = {
        "actor died": "ActorDiedError", "actor unavailable": "ActorUnavailableError", "node died": "NodeDiedError",
        "worker crashed": "WorkerCrashedError", "object lost": "ObjectLostError", "out of memory": "OutOfMemoryError",
        "get timeout": "GetTimeoutError", "owner died": "OwnerDiedError",
    }  # fmt: skip
    for word in case("25_ray_stuck")["exceptions_to_cover"]:
        kind = getattr(exceptions, names[word])
        assert issubclass(kind, (exceptions.RayError, TimeoutError)), word


def test_status_that_says_running_is_not_believed() -> None:
    """A silent agent trips the heartbeat and its node is taken down, whatever its job status says."""
    world = drill.World(5)
    world.crashing, world.rate = False, 0.0
    world.cloud.faults = lambda call: "hung" if call == "run_agent" else None
    world.cloud.preempt_after_s = lambda: None
    world.cap = drill.micro(1000)
    world.plan = drill.replace(world.plan, cap_usd=world.cap)
    world.spec = world.spec.model_copy(
        update={"budget": world.spec.budget.model_copy(update={"cap_usd": drill._dollars(world.cap)})}
    )
    out = asyncio.run(world.run())
    assert out.ending.startswith("3 gate heartbeat"), out
    assert not out.bad
    world.db.close()


def test_second_controller_is_refused_whatever_the_job_says(tmp_path: Path) -> None:
    clock = VirtualClock()
    with Ledger.open(RunDir(tmp_path), clock, create=True), pytest.raises(LedgerLocked):
        Ledger.open(RunDir(tmp_path), clock)
