"""The session agent on a virtual clock: scripted ports, a real plan, store, journal and analysis."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from campaign.client.base import Job, Outcome, Usage
from campaign.client.lag import lag_counts
from campaign.engines.base import BootOrder, BootRecord, Counters
from campaign.errors import EngineError
from campaign.ledger.agent import AgentJournal
from campaign.ledger.agent import read as read_journal
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import GroupPlan, RoundPlan, SessionPlan
from campaign.report.instrument import instrument
from campaign.session.added import Added
from campaign.session.agent import SessionAgent
from campaign.session.ports import Command, Ports
from campaign.session.request import Identity
from campaign.session.round import Progress, SessionContext
from campaign.spec.load import load
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock
from campaign.workloads.packs import load_all

ROOT = Path(__file__).parents[2]
SMALL = (
    "ladders.depth.values=[3]", "ladders.depth.boots=2", "pairs.aa.boots=2", "pairs.kv.boots=2",
    "workloads.copy.n=2", "workloads.chat.n=2", "workloads.health.n=2", "anchor.between=false",
)  # fmt: skip


class Inline(Executor):
    """Runs at once: a thread would let virtual time jump."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


@dataclass
class Host:
    """Boots in a second, or as told."""

    clock: VirtualClock
    fail: Callable[[BootOrder], EngineError | None] = lambda _: None
    boot_s: float = 1.0
    live: set[str] = field(default_factory=set)
    booted: list[str] = field(default_factory=list)
    most_live: int = 0
    dead: bool = False

    async def boot(self, order: BootOrder) -> BootRecord:
        self.booted.append(order.boot_id)
        self.live.add(order.boot_id)
        self.most_live = max(self.most_live, len(self.live))
        await self.clock.sleep(self.boot_s)
        if (error := self.fail(order)) is not None:
            raise error
        return BootRecord(
            order.boot_id,
            f"http://127.0.0.1:1/{order.arm}",
            "m",
            1,
            1,
            int(self.boot_s * 1e9),
            "cpu",
            {"argv": []},
        )

    async def counters(self, boot_id: str) -> Counters | None:
        return None

    async def alive(self, boot_id: str) -> bool:
        return not self.dead

    async def why_dead(self, boot_id: str) -> tuple[str, str]:
        return "died", "segfault"

    async def stop(self, boot_id: str) -> None:
        self.live.discard(boot_id)

    async def close(self) -> None:
        self.live.clear()


