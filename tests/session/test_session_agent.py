"""The session agent on a virtual clock: scripted ports, a real plan, store, journal and analysis."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from session_rig import ROOT, SMALL, Rig, all_rounds, rig

from campaign.client.base import Job
from campaign.engines.base import Counters
from campaign.errors import EngineError
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import GroupPlan
from campaign.report.instrument import instrument
from campaign.session.added import Added
from campaign.session.ports import Command
from campaign.spec.load import load
from campaign.store.folder import FolderStore
from campaign.workloads.packs import load_all


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


async def test_counters_of_overlapping_requests_belong_to_the_wave(tmp_path: Path) -> None:
    it = rig(
        tmp_path, "pairs.kv.concurrency=3", "workloads.chat.n=6", "arms.plain.max_running_requests=3",
        "arms.plain.speculation={method: ngram, depth: 3}", keep=lambda g: g.name.startswith("pair.kv"),
    )  # fmt: skip

    async def counters(boot_id: str) -> Counters:
        # Every request so far took one prefill token and steps of two tokens, one of them accepted.
        arm = boot_id.rpartition("/")[2].partition("@")[0]
        sent = [j for j in it.client.jobs if j.base_url.endswith(f"/{arm}")]
        tokens = sum(j.body["max_tokens"] for j in sent)
        steps = sum((j.body["max_tokens"] - 1) // 2 for j in sent)
        odd = sum((j.body["max_tokens"] - 1) % 2 for j in sent)
        return Counters(
            drafts=steps, drafted=3 * steps, accepted=tokens - len(sent) - steps - odd, generated=tokens
        )

    it.host.counters = counters  # type: ignore[method-assign]  # this host counts
    assert await it.agent.run() == "done"
    rows = [r for r in FolderStore(it.run_dir).rows() if r.phase == "measure"]
    assert rows
    # No request among others claims the server's counters.
    assert all(r.steps is None and r.step_ms is None for r in rows)
    cells = [c for e in it.events("round_committed") for c in e.payload["cells"]]
    for cell in cells:
        # A wave is the slot set run once.
        assert {w["requests"] for w in cell["waves"]} == {6}
        assert cell["overlapping"]["requests"] == 6 * len(cell["waves"])
        assert cell["overlapping"]["reasons"] == []
        assert cell["overlapping"]["steps"] == sum(w["steps"] for w in cell["waves"])
        decoded = cell["overlapping"]["tokens"] - cell["overlapping"]["requests"]
        assert cell["overlapping"]["accept_len"] == decoded / cell["overlapping"]["steps"]
        assert 1 < cell["overlapping"]["accept_len"] <= 2


async def test_a_server_is_settled_after_warm_up_and_looked_at_before_the_commit(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    calls: list[tuple[str, int]] = []

    async def settle(boot_id: str) -> dict[str, Any]:
        calls.append(("settle", len(it.client.jobs)))
        return {"drained": True, "cache_reset": "done", "why": None}

    async def recheck(boot_id: str) -> dict[str, Any]:
        calls.append(("recheck", len(it.client.jobs)))
        return {"effective": [], "pages": [{"page": "/p", "key": "k", "before": 1, "after": 2}]}

    it.host.settle, it.host.recheck = settle, recheck  # type: ignore[attr-defined]  # as a real host has them
    assert await it.agent.run() == "done"
    # Two boots a round: both settled between warm-up and the four measured requests, both looked at after them.
    assert calls == [(w, n + base) for base in (0, 6) for w, n in [("settle", 2)] * 2 + [("recheck", 6)] * 2]
    cell = it.events("round_committed")[0].payload["cells"][0]
    assert cell["server"]["settled"]["cache_reset"] == "done"
    assert cell["server"]["changed"][0]["key"] == "k"
    assert "waves" not in cell


async def test_a_server_that_is_another_one_afterwards_voids_its_round(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")

    async def recheck(boot_id: str) -> dict[str, Any]:
        return {"effective": ["speculation.depth: asked for 3, in force is 5"], "pages": []}

    it.host.recheck = recheck  # type: ignore[attr-defined]  # likewise
    assert await it.agent.run() == "failed"
    assert it.committed == []
    assert "in force is 5" in it.events("round_voided")[0].payload["reason"]
    assert {r.validity for r in FolderStore(it.run_dir).rows()} == {"void"}


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


# --- readings, and what is added while a session is held


@pytest.mark.parametrize(
    ("gate", "reads", "value"),
    [
        ("max_throttled=0.1", {"gpu0_throttle": 0.0, "gpu1_throttle": 0.4}, "0.4"),
        ("max_throttled=0.1", {"gpu0_throttle": None}, "unknown"),
        ("max_throttled=0.1", {"cpu_load": 1.0}, "unknown"),
        ("max_throttled=0.1", {"gpu0_throttle": float("nan")}, "unknown"),
        ("min_sm_mhz=1500", {"gpu0_sm_mhz": 1800.0, "gpu1_sm_mhz": 1200.0}, "1200"),
        ("min_sm_mhz=1500", {}, "unknown"),
    ],
)
async def test_throttled_or_slow_or_unread_gpus_trip(
    tmp_path: Path, gate: str, reads: dict[str, float | None], value: str
) -> None:
    it = rig(tmp_path / "a", f"gates.{gate}", reads=reads)
    assert await it.agent.run() == "tripped"
    (trip,) = it.events("gate_tripped")
    assert (trip.payload["gate"], trip.payload["value"]) == ("telemetry", value)
    assert it.committed == []
    again = rig(tmp_path / "b", f"gates.{gate}", reads=reads, overrides=frozenset({"telemetry"}))
    assert await again.agent.run() == "done"


async def test_gpus_within_their_limits_go_on(tmp_path: Path) -> None:
    reads = {"gpu0_throttle": 0.1, "gpu0_sm_mhz": 1500.0}
    it = rig(tmp_path, "gates.max_throttled=0.1", "gates.min_sm_mhz=1500", reads=reads)
    assert await it.agent.run() == "done"


async def test_limits_hold_over_the_requests_and_not_over_the_boot(tmp_path: Path) -> None:
    """A GPU that idles through a long boot would thin out how much of the measurement it was throttled."""
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    it.host.boot_s = 100.0
    telemetry = it.agent._ctx.ports.telemetry
    asked: list[tuple[int, int]] = []
    reads = telemetry.window

    async def window(start_ns: int, end_ns: int) -> dict[str, float | None]:
        asked.append((start_ns, end_ns))
        return await reads(start_ns, end_ns)

    telemetry.window = window  # type: ignore[method-assign]
    assert await it.agent.run() == "done"
    assert len(asked) == len(it.committed)
    assert all(0 < end - start < 100e9 for start, end in asked)


def addition(name: str = "main.add1") -> bytes:
    """The pair `aa` between anchors of its own, as `campaign add` sends it."""
    loaded = load(ROOT / "experiments.yaml", (*SMALL, "sessions.main.pairs=[aa]", "sessions.main.ladders=[]"))
    (plan,) = build(loaded.spec, declared_prices(loaded.spec)).sessions
    return Added(plan, loaded.spec, load_all(loaded, ROOT)).named(name, "here").dump()


async def test_a_held_session_runs_what_is_added_and_then_ends_well(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv", hold_s=3600)
    it.control.more.append(addition())
    assert await it.agent.run() == "done"
    (held,) = it.events("session_held")
    assert held.payload["until_utc_ns"] <= it.clock.utc_ns()
    mine = [e for e in it.events() if e.session == "main.add1"]
    assert mine[0].type == "session_started"
    assert (mine[-1].type, mine[-1].payload["state"]) == ("session_finished", "done")
    committed = [e.payload["round_id"] for e in mine if e.type == "round_committed"]
    assert committed[0].startswith("anchor.first")
    assert committed[-1].startswith("anchor.last")
    assert any(r.startswith("pair.aa") for r in committed)
    assert {e.payload["lease"] for e in mine if "lease" in e.payload} == {"main.1"}
    assert it.events()[-1].session == "main"


async def test_what_is_added_may_trip_without_ending_the_hold(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv", hold_s=3600)
    it.client.fails = lambda job: "main.add" in job.request_id and "/measure/" in job.request_id
    it.control.more += [addition(), addition("main.add2")]
    assert await it.agent.run() == "done"
    ends = [e.payload["state"] for e in it.events("session_finished")]
    assert ends == ["tripped", "tripped", "done"]


async def test_a_hold_ends_before_its_lease_and_silence_never_extends(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv", hold_s=10**6, lease_s=1200)
    assert await it.agent.run() == "done"
    assert it.clock.monotonic_ns() < 1200e9
    assert it.events("gate_tripped") == []


@pytest.mark.parametrize(("gate", "state"), [(None, "done"), ("cost", "tripped")])
async def test_a_stop_ends_a_hold(tmp_path: Path, gate: str | None, state: str) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv", hold_s=3600)

    async def stop() -> None:
        while not it.events("session_held"):
            await it.clock.sleep(1.0)
        it.control.command = Command(stop=True, why="enough", gate=gate)

    task = asyncio.create_task(stop())
    assert await it.agent.run() == state
    await task
    assert it.clock.monotonic_ns() < 1800e9


async def test_an_addition_that_cannot_be_read_is_an_infrastructure_failure(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv", hold_s=3600)
    it.control.more.append(b"{}")
    assert await it.agent.run() == "failed"
    assert it.events("session_finished")[0].payload["exit_code"] == 4


async def test_lag_above_two_percent_of_a_step_flags_rows_and_cell(tmp_path: Path) -> None:
    it = rig(tmp_path, keep=lambda g: g.name == "pair.kv")
    it.client.lag_us = 300.0  # of 10 ms
    assert await it.agent.run() == "done"
    rows = [r for r in FolderStore(it.run_dir).rows() if r.phase != "warmup"]
    assert {r.validity for r in rows} == {"valid"}
    assert all("client_lag" in r.reasons for r in rows)
    cells = [c["client"] for e in it.events("round_committed") for c in e.payload["cells"]]
    assert {c["verdict"] for c in cells} == {"flag"}
    said = instrument(it.run_dir, [("main", "main.1")], it.events())["sentences"]
    assert any("flagged for lag above 2%" in s for s in said)


async def test_lag_above_ten_percent_voids_and_trips(tmp_path: Path) -> None:
    it = rig(tmp_path / "a", keep=lambda g: g.name == "pair.kv")
    it.client.lag_us = 1500.0
    assert await it.agent.run() == "tripped"
    assert it.committed == []
    assert {r.validity for r in FolderStore(it.run_dir).rows() if r.phase != "warmup"} == {"void"}
    it = rig(tmp_path / "b", keep=lambda g: g.name == "pair.kv", overrides=frozenset({"max_void_share"}))
    it.client.lag_us = 1500.0
    assert await it.agent.run() == "done"
    cells = [c["client"] for e in it.events("round_committed") for c in e.payload["cells"]]
    assert {c["verdict"] for c in cells} == {"void"}
    said = instrument(it.run_dir, [("main", "main.1")], it.events())["sentences"]
    assert any("void for lag above 10%" in s for s in said)


@pytest.mark.parametrize(
    ("declared", "per_cpu", "processes"), [((), 1e6, 1), ((), 250.0, 2), (("client.processes=3",), 1e6, 3)]
)
async def test_processes_follow_the_self_check(
    tmp_path: Path, declared: tuple[str, ...], per_cpu: float, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    it = rig(
        tmp_path, "pairs.kv.concurrency=3", "workloads.chat.n=3", "arms.plain.max_running_requests=3", *declared,
        keep=lambda g: g.name.startswith("pair.kv"),
    )  # fmt: skip
    scaled: list[tuple[int, list[int]]] = []

    async def selfcheck() -> dict[str, Any]:
        return {"chunks_per_cpu_s": per_cpu}

    async def scale(count: int, cpus: list[int]) -> None:
        scaled.append((count, cpus))

    it.client.selfcheck, it.client.scale = selfcheck, scale  # type: ignore[attr-defined]  # optional of a client
    assert await it.agent.run() == "done"
    # Three streams at one step in 11 or 12 ms are some 250 chunks a second; a process may use half a core.
    assert scaled == [(processes, [])]
    (kept,) = (tmp_path / "provenance").glob("main~client-*.json")
    assert json.loads(kept.read_text())["processes"] == processes
