"""Load shapes above concurrency 1: what is in flight when, and which requests count.

- `waves` (the default): the slot set is run once, everything in flight is done, then the next.
- `steady`: a closed loop; a new request starts as soon as one ends, from the first to the last.
- `constant`, `poisson`, `ramp`, `schedule`: an open loop; requests start at planned times, whatever is in flight
  (at most `concurrency`: what has to wait shows in its start-time error).

The rule that cuts ramp and tail is fixed here, before the run: the first and the last slot sets of a boot,
as many as hold `concurrency` requests, are sent and stored as `warmup` and never analysed. A `schedule` is
somebody's trace and a `ramp` has no steady part: neither is cut.
"""

import math
import random
from dataclasses import dataclass

from campaign.spec.models import Load


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The load shape of a group, as fixed before the run."""

    shape: str
    rate: float | None
    """Requested requests per second of an open loop."""
    cut_sets: int
    """Slot sets cut at each end of every boot."""

    @property
    def open(self) -> bool:
        """Whether requests start at planned times."""
        return self.shape in OPEN


OPEN = frozenset({"constant", "poisson", "ramp", "schedule"})


def load_plan(load: Load | None, concurrency: int, slots: int) -> LoadPlan | None:
    """None for waves and for concurrency 1, which need no plan of their own."""
    if load is None or load.shape == "waves":
        return None
    cut = 0 if load.shape in {"ramp", "schedule"} else math.ceil(concurrency / slots)
    rate = load.rate
    if load.shape == "ramp" and load.rate is not None and load.to_rate is not None:
        rate = (load.rate + load.to_rate) / 2
    if load.shape == "schedule" and len(load.at_s) > 1 and load.at_s[-1] > load.at_s[0]:
        rate = (len(load.at_s) - 1) / (load.at_s[-1] - load.at_s[0])
    return LoadPlan(load.shape, rate, cut)


def offsets_ns(load: Load, count: int, key: str) -> tuple[int | None, ...]:
    """Start of each of `count` requests after the first moment of the run; None in a closed loop.

    `key` seeds the gaps of a Poisson process: arms that are compared share it, so they see the same arrivals.
    """
    if load.shape == "schedule":
        return tuple(round(at * 1e9) for at in load.at_s)
    if load.rate is None or load.shape not in OPEN:
        return (None,) * count
    if load.shape == "ramp" and load.to_rate is not None:
        return tuple(round(at * 1e9) for at in ramp_s(load.rate, load.to_rate, count))
    if load.shape == "constant":
        return tuple(round(i / load.rate * 1e9) for i in range(count))
    gaps = random.Random(f"arrivals/{key}")  # noqa: S311 -- a planned sequence, not a secret
    at, found = 0.0, []
    for _ in range(count):
        found.append(round(at * 1e9))
        at += gaps.expovariate(load.rate)
    return tuple(found)


def ramp_s(first: float, last: float, count: int) -> tuple[float, ...]:
    """Start times in seconds of `count` requests whose rate goes evenly in time from `first` to `last`."""
    whole = 2 * count / (first + last)
    slope = (last - first) / whole
    # Requests up to t are first t + slope t^2 / 2; this form of the root holds where the slope is 0.
    return tuple(2 * i / (first + math.sqrt(max(0.0, first * first + 2 * slope * i))) for i in range(count))
