"""Depth is a question of tok/s, and tok/s is loud: a composite takes each factor where it is cheap.

    log ratio(tok/s) = log ratio(accept_len) - log ratio(step_ms)

Step time is measured at concurrency 1, where tok/s is wanted, with few requests; acceptance comes from a larger cell
of the same arms at a higher concurrency, where hundreds of requests fit in the same minutes. That is only right
if acceptance does not move with concurrency, which is checked on each arm: where it is shown to move, or is not
shown to stay within the margin, there is no composite. Always labelled; never primary.
"""

import math
from dataclasses import dataclass

from campaign.analysis.estimate import Estimate, ratio


@dataclass(frozen=True, slots=True)
class Composite:
    """tok/s of b over a from two cells, with both parts."""

    ratio: float | None
    lo: float | None
    hi: float | None
    step: Estimate
    """Log ratio of step_ms at concurrency 1."""
    accept: Estimate
    """Log ratio of accept_len at the higher concurrency."""
    moves: tuple[Estimate, ...]
    """For each arm: log ratio of accept_len, higher concurrency over 1."""
    reasons: tuple[str, ...]


def composite(
    step: Estimate, accept: Estimate, moves: tuple[Estimate, ...], *, margin: float, level: float = 0.95
) -> Composite:
    """Both parts as one ratio; without a value where acceptance moves with concurrency, or may.

    Reasons: `composite`, `accept_moves` (shown to differ), `accept_may_move` (not shown to stay within margin).
    """
    limit = math.log1p(margin)
    reasons = ["composite"]
    if any(m.p_zero() < 0.05 and m.p_equivalent(limit) >= 0.05 for m in moves):
        reasons.append("accept_moves")
    elif not moves or any(m.p_equivalent(limit) >= 0.05 for m in moves):
        reasons.append("accept_may_move")
    if len(reasons) > 1:
        return Composite(None, None, None, step, accept, moves, tuple(reasons))
    mean = accept.mean - step.mean
    # The parts are measured on different requests and boots, so their errors add as variances.
    sides = [max(x.errors, key=lambda e: e[0]) for x in (step, accept)]
    variance = math.fsum(se**2 for se, _ in sides)
    df = variance**2 / math.fsum(se**4 / d for se, d in sides) if variance > 0 else 1.0
    found = Estimate(mean, ((math.sqrt(variance), df),))
    lo, hi = found.interval(level)
    return Composite(ratio(mean), ratio(lo), ratio(hi), step, accept, moves, tuple(reasons))
