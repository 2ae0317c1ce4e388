"""What a depth that was not run would give, said before it runs and scored after.

    tau(d)  = 1 + sum over i <= d of c_0 c_1 ... c_(i-1)       c_i: acceptance at position i given all before
    step(d) = line through the steps of the depths that ran
    tok/s   = 1000 * (tau + undrafted steps per draft) / step, where the step is the window over drafts

c_i of the deepest arm that ran; beyond it the last two positions' mean goes on, and its standard error grows by
their difference with each position, since acceptance tends to fall. Intervals: seeded bootstrap over prompts, all arms
drawing the same ones, with that growth and the boot sd in it. Below two depths the step is not identified.

An engine that counts accepted tokens without their positions gives one c for all positions, solved from its tau
(`geometric`). Steps without a draft are taken to be as many per draft as in the deepest arm that ran.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from campaign.analysis.decompose import Drafter
from campaign.analysis.variance import usable
from campaign.spec.models import Speculation
from campaign.store.row import RequestRow

RESAMPLES = 1000
UNSEEN_BOOT_SD = 0.003
"""Of the new arm's own boot (log scale), where the spec declares none: no row of another arm knows it."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """One depth that did not run. Intervals at 95 %; None with the reasons where not identified."""

    depth: int
    tau: float | None
    tau_lo: float | None
    tau_hi: float | None
    step_ms: float | None
    tok_s: float | None
    tok_s_lo: float | None
    tok_s_hi: float | None
    reasons: tuple[str, ...]


def forecast(
    rows: Sequence[RequestRow],
    arms: Sequence[Drafter],
    depths: Sequence[int],
    *,
    boot_sd: float = UNSEEN_BOOT_SD,
) -> list[Forecast]:
    """Depths of one method on one workload. rows: valid ones of the arms that ran, at concurrency 1.

    boot_sd: of the new arm's own boot (log scale).
    """
    tables: dict[int, dict[str, list[RequestRow]]] = {}
    for arm in arms:
        if not arm.depth:
            continue
        blocks: dict[str, list[RequestRow]] = defaultdict(list)
        for r in rows:
            known = r.accept_pos is not None or r.accepted is not None
            if r.arm == arm.name and usable(r) and r.window_ms and r.drafts and known:
                blocks[r.block].append(r)
        if blocks:
            tables[arm.depth] = dict(blocks)
    ran = sorted(tables)
    reasons = () if len(ran) >= 2 else ("not_identified:one_depth",) if ran else ("no_rows",)
    shared = sorted(set.intersection(*(set(t) for t in tables.values()))) if tables else []
    if reasons or len(shared) < 3:
        why = reasons or ("too_few_blocks",)
        return [Forecast(d, None, None, None, None, None, None, None, why) for d in depths]
    geometric = any(r.accept_pos is None for b in shared for r in tables[ran[-1]][b])
    rng = np.random.default_rng(20260701)
    draws = [_model(tables, shared)]
    for _ in range(RESAMPLES):
        pick = [shared[i] for i in rng.integers(0, len(shared), len(shared))]
        draws.append(_model(tables, pick))
    said = [_summed(draws, depth, boot_sd, rng) for depth in depths]
    return [replace(f, reasons=(*f.reasons, "geometric")) for f in said] if geometric else said


