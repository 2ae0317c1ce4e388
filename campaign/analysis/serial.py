"""Batches in time: whether those of one boot may count as independent. Pure.

A steady or open loop has no barrier between slot sets, so neighbouring batches share requests in flight. Their
lag-1 autocorrelation is tested; where it is positive, or where there are too few batches to tell, the boot is
the block.
"""

import math
from typing import Final

import numpy as np

ALPHA: Final = 0.05
"""One-sided level of the test: only positive autocorrelation makes an interval too narrow."""
MIN_NEIGHBOURS: Final = 8
"""Pairs of neighbouring batches below which nothing can be said."""


def lag1(y: np.ndarray) -> tuple[float, float] | None:
    """(lag-1 autocorrelation, one-sided p of none) of boots (rows) by batches in order of time (columns).

    Boot means are removed, which pulls the estimate down by 1/w for w batches; that is put back (Kendall 1954).
    The p is normal with variance 1/pairs (Bartlett 1946). None of fewer than 3 batches, fewer than
    `MIN_NEIGHBOURS` pairs, or no spread.
    """
    boots, w = y.shape
    pairs = boots * (w - 1)
    inner = y - y.mean(axis=1)[:, None]
    square = float((inner * inner).sum())
    if w < 3 or pairs < MIN_NEIGHBOURS or square <= 0:
        return None
    r = float((inner[:, 1:] * inner[:, :-1]).sum()) / square * (w / (w - 1)) + 1 / w
    return r, 0.5 * math.erfc(r * math.sqrt(pairs) / math.sqrt(2))


def independent(y: np.ndarray) -> bool:
    """Whether the batches may be the blocks."""
    found = lag1(y)
    return found is not None and found[1] >= ALPHA
