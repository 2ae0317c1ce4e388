"""Two arms, one metric: the mean log ratio b/a and its interval.

Model, on logs: d[slot, round] = mu + slot + round + e, slots crossed with boots. The variance of the mean is

    V = s_d^2 / n  +  h * boot_sd^2,      h = 1/boots_a + 1/boots_b

s_d^2 is the variance of the slot means of d (n - 1 degrees of freedom): it carries what the effect itself
does between prompts and the residual of requests. The second part is what the boots do to a whole column.
Degrees of freedom after Satterthwaite, never below those of the boot part or n - 1, whichever is fewer, and
the interval is never narrower than the t interval on boot means alone; docs/STATISTICS.md has the
simulation that made these two rules.

Above concurrency 1 the block is a wave. Waves have no identity from one boot to the next, so their spread is
taken within boots.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from campaign.analysis.describe import median
from campaign.analysis.estimate import Estimate, critical
from campaign.analysis.model import BootSdSource
from campaign.analysis.serial import independent
from campaign.analysis.variance import (
    KNOWN_N,
    Boot,
    BootVariance,
    Split,
    common_blocks,
    join,
    pool,
    residents,
    split,
    varies,
)
from campaign.plan.power import Prior, satterthwaite
from campaign.spec.models import Metric

KNOWN_DF = 1e6
SUPPOSED = (0.001, 0.003, 0.01, 0.03)
"""Boot standard deviations tried where none is known: GPUs show 0.1 to 0.5 %, one CPU thread 2 to 3 %."""
SIGNED_SHARE = 0.5
"""How far below zero an estimated boot variance is believed, in shares of the residual behind a boot mean."""
_ZERO_SPREAD = 1e-12
"""Relative spread below which logs of measured values count as equal."""


@dataclass(frozen=True, slots=True)
class BootSd:
    """Between-boot standard deviation as a comparison uses it."""

    sd: float | None
    df: float
    """1e6 where it is declared, or a prior without degrees of freedom: taken as known."""
    source: BootSdSource
    ms_residual: float | None
    """Within-boot residual mean square of one arm; None where no arm was booted twice."""
    reasons: tuple[str, ...] = ()
    signed: float | None = None
    """The estimated variance before it is cut off at zero; None where it is declared or unknown."""
    n: float = KNOWN_N
    """Blocks a boot behind the estimate."""
    own_df: float = 0.0
    """Degrees of freedom of the comparison's own boots in it."""


@dataclass(frozen=True, slots=True)
class PairStats:
    """What one comparison says of one metric."""

    n: int
    """Blocks both arms have in every boot; above concurrency 1 waves per arm."""
    boots: int
    mean: float | None
    """Mean log ratio b/a."""
    median: float | None
    """Median log ratio over blocks, beside the mean: far from it when a block is far out."""
    boots_only: Estimate | None
    """Without the boot variance."""
    full: Estimate | None
    """With it; None where the boot standard deviation is unknown."""
    boot: BootSd
    overturn_sd: float | None
    """Boot sd at which the boots-only difference would stop being significant at the level asked for."""
    blocks: tuple[tuple[str, float], ...]
    reasons: tuple[str, ...]
    supposed: tuple[tuple[float, Estimate], ...] = ()
    """(boot sd, estimate with it) where the boot sd is unknown: what boot variance would do."""


@dataclass(frozen=True, slots=True)
class Pool:
    """What the rest of a session knows about boots, for one comparison."""

    resident: bool
    """Whether the comparison counts as resident: what a round does to both arms cancels."""
    own: Split | None
    """The two arms alone."""
    whole: tuple[Split, ...]
    """Every group of the session booted in the same manner, the comparison's own among them."""
    rest: tuple[Split, ...]
    """The same without the two arms."""


def pool_for(
    groups: Mapping[str, Sequence[Boot]], designs: Mapping[str, str], group: str, pair: tuple[str, str]
) -> Pool:
    """What to pool with a comparison: all boots of the session that were booted in the same manner.

    Boots apart carry what time does between rounds, so they stand in for residents where nothing else is
    there, never the other way round.
    """
    arms = [b for b in groups.get(group, ()) if b.arm in pair]
    resident = residents(arms, designs.get(group, "blocks"))
    own = split(arms, resident=resident)
    whole: dict[bool, list[Split]] = {True: [], False: []}
    rest: dict[bool, list[Split]] = {True: [], False: []}
    for name in sorted(groups):
        boots = groups[name]
        kind = residents(boots, designs.get(name, "blocks"))
        if name != group:
            found = split(boots, resident=kind)
            if found is not None:
                whole[kind].append(found)
                rest[kind].append(found)
            continue
        # A comparison with an arm that cannot vary is not resident, though its group may be: it uses its own.
        joint = split(boots, resident=kind) if kind == resident else own
        left = split([b for b in boots if b.arm not in pair], resident=kind) if kind == resident else None
        if joint is not None:
            whole[resident].append(joint)
        if left is not None:
            rest[resident].append(left)
    kind = resident and bool(whole[True])
    return Pool(resident, own, tuple(whole[kind]), tuple(rest[kind]))