@dataclass
class Client:
    """Answers with tokens at a pace that the test decides."""

    clock: VirtualClock
    step_ms: Callable[[Job], float] = lambda _: 10.0
    fails: Callable[[Job], bool] = lambda _: False
    lag_us: float = 1.0
    in_flight: Counter[str] = field(default_factory=Counter)
    seen: list[dict[str, int]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    cancelled: bool = False

    async def run(self, job: Job) -> Outcome:
        arm = job.base_url.rsplit("/", 1)[1]
        self.jobs.append(job)
        self.in_flight[arm] += 1
        self.seen.append({a: n for a, n in self.in_flight.items() if n})
        sent = self.clock.monotonic_ns()
        tokens = job.body["max_tokens"]
        await self.clock.sleep((100 + self.step_ms(job) * (tokens - 1)) / 1000)
        self.in_flight[arm] -= 1
        first = sent + 100_000_000
        last = self.clock.monotonic_ns()
        state = "cancelled" if self.cancelled else "failed" if self.fails(job) else "ok"
        return Outcome(
            request_id=job.request_id, state=state, sent_ns=sent, sent_utc_ns=self.clock.utc_ns(), first_ns=first,
            last_ns=last, done_ns=last, stamp_source="user", reads=tokens, events=tokens, content_chunks=tokens,
            usage=Usage(20, tokens, 0), first_chunk_tokens=None, finish="length", http_status=200,
            error_code="500" if state == "failed" else None, error="boom" if state == "failed" else None,
            text_sha256=None, timings=None, lag=lag_counts([int(self.lag_us * 1000)] * 10),
        )  # type: ignore[arg-type]  # state is one of the literals  # fmt: skip

    async def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        raise AssertionError(url)

    async def cancel(self) -> None:
        self.cancelled = True

    async def close(self) -> None: ...


class Telemetry:
    async def start(self, path: str) -> dict[str, Any]:
        return {"host": "h"}

    def __init__(self, reads: Mapping[str, float | None] = {"cpu_load": 1.0}) -> None:
        self.reads = dict(reads)

    async def window(self, start_ns: int, end_ns: int) -> dict[str, float | None]:
        return self.reads

    async def close(self) -> None: ...


@dataclass
class Control:
    command: Command | None = None
    more: list[bytes] = field(default_factory=list)

    async def poll(self) -> Command | None:
        return self.command

    async def added(self) -> bytes | None:
        return self.more.pop(0) if self.more else None


@dataclass
class Rig:
    agent: SessionAgent
    host: Host
    client: Client
    control: Control
    clock: VirtualClock
    plan: SessionPlan
    run_dir: RunDir
    progress: Progress

    def events(self, type_: str | None = None) -> list[Any]:
        found = read_journal(self.run_dir.journals / "main.jsonl")
        return [e for e in found if type_ in {None, e.type}]

    @property
    def committed(self) -> list[str]:
        return [e.payload["round_id"] for e in self.events("round_committed")]


def rig(
    tmp_path: Path,
    *sets: str,
    lease_s: float = 36_000,
    overrides: frozenset[str] = frozenset(),
    attempts: Mapping[str, int] = {},
    done: frozenset[str] = frozenset(),
    keep: Callable[[GroupPlan], bool] = lambda _: True,
    reads: Mapping[str, float | None] = {"cpu_load": 1.0},
    hold_s: float = 0.0,
) -> Rig:
    clock = VirtualClock()
    loaded = load(ROOT / "experiments.yaml", (*SMALL, *sets))
    (plan,) = build(loaded.spec, declared_prices(loaded.spec)).sessions
    plan = replace(plan, groups=tuple(g for g in plan.groups if keep(g)), hold_s=hold_s)
    run_dir = RunDir(tmp_path)
    host, client, control, progress = Host(clock), Client(clock), Control(), Progress()
    ctx = SessionContext(
        who=Identity("run", "quickstart", "main", "main.1", "node-1", simulated=True),
        spec=loaded.spec, plan=plan, prompts=load_all(loaded, ROOT), run_dir=run_dir,
        ports=Ports(host, client, Telemetry(reads)), store=FolderStore(run_dir),
        journal=AgentJournal(run_dir.journals / "main.jsonl", "agent:main", clock), clock=clock, cpus=(),
        progress=progress, disk=Inline(), stopping=asyncio.Event(), overrides=overrides,
    )  # fmt: skip

    async def admit(group: GroupPlan, round_: RoundPlan) -> str | None:
        return None

    agent = SessionAgent(
        ctx, control, admit, deadline_utc_ns=clock.utc_ns() + int(lease_s * 1e9), attempts=attempts, done=done
    )
    return Rig(agent, host, client, control, clock, plan, run_dir, progress)


def all_rounds(it: Rig) -> list[str]:
    return [r.id for g in it.plan.groups for r in g.rounds]


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


# --- looks that may stop a pair


def _looked(tmp_path: Path, ratio: float, boot_sd: float = 0.005) -> Rig:
    it = rig(
        tmp_path, "pairs.kv.boots=6", "pairs.kv.looks=[2,4]", "workloads.chat.n=8",
        f"statistics.boot_sd.step_ms={boot_sd}", keep=lambda g: g.name == "pair.kv",
    )  # fmt: skip

    def step_ms(job: Job) -> float:
        spread = 1 + 0.01 * (sum(job.request_id.encode()) % 7 - 3) / 3
        return 10 * spread * (ratio if job.base_url.endswith("kv.b") else 1.0)

    it.client.step_ms = step_ms
    return it


async def test_a_pair_stops_at_the_first_look_that_shows_it(tmp_path: Path) -> None:
    it = _looked(tmp_path, 1.5)
    assert await it.agent.run() == "done"
    rounds = all_rounds(it)
    assert it.committed == rounds[:2]
    (stop,) = it.events("group_stopped")
    assert (stop.payload["group"], stop.payload["look"], stop.payload["why"]) == ("pair.kv", 2, "differs")
    assert stop.payload["skipped"] == rounds[2:]


async def test_a_look_that_shows_nothing_goes_on_to_the_end(tmp_path: Path) -> None:
    it = _looked(tmp_path, 1.0, boot_sd=0.2)
    assert await it.agent.run() == "done"
    assert it.committed == all_rounds(it)
    assert it.events("group_stopped") == []


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
