"""A mean log ratio, its standard errors, and what may be said of it.

Everything is on the log scale until the last step; nothing here returns NaN or infinity.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy import special


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with one or more (standard error, degrees of freedom); the widest of them is believed.

    The second error, where there is one, is that of the boots alone: an interval is never narrower than the
    t interval that takes boots for the only replicates.
    """

    mean: float
    errors: tuple[tuple[float, float], ...]

    def half_width(self, level: float) -> float:
        """Half the interval at this two-sided level."""
        return max(critical(level, df) * se for se, df in self.errors)

    def interval(self, level: float) -> tuple[float, float]:
        """(low, high)."""
        half = self.half_width(level)
        return self.mean - half, self.mean + half

    def df(self, level: float) -> float:
        """Degrees of freedom of the error that decides at this level."""
        return max(self.errors, key=lambda e: critical(level, e[1]) * e[0])[1]

    def p_zero(self) -> float:
        """Two-sided p-value of no difference."""
        return min(1.0, max(2 * _tail(abs(self.mean) / se, df) for se, df in self.errors))

    def p_equivalent(self, limit: float) -> float:
        """P-value of two one-sided tests of |difference| < limit (Schuirmann 1987)."""
        gap = limit - abs(self.mean)
        return min(1.0, max(_tail(gap / se, df) for se, df in self.errors))

    def p_beyond(self, limit: float) -> float:
        """P-value of the minimum-effect test, H0: |difference| <= limit."""
        gap = abs(self.mean) - limit
        return min(1.0, max(_tail(gap / se, df) for se, df in self.errors))


def critical(level: float, df: float) -> float:
    """Two-sided critical value of Student's t."""
    return float(special.stdtrit(df, 0.5 + level / 2))


def _tail(t: float, df: float) -> float:
    return float(special.stdtr(df, -t))


def ratio(log_value: float | None) -> float | None:
    """exp, or None where the result is not a finite number above 0."""
    if log_value is None or not math.isfinite(log_value) or abs(log_value) > 700:
        return None
    return math.exp(log_value)


def holm(p_values: Mapping[str, float | None]) -> dict[str, float]:
    """Holm-adjusted p-values (Scandinavian J. Statistics 6, 1979), by key.

    The family is what was declared: a comparison without a p-value counts as 1 and still costs its share.
    """
    ordered = sorted(p_values, key=lambda k: (_or_one(p_values[k]), k))
    adjusted: dict[str, float] = {}
    worst = 0.0
    for rank, key in enumerate(ordered):
        worst = max(worst, min(1.0, (len(ordered) - rank) * _or_one(p_values[key])))
        adjusted[key] = worst
    return adjusted


def _or_one(p: float | None) -> float:
    return 1.0 if p is None else p
