"""Stopping early without fooling oneself: an interval that holds at every look, under an estimated variance.

Units x_1, x_2, ... are log ratios b/a, one for each whole ABBA quad. With a normal prior of variance g on the
standardised effect and the scale-invariant prior on the variance, the Bayes factor against a mean of m is

    E_n(m) = (1 + n g)^(-1/2) * ((1 + t^2/(n-1)) / (1 + t^2/((n-1)(1 + n g))))^(n/2),   t = sqrt(n) (mean - m) / s

a test martingale at the true mean whatever the variance (t-mixture; Goenen et al., American Statistician 59, 2005;
Hendriksen, de Heide & Gruenwald, Bayesian Analysis 16, 2021), so that P(E ever reaches 1/alpha) <= alpha (Ville). All
m with E_n(m) < 1/alpha are an interval that holds at all n at once.

Boots do not average out by looking longer: their part, `t * sqrt(h) * boot_sd`, is added at every look, with its share
of the error rate split over the looks named in the spec. Stops are therefore rare where boots are few, and right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from campaign.analysis.estimate import critical
from campaign.analysis.pairs import KNOWN_DF

PRIOR = 1.0
"""Variance of the standardised effect under the alternative: a difference of about one sd of a unit."""
BOOT_SHARE = 0.4
"""Of the error rate, for the boots; the rest is for the units."""


@dataclass(frozen=True, slots=True)
class Look:
    """What one look says. Log scale."""

    n: int
    """Units (whole quads) seen."""
    mean: float | None
    lo: float | None
    hi: float | None
    """Holds at every look together; None where the units so far bound nothing."""
    stop: bool
    why: str
    """`differs`, `equivalent` or `open`."""


def quads(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """Log ratios b/a of whole quads: slots in order, two by two. An odd last slot is left out."""
    if len(a) != len(b):
        raise ValueError("both arms have the same slots")
    d = [y - x for x, y in zip(a, b, strict=True)]
    return [(d[i] + d[i + 1]) / 2 for i in range(0, len(d) - 1, 2)]


def e_value(units: Sequence[float], m: float = 0.0, g: float = PRIOR) -> float:
    """Evidence against a mean of m; 1 below two units or without spread."""
    n = len(units)
    if n < 2:
        return 1.0
    mean = math.fsum(units) / n
    square = math.fsum((x - mean) ** 2 for x in units)
    if square <= 1e-24:
        return 1.0
    u = n * (mean - m) ** 2 / square
    return math.exp(-0.5 * math.log1p(n * g) + n / 2 * (math.log1p(u) - math.log1p(u / (1 + n * g))))


def half_width(units: Sequence[float], alpha: float, g: float = PRIOR) -> float | None:
    """Half of the always-valid interval; None where these units bound nothing yet."""
    n = len(units)
    if n < 2:
        return None
    mean = math.fsum(units) / n
    square = math.fsum((x - mean) ** 2 for x in units)
    k = math.exp(2 / n * (math.log(1 / alpha) + 0.5 * math.log1p(n * g)))
    if square <= 1e-24 or k >= 1 + n * g:
        return None
    return math.sqrt(square / n * (k - 1) / (1 - k / (1 + n * g)))


def look(
    units: Sequence[float],
    *,
    looks: int,
    boots: float,
    boot_sd: float | None,
    boot_df: float = KNOWN_DF,
    limit: float,
    alpha: float = 0.05,
) -> Look:
    """Judge what was seen so far.

    looks: how many the spec names in all. boots: of each arm so far, as if all weighed alike. limit: log(1 + margin): the look also stops
    where the whole interval lies inside. Without a boot sd nothing stops.
    """
    n = len(units)
    mean = math.fsum(units) / n if n else None
    own = half_width(units, alpha * (1 - BOOT_SHARE))
    if mean is None or own is None or boot_sd is None or boots <= 0:
        return Look(n, mean, None, None, stop=False, why="open")
    level = 1 - alpha * BOOT_SHARE / max(1, looks)
    half = own + critical(level, boot_df) * math.sqrt(2 / boots) * boot_sd
    lo, hi = mean - half, mean + half
    why = "differs" if lo > 0 or hi < 0 else "equivalent" if -limit < lo and hi < limit else "open"
    return Look(n, mean, lo, hi, stop=why != "open", why=why)


@dataclass(frozen=True, slots=True)
class Saved:
    """What stopping saved against the fixed plan."""

    requests: int
    boots: int
    usd: float | None


def saved(
    planned_requests: int, sent: int, planned_boots: int, booted: int, usd_planned: float | None
) -> Saved:
    """Against the fixed n; dollars in proportion to the boots and requests not run."""
    left = planned_requests - sent
    share = left / planned_requests if planned_requests else 0.0
    return Saved(left, planned_boots - booted, None if usd_planned is None else usd_planned * share)
