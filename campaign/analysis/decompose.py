"""What a speculative step is made of: bare step, verification by width, drafting, the rest.

    verify(w) = t1 + overhead + slope * (w - 1)          from a weights-free drafter, whose drafting costs nothing
    step      = verify(w) + depth * draft                for a drafter with weights, at the width it verifies

Two estimates of every part are kept apart. `*_as_published`: median over requests of window over drafts, 1000 over the
aggregate rate. The others are ratios of sums over requests, so that drafts weigh alike. Intervals are seeded
percentile bootstraps over prompts: each arm's own prompts (`slope_lo`) and prompts drawn once for all arms (`paired`).
They hold these boots only.

A part that breaks what must hold is not a number: verify <= step, draft >= 0, tokens per step <= depth + 1, acceptance that
does not rise with position. It is None, with `not_identified:WHY`.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from campaign.analysis.describe import median
from campaign.analysis.estimate import critical
from campaign.analysis.variance import usable
from campaign.store.row import RequestRow

RESAMPLES = 2000
_FREE = ("ngram", "suffix", "lookup", "prompt-lookup", "prompt_lookup")


def weights_free(method: str) -> bool:
    """Whether a method drafts from text alone."""
    return method.lower().startswith(_FREE)


@dataclass(frozen=True, slots=True)
class Drafter:
    """An arm as a decomposition sees it."""

    name: str
    method: str | None
    """None: no speculation."""
    depth: int | None


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; None where it is not identified."""

    value: float | None
    lo: float | None
    hi: float | None


@dataclass(frozen=True, slots=True)
class Verified:
    """One drafting arm."""

    arm: str
    method: str
    depth: int
    width: float | None
    """Mean tokens verified per drafted step, the bonus token included."""
    step_ms: Interval
    """Time of a drafted step, drafting included."""
    step_ms_as_published: float | None
    """Median over requests of window over drafts."""
    tau_as_published: float | None
    """1 + accepted / drafts."""
    tau_completion: float | None
    """Completion tokens over verify calls: the other published variant."""
    draft_ms: float | None
    """Of one drafted token; arms with weights only."""
    conditional: tuple[Interval, ...]
    """Acceptance at a position given that all before it were accepted."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """One session's arms on one workload."""

    session: str
    workload: str
    t1: Interval
    t1_as_published: float | None
    arms: tuple[Verified, ...]
    method: str | None
    """The weights-free drafter that verify cost comes from."""
    slope: Interval
    """ms per further verified token."""
    slope_as_published: Interval
    slope_paired: Interval
    """`slope_as_published` with prompts drawn once for both widths."""
    overhead_ms: float | None
    reasons: tuple[str, ...]


def decompose(
    rows: Sequence[RequestRow], *, session: str, workload: str, arms: Sequence[Drafter]
) -> Decomposition | None:
    """From the rows of one session and workload at concurrency 1; None where no arm drafts."""
    mine: dict[str, list[RequestRow]] = defaultdict(list)
    for r in sorted(rows, key=lambda r: r.key):
        if (
            usable(r)
            and r.session == session
            and r.workload == workload
            and r.concurrency == 1
            and r.window_ms
        ):
            mine[r.arm].append(r)
    drafting = [a for a in arms if a.method is not None and a.depth and mine.get(a.name)]
    if not drafting:
        return None
    base = next((mine[a.name] for a in arms if a.method is None and mine.get(a.name)), [])
    t1 = _ratio_interval(base, _steps) if base else Interval(None, None, None)
    free: dict[str, list[Drafter]] = defaultdict(list)
    for a in drafting:
        if weights_free(str(a.method)):
            free[str(a.method)].append(a)
    method = next((m for m, group in sorted(free.items()) if len(_widths(group, mine)) > 1), None)
    reasons = [] if base else ["no_base"]
    slope = published = paired = Interval(None, None, None)
    overhead = None
    if method is None:
        reasons.append("one_width" if free else "not_identified:no_weights_free_drafter")
    else:
        tables = [mine[a.name] for a in sorted(free[method], key=lambda a: a.depth or 0)]
        slope = _interval(tables, lambda t: _slope(t, _sum_verify))
        published = _interval(tables, lambda t: _slope(t, _median_verify))
        paired = _interval(tables, lambda t: _slope(t, _median_verify), paired=True)
        if t1.value is not None and slope.value is not None:
            at_one = _line(tables, _sum_verify, 1.0)
            overhead = None if at_one is None else at_one - t1.value
            if overhead is not None and overhead < 0:
                overhead = None
                reasons.append("not_identified:overhead_negative")
    line = {a.name: a for a in free.get(method or "", [])}
    verified = [
        _verified(a, mine[a.name], [mine[n] for n in line] if len(line) > 1 else [])
        for a in sorted(drafting, key=lambda a: (a.method or "", a.depth or 0, a.name))
    ]
    rate = _ratio(base, _tokens, _window) if base else None
    return Decomposition(
        session, workload, t1, 1 / rate if rate else None, tuple(verified), method, slope, published, paired,
        overhead, tuple(reasons),
    )  # fmt: skip


