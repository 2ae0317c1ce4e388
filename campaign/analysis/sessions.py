"""Several sessions of one pair: t on session means.

Below ten sessions their means are the only honest replicates: whatever a session did to both arms is in them
once. The standard error is sd(session means) / sqrt(sessions), with sessions - 1 degrees of freedom; nothing of the
boots need be added, since each session booted anew.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from campaign.analysis.estimate import Estimate

FEW = 10
"""Sessions below which t on their means is used; above it still is, and is merely less needed."""


@dataclass(frozen=True, slots=True)
class OverSessions:
    """One comparison over several sessions, log scale."""

    sessions: int
    estimate: Estimate | None
    """None below two sessions, or without spread."""
    mean: float
    sd: float | None


def over_sessions(means: Sequence[float]) -> OverSessions | None:
    """From one mean log ratio a session; None of nothing."""
    n = len(means)
    if n == 0:
        return None
    mean = math.fsum(means) / n
    if n < 2:
        return OverSessions(n, None, mean, None)
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in means) / (n - 1))
    estimate = Estimate(mean, ((sd / math.sqrt(n), n - 1.0),)) if sd > 1e-12 else None
    return OverSessions(n, estimate, mean, sd)
