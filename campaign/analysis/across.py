"""Two arms that were never in one session: refused as a pair, and what can be said of them all the same.

Nodes, boots and days lie between sessions, so a difference of arms cannot be told from them by design. What is
reported is a separate result under its own name, with the session variance in it:

    V = s_d^2 / n  +  2 * session_sd^2          (one session an arm; a session's boots are inside it)

`session_sd` is estimated from arms of one hash that stand in several sessions, or declared. Unknown, no
difference is claimed and the interval of these two sessions alone is given, labelled so, with its equivalence
test: a statement about these two sessions and no others.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from campaign.analysis.estimate import Estimate, ratio
from campaign.analysis.pairs import KNOWN_DF
from campaign.analysis.validity import MIN_BLOCKS
from campaign.analysis.variance import MEASURED, boots_of, usable
from campaign.analysis.verdicts import ALPHA, direction
from campaign.plan.model import ArmPlan
from campaign.plan.power import METRICS
from campaign.spec.models import Metric
from campaign.store.row import RequestRow

CAVEAT = "not a pair: node, day and boots differ with the arm"


@dataclass(frozen=True, slots=True)
class Side:
    """One arm in one session of one run."""

    run: str
    session: str
    arm: ArmPlan
    rows: tuple[RequestRow, ...]


@dataclass(frozen=True, slots=True)
class SessionSd:
    """Between-session standard deviation on the log scale, what the sessions' boots add included."""

    sd: float | None
    df: float
    source: str
    """`estimated`, `declared` or `unknown`."""


@dataclass(frozen=True, slots=True)
class Across:
    """One metric of one comparison across sessions. Ratios are b/a."""

    a: Side
    b: Side
    matched_by: str
    """`arms`, `hash`, `name`, `series` or `nearest`."""
    changed: Mapping[str, tuple[Any, Any]]
    """Fields in which the configurations differ: (a, b)."""
    workload: str
    concurrency: int
    metric: Metric
    n: int
    ratio: float | None
    lo: float | None
    hi: float | None
    lo90: float | None
    hi90: float | None
    lo_these_sessions: float | None
    hi_these_sessions: float | None
    lo90_these_sessions: float | None
    hi90_these_sessions: float | None
    session_sd: SessionSd
    margin: float
    p_tost: float | None
    p_tost_these_sessions: float | None
    margin_smallest: float | None
    """The smallest margin at which the equivalence test that decides would pass."""
    differs: bool | None
    equivalent: bool | None
    """With the session variance where it is known; of these sessions alone where it is not."""
    equivalent_these_sessions: bool | None
    verdict: str
    reasons: tuple[str, ...]


