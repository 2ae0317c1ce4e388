"""What a number of prompts and boots can resolve.

The model is the one `analysis` tests with, on the log scale. For arm a, slot s and boot r,

    y[a, s, r] = mu[a] + slot[a, s] + boot[a, r] + e[a, s, r]

and the mean log ratio of two arms over n slots and k boots each has variance

    V = slot_sd^2 / n + 2 residual_sd^2 / (n k) + 2 boot_sd^2 / k

with degrees of freedom after Satterthwaite (Biometrics Bulletin 2, 1946). Power comes from the noncentral t,
for the test that `analysis` makes: with boots that had to be estimated, the t on boot means alone must pass too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from campaign.plan.model import GroupPlan, PlannedDesign
from campaign.spec.models import Metric

METRICS: tuple[Metric, ...] = get_args(Metric)
RESIDENT: frozenset[str] = frozenset({"alternated", "duet"})
"""Designs whose rounds hold both arms, so that what the round does to both cancels."""
_DF_KNOWN = 1e6
"""Degrees of freedom of a standard deviation taken as known."""


@dataclass(frozen=True, slots=True)
class Prior:
    """Variance components on the log scale, by metric (0.01 is about 1 %)."""

    slot_sd: Mapping[Metric, float]
    """Between slots, of the log ratio of two arms: how much the effect itself differs by prompt."""
    boot_sd: Mapping[Metric, float]
    """Between boots of one arm."""
    residual_sd: Mapping[Metric, float]
    """One request of one arm, slot and boot effects removed."""
    boot_df: Mapping[Metric, float] = field(default_factory=dict)
    """Degrees of freedom behind `boot_sd`; absent where it is stated and not estimated."""
    session_sd: Mapping[Metric, float] = field(default_factory=dict)
    """Between sessions (node draws) of one arm; used across runs only."""
    boot_signed: Mapping[Metric, float] = field(default_factory=dict)
    """The boot variance as it was estimated: a difference of mean squares, below zero where requests drown the boots.
    `boot_sd` squared, cut off at zero, would be too large on average."""
    boot_n: Mapping[Metric, float] = field(default_factory=dict)
    """Blocks a boot behind that estimate: few of them make it a noisy one, whatever its degrees of freedom."""
    source: Literal["prior", "default", "declared"] = "prior"
    """`prior`: from earlier rows; `default`: stated below; `declared`: boots by the spec, the rest as stated below."""
    said: str = ""
    """Which earlier runs, in words; empty for the defaults."""


_CPU = Prior(
    slot_sd={"step_ms": 0.010, "accept_len": 0.050, "decode_tok_s": 0.050, "ttft_ms": 0.010},
    boot_sd={"step_ms": 0.025, "accept_len": 0.002, "decode_tok_s": 0.025, "ttft_ms": 0.030},
    residual_sd={"step_ms": 0.045, "accept_len": 0.080, "decode_tok_s": 0.090, "ttft_ms": 0.060},
    source="default",
)
_GPU = Prior(
    slot_sd={"step_ms": 0.003, "accept_len": 0.020, "decode_tok_s": 0.020, "ttft_ms": 0.010},
    boot_sd={"step_ms": 0.003, "accept_len": 0.002, "decode_tok_s": 0.004, "ttft_ms": 0.030},
    residual_sd={"step_ms": 0.0086, "accept_len": 0.066, "decode_tok_s": 0.066, "ttft_ms": 0.060},
    source="default",
)


def default_prior(device: Literal["cpu", "gpu"]) -> Prior:
    """Stated components where there are no rows yet.

    cpu: llama.cpp, one thread, SmolLM2-135M: request CV of the step 2 to 7 %, boots 2.5 %.
    gpu: two-way split of four SGLang sessions of one record campaign (BRL-2026-11): step 0.86 %,
    tok/s 6.6 % per request; boots 0.1 to 0.5 %.
    """
    return _CPU if device == "cpu" else _GPU


def satterthwaite(terms: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Variance and degrees of freedom of `sum(coefficient * mean_square)` over (coefficient, ms, df).

    Coefficients may be negative; the variance is not floored here. df is 0 where nothing varies.
    """
    variance = sum(c * ms for c, ms, _ in terms)
    spread = sum((c * ms) ** 2 / df for c, ms, df in terms if df > 0)
    return variance, (variance * variance / spread if spread > 0 else 0.0)


def boot_df(boots: int, design: PlannedDesign, arms: int = 2) -> int:
    """Degrees of freedom of the boot standard deviation that one group of `arms` arms gives itself."""
    free = arms - 1 if design in RESIDENT else arms
    return max(0, (boots - 1) * free)


def session_boot_df(groups: Iterable[GroupPlan], *, resident: bool) -> int:
    """Degrees of freedom the boots of a session's groups give together, pooled as `analysis` pools them.

    `resident` asks for groups whose rounds hold several arms, else for those that boot apart.
    """
    total = 0
    for group in groups:
        if (group.design in RESIDENT) != resident:
            continue
        boots = sum(len(r.boots) for r in group.rounds)
        arms = len({b.arm for r in group.rounds for b in r.boots})
        rounds = len(group.rounds) - 1 if resident else 0
        total += max(0, boots - arms - rounds)
    return total


