"""From statistics to a word: one verdict per comparison and metric, then the family's adjustment."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from campaign.analysis.bootstrap import CLAIMS_FROM, bca
from campaign.analysis.estimate import Estimate, holm, ratio
from campaign.analysis.model import Verdict, VerdictWord
from campaign.analysis.pairs import PairStats
from campaign.plan.model import Comparison
from campaign.spec.models import Metric

ALPHA = 0.05
HIGHER_IS_FASTER: frozenset[Metric] = frozenset({"decode_tok_s"})


@dataclass(frozen=True, slots=True)
class Context:
    """What a verdict says beside its statistics."""

    comparison: Comparison
    session: str
    design: str
    metric: Metric
    level: float
    fatal: tuple[str, ...]
    notes: tuple[str, ...]
    usd: float | None


def direction(metric: Metric, log_ratio: float) -> VerdictWord:
    """The word for b against a."""
    if metric == "accept_len":
        return "higher" if log_ratio > 0 else "lower"
    return "faster" if (log_ratio > 0) == (metric in HIGHER_IS_FASTER) else "slower"


def word(kind: str, way: VerdictWord, *, differs: bool | None, equivalent: bool | None) -> VerdictWord:
    """Precedence: a null or an A/A is asked for equivalence first, any other pair for a difference."""
    if kind in {"null", "aa"}:
        return "equivalent" if equivalent else way if differs else "unresolved"
    return way if differs else "equivalent" if equivalent else "unresolved"


def verdict(stats: PairStats, about: Context) -> Verdict:
    """One verdict, unadjusted.

    `invalid` goes first; what was measured is printed all the same. Without a boot standard deviation, and
    without spread, nothing is claimed.
    """
    c, limit = about.comparison, math.log1p(about.comparison.margin)
    full = stats.full
    fatal = set(about.fatal)
    partial = "partial" in about.notes
    left_out = "stopped_by_forecast" in about.notes
    if "too_few_blocks" in stats.reasons and not partial and not left_out:
        fatal.add("too_few_blocks")
    differs = equivalent = None
    p = p_tost = None
    if full is not None:
        p, p_tost = full.p_zero(), full.p_equivalent(limit)
        differs, equivalent = p < 1 - about.level, p_tost < ALPHA
    said: VerdictWord = "unresolved"
    if fatal:
        said = "invalid"
    elif not partial and stats.mean is not None:
        said = word(c.kind, direction(about.metric, stats.mean), differs=differs, equivalent=equivalent)
    lo, hi = _ratios(full, about.level)
    again = bca([value for _, value in stats.blocks], about.level) if stats.boots_only is not None else None
    lo_only, hi_only = _ratios(stats.boots_only, about.level)
    lo90, hi90 = _ratios(full, 1 - 2 * ALPHA)
    return Verdict(
        pair=c.pair,
        kind=c.kind,
        family=c.family,
        session=about.session,
        workload=c.workload,
        concurrency=c.concurrency,
        a=c.a,
        b=c.b,
        metric=about.metric,
        primary=about.metric == c.primary,
        ratio=ratio(stats.mean),
        lo=lo,
        hi=hi,
        ci_level=about.level,
        lo_boots_only=lo_only,
        hi_boots_only=hi_only,
        lo90=lo90,
        hi90=hi90,
        n=stats.n,
        boots=stats.boots,
        df=None if full is None else full.df(about.level),
        boot_sd=stats.boot.sd,
        boot_sd_source=stats.boot.source,
        differs=differs,
        equivalent=equivalent,
        margin=c.margin,
        verdict=said,
        verdict_adjusted=None,
        reasons=tuple(sorted(fatal | set(about.notes) | (set() if left_out else set(stats.reasons)))),
        usd=about.usd,
        design=about.design,
        p=p,
        p_tost=p_tost,
        blocks=stats.blocks,
        ratio_median=ratio(stats.median),
        boot_sd_overturn=stats.overturn_sd,
        supposed=tuple(
            (sd, *_ratios(found, about.level), found.p_zero() < 1 - about.level)
            for sd, found in stats.supposed
        ),
        margin_smallest=_margin(full),
        lo_bootstrap=None if again is None else ratio(again[0]),
        hi_bootstrap=None if again is None else ratio(again[1]),
        bootstrap_claims=again is not None and len(stats.blocks) >= CLAIMS_FROM,
    )


def adjust(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Holm over each declared family (session and family name), on its primary metric; order is kept.

    Both tests are adjusted, the one for a difference and the one for equivalence; `invalid` and what had no
    p-value stay what they are and still count as members.
    """
    families: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        if v.primary:
            families[v.session, v.family].append(v)
    words: dict[tuple[str, str, str], tuple[VerdictWord, float | None]] = {}
    for (session, _), members in families.items():
        differ = holm({v.pair: v.p for v in members})
        same = holm({v.pair: v.p_tost for v in members})
        for v in members:
            adjusted = v.said_adjusted or v.verdict
            if v.verdict != "invalid" and "partial" not in v.reasons and v.p is not None and v.ratio:
                adjusted = word(
                    v.kind,
                    direction(v.metric, v.ratio - 1),
                    differs=differ[v.pair] < 1 - v.ci_level,
                    equivalent=same[v.pair] < ALPHA,
                )
            words[session, v.pair, v.metric] = (adjusted, differ[v.pair] if v.p is not None else None)
    out = []
    for v in verdicts:
        if v.primary:
            adjusted, p = words[v.session, v.pair, v.metric]
            out.append(replace(v, verdict_adjusted=adjusted, p_adjusted=p))
        else:
            out.append(v)
    return out


def _margin(estimate: Estimate | None) -> float | None:
    """The margin whose limits the 90 % interval just touches."""
    if estimate is None:
        return None
    return math.expm1(max(abs(end) for end in estimate.interval(1 - 2 * ALPHA)))


def _ratios(estimate: Estimate | None, level: float) -> tuple[float | None, float | None]:
    if estimate is None:
        return None, None
    lo, hi = estimate.interval(level)
    low, high = ratio(lo), ratio(hi)
    return (low, high) if low is not None and high is not None else (None, None)