def changed(a: ArmPlan, b: ArmPlan) -> dict[str, tuple[Any, Any]]:
    """Dotted fields in which two configurations differ."""
    left, right = (_flat(x.config.model_dump(mode="json", exclude={"estimate", "from_"})) for x in (a, b))
    return {
        key: (left.get(key), right.get(key))
        for key in dict.fromkeys((*left, *right))
        if left.get(key) != right.get(key)
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            out |= _flat(item, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = item
    return out


def match(
    a: Sequence[ArmPlan], b: Sequence[ArmPlan], *, series: bool, given: Mapping[str, str] | None = None
) -> list[tuple[ArmPlan, ArmPlan, str]]:
    """Which arm of one run stands against which of the other.

    `given` first; then equal hashes; then equal names (`series` where both runs carry one series); then an arm
    left over whose configuration differs in exactly one field from exactly one arm left over.
    """
    left, right = {x.name: x for x in a}, {x.name: x for x in b}
    found = [(left[x], right[y], "arms") for x, y in (given or {}).items() if x in left and y in right]
    if given:
        return found

    def take(pairs: Iterable[tuple[ArmPlan, ArmPlan]], how: str) -> None:
        for x, y in pairs:
            if x.name in left and y.name in right:
                found.append((left.pop(x.name), right.pop(y.name), how))

    take([(x, y) for x in list(left.values()) for y in list(right.values()) if x.hash == y.hash], "hash")
    same_name = [(x, right[name]) for name, x in left.items() if name in right]
    take(same_name, "series" if series else "name")
    near = [(x, y) for x in left.values() for y in right.values() if len(changed(x, y)) == 1]
    once = [
        (x, y) for x, y in near
        if sum(p is x for p, _ in near) == 1 and sum(q is y for _, q in near) == 1
    ]  # fmt: skip
    take(once, "nearest")
    return found


def session_sd(rows: Iterable[RequestRow], metric: Metric) -> SessionSd:
    """From arms of one hash on one workload in two or more sessions, compared on the slots they share.

    Every two sessions of an arm give one difference of means with its own variance within; what is left is
    twice the session variance. Pooled with one degree of freedom for each session beyond an arm's first.
    """
    cells: dict[tuple[str, str], dict[str, list[RequestRow]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if usable(row) and row.concurrency == 1:
            cells[row.arm_hash, row.workload][f"{row.run}/{row.session}"].append(row)
    total, df = 0.0, 0
    for sessions in cells.values():
        if len(sessions) < 2:
            continue
        found = []
        for x, y in combinations(sorted(sessions), 2):
            d = _differences(sessions[x], sessions[y], metric)
            if len(d) >= 2:
                found.append((float(np.mean(d)) ** 2 - float(np.var(d, ddof=1)) / len(d)) / 2)
        if found:
            own = len(sessions) - 1
            total, df = total + own * float(np.mean(found)), df + own
    if not df:
        return SessionSd(None, 0.0, "unknown")
    return SessionSd(math.sqrt(max(0.0, total / df)), float(df), "estimated")


def _differences(a: Sequence[RequestRow], b: Sequence[RequestRow], metric: Metric) -> list[float]:
    """Log ratios b/a by slot, over the slots both have; boots of a session averaged."""
    left, right = _by_slot(a, metric), _by_slot(b, metric)
    return [right[k] - left[k] for k in sorted(left.keys() & right.keys())]


def _by_slot(rows: Sequence[RequestRow], metric: Metric) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for boot in boots_of([r for r in rows if r.phase in MEASURED], metric):
        for block, value in boot.values.items():
            found[block].append(value)
    return {k: math.fsum(v) / len(v) for k, v in found.items()}


def compare_across(
    a: Side,
    b: Side,
    how: str,
    *,
    workload: str,
    concurrency: int = 1,
    margin: float,
    level: float = 0.95,
    sds: Mapping[Metric, SessionSd],
    metrics: Sequence[Metric] = METRICS,
) -> list[Across]:
    """Every metric of one comparison across sessions, on the slots of one workload that both sides have."""
    mine = [r for r in a.rows if r.workload == workload and r.concurrency == concurrency and usable(r)]
    other = [r for r in b.rows if r.workload == workload and r.concurrency == concurrency and usable(r)]
    return [
        _one(a, b, how, mine, other, m, workload=workload, concurrency=concurrency, margin=margin, level=level,
             sd=sds.get(m, SessionSd(None, 0.0, "unknown")))
        for m in metrics
    ]  # fmt: skip


def _one(
    a: Side,
    b: Side,
    how: str,
    mine: Sequence[RequestRow],
    other: Sequence[RequestRow],
    metric: Metric,
    *,
    workload: str,
    concurrency: int,
    margin: float,
    level: float,
    sd: SessionSd,
) -> Across:
    d = np.array(_differences(mine, other, metric))
    fatal = _fatal(mine, other, metric, len(d))
    reasons = ["across_sessions", *(["session_sd_unknown"] if sd.sd is None else [])]
    mean = float(d.mean()) if len(d) else None
    these, whole = _estimates(d, sd)
    if these is None and mean is not None:
        reasons.append("no_spread" if len(d) >= 2 else "too_few_blocks")
    limit = math.log1p(margin)
    same_these = these.p_equivalent(limit) < ALPHA if these is not None else None
    decides = whole or these
    differs = whole.p_zero() < 1 - level if whole is not None else None
    equivalent = decides.p_equivalent(limit) < ALPHA if decides is not None else None
    said = "unresolved"
    if fatal:
        said = "invalid"
    elif mean is not None:
        # Across sessions nothing but equality is asked for first: a difference may be the node's.
        said = "equivalent" if equivalent else direction(metric, mean) if differs else "unresolved"
    ends = decides.interval(1 - 2 * ALPHA) if decides is not None else None
    return Across(
        a=a, b=b, matched_by=how, changed=changed(a.arm, b.arm), workload=workload, concurrency=concurrency,
        metric=metric, n=len(d), ratio=ratio(mean),
        lo=_end(whole, level, 0), hi=_end(whole, level, 1),
        lo90=_end(whole, 1 - 2 * ALPHA, 0), hi90=_end(whole, 1 - 2 * ALPHA, 1),
        lo_these_sessions=_end(these, level, 0), hi_these_sessions=_end(these, level, 1),
        lo90_these_sessions=_end(these, 1 - 2 * ALPHA, 0), hi90_these_sessions=_end(these, 1 - 2 * ALPHA, 1),
        session_sd=sd, margin=margin,
        p_tost=whole.p_equivalent(limit) if whole is not None else None,
        p_tost_these_sessions=these.p_equivalent(limit) if these is not None else None,
        margin_smallest=math.expm1(max(abs(ends[0]), abs(ends[1]))) if ends is not None else None,
        differs=differs, equivalent=equivalent, equivalent_these_sessions=same_these, verdict=said,
        reasons=tuple(sorted({*reasons, *fatal})),
    )  # fmt: skip


def _fatal(a: Sequence[RequestRow], b: Sequence[RequestRow], metric: Metric, n: int) -> set[str]:
    """What makes the comparison invalid."""
    broken = {
        "too_few_blocks": n < MIN_BLOCKS,
        "mixed_simulated": len({r.simulated for r in (*a, *b)}) > 1,
        "mixed_rate_definition": metric != "ttft_ms" and len({r.rate_definition for r in (*a, *b)}) > 1,
        "unequal_lengths": metric != "ttft_ms" and _unequal(a, b),
    }
    return {code for code, bad in broken.items() if bad}


def _estimates(d: np.ndarray, sd: SessionSd) -> tuple[Estimate | None, Estimate | None]:
    """(of these sessions, with the session variance); None without spread or where it is unknown."""
    n = len(d)
    if n < 2 or float(d.max() - d.min()) <= 1e-12:
        return None, None
    mean, within = float(d.mean()), float(d.var(ddof=1)) / n
    these = Estimate(mean, ((math.sqrt(within), n - 1.0),))
    if sd.sd is None:
        return these, None
    added = 2 * sd.sd**2
    total = within + added
    df = total**2 / (within**2 / (n - 1) + added**2 / sd.df) if total > 0 else sd.df
    errors = [(math.sqrt(total), max(df, min(sd.df, n - 1.0)))]
    if sd.df < KNOWN_DF and added > 0:
        errors.append((math.sqrt(added), sd.df))
    return these, Estimate(mean, tuple(errors))


def _unequal(a: Sequence[RequestRow], b: Sequence[RequestRow]) -> bool:
    lengths: dict[int, set[int]] = defaultdict(set)
    both = {r.slot for r in a} & {r.slot for r in b}
    for row in (*a, *b):
        if row.slot in both and row.completion_tokens is not None:
            lengths[row.slot].add(row.completion_tokens)
    return any(len(v) > 1 for v in lengths.values())


def _end(estimate: Estimate | None, level: float, side: int) -> float | None:
    return None if estimate is None else ratio(estimate.interval(level)[side])


def across_json(x: Across) -> dict[str, Any]:
    """The entry of `across` in JSON."""
    return {
        "a": {"run": x.a.run, "session": x.a.session, "arm": x.a.arm.name, "hash": x.a.arm.hash},
        "b": {"run": x.b.run, "session": x.b.session, "arm": x.b.arm.name, "hash": x.b.arm.hash},
        "matched_by": x.matched_by,
        "changed": {k: {"a": v[0], "b": v[1]} for k, v in x.changed.items()},
        "workload": x.workload,
        "concurrency": x.concurrency,
        "metric": x.metric,
        "n": x.n,
        "ratio": x.ratio,
        "lo": x.lo,
        "hi": x.hi,
        "lo90": x.lo90,
        "hi90": x.hi90,
        "lo_these_sessions": x.lo_these_sessions,
        "hi_these_sessions": x.hi_these_sessions,
        "lo90_these_sessions": x.lo90_these_sessions,
        "hi90_these_sessions": x.hi90_these_sessions,
        "session_sd": x.session_sd.sd,
        "session_sd_df": x.session_sd.df if x.session_sd.sd is not None else None,
        "session_sd_source": x.session_sd.source,
        "margin": x.margin,
        "p_tost": x.p_tost,
        "p_tost_these_sessions": x.p_tost_these_sessions,
        "margin_smallest": x.margin_smallest,
        "differs": x.differs,
        "equivalent": x.equivalent,
        "equivalent_these_sessions": x.equivalent_these_sessions,
        "verdict": x.verdict,
        "caveat": CAVEAT if x.session_sd.sd is not None else f"{CAVEAT}; the session variance is unknown, so this speaks of these sessions only",
        "reasons": list(x.reasons),
    }  # fmt: skip
