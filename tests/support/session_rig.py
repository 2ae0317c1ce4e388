"""A session agent on a virtual clock: scripted ports, a real plan, store, journal and analysis."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from campaign.client.base import Job, Outcome, Usage
from campaign.client.lag import lag_counts
from campaign.engines.base import BootOrder, BootRecord, Counters
from campaign.errors import EngineError
from campaign.ledger.agent import AgentJournal
from campaign.ledger.agent import read as read_journal
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import GroupPlan, RoundPlan, SessionPlan
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
    counts: Callable[[str], Counters | None] = lambda _: None
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
        return self.counts(boot_id)

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
    timings: Callable[[Job], dict[str, Any] | None] = lambda _: None
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
            text_sha256=None, timings=self.timings(job), lag=lag_counts([int(self.lag_us * 1000)] * 10),
        )  # type: ignore[arg-type]  # state is one of the literals  # fmt: skip

    async def fetch(self, url: str, timeout_s: float) -> tuple[int, bytes]:
        raise AssertionError(url)

    async def cancel(self) -> None:
        self.cancelled = True

    async def close(self) -> None: ...


class Telemetry:
    def __init__(self, reads: Mapping[str, float | None] = {"cpu_load": 1.0}) -> None:
        self.reads = dict(reads)

    async def start(self, path: str) -> dict[str, Any]:
        return {"host": "h"}

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