@dataclass(frozen=True, slots=True)
class Precision:
    """What a design is expected to give: variance of the mean log ratio, and the two errors it is tested with."""

    variance: float
    df: float
    boots_variance: float
    """Of the boot means alone: the interval is never narrower than theirs."""
    boots_df: float
    """1e6 where the boot standard deviation is taken as known."""


def precision(
    metric: Metric,
    n_slots: int,
    boots: int,
    prior: Prior,
    design: PlannedDesign,
    *,
    df_boot: float | None = None,
) -> Precision:
    """Expected precision of a comparison.

    `df_boot` is what the boot standard deviation will rest on; left out, it is the pair's own boots and those
    behind the prior. Where there are none it is taken as known: such a pair needs a declared `boot_sd`, or
    stays unresolved.
    """
    if n_slots < 2 or boots < 1:
        raise ValueError("needs at least 2 slots and 1 boot")
    slot, boot, residual = prior.slot_sd[metric], prior.boot_sd[metric], prior.residual_sd[metric]
    if df_boot is None:
        df_boot = boot_df(boots, design) + prior.boot_df.get(metric, 0.0)
    df = df_boot or _DF_KNOWN
    share = 2.0 / boots
    within = (slot**2 + share * residual**2) / n_slots
    seen = share * (boot**2 + residual**2 / n_slots)
    variance, free = satterthwaite(
        (
            (1.0, within, n_slots - 1.0),
            (1.0, seen, df),
            (-share / n_slots, residual**2, df * (n_slots - 1.0)),
        )
    )
    return Precision(variance, max(free, min(df, n_slots - 1.0)), seen, df)


def achieved_power(difference: float, found: Precision, alpha: float = 0.05) -> float:
    """Probability that the two-sided test at `alpha` finds a log difference of this size.

    Both errors of the test must be passed; the smaller of the two probabilities is returned.
    """
    # scipy.stats takes seconds to import, which `campaign plan` would pay on every call.
    from scipy.special import nctdtr, stdtrit

    if found.variance <= 0:
        return 1.0 if difference else alpha
    shift = abs(difference) / math.sqrt(found.variance)
    passed = []
    for scale, df in ((1.0, found.df), (found.boots_variance / found.variance, found.boots_df)):
        if scale <= 0 or (scale != 1.0 and df >= _DF_KNOWN):
            continue
        critical = float(stdtrit(df, 1 - alpha / 2)) * math.sqrt(scale)
        near = 1.0 - float(nctdtr(df, shift, critical))
        # Beyond a shift of 3 the far tail is below 1e-6 and numerically unstable.
        far = float(nctdtr(df, shift, -critical)) if shift < 3 else 0.0
        passed.append(min(1.0, near + far))
    return min(passed)


def resolvable(
    metric: Metric,
    n_slots: int,
    boots: int,
    prior: Prior,
    design: PlannedDesign,
    *,
    alpha: float = 0.05,
    power: float = 0.8,
    df_boot: float | None = None,
) -> float:
    """Smallest relative difference (0.02 is 2 %) found with this power at the two-sided level `alpha`.

    `df_boot`: degrees of freedom of the boot standard deviation, e.g. `session_boot_df(...)`.
    """
    found = precision(metric, n_slots, boots, prior, design, df_boot=df_boot)
    if found.variance <= 0:
        return 0.0
    sd = math.sqrt(found.variance)
    low, high = 0.0, 4.0
    while achieved_power(high * sd, found, alpha) < power:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        enough = achieved_power(middle * sd, found, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return math.expm1(high * sd)


def needed_boots(
    metric: Metric,
    n_slots: int,
    difference: float,
    prior: Prior,
    design: PlannedDesign,
    *,
    alpha: float = 0.05,
    power: float = 0.8,
    at_most: int = 64,
) -> int | None:
    """Fewest boots per arm (2 or more) that resolve a relative difference; None beyond `at_most`."""
    for boots in range(2, at_most + 1):
        if resolvable(metric, n_slots, boots, prior, design, alpha=alpha, power=power) <= difference:
            return boots
    return None


def needed_slots(
    metric: Metric,
    boots: int,
    difference: float,
    prior: Prior,
    design: PlannedDesign,
    *,
    alpha: float = 0.05,
    power: float = 0.8,
    at_most: int = 4096,
    df_boot: float | None = None,
) -> int | None:
    """Fewest slots that resolve a relative difference; None where the boots alone forbid it."""

    def enough(n: int) -> bool:
        return (
            resolvable(metric, n, boots, prior, design, alpha=alpha, power=power, df_boot=df_boot)
            <= difference
        )

    if not enough(at_most):
        return None
    low, high = 1, at_most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
