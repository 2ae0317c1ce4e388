"""How good is this machine's instrument: the client against a server whose sends are known.

What is measured: the lag of each event's stamp against the server's own stamp of its send, at the pace of a
fast stream; chunks read and parsed per CPU second, saturated; and how late requests start against a plan.
The reference server runs in a process of its own on this machine, so its sends share the cores.
"""

import asyncio
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from campaign.client.base import Job, Outcome
from campaign.client.http import HttpClient

if TYPE_CHECKING:
    from campaign.testing.reference_server import Schedule

STREAMS: Final = 32
RATE: Final = 93.0
EVENTS: Final = 200
START_RATE: Final = 200.0
"""Planned requests per second while start times are measured."""
STARTS: Final = 200
LEAD_S: Final = 0.1
"""A connection is made so long before its request is due."""
UNPACED: Final = 40_000
"""Events of a saturated stream."""

MAX_LAG_P99_US: Final = 1000.0
MAX_START_ERR_P99_US: Final = 1000.0
MIN_CHUNKS_PER_CPU_S: Final = 50_000.0


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """One check. Times in us."""

    stamp_source: str
    lag_p50_us: float
    lag_p99_us: float
    user_lag_p50_us: float
    user_lag_p99_us: float
    chunks_per_cpu_s: float
    start_err_p99_us: float
    streams: int
    merged_reads: int
    lost_events: int
    server_late_p99_us: float | None
    """How late the reference server was against its own schedule; its stamps are of when it did send."""
    reasons: tuple[str, ...]
    """What is not as it should be."""

    @property
    def ok(self) -> bool:
        return not self.reasons

    def to_json(self) -> dict[str, Any]:
        """The shape of `campaign selfcheck --json` (a contract, see docs/CONTRACTS.md)."""
        return {
            "stamp_source": self.stamp_source,
            "lag_p50_us": round(self.lag_p50_us, 1),
            "lag_p99_us": round(self.lag_p99_us, 1),
            "user_lag_p50_us": round(self.user_lag_p50_us, 1),
            "user_lag_p99_us": round(self.user_lag_p99_us, 1),
            "chunks_per_cpu_s": round(self.chunks_per_cpu_s),
            "start_err_p99_us": round(self.start_err_p99_us, 1),
            "streams": self.streams,
            "merged_reads": self.merged_reads,
            "lost_events": self.lost_events,
            "server_late_p99_us": self.server_late_p99_us,
            "ok": self.ok,
            "reasons": list(self.reasons),
        }


def rank(values: Sequence[float], share: float) -> float:
    """Nearest-rank percentile of sorted values."""
    return values[max(1, math.ceil(share * len(values))) - 1]


