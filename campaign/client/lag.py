"""Lags as counts by bucket: small enough to cross Ray with every request, and they add up to a cell. Pure.

Bucket 0 holds lags of less than 1 us (a stamp may also be early, by what the offset is uncertain); bucket k
above it holds [1.05^(k-1), 1.05^k) us and stands for its geometric middle, so a percentile is exact to 2.5 %.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Final

LagCounts = tuple[tuple[int, int], ...]
"""(bucket, count), in order of bucket."""

FLAG: Final = 0.02
"""A p99 lag above this share of the median step flags a cell (`client_lag`)."""
VOID: Final = 0.10
"""Above this share it is void."""
_LOG: Final = math.log(1.05)
_BOUNDS: Final = tuple(1000 * 1.05**k for k in range(500))
"""Lower bound of each bucket from 1, in ns; the last is beyond any request."""


def lag_counts(lags_ns: Iterable[int]) -> LagCounts:
    """Sort lags in nanoseconds into buckets."""
    values = sorted(lags_ns)
    found, done = [], 0
    while done < len(values):
        bucket = bisect_right(_BOUNDS, values[done])
        upto = bisect_left(values, _BOUNDS[bucket], done) if bucket < len(_BOUNDS) else len(values)
        found.append((bucket, upto - done))
        done = upto
    return tuple(found)


def merge(parts: Iterable[LagCounts]) -> LagCounts:
    """Counts of several requests together."""
    total: Counter[int] = Counter()
    for part in parts:
        total.update(dict(part))
    return tuple(sorted(total.items()))


def percentile(counts: LagCounts, share: float) -> float | None:
    """Nearest-rank percentile in us; None of nothing."""
    n = sum(count for _, count in counts)
    if not n:
        return None
    rank, seen = max(1, math.ceil(share * n)), 0
    for bucket, count in counts:
        seen += count
        if seen >= rank:
            return 0.5 if bucket == 0 else round(math.exp(_LOG * (bucket - 0.5)), 3)
    raise AssertionError("a rank lies within the counts")


def judge(p99_us: float | None, step_ms: float | None) -> str | None:
    """`flag` or `void` where the lag is not small against a step; None where it is, or one is not known."""
    if p99_us is None or not step_ms:
        return None
    share = p99_us / (1000 * step_ms)
    return "void" if share > VOID else "flag" if share > FLAG else None