def _constant(tau: float, depth: int) -> float:
    """The c of `1 + c + c^2 + ... + c^depth = tau`, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        c = (low + high) / 2
        low, high = (c, high) if math.fsum(c**i for i in range(depth + 1)) < tau else (low, c)
    return (low + high) / 2


def _summed(draws: Sequence["_Fitted"], depth: int, boot_sd: float, rng: np.random.Generator) -> Forecast:
    """The first draw is the data themselves; the others make the interval."""
    values = [_at(draws[0], depth, 0.0, 0.0, np.zeros(2))]
    for model in draws[1:]:
        noise, slow = float(rng.normal()), float(rng.normal()) * boot_sd
        values.append(_at(model, depth, noise, slow, rng.normal(size=2)))
    tau, step, rate = values[0][0], values[0][1], values[0][2]
    speeds = sorted(r for _, s, r in values[1:] if s > 0)
    if step <= 0 or len(speeds) < RESAMPLES * 0.95:
        return Forecast(depth, tau, None, None, None, None, None, None, ("not_identified:step",))
    taus = sorted(v[0] for v in values[1:])
    ends = [(v[int(0.025 * len(v))], v[int(0.975 * len(v)) - 1]) for v in (taus, speeds)]
    return Forecast(depth, tau, *ends[0], step, rate, *ends[1], ())


@dataclass(frozen=True, slots=True)
class _Fitted:
    conditional: tuple[float, ...]
    mean: tuple[float, float]
    slope: float
    spread: float
    """Between prompts, of log tau of one request set: what a new arm's sampling adds."""
    undrafted: float
    """Steps without a draft, per draft, of the deepest arm."""


def _model(tables: Mapping[int, Mapping[str, Sequence[RequestRow]]], blocks: Sequence[str]) -> _Fitted:
    deepest = max(tables)
    kept = [r for b in blocks for r in tables[deepest][b]]
    if any(r.accept_pos is None for r in kept):
        drafts = sum(r.drafts or 0 for r in kept)
        tau = 1 + sum(r.accepted or 0 for r in kept) / drafts
        return _stepped(tables, blocks, (_constant(min(tau, deepest + 1.0), deepest),) * deepest)
    hits = [0] * deepest
    for r in kept:
        for i, v in enumerate((r.accept_pos or ())[:deepest]):
            hits[i] += v
    drafts = sum(r.drafts or 0 for r in kept)
    before = [drafts, *hits[:-1]]
    conditional = tuple(min(1.0, h / b) if b else 0.0 for h, b in zip(hits, before, strict=True))
    return _stepped(tables, blocks, conditional)


def _stepped(
    tables: Mapping[int, Mapping[str, Sequence[RequestRow]]],
    blocks: Sequence[str],
    conditional: tuple[float, ...],
) -> _Fitted:
    """With the line of the steps."""
    deepest = max(tables)
    points = []
    for depth, table in tables.items():
        mine = [r for b in blocks for r in table[b]]
        drafts = sum(r.drafts or 0 for r in mine)
        points.append((float(depth), math.fsum(r.window_ms or 0 for r in mine) / drafts))
    x = math.fsum(p[0] for p in points) / len(points)
    y = math.fsum(p[1] for p in points) / len(points)
    slope = math.fsum((p[0] - x) * (p[1] - y) for p in points) / math.fsum((p[0] - x) ** 2 for p in points)
    per = [math.log((r.tokens_in_window or 1) / (r.drafts or 1)) for b in blocks for r in tables[deepest][b]]
    mean = math.fsum(per) / len(per)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in per) / max(1, len(per) - 1) / len(per))
    kept = [r for b in blocks for r in tables[deepest][b]]
    undrafted = sum(r.undrafted or 0 for r in kept) / sum(r.drafts or 0 for r in kept)
    return _Fitted(conditional, (x, y), slope, spread, undrafted)


def _at(m: _Fitted, depth: int, noise: float, slow: float, own: np.ndarray) -> tuple[float, float, float]:
    """Tau, step in ms, tok/s."""
    last = m.conditional[-2:]
    level, fall = sum(last) / len(last), abs(last[-1] - last[0]) if len(last) > 1 else 0.05
    tau, reach = 1.0, 1.0
    for i in range(depth):
        if i < len(m.conditional):
            c = m.conditional[i]
        else:
            beyond = i - len(m.conditional) + 1
            c = min(0.999, max(0.0, level + noise * max(fall, 0.02) * beyond))
        reach *= c
        tau += reach
    # The new arm is measured on seeds of its own: its sampling error is in the interval too.
    tau *= math.exp(float(own[0]) * m.spread)
    step = (m.mean[1] + m.slope * (depth - m.mean[0])) * math.exp(slow)
    return tau, step, 1000 * (tau + m.undrafted) / step if step else 0.0


