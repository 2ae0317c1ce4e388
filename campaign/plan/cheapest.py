"""The cheapest design that resolves a wanted difference, from what a boot and a request cost."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from campaign.plan.model import PlannedDesign
from campaign.plan.power import Prior, needed_slots, resolvable
from campaign.spec.models import Metric


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one arm, in seconds of the node."""

    boot_s: float
    """Start to ready, weights included."""
    request_s: float
    """One request at concurrency 1."""
    usd_per_hour: float


@dataclass(frozen=True, slots=True)
class Proposal:
    """One design: per arm, `boots` boots with `slots` requests each."""

    design: PlannedDesign
    boots: int
    slots: int
    resolvable: float
    """Smallest relative difference found with 80 % power."""
    minutes: float
    usd: float

    @property
    def requests(self) -> int:
        """Of both arms."""
        return 2 * self.boots * self.slots


def price(costs: Costs, boots: int, slots: int) -> float:
    """Dollars of both arms' boots and requests."""
    seconds = 2 * boots * (costs.boot_s + slots * costs.request_s)
    return seconds * costs.usd_per_hour / 3600


def cheapest(
    metric: Metric,
    difference: float,
    prior: Prior,
    costs: Costs,
    *,
    designs: Sequence[PlannedDesign] = ("alternated", "blocks"),
    at_most_boots: int = 32,
    at_most_slots: int = 1024,
    df_boot: float | None = None,
) -> list[Proposal]:
    """The cheapest number of boots and requests of each design, the cheapest design first.

    Residents (`alternated`) need both arms on the node at once; `blocks` boots them one after another; `bracketed` boots
    each once, and makes sense only where the boot sd is known. A design that cannot resolve the difference is left out. `df_boot`: degrees of freedom of the boot sd, where the session brings
    more than the pair's own.
    """
    found = []
    for design in designs:
        best: Proposal | None = None
        for boots in (1,) if design == "bracketed" else range(2, at_most_boots + 1):
            if best is not None and price(costs, boots, 3) >= best.usd:
                break
            slots = needed_slots(
                metric, boots, difference, prior, design, at_most=at_most_slots, df_boot=df_boot
            )
            if slots is None:
                continue
            slots = max(3, slots)
            usd = price(costs, boots, slots)
            if best is None or usd < best.usd:
                got = resolvable(metric, slots, boots, prior, design, df_boot=df_boot)
                minutes = 2 * boots * (costs.boot_s + slots * costs.request_s) / 60
                best = Proposal(design, boots, slots, got, minutes, usd)
        if best is not None and math.isfinite(best.usd):
            found.append(best)
    return sorted(found, key=lambda p: p.usd)