def _widths(group: Sequence[Drafter], mine: Mapping[str, Sequence[RequestRow]]) -> set[float]:
    return {round(w, 6) for a in group if (w := _width(mine[a.name])) is not None}


def _verified(arm: Drafter, rows: Sequence[RequestRow], line: Sequence[Sequence[RequestRow]]) -> Verified:
    assert arm.depth is not None
    reasons: list[str] = []
    width = _width(rows)
    drafts = sum(r.drafts or 0 for r in rows)
    accepted = None if any(r.accepted is None for r in rows) else sum(r.accepted or 0 for r in rows)
    tau = 1 + accepted / drafts if accepted is not None and drafts else None
    completion = sum(r.completion_tokens or 0 for r in rows) / drafts if drafts else None
    if width is None:
        reasons.append("drafted_not_counted")
    honoured = width is None or width <= arm.depth + 1 + 1e-9
    if not honoured:
        reasons.append("depth_not_honoured")
    if tau is not None and honoured and tau > arm.depth + 1 + 1e-9:
        reasons.append("not_identified:accept_len_above_width")
    step = _ratio_interval(rows, _drafts) if drafts else Interval(None, None, None)
    conditional = _conditional(rows)
    shares = [c.value for c in conditional[1:] if c.value is not None]
    if any(v > 1 + 1e-9 for v in shares):
        reasons.append("not_identified:accept_pos_increases")
    draft = None
    if not weights_free(str(arm.method)):
        verify = _line(line, _sum_verify, width) if line and width is not None else None
        if verify is None:
            reasons.append("not_identified:no_verify_at_this_width")
        elif step.value is not None and verify > step.value:
            # The drafter would take less than no time: the two arms do not share a verify cost.
            reasons.append("not_identified:verify_above_step")
        elif step.value is not None:
            draft = (step.value - verify) / arm.depth
    return Verified(
        arm.name, str(arm.method), arm.depth, width, step, _median_verify(rows), tau, completion, draft, conditional,
        tuple(reasons),
    )  # fmt: skip


def _conditional(rows: Sequence[RequestRow]) -> tuple[Interval, ...]:
    """Position by position, delete-one-prompt jackknife, limits inside 0 and 1."""
    if not rows or any(r.accept_pos is None or not r.drafts for r in rows):
        return ()
    blocks: dict[str, list[RequestRow]] = defaultdict(list)
    for r in rows:
        blocks[r.block].append(r)
    depth = max(len(r.accept_pos or ()) for r in rows)

    def share(kept: Sequence[RequestRow], i: int) -> float | None:
        def hits(j: int) -> int:
            return sum((r.accept_pos or ())[j] if j < len(r.accept_pos or ()) else 0 for r in kept)

        of = sum(r.drafts or 0 for r in kept) if i == 0 else hits(i - 1)
        return hits(i) / of if of else None

    found = []
    for i in range(depth):
        value = share(rows, i)
        left = [share([r for b, x in blocks.items() if b != out for r in x], i) for out in blocks]
        known = [x for x in left if x is not None]
        if value is None or len(known) < 3 or len(known) < len(left):
            found.append(Interval(value, None, None))
            continue
        n = len(known)
        mean = math.fsum(known) / n
        se = math.sqrt((n - 1) / n * math.fsum((x - mean) ** 2 for x in known))
        half = critical(0.95, n - 1) * se
        found.append(Interval(value, max(0.0, value - half), min(1.0, value + half)))
    return tuple(found)


# --- statistics of a set of rows

Rows = Sequence[RequestRow]


def _window(r: RequestRow) -> float:
    return r.window_ms or 0.0


def _steps(r: RequestRow) -> float:
    return float(r.steps or 0)


def _drafts(r: RequestRow) -> float:
    return float(r.drafts or 0)


def _tokens(r: RequestRow) -> float:
    return float(r.tokens_in_window or 0)


def _ratio(
    rows: Rows, top: Callable[[RequestRow], float], bottom: Callable[[RequestRow], float]
) -> float | None:
    below = math.fsum(bottom(r) for r in rows)
    return math.fsum(top(r) for r in rows) / below if below > 0 else None


def _width(rows: Rows) -> float | None:
    drafts = sum(r.drafts or 0 for r in rows)
    if not drafts or any(r.drafted is None for r in rows):
        return None
    return 1 + sum(r.drafted or 0 for r in rows) / drafts


def _sum_verify(rows: Rows) -> float | None:
    # Undrafted steps are left in where a drafter skipped none; where it did, `speculation` takes them out.
    return _ratio(rows, _window, _drafts)


