"""What a token costs, from two prices that are never mixed, and what two frontiers differ by.

`usd_per_mtok_spent`: realised dollars of the group over the output tokens of its valid rows: boots, idle time and
teardown are in it, and it says what this campaign paid. `usd_per_mtok_node`: the node's hourly rate over the output
tokens an hour of serving gives at that concurrency: what a server that does nothing else would pay.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from campaign.store.row import RequestRow


@dataclass(frozen=True, slots=True)
class CellEconomics:
    """One arm on one workload at one concurrency."""

    session: str
    arm: str
    workload: str
    concurrency: int
    n: int
    accelerators: int | None
    """GPUs of the engine; None on CPU or where unknown."""
    output_tokens: int
    tok_s: float | None
    """Output tokens per second of serving, all requests in flight together, prefill included."""
    tok_s_per_gpu: float | None
    interactivity: float | None
    """tok/s of one user: median decode rate."""
    rate_se: float | None
    """Standard error of the log rate: between waves or prompts, and between boots where there are two or more."""
    usd_per_mtok_spent: float | None
    usd_per_mtok_node: float | None
    joules_per_token: float | None
    reasons: tuple[str, ...]


def gpus(gpu_set: str) -> int | None:
    """How many GPUs a `gpu_set` names; None for `cpu` and what is not a list of numbers."""
    parts = [p for p in gpu_set.split(",") if p.strip()]
    return len(parts) if parts and all(p.strip().isdigit() for p in parts) else None


def economics(
    rows: Iterable[RequestRow],
    *,
    usd_per_hour: Mapping[str, float],
    usd_by_group: Mapping[tuple[str, str], float],
    accelerators: Mapping[tuple[str, str], int] | None = None,
) -> list[CellEconomics]:
    """One entry per session, arm, workload and concurrency, in order.

    rows: valid ones. usd_per_hour: session -> node rate. usd_by_group: (session, group) -> dollars spent; shared out
    over the group's arms by their time. accelerators: (session, arm) -> GPUs, where rows do not say.
    """
    cells: dict[tuple[str, str, str, int], list[RequestRow]] = defaultdict(list)
    seconds: dict[tuple[str, str], float] = defaultdict(float)
    for r in rows:
        if r.phase == "measure" and r.state == "ok" and r.validity == "valid":
            cells[r.session, r.arm, r.workload, r.concurrency].append(r)
            seconds[r.session, r.group] += _length(r)
    return [
        _cell(key, mine, usd_per_hour.get(key[0]), usd_by_group, seconds, (accelerators or {}).get(key[:2]))
        for key, mine in sorted(cells.items())
    ]


def _length(r: RequestRow) -> float:
    """Seconds of one request; from its parts where no end was stamped."""
    if r.e2e_ms is not None:
        return r.e2e_ms / 1000
    return ((r.ttft_ms or 0.0) + (r.window_ms or 0.0)) / 1000


def _cell(
    key: tuple[str, str, str, int],
    rows: Sequence[RequestRow],
    rate: float | None,
    usd_by_group: Mapping[tuple[str, str], float],
    seconds: Mapping[tuple[str, str], float],
    told: int | None,
) -> CellEconomics:
    session, arm, workload, concurrency = key
    tokens = sum(r.completion_tokens or 0 for r in rows)
    busy = _busy(rows)
    tok_s = tokens / busy if busy > 0 and tokens else None
    speeds = sorted(r.decode_tok_s for r in rows if r.decode_tok_s)
    spent = 0.0
    known = False
    for group in {r.group for r in rows}:
        paid, all_s = usd_by_group.get((session, group)), seconds[session, group]
        if paid is not None and all_s > 0:
            known = True
            spent += paid * sum(_length(r) for r in rows if r.group == group) / all_s
    power = [r.joules for r in rows]
    joules = math.fsum(j for j in power if j is not None)
    count = told or next((g for g in (gpus(r.gpu_set) for r in rows) if g), None)
    reasons = []
    if not known:
        reasons.append("no_spend")
    if rate is None or rate <= 0:
        reasons.append("no_node_rate")
    if any(j is None for j in power):
        reasons.append("power_not_sampled")
    return CellEconomics(
        session=session,
        arm=arm,
        workload=workload,
        concurrency=concurrency,
        n=len(rows),
        accelerators=count,
        output_tokens=tokens,
        tok_s=tok_s,
        tok_s_per_gpu=tok_s / count if tok_s is not None and count else None,
        interactivity=float(np.median(speeds)) if speeds else None,
        rate_se=_rate_se(rows),
        usd_per_mtok_spent=1e6 * spent / tokens if known and tokens else None,
        usd_per_mtok_node=1e6 * rate / 3600 / tok_s if rate and rate > 0 and tok_s else None,
        joules_per_token=joules / tokens if tokens and not any(j is None for j in power) else None,
        reasons=tuple(reasons),
    )


def _rate_se(rows: Sequence[RequestRow]) -> float | None:
    """The larger of the error over blocks and that over boots; None of one block."""
    found = []
    for key in ("block", "boot_id"):
        groups: dict[str, list[float]] = defaultdict(list)
        for r in rows:
            if r.decode_tok_s:
                groups[getattr(r, key)].append(math.log(r.decode_tok_s))
        means = [math.fsum(v) / len(v) for v in groups.values()]
        if len(means) >= 2:
            found.append(float(np.std(means, ddof=1)) / math.sqrt(len(means)))
    return max(found) if found else None


def _busy(rows: Sequence[RequestRow]) -> float:
    """Seconds in which the engine served: a wave from its first send to its last end, one by one at concurrency 1."""
    waves: dict[tuple[str, str], list[RequestRow]] = defaultdict(list)
    for r in rows:
        waves[r.boot_id, r.block if r.concurrency > 1 else f"{r.slot}/{r.seed}"].append(r)
    total = 0.0
    for wave in waves.values():
        ends = [r.done_ns for r in wave if r.done_ns is not None]
        if len(wave) > 1 and len(ends) == len(wave):
            total += (max(ends) - min(r.sent_ns for r in wave)) / 1e9
        else:
            total += max(_length(r) for r in wave)
    return total


@dataclass(frozen=True, slots=True)
class Point:
    """One operating point of a frontier."""

    interactivity: float
    """tok/s of one user."""
    usd_per_mtok: float
    sd: float
    """Standard error of log cost at this point (and of log interactivity: they come from one rate)."""


@dataclass(frozen=True, slots=True)
class Iso:
    """What b is over a where the other axis is held. Ratios b/a; None where the frontiers do not overlap."""

    at: float
    ratio: float | None
    lo: float | None
    hi: float | None
    reasons: tuple[str, ...]


def pareto(points: Sequence[Point]) -> list[Point]:
    """Points no other beats on both axes, by rising interactivity (and rising cost)."""
    kept: list[Point] = []
    for p in sorted(points, key=lambda p: (-p.interactivity, p.usd_per_mtok)):
        if not kept or p.usd_per_mtok < kept[-1].usd_per_mtok:
            kept.append(p)
    return kept[::-1]


def _at(x: np.ndarray, y: np.ndarray, at: float) -> np.ndarray:
    """Linear interpolation of each row's y at one x; NaN outside."""
    out = np.full(len(x), np.nan)
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        order = np.argsort(a)
        if a[order][0] - 1e-12 <= at <= a[order][-1] + 1e-12:
            out[i] = np.interp(at, a[order], b[order])
    return out


