"""What is left of a session whose node is gone, as a session of its own.

A comparison is made within one node. So the blocks that were completed stay where they are, and what is left
starts anew on the next node: between anchors of its own.
"""

from dataclasses import replace

from campaign.ledger.model import RunState
from campaign.money import MicroUsd
from campaign.plan.model import SessionPlan


def continued(plan: SessionPlan, state: RunState, name: str) -> SessionPlan | None:
    """The rest of `plan` under a new name, or None where only anchors are left.

    Groups keep their names and rounds their ids; every anchor is measured again. The lease asked for is as long as
    before: what is left may be the slow part.
    """
    done = set(state.done(plan.name))
    groups = []
    for group in plan.groups:
        rounds = group.rounds if group.kind == "anchor" else tuple(r for r in group.rounds if r.id not in done)
        if rounds:
            share = len(rounds) / len(group.rounds)
            groups.append(
                replace(
                    group,
                    rounds=rounds,
                    seconds=group.seconds * share,
                    usd_expected=MicroUsd(int(group.usd_expected * share)),
                )
            )
    if all(group.kind == "anchor" for group in groups):
        return None
    left = {group.name for group in groups}
    rounds_left = [r for g in groups for r in g.rounds]
    return replace(
        plan,
        name=name,
        groups=tuple(groups),
        comparisons=tuple(c for c in plan.comparisons if c.group in left),
        boots=sum(len(r.boots) for r in rounds_left),
        requests=sum(len(r.warmup) + len(r.sequence) for r in rounds_left),
    )