def _median_verify(rows: Rows) -> float | None:
    return median([r.window_ms / r.drafts for r in rows if r.window_ms and r.drafts])


def _points(tables: Sequence[Rows], statistic: Callable[[Rows], float | None]) -> list[tuple[float, float]]:
    found = [(_width(t), statistic(t)) for t in tables]
    return [(w, v) for w, v in found if w is not None and v is not None]


def _fit(points: Sequence[tuple[float, float]]) -> tuple[float, float, float] | None:
    """(mean width, mean value, slope); None of one width."""
    if len(points) < 2:
        return None
    x = math.fsum(p[0] for p in points) / len(points)
    y = math.fsum(p[1] for p in points) / len(points)
    square = math.fsum((p[0] - x) ** 2 for p in points)
    if square < 1e-12:
        return None
    return x, y, math.fsum((p[0] - x) * (p[1] - y) for p in points) / square


def _slope(tables: Sequence[Rows], statistic: Callable[[Rows], float | None]) -> float | None:
    fit = _fit(_points(tables, statistic))
    return None if fit is None else fit[2]


def _line(tables: Sequence[Rows], statistic: Callable[[Rows], float | None], at: float) -> float | None:
    fit = _fit(_points(tables, statistic))
    return None if fit is None else fit[1] + fit[2] * (at - fit[0])


def _ratio_interval(rows: Rows, bottom: Callable[[RequestRow], float]) -> Interval:
    """Window over a count, summed, with a percentile bootstrap over prompts; all resamples at once."""
    value = _ratio(rows, _window, bottom)
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for r in rows:
        sums[r.block][0] += _window(r)
        sums[r.block][1] += bottom(r)
    if value is None or len(sums) < 3:
        return Interval(value, None, None)
    table = np.array(list(sums.values()))
    pick = np.random.default_rng(20260701).integers(0, len(table), (RESAMPLES, len(table)))
    drawn = table[pick].sum(axis=1)
    lo, hi = (float(q) for q in np.quantile(drawn[:, 0] / np.maximum(drawn[:, 1], 1e-12), [0.025, 0.975]))
    return Interval(value, lo, hi)


def _interval(
    tables: Sequence[Rows], statistic: Callable[[Sequence[Rows]], float | None], *, paired: bool = False
) -> Interval:
    """Percentile bootstrap over prompts; without limits below 3 prompts."""
    value = statistic(tables)
    blocks = [{b: [r for r in t if r.block == b] for b in dict.fromkeys(r.block for r in t)} for t in tables]
    shared = [b for b in blocks[0] if all(b in other for other in blocks[1:])]
    names = [shared] * len(tables) if paired else [list(b) for b in blocks]
    if value is None or any(len(n) < 3 for n in names):
        return Interval(value, None, None)
    rng = np.random.default_rng(20260701)
    draws = []
    for _ in range(1000):
        once = rng.integers(0, len(names[0]), len(names[0])) if paired else None
        drawn = []
        for own, of in zip(names, blocks, strict=True):
            pick = once if once is not None else rng.integers(0, len(own), len(own))
            drawn.append(list(itertools.chain.from_iterable(of[own[i]] for i in pick)))
        found = statistic(drawn)
        if found is not None:
            draws.append(found)
    if len(draws) < 100:
        return Interval(value, None, None)
    lo, hi = (float(q) for q in np.quantile(draws, [0.025, 0.975]))
    return Interval(value, lo, hi)


def _shown(i: Interval) -> dict[str, float | None]:
    return {"value": i.value, "lo": i.lo, "hi": i.hi}


def decomposition_json(d: Decomposition) -> dict[str, Any]:
    """The entry of `speculation.decomposition` in JSON."""
    return {
        "session": d.session,
        "workload": d.workload,
        "t1_ms": _shown(d.t1),
        "t1_ms_as_published": d.t1_as_published,
        "method": d.method,
        "verify_slope_ms": _shown(d.slope),
        "verify_slope_ms_as_published": _shown(d.slope_as_published),
        "verify_slope_ms_paired": _shown(d.slope_paired),
        "overhead_ms": d.overhead_ms,
        "reasons": list(d.reasons),
        "arms": [
            {
                "arm": a.arm,
                "method": a.method,
                "depth": a.depth,
                "verified_tokens": a.width,
                "drafted_step_ms": _shown(a.step_ms),
                "verify_ms_as_published": a.step_ms_as_published,
                "tau_as_published": a.tau_as_published,
                "tau_completion_over_calls": a.tau_completion,
                "draft_ms": a.draft_ms,
                "accept_conditional": [_shown(c) for c in a.conditional],
                "reasons": list(a.reasons),
            }
            for a in d.arms
        ],
    }