async def check(*, kernel_stamps: bool = True, streams: int = STREAMS, quick: bool = False) -> SelfCheck:
    """Measure this machine; takes about 6 s, `quick` 2 s.

    Raises OSError where the reference server cannot be started.
    """
    events, count = (EVENTS // 4, STARTS // 4) if quick else (EVENTS, STARTS)
    from campaign.testing.reference_server import ReferenceServer, Schedule

    with ReferenceServer() as server:
        client = HttpClient(kernel_stamps=kernel_stamps)
        try:
            await _many(
                client, server.url, Schedule(tokens=5), 4, 0.001
            )  # warm: imports, threads, first pages
            await _page(client, server.url + "/stats")
            lags = await _lags(client, server.url, Schedule(rate=RATE, tokens=events), streams)
            stats = await _page(client, server.url + "/stats")
            per_cpu = await _saturated(client, server.url, 1 if quick else 3)
            starts = await _starts(client, server.url, count)
        finally:
            await client.close()
    outcomes, used, user = lags
    source = "kernel" if all(o.stamp_source == "kernel" for o in outcomes) else "user"
    lost = sum(events - o.content_chunks for o in outcomes)
    p99 = rank(used, 0.99)
    start = rank(starts, 0.99)
    reasons = []
    if lost or not used:
        reasons.append(f"lost_events: {lost} of {events * streams}")
    if p99 > MAX_LAG_P99_US:
        reasons.append(f"lag_p99_us: {p99:.0f}, at most {MAX_LAG_P99_US:.0f}")
    if start > MAX_START_ERR_P99_US:
        reasons.append(f"start_err_p99_us: {start:.0f}, at most {MAX_START_ERR_P99_US:.0f}")
    if per_cpu < MIN_CHUNKS_PER_CPU_S:
        reasons.append(f"chunks_per_cpu_s: {per_cpu:.0f}, at least {MIN_CHUNKS_PER_CPU_S:.0f}")
    return SelfCheck(
        stamp_source=source,
        lag_p50_us=rank(used, 0.5),
        lag_p99_us=p99,
        user_lag_p50_us=rank(user, 0.5),
        user_lag_p99_us=rank(user, 0.99),
        chunks_per_cpu_s=per_cpu,
        start_err_p99_us=start,
        streams=streams,
        merged_reads=sum(o.merged_reads for o in outcomes),
        lost_events=lost,
        server_late_p99_us=stats["late_p99_us"],
        reasons=tuple(reasons),
    )


async def _page(client: HttpClient, url: str) -> Any:
    _, body = await client.fetch(url, 30)
    return json.loads(body)


async def _many(
    client: HttpClient, url: str, schedule: "Schedule", count: int, apart_s: float
) -> list[tuple[Outcome, dict[str, Any]]]:
    """`count` requests, started on a plan; (outcome, chunk record) of each."""
    from dataclasses import asdict
    from tempfile import TemporaryDirectory

    body = {"model": "reference", "stream": True, "schedule": asdict(schedule)}
    start = time.monotonic_ns() + int(2 * LEAD_S * 1e9)
    with TemporaryDirectory(prefix="campaign-selfcheck-") as folder:

        async def one(i: int) -> Outcome:
            due = start + int(i * apart_s * 1e9)
            job = Job(
                f"r{i}",
                url,
                "/v1/chat/completions",
                body,
                60,
                schedule.tokens,
                start_ns=due,
                sidecar_dir=folder,
            )
            await asyncio.sleep(max(0.0, (due - time.monotonic_ns()) / 1e9 - LEAD_S))
            return await client.run(job)

        outcomes = await asyncio.gather(*(one(i) for i in range(count)))
        records = {}
        with open(f"{folder}/chunks.jsonl", "rb") as file:  # noqa: ASYNC230,PTH123 -- nothing is in flight now
            for line in file:
                record = json.loads(line)
                records[record.get("request_id")] = record
    return [(outcome, records[outcome.request_id]) for outcome in outcomes]


async def _lags(
    client: HttpClient, url: str, schedule: "Schedule", streams: int
) -> tuple[list[Outcome], list[float], list[float]]:
    """(outcomes, sorted lags of the stamp used, sorted lags of the user stamp) in us."""
    await _page(client, url + "/stamps")
    seen = await _many(client, url, schedule, streams, 1 / schedule.rate / streams)
    truth = sorted((await _page(client, url + "/stamps")).values(), key=lambda a: a["arrival_ns"])
    used: list[float] = []
    user: list[float] = []
    # Requests were sent in this order, a fraction of a step apart, and reached the server in it.
    for (_, record), answer in zip(sorted(seen, key=lambda s: s[1]["sent_ns"]), truth, strict=False):
        late = dict(zip(record["read_ns"], record["read_user_ns"] or record["read_ns"], strict=True))
        for at, sent in zip(record["event_ns"], answer["send_ns"], strict=False):
            if sent < 0:
                continue
            used.append((record["sent_ns"] + at - sent) / 1e3)
            user.append((record["sent_ns"] + late[at] - sent) / 1e3)
    return [o for o, _ in seen], sorted(used), sorted(user)


async def _saturated(client: HttpClient, url: str, times: int) -> float:
    """Events read and parsed per CPU second of this process; the best of several, since others use the cores."""
    best = 0.0
    for _ in range(times):
        before = time.process_time()
        body = {"stream": True, "schedule": {"tokens": UNPACED, "paced": False}}
        outcome = await client.run(Job("r", url, "/v1/chat/completions", body, 60, UNPACED))
        used = time.process_time() - before
        best = max(best, outcome.content_chunks / used)
    return best


async def _starts(client: HttpClient, url: str, count: int) -> list[float]:
    from campaign.testing.reference_server import Schedule

    seen = await _many(client, url, Schedule(ttft_ms=1, rate=1000, tokens=2), count, 1 / START_RATE)
    return sorted(abs(o.start_error_us) for o, _ in seen if o.start_error_us is not None)
