"""Medians and percentiles, and the n a percentile needs."""

from collections.abc import Sequence

from scipy import special


def median(values: Sequence[float]) -> float | None:
    """The middle value, or the mean of the two middle ones; None of nothing."""
    ordered = sorted(values)
    n = len(ordered)
    if n == 0:
        return None
    return ordered[n // 2] if n % 2 else (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def percentile_needs(q: float, confidence: float = 0.99) -> int:
    """Fewest values that support percentile `q` (0.99 is p99).

    MLPerf LoadGen's early-stopping rule with one value above the percentile: P(at most 1 of n lies above it)
    must fall below 1 - confidence. p99 needs 662, p90 64, p50 11 at 99 %.
    """
    if not (0 < q < 1 and 0 < confidence < 1):
        raise ValueError("q and confidence lie between 0 and 1")
    n = 2
    while float(special.bdtr(1, n, 1 - q)) >= 1 - confidence:
        n += 1
    return n


def percentile(values: Sequence[float], q: float, confidence: float = 0.99) -> float | None:
    """An upper bound of percentile `q` at this confidence; None where n does not support one.

    The bound is the t-th largest value, with the largest t for which P(at most t of n lie above the
    percentile) stays below 1 - confidence (MLPerf LoadGen, early stopping).
    """
    n = len(values)
    if n < percentile_needs(q, confidence):
        return None
    t = 1
    while float(special.bdtr(t + 1, n, 1 - q)) < 1 - confidence:
        t += 1
    return sorted(values)[n - t]
