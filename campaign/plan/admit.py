"""Which sessions start, which wait, and what to cut where none fits."""

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from campaign.errors import BudgetRefused
from campaign.money import MicroUsd
from campaign.plan.cost import arm_times
from campaign.plan.expand import Draft
from campaign.plan.model import CampaignPlan
from campaign.plan.outline import Outline, outline
from campaign.plan.text import dollars
from campaign.spec.models import Spec

_SHORT_BOOT_S = 60.0
"""Boot timeout suggested where every boot is expected within a quarter of it."""


def admit(sessions: Sequence[Outline], cap: MicroUsd) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(admitted, warnings): by priority, as long as the worst cases fit under the cap together.

    The first session that must wait makes all after it wait, so that a cheap late one does not take the
    money an important one is waiting for. A session that asks more than the whole cap is passed over.
    """
    admitted: list[str] = []
    warnings: list[str] = []
    worst = expected = 0
    waiting = False
    for session in sessions:
        ask = session.lease.usd_worst
        if ask > cap:
            warnings.append(
                f"session {session.name} asks {dollars(ask)} worst case, more than the whole cap of "
                f"{dollars(cap)}: it will not run"
            )
            continue
        waiting = waiting or worst + ask > cap
        if waiting:
            warnings.append(_waits(session.name, ask, expected, cap))
        else:
            admitted.append(session.name)
            worst += ask
        expected += session.lease.usd_expected
    return tuple(admitted), tuple(warnings)


def _waits(session: str, ask: int, before: int, cap: int) -> str:
    outlook = (
        f"it starts once what runs before it ({dollars(before)} expected) has settled"
        if before + ask <= cap
        else f"it will hardly fit: {dollars(before)} are expected to be spent before it"
    )
    return f"session {session} asks {dollars(ask)} worst case and waits for money to settle; {outlook}"


def cuts(spec: Spec, sessions: Sequence[Outline], cap: MicroUsd) -> tuple[str, ...]:
    """What to change so that something fits, one suggestion each; for a plan of which no session does."""
    cheapest = min(sessions, key=lambda s: s.lease.usd_worst)
    ask = cheapest.lease.usd_worst
    drafts = cheapest.drafts

    def saved(kept: Sequence[Draft], changed: Spec = spec) -> int:
        return ask - outline(changed, cheapest.name, cheapest.price, kept).lease.usd_worst

    floor = ask - saved([])
    anchors = f" (with anchors alone session {cheapest.name} asks {dollars(floor)})" if floor > cap else ""
    found = [f"raise budget.cap_usd to at least {math.ceil(ask / 10_000) / 100:.2f}{anchors}"]
    for where in dict.fromkeys(d.where for d in drafts):
        kind, _, name = where.partition(".")
        less = saved([d for d in drafts if d.where != where])
        if less > 0:
            found.append(f"cut {kind.removesuffix('s')} {name} ({dollars(less)} less)")
    fewer = [replace(d, boots=max(2, d.boots // 2)) if d.boots > 2 else d for d in drafts]
    less = saved(fewer)
    if less > 0:
        steps = {f"{d.boots} -> {f.boots}" for d, f in zip(drafts, fewer, strict=True) if d.boots != f.boots}
        found.append(f"boots {', '.join(sorted(steps))} ({dollars(less)} less)")
    short = _shorter_boot_timeout(spec, cheapest)
    if short is not None and (less := saved(drafts, short)) > 0:
        given = spec.gates.boot_timeout.total_seconds()
        found.append(f"gates.boot_timeout {given:g}s -> {_SHORT_BOOT_S:g}s ({dollars(less)} less)")
    return tuple(found)


def _shorter_boot_timeout(spec: Spec, session: Outline) -> Spec | None:
    boots = [
        arm_times(arm.config, spec.workloads[choice.draft.workload]).boot_s
        for _, choice in session.groups
        for arm in choice.draft.arms
    ]
    if spec.gates.boot_timeout.total_seconds() <= _SHORT_BOOT_S or max(boots) * 4 > _SHORT_BOOT_S:
        return None
    gates = spec.gates.model_copy(update={"boot_timeout": timedelta(seconds=_SHORT_BOOT_S)})
    return spec.model_copy(update={"gates": gates})


def require_admitted(plan: CampaignPlan) -> None:
    """Raise BudgetRefused, with what to cut, where no session of the plan fits under the cap."""
    if plan.admitted or not plan.sessions:
        return
    session = min(plan.sessions, key=lambda s: s.usd_worst)
    raise BudgetRefused(
        "budget",
        f"session {session.name} asks {dollars(session.usd_worst)} worst case",
        f"cap_usd {dollars(plan.cap_usd)}",
        "; or ".join(plan.cut),
    )