def boot_sd(
    metric: Metric, session: Pool, *, declared: float | None = None, prior: Prior | None = None
) -> BootSd:
    """Which boot standard deviation a comparison carries, and from where.

    Order: declared, unless this run's own boots prove it too small (chi-square, 1 %); estimated from this
    run, joined with a prior's degrees of freedom; prior; unknown. A comparison whose own boots vary more
    than the rest (F, 1 %) stands on its own alone.
    """
    own, splits = session.own, session.whole
    found = pool(splits)
    residual = own.ms_residual if own is not None else _residual(splits)
    reasons: list[str] = []
    if own is not None and session.rest and found is not None:
        rest = pool(session.rest)
        expected = (rest.variance if rest else 0.0) + own.ms_residual / own.n
        rest_df = sum(s.df_boot for s in session.rest)
        if expected > 0 and float(special.fdtrc(own.df_boot, rest_df, own.ms_boot / expected)) < 0.01:
            found, splits = pool([own]), (own,)
            reasons.append("boot_sd_not_pooled")
    if declared is not None:
        if found is None or not _contradicts(declared, splits):
            return BootSd(declared, KNOWN_DF, "declared", residual)
        reasons.append("declared_boot_sd_too_small")
    known = prior.boot_sd.get(metric) if prior is not None and prior.source == "prior" else None
    if found is not None:
        if known is not None and prior is not None and metric in prior.boot_df and not reasons:
            before = BootVariance(
                prior.boot_signed.get(metric, known**2),
                prior.boot_df[metric],
                prior.boot_n.get(metric, found.n),
            )
            found = join([found, before], residual or 0.0) or found
        own_df = float(own.df_boot) if own is not None else 0.0
        return BootSd(
            found.sd, found.df, "estimated", residual, tuple(reasons), found.signed, found.n, own_df
        )
    if known is not None and prior is not None:
        if residual is None:
            residual = prior.residual_sd.get(metric, 0.0) ** 2
        return BootSd(
            known, prior.boot_df.get(metric, KNOWN_DF), "prior", residual,
            signed=prior.boot_signed.get(metric), n=prior.boot_n.get(metric, KNOWN_N),
        )  # fmt: skip
    return BootSd(None, 0.0, "unknown", residual, ("boot_sd_unknown",))


def _residual(splits: Sequence[Split]) -> float | None:
    df = sum(s.df_residual for s in splits)
    return math.fsum(s.ms_residual * s.df_residual for s in splits) / df if df else None


def _contradicts(declared: float, splits: Sequence[Split]) -> bool:
    """Whether the boots seen are too far apart for the declared value, at the 1 % level."""
    scaled = 0.0
    for s in splits:
        expected = declared**2 + s.ms_residual / s.n
        if expected <= 0:
            return s.ms_boot > 0
        scaled += s.df_boot * s.ms_boot / expected
    return float(special.chdtrc(sum(s.df_boot for s in splits), scaled)) < 0.01


