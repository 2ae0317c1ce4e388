"""A bootstrap interval of a mean, beside the t interval: a diagnostic, never a verdict.

BCa (Efron, JASA 82, 1987): percentiles of resampled means, shifted for bias and acceleration. The resampling is
seeded, so the same blocks give the same interval. Below n = 16 it covers too little and claims nothing.
"""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special

RESAMPLES = 2000
CLAIMS_FROM = 16
"""Blocks from which its coverage is claimed."""


def bca(values: Sequence[float], level: float = 0.95, *, seed: int = 20260701) -> tuple[float, float] | None:
    """(low, high) of the mean; None below 3 values or without spread."""
    x = np.asarray(values, dtype=float)
    n = len(x)
    if n < 3 or not np.isfinite(x).all() or float(x.max() - x.min()) < 1e-12:
        return None
    rng = np.random.default_rng(seed)
    means = np.sort(x[rng.integers(0, n, (RESAMPLES, n))].mean(axis=1))
    mean = float(x.mean())
    below = (float((means < mean).sum()) + 0.5 * float((means == mean).sum())) / RESAMPLES
    z0 = float(special.ndtri(min(max(below, 0.5 / RESAMPLES), 1 - 0.5 / RESAMPLES)))
    left = (x.sum() - x) / (n - 1)
    u = left.mean() - left
    spread = float((u * u).sum())
    acceleration = float((u**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0
    ends = []
    for tail in ((1 - level) / 2, (1 + level) / 2):
        z = z0 + float(special.ndtri(tail))
        share = float(special.ndtr(z0 + z / (1 - acceleration * z)))
        ends.append(float(np.quantile(means, min(max(share, 0.0), 1.0))))
    return (ends[0], ends[1]) if all(math.isfinite(e) for e in ends) else None
