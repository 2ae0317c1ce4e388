"""The session agent on a virtual clock: scripted ports, a real plan, store, journal and analysis."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import pytest
from session_rig import Rig, all_rounds, rig

from campaign.client.base import Job
from campaign.errors import EngineError
from campaign.plan.model import GroupPlan
from campaign.session.ports import Command
from campaign.store.folder import FolderStore


async def test_every_planned_request_is_measured_once_and_committed(tmp_path: Path) -> None:
    it = rig(tmp_path)
    assert await it.agent.run() == "done"
    assert it.committed == all_rounds(it)
    rows = [r for r in FolderStore(it.run_dir).rows() if r.phase != "warmup"]
    got = Counter((r.group, r.arm, r.boot_index, r.slot, r.seed) for r in rows)
    want = Counter(
        (g.name, q.arm, b.index, q.slot, q.seed)
        for g in it.plan.groups for r in g.rounds for q in r.sequence for b in r.boots if b.arm == q.arm
    )  # fmt: skip
    assert got == want
    assert all(r.simulated for r in rows)
    assert not it.host.live
    assert it.progress.done == it.progress.total


async def test_intent_comes_before_the_act_and_phases_follow_it(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    await it.agent.run()
    order = [e.type for e in it.events()]
    assert order[0] == "session_started"
    assert order[-1] == "session_finished"
    assert order.index("round_started") < order.index("boot_started") < order.index("boot_ready")
    assert order.index("round_committed") < order.index("boot_stopped")
    phases = [e.payload["phase"] for e in it.events("phase_started")]
    assert phases == ["setup", *["load", "warmup", "measure", "idle"] * 2]


async def test_warm_up_sends_a_prompt_that_is_not_measured(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    await it.agent.run()
    warm = {str(j.body["messages"]) for j in it.client.jobs if "/warmup/" in j.request_id}
    measured = {str(j.body["messages"]) for j in it.client.jobs if "/measure/" in j.request_id}
    assert warm
    assert not warm & measured


async def test_alternated_pair_has_one_request_in_flight_in_abba_order(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    await it.agent.run()
    assert all(sum(now.values()) == 1 for now in it.client.seen)
    arms = [j.base_url.rsplit("/", 1)[1] for j in it.client.jobs if "/measure/" in j.request_id]
    first = [arms[:4], arms[4:]]
    assert all(a in (["plain", "kv.b", "kv.b", "plain"], ["kv.b", "plain", "plain", "kv.b"]) for a in first)
    assert first[0] != first[1]
    assert it.host.most_live == 2


async def test_waves_keep_concurrency_and_never_mix_arms(tmp_path: Path) -> None:
    it = rig(
        tmp_path, "pairs.kv.concurrency=3", "workloads.chat.n=6", "arms.plain.max_running_requests=3",
        keep=lambda g: g.name.startswith("pair.kv"),
    )  # fmt: skip
    assert await it.agent.run() == "done"
    measured = it.client.seen[2:]
    assert max(sum(now.values()) for now in measured) == 3
    assert all(len(now) == 1 for now in measured)


async def test_duet_has_both_arms_in_flight_at_once(tmp_path: Path) -> None:
    it = rig(tmp_path, "pairs.kv.design=duet", keep=lambda g: g.name == "pair.kv")
    assert await it.agent.run() == "done"
    assert {"plain": 1, "kv.b": 1} in it.client.seen
    assert max(max(now.values()) for now in it.client.seen) == 1


async def test_stop_does_not_wait_for_a_boot(tmp_path: Path) -> None:
    it = rig(tmp_path)
    it.host.boot_s = 600

    async def press() -> None:
        await it.clock.sleep(5)
        it.control.command = Command(stop=True, why="enough")

    task = asyncio.create_task(press())
    assert await it.agent.run() == "stopped"
    await task
    assert it.clock.monotonic_ns() < 10e9
    assert not it.host.live
    assert it.committed == []


async def test_stop_drops_the_request_in_flight_and_commits_nothing_half(tmp_path: Path) -> None:
    it = rig(tmp_path)

    async def press() -> None:
        await it.clock.sleep(30)
        it.control.command = Command(stop=True, why="enough", gate="cost")

    task = asyncio.create_task(press())
    assert await it.agent.run() == "tripped"
    await task
    assert it.client.cancelled
    begun = [e.payload["round_id"] for e in it.events("round_started")]
    assert begun[:-1] == it.committed


@pytest.mark.parametrize(("kind", "tries"), [("config", 1), ("oom", 1), ("died", 2), ("hung", 2)])
async def test_failed_boot_is_tried_again_only_where_that_can_help(
    tmp_path: Path, kind: str, tries: int
) -> None:
    it = rig(tmp_path)
    it.host.fail = lambda _: EngineError(kind, "no")
    assert await it.agent.run() == "failed"
    assert len(it.events("boot_failed")) == tries
    assert it.events("session_finished")[0].payload["exit_code"] == 4


async def test_dead_server_voids_the_round_which_is_done_again_under_the_next_attempt(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    once = iter([True])
    it.client.fails = lambda job: "/measure/" in job.request_id and next(once, False)
    it.host.dead = True
    assert await it.agent.run() == "done"
    assert [e.payload["attempt"] for e in it.events("round_started")] == [0, 1, 0]
    rows = FolderStore(it.run_dir).rows()
    assert {r.validity for r in rows if r.round == 0 and r.boot_attempt == 0} == {"void"}
    assert {r.validity for r in rows if r.boot_attempt == 1} == {"valid"}
    assert it.progress.done == it.progress.total


async def test_third_error_in_a_row_trips(tmp_path: Path) -> None:
    it = rig(tmp_path)
    it.client.fails = lambda job: "/measure/" in job.request_id
    assert await it.agent.run() == "tripped"
    (trip,) = it.events("gate_tripped")
    assert (trip.payload["gate"], trip.payload["value"]) == ("max_consecutive_errors", "3")
    assert "boom" in trip.payload["detail"]


async def test_cell_with_too_many_void_rows_trips_unless_overridden(tmp_path: Path) -> None:
    def every_other() -> Callable[[Job], bool]:
        count = iter(range(10_000))
        return lambda job: "/measure/" in job.request_id and next(count) % 2 == 0

    it = rig(tmp_path / "a", keep=lambda g: g.name == "pair.kv")
    it.client.fails = every_other()
    assert await it.agent.run() == "tripped"
    assert it.events("gate_tripped")[0].payload["gate"] == "max_void_share"
    assert it.committed == []
    again = rig(tmp_path / "b", keep=lambda g: g.name == "pair.kv", overrides=frozenset({"max_void_share"}))
    again.client.fails = every_other()
    assert await again.agent.run() == "done"


def slows_down(it: Rig, factor: float) -> None:
    def step(job: Job) -> float:
        # Requests differ by a thousandth, so that there is a spread to judge by.
        wobble = 1 + 0.001 * (crc32(job.request_id.encode()) % 3)
        return 10.0 * wobble * (factor if "anchor.last" in job.request_id else 1.0)

    it.client.step_ms = step


async def test_proven_drift_trips_and_small_drift_does_not(tmp_path: Path) -> None:
    it = rig(tmp_path / "a", "anchor.boots=3")
    slows_down(it, 2.0)
    assert await it.agent.run() == "tripped"
    (trip,) = it.events("gate_tripped")
    assert trip.payload["gate"] == "anchor_drift"
    assert trip.payload["limit"] == "25.0%"
    near = rig(tmp_path / "b", "anchor.boots=3")
    slows_down(near, 1.05)
    assert await near.agent.run() == "done"


async def test_overridden_drift_goes_on(tmp_path: Path) -> None:
    it = rig(tmp_path, "anchor.boots=3", overrides=frozenset({"anchor_drift"}))
    slows_down(it, 2.0)
    assert await it.agent.run() == "done"


async def test_end_of_the_lease_trips(tmp_path: Path) -> None:
    it = rig(tmp_path, lease_s=30)
    assert await it.agent.run() == "tripped"
    (trip,) = it.events("gate_tripped")
    assert trip.payload["gate"] == "lease_time"
    assert it.clock.monotonic_ns() < 33e9


async def test_committed_rounds_are_not_done_again_and_attempts_count_on(tmp_path: Path) -> None:
    def pairs(group: GroupPlan) -> bool:
        return group.name in {"pair.kv", "pair.aa"}

    rounds = all_rounds(rig(tmp_path / "plan", keep=pairs))
    it = rig(tmp_path / "run", keep=pairs, done=frozenset(rounds[:2]), attempts={rounds[2]: 3})
    assert await it.agent.run() == "done"
    assert it.committed == rounds[2:]
    assert it.events("round_started")[0].payload == {"round_id": rounds[2], "attempt": 3}
