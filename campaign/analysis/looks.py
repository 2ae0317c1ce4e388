"""A look inside a run: from the rows of a pair's rounds so far to whether it may stop, and what it said."""

import math
from collections.abc import Mapping, Sequence

from campaign.analysis.pairs import boot_sd, pool_for
from campaign.analysis.sequential import Look, look, quads
from campaign.analysis.variance import Boot, boots_of
from campaign.plan.model import Comparison, GroupPlan
from campaign.plan.power import RESIDENT, Prior
from campaign.spec.models import Metric
from campaign.store.row import RequestRow

OPEN = Look(0, None, None, None, stop=False, why="open")


def take(
    rows: Sequence[RequestRow],
    group: GroupPlan,
    comparison: Comparison,
    rounds: int,
    *,
    level: float = 0.95,
    declared: Mapping[Metric, float] | None = None,
    prior: Prior | None = None,
) -> Look:
    """Judge the first `rounds` rounds of a pair on its primary metric.

    rows: valid ones of the group. Only where both arms are resident at concurrency 1: units are whole ABBA quads in
    the order they were sent, round by round; a slot that one arm lost is left out of its quad's pair.
    """
    if group.design not in RESIDENT or group.concurrency != 1 or rounds not in group.looks:
        return OPEN
    metric = comparison.primary
    boots = [b for b in boots_of([r for r in rows if r.group == group.name], metric) if b.round < rounds]
    order = {r.index: list(dict.fromkeys(f"s{q.slot}" for q in r.sequence)) for r in group.rounds}
    units: list[float] = []
    pairs = 0
    for index in range(rounds):
        sides = [_side(boots, arm, index) for arm in (comparison.a, comparison.b)]
        if sides[0] is None or sides[1] is None:
            continue
        shared = [s for s in order.get(index, []) if s in sides[0].values and s in sides[1].values]
        units += quads([sides[0].values[s] for s in shared], [sides[1].values[s] for s in shared])
        pairs += 1
    pool = pool_for({group.name: boots}, {group.name: group.design}, group.name, (comparison.a, comparison.b))
    known = boot_sd(metric, pool, declared=(declared or {}).get(metric), prior=prior)
    return look(
        units,
        looks=len(group.looks),
        boots=pairs,
        boot_sd=known.sd,
        boot_df=known.df,
        limit=math.log1p(comparison.margin),
        alpha=1 - level,
    )


def _side(boots: Sequence[Boot], arm: str, round_: int) -> Boot | None:
    return next((b for b in boots if b.arm == arm and b.round == round_), None)
