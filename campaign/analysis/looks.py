"""A look inside a run: from the rows of a group so far to whether it may stop, and what it said.

A pair stops where its comparison is decided. A ladder stops where all of its comparisons are, each at its share of the
error rate (Bonferroni over the group), so that the verdicts adjusted for the family are decided too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from campaign.analysis.pairs import boot_sd, pool_for
from campaign.analysis.sequential import Look, look, quads
from campaign.analysis.variance import Boot, boots_of
from campaign.plan.model import Comparison, GroupPlan
from campaign.plan.power import RESIDENT, Prior
from campaign.spec.models import Metric
from campaign.store.row import RequestRow

OPEN = Look(0, None, None, None, stop=False, why="open")


@dataclass(frozen=True, slots=True)
class Stop:
    """How far a group ran that was stopped early."""

    rounds: int
    """Whole rounds."""
    quads: int = 0
    """Whole quads of the round after them."""

    @classmethod
    def of(cls, event: Mapping[str, Any]) -> "Stop":
        """From the ledger's record of the stop."""
        return cls(int(event["look"]), int(event.get("quads") or 0))

    def cut(self, group: GroupPlan) -> GroupPlan:
        """The group without what the stop left out."""
        rounds = group.rounds[: self.rounds]
        if self.quads and self.rounds < len(group.rounds):
            last = group.rounds[self.rounds]
            rounds += (replace(last, sequence=last.sequence[: self.quads * quad(group)]),)
        return replace(group, rounds=rounds)


def quad(group: GroupPlan) -> int:
    """Requests of one whole quad: two slots on every arm."""
    return 2 * len(group.arms)


def quads_per_round(group: GroupPlan) -> int:
    """Whole quads of one round; an odd last slot is in none."""
    return len(group.rounds[0].sequence) // quad(group) if group.rounds else 0


def take(
    rows: Sequence[RequestRow],
    group: GroupPlan,
    comparison: Comparison,
    rounds: int,
    *,
    quads_more: int = 0,
    level: float = 0.95,
    declared: Mapping[Metric, float] | None = None,
    prior: Prior | None = None,
) -> Look:
    """Judge the first `rounds` rounds of a comparison, and `quads_more` whole quads of the next, on its primary metric.

    rows: valid ones of the group. Only where both arms are resident at concurrency 1: units are whole ABBA quads in
    the order they were sent, round by round; a slot that one arm lost is left out of its quad's pair.
    """
    named = rounds in group.looks
    if quads_more:
        named = group.design == "alternated" and at_quad(group, rounds, quads_more) in group.look_quads
    if group.design not in RESIDENT or group.concurrency != 1 or not named:
        return OPEN
    metric = comparison.primary
    upto = rounds + bool(quads_more)
    boots = [b for b in boots_of([r for r in rows if r.group == group.name], metric) if b.round < upto]
    order = {r.index: list(dict.fromkeys(f"s{q.slot}" for q in r.sequence)) for r in group.rounds}
    units: list[float] = []
    counts: list[int] = []
    for index in range(upto):
        sides = [_side(boots, arm, index) for arm in (comparison.a, comparison.b)]
        if sides[0] is None or sides[1] is None:
            continue
        shared = [s for s in order.get(index, []) if s in sides[0].values and s in sides[1].values]
        mine = quads([sides[0].values[s] for s in shared], [sides[1].values[s] for s in shared])
        units += mine
        counts.append(len(mine))
    # Boots that hold fewer prompts would take prompts from all others.
    whole = [b for b in boots if b.round < rounds] if rounds else boots
    pool = pool_for({group.name: whole}, {group.name: group.design}, group.name, (comparison.a, comparison.b))
    known = boot_sd(metric, pool, declared=(declared or {}).get(metric), prior=prior)
    return look(
        units,
        looks=len(group.looks) + len(group.look_quads),
        # Boots weigh as their quads do: a round that has just begun adds little of a boot.
        boots=sum(counts) ** 2 / sum(c * c for c in counts) if any(counts) else 0.0,
        boot_sd=known.sd,
        boot_df=known.df,
        limit=math.log1p(comparison.margin),
        alpha=1 - level,
    )


def at_quad(group: GroupPlan, rounds: int, quads_more: int) -> int:
    """The number of the quad after which a look in a round stands."""
    return rounds * quads_per_round(group) + quads_more


def decide(
    rows: Sequence[RequestRow],
    group: GroupPlan,
    comparisons: Iterable[Comparison],
    stop: Stop,
    *,
    level: float = 0.95,
    declared: Mapping[Metric, float] | None = None,
    prior: Prior | None = None,
) -> str | None:
    """Why the group may stop here (`differs`, `equivalent`, `decided` of several comparisons), or None."""
    mine = [c for c in comparisons if c.group == group.name]
    said = []
    for c in mine:
        seen = take(
            rows, group, c, stop.rounds, quads_more=stop.quads, level=share(level, len(mine)), declared=declared,
            prior=prior,
        )  # fmt: skip
        if not seen.stop:
            return None
        said.append(seen.why)
    return said[0] if len(set(said)) == 1 else "decided" if said else None


def share(level: float, comparisons: int) -> float:
    """The level of one of so many comparisons (Bonferroni)."""
    return 1 - (1 - level) / max(1, comparisons)


def _side(boots: Sequence[Boot], arm: str, round_: int) -> Boot | None:
    return next((b for b in boots if b.arm == arm and b.round == round_), None)