def iso(
    a: Sequence[Point], b: Sequence[Point], *, at: float, hold: str, level: float = 0.95, draws: int = 2000
) -> Iso:
    """Cost at one interactivity (`hold="interactivity"`), or interactivity at one cost (`hold="cost"`), b over a.

    Both frontiers are interpolated between their own points on log axes, never beyond. The interval is a seeded
    parametric bootstrap of the points' rates; it is given only where 95 % of the draws still overlap.
    """
    if hold not in {"interactivity", "cost"}:
        raise ValueError("hold is interactivity or cost")
    fronts = [pareto(a), pareto(b)]
    if any(len(f) < 2 for f in fronts) or at <= 0:
        return Iso(at, None, None, None, ("too_few_points",))
    rng = np.random.default_rng(20260701)
    found = []
    for front in fronts:
        noise = rng.normal(0, 1, (draws + 1, len(front))) * np.array([p.sd for p in front])
        noise[0] = 0.0
        # A faster rate is more interactive and, at a fixed node price, cheaper by the same factor.
        speed = np.log([p.interactivity for p in front]) + noise
        cost = np.log([p.usd_per_mtok for p in front]) - noise
        x, y = (speed, cost) if hold == "interactivity" else (cost, speed)
        found.append(_at(x, y, math.log(at)))
    d = found[1] - found[0]
    if not math.isfinite(float(d[0])):
        return Iso(at, None, None, None, ("no_overlap",))
    rest = d[1:][np.isfinite(d[1:])]
    value = math.exp(float(d[0]))
    if len(rest) < 0.95 * draws:
        return Iso(at, value, None, None, ("edge_of_overlap",))
    lo, hi = (float(v) for v in np.quantile(rest, [(1 - level) / 2, (1 + level) / 2]))
    return Iso(at, value, math.exp(lo), math.exp(hi), ())
