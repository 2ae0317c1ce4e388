"""What analysis concludes. Shapes and units: docs/CONTRACTS.md; None is unknown, with a reason beside it."""

from dataclasses import dataclass
from typing import Literal

from campaign.spec.models import Metric

VerdictWord = Literal["faster", "slower", "higher", "lower", "equivalent", "unresolved", "invalid"]
BootSdSource = Literal["estimated", "declared", "prior", "unknown"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """One metric of one comparison. Ratios are b/a; intervals are on the ratio."""

    pair: str
    kind: Literal["pair", "ladder", "null", "aa"]
    family: str
    session: str
    workload: str
    concurrency: int
    a: str
    b: str
    metric: Metric
    primary: bool
    ratio: float | None
    lo: float | None
    hi: float | None
    ci_level: float
    lo_boots_only: float | None
    """Interval of these boots only: without the boot variance."""
    hi_boots_only: float | None
    lo90: float | None
    hi90: float | None
    n: int
    """Blocks in which both arms have a valid value."""
    boots: int
    """Boots per arm (the smaller of the two)."""
    df: float | None
    boot_sd: float | None
    """Between-boot standard deviation on the log scale."""
    boot_sd_source: BootSdSource
    differs: bool | None
    equivalent: bool | None
    margin: float
    verdict: VerdictWord
    verdict_adjusted: VerdictWord | None
    """Holm-adjusted over the declared family, on its primary metric; None elsewhere."""
    reasons: tuple[str, ...]
    usd: float | None
    """Dollars spent on the group this comparison came from."""
    design: str = ""
    p: float | None = None
    """Two-sided p-value of no difference (unadjusted)."""
    p_tost: float | None = None
    blocks: tuple[tuple[str, float], ...] = ()
    """(block, mean log ratio b/a) for plots: one per slot."""
    ratio_median: float | None = None
    """Median over blocks, beside the mean: far from it where a block is far out."""
    p_adjusted: float | None = None
    """Holm-adjusted p; None off the primary metric."""
    boot_sd_overturn: float | None = None
    """Boot sd (log scale) that would make the boots-only difference not significant; None where it is not."""
    supposed: tuple[tuple[float, float | None, float | None, bool], ...] = ()
    """(boot sd, low, high, differs) where the boot sd is unknown: what boot variance would do."""
    margin_smallest: float | None = None
    """The smallest margin at which the equivalence test would pass; None without an interval."""
    lo_bootstrap: float | None = None
    """BCa interval over blocks, these boots only: a diagnostic beside the t interval."""
    hi_bootstrap: float | None = None
    said_adjusted: VerdictWord | None = None
    """The family-adjusted word of a group that a look ended, where no p-value is; None elsewhere."""
    bootstrap_claims: bool = False
    """Whether n is large enough (16) for its coverage to be claimed."""


@dataclass(frozen=True, slots=True)
class AnchorResult:
    """One anchor of one session, judged on step time."""

    session: str
    position: str
    """`first`, `between1`, ..., `last`."""
    step_ms: float | None
    reference_ms: float | None
    drift: float | None
    """Relative: 0.01 is 1 % slower than the reference."""
    lo: float | None
    hi: float | None
    ok: bool | None
    """True: |drift| <= delta shown; False: proven beyond delta; None: not proven, reasons say so."""
    n: int
    boots: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WidthCost:
    """Cost of one verify step at one mean width."""

    arm: str
    depth: int | None
    verified_tokens: float | None
    """Mean tokens verified per drafted step, bonus token included."""
    verify_ms: float | None
    lo: float | None
    hi: float | None
    accept_len: float | None
    accept_rate: float | None
    accept_pos: tuple[float, ...] | None
    """Share of drafts accepted at position 0, 1, ...; conditional on nothing."""
    break_even_accept_len: float | None
    """Tokens per step at which this width is as fast as no speculation: step_ms / t1_ms."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Speculation:
    """What one ladder says about the cost of verifying tokens."""

    session: str
    ladder: str
    t1_ms: float | None
    """Bare forward step: step time without speculation."""
    widths: tuple[WidthCost, ...]
    verify_slope_ms: float | None
    """Milliseconds per further verified token."""
    slope_lo: float | None
    slope_hi: float | None
    reasons: tuple[str, ...]