def compare(
    a: Sequence[Boot],
    b: Sequence[Boot],
    *,
    boot: BootSd,
    resident: bool,
    waves: bool = False,
    serial: bool = False,
    level: float = 0.95,
) -> PairStats:
    """The mean log ratio b/a of two arms' boots, with the interval of the model above.

    resident: only rounds that hold both arms count. waves: blocks are nested in boots.
    serial: they are batches of a steady or open loop; where they are not independent, the boot is the block.
    """
    if resident:
        rounds = {x.round for x in a} & {x.round for x in b}
        a, b = [x for x in a if x.round in rounds], [x for x in b if x.round in rounds]
    blocks = common_blocks([*a, *b]) if a and b else []
    k = min(len(a), len(b))
    n = len(blocks) * (k if waves else 1)
    if not blocks:
        return PairStats(0, k, None, None, None, None, boot, None, (), ("too_few_blocks",))
    ya = np.array([[x.values[s] for s in blocks] for x in a])
    yb = np.array([[x.values[s] for s in blocks] for x in b])
    d = yb.mean(axis=0) - ya.mean(axis=0)
    mean = float(d.mean())
    shown = tuple(zip(blocks, (float(x) for x in d), strict=True))
    middle = median([float(x) for x in d])
    if len(blocks) < 2:
        return PairStats(n, k, mean, middle, None, None, boot, None, shown, ("too_few_blocks",))
    together = resident and len(ya) == len(yb)
    if serial and not all(map(independent, [yb - ya] if together else [ya, yb])):
        return _by_boots(
            ya, yb, PairStats(n, k, mean, middle, None, None, boot, None, shown, ()), paired=together
        )
    within, df = _within(ya, yb, paired=resident) if waves else (float(d.var(ddof=1)) / len(d), len(d) - 1.0)
    if within <= (_ZERO_SPREAD * max(1.0, abs(mean))) ** 2:
        return PairStats(n, k, mean, middle, None, None, boot, None, shown, ("no_spread",))
    # An arm that cannot vary (tokens per step without speculation) has no boot variance either.
    h = math.fsum(1.0 / len(arm) for arm in (a, b) if any(varies(arm, x.arm) for x in arm))
    boots_only = Estimate(mean, ((math.sqrt(within), df),))
    full = _with_boots(mean, (within, df), h, boot=boot, n=len(blocks))
    spare = (mean / critical(level, df)) ** 2 - within
    overturn = math.sqrt(spare / h) if spare > 0 and h > 0 else None
    supposed: list[tuple[float, Estimate]] = []
    if boot.sd is None and h > 0:
        for sd in SUPPOSED:
            if_so = BootSd(sd, KNOWN_DF, "declared", boot.ms_residual)
            found = _with_boots(mean, (within, df), h, boot=if_so, n=len(blocks))
            if found is not None:
                supposed.append((sd, found))
    return PairStats(
        n, k, mean, middle, boots_only, full, boot, overturn, shown, boot.reasons, tuple(supposed)
    )


def _by_boots(ya: np.ndarray, yb: np.ndarray, found: PairStats, *, paired: bool) -> PairStats:
    """With the boot as the block: its mean is one value, and the spread of boots is in the interval already."""
    found = replace(found, reasons=("autocorrelated",))
    arms = [(yb - ya).mean(axis=1)] if paired else [ya.mean(axis=1), yb.mean(axis=1)]
    if any(len(arm) < 2 for arm in arms):
        return replace(found, reasons=("autocorrelated", "too_few_blocks"))
    terms = [(1.0 / len(arm), float(arm.var(ddof=1)), len(arm) - 1.0) for arm in arms]
    variance, df = satterthwaite(terms)
    if found.mean is None or variance <= 0:
        return replace(found, reasons=("autocorrelated", "no_spread"))
    estimate = Estimate(found.mean, ((math.sqrt(variance), df),))
    return replace(found, boots_only=estimate, full=estimate)


def _within(ya: np.ndarray, yb: np.ndarray, *, paired: bool) -> tuple[float, float]:
    """Variance of the mean from the spread of waves inside boots, and its degrees of freedom."""
    w = ya.shape[1]
    if paired and len(ya) == len(yb):
        d = yb - ya
        inner = d - d.mean(axis=1)[:, None]
        df = len(d) * (w - 1.0)
        return float((inner * inner).sum()) / df / d.size, df
    terms = []
    for y in (ya, yb):
        inner = y - y.mean(axis=1)[:, None]
        own = len(y) * (w - 1.0)
        terms.append((1.0 / y.size, float((inner * inner).sum()) / own, own))
    return satterthwaite(terms)


def _with_boots(
    mean: float, within: tuple[float, float], h: float, *, boot: BootSd, n: int
) -> Estimate | None:
    if boot.sd is None:
        return None
    variance, df = within
    residual = boot.ms_residual or 0.0
    # `within` and the boots' part are told apart by a difference of mean squares. Cut off at zero the sum would
    # be too large on average where requests are loud and boots are not.
    own = boot.sd**2 if boot.signed is None else max(boot.signed, -SIGNED_SHARE * residual / n)
    added = h * own
    seen = h * (own + residual / n)
    boot_df = boot.df
    if boot.df < KNOWN_DF and boot.n < n and own + residual / boot.n > 0:
        # Boots of fewer blocks than these: what they say of the boot variance is noisier than their number tells.
        boot_df *= ((own + residual / n) / (own + residual / boot.n)) ** 2
        boot_df = max(boot_df, min(boot.own_df, boot.df), 1.0)
    spread = variance**2 / df + seen**2 / boot_df + (h * residual / n) ** 2 / (boot_df * max(1, n - 1))
    total = variance + added
    floor = min(boot_df, df)
    errors: list[tuple[float, float]] = []
    if total > 0:
        errors.append((math.sqrt(total), max(total**2 / spread if spread > 0 else df, floor)))
    if (boot.df < KNOWN_DF or not errors) and seen > 0:
        errors.append((math.sqrt(seen), boot_df))
    return Estimate(mean, tuple(errors))