def foresee(
    rows: Sequence[RequestRow],
    arms: Mapping[str, Speculation | None],
    names: Sequence[str],
    *,
    boot_sd: float = UNSEEN_BOOT_SD,
) -> tuple[list[Forecast], float | None]:
    """Forecasts of the named arms, one each, and the best rate (tok/s) of the arms that have rows.

    arms: of one ladder and workload, by name, with their `speculation`. rows: valid ones at concurrency 1. Arms of
    simulated acceptance say nothing of the others: neither their acceptance nor their rate is one to reach.
    """
    arms = {n: s for n, s in arms.items() if n in names or s is None or s.simulated_acceptance is None}
    ran = {r.arm for r in rows}
    drafters = [
        Drafter(
            name,
            s.method if s is not None and s.depth else None,
            s.depth if s is not None and s.depth else None,
        )
        for name, s in arms.items()
        if name in ran and name not in names
    ]
    depths = [(s.depth if (s := arms.get(name)) is not None else 0) for name in names]
    rates = [v for name in arms if (v := aggregate(rows, name)) is not None]
    return forecast(rows, drafters, depths, boot_sd=boot_sd), max(rates, default=None)


def aggregate(rows: Sequence[RequestRow], arm: str) -> float | None:
    """Tokens over the sum of windows of one arm, tok/s; None without rows."""
    good = [r for r in rows if r.arm == arm and usable(r) and r.window_ms and r.tokens_in_window]
    window = math.fsum(r.window_ms or 0 for r in good)
    return 1000 * sum(r.tokens_in_window or 0 for r in good) / window if window > 0 else None


def mean_tau(rows: Sequence[RequestRow], arm: str) -> float | None:
    """1 + accepted over drafts of one arm; None without drafts."""
    good = [r for r in rows if r.arm == arm and usable(r) and r.drafts and r.accepted is not None]
    drafts = sum(r.drafts or 0 for r in good)
    return 1 + sum(r.accepted or 0 for r in good) / drafts if drafts else None


def none_can_win(forecasts: Sequence[Forecast], best_tok_s: float) -> bool | None:
    """Whether no forecast depth reaches the best rate so far within its interval; None where one is unknown."""
    if not forecasts or any(f.tok_s_hi is None for f in forecasts):
        return None
    return all((f.tok_s_hi or 0.0) < best_tok_s for f in forecasts)


def forecast_json(f: Forecast) -> dict[str, Any]:
    """As stored and printed."""
    return {
        "depth": f.depth, "tau": f.tau, "tau_lo": f.tau_lo, "tau_hi": f.tau_hi, "step_ms": f.step_ms,
        "tok_s": f.tok_s, "tok_s_lo": f.tok_s_lo, "tok_s_hi": f.tok_s_hi, "reasons": list(f.reasons),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Score:
    """One forecast against what came."""

    depth: int
    quantity: str
    said: float
    lo: float
    hi: float
    came: float

    @property
    def inside(self) -> bool:
        return self.lo <= self.came <= self.hi


def score(said: Mapping[str, Any], tau: float | None, tok_s: float | None) -> list[Score]:
    """Both quantities of one stored forecast; what it did not say is not scored."""
    found = []
    for quantity, came in (("tau", tau), ("tok_s", tok_s)):
        value, lo, hi = said.get(quantity), said.get(f"{quantity}_lo"), said.get(f"{quantity}_hi")
        if came is not None and value is not None and lo is not None and hi is not None:
            found.append(Score(int(said["depth"]), quantity, float(value), float(lo), float(hi), came))
    return found
