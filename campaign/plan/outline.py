"""One session: its groups with anchors around them, its lease, and its rounds."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from campaign.money import MicroUsd
from campaign.plan.arrivals import load_plan
from campaign.plan.cost import (
    CHEAP_BOOT_S,
    SETUP_S,
    TEARDOWN_SHARE,
    Lease,
    Price,
    apportion,
    arm_times,
    lease,
)
from campaign.plan.design import Choice, choose, layout
from campaign.plan.expand import Draft, anchor, expand
from campaign.plan.model import ArmPlan, GroupPlan, SessionPlan
from campaign.plan.order import build_rounds
from campaign.plan.power import RESIDENT
from campaign.plan.storage import load_s
from campaign.spec.models import Spec


@dataclass(frozen=True, slots=True)
class Outline:
    """A session before its rounds are written out: enough to price it, and to price it without a part."""

    name: str
    node: str
    price: Price
    setup_s: float
    """From launch to the first boot."""
    groups: tuple[tuple[str, Choice], ...]
    """(name, choice) in running order, anchors among them."""
    lease: Lease
    hold_s: float = 0.0
    """Time the node is kept after the last anchor."""

    @property
    def drafts(self) -> tuple[Draft, ...]:
        """What is compared; no anchors."""
        return tuple(c.draft for _, c in self.groups if c.draft.kind != "anchor")

    def unreached(self) -> tuple[str, ...]:
        """Groups that do not finish before the lease ends."""
        ends = accumulate((c.seconds for _, c in self.groups), initial=self.setup_s)
        next(ends)
        return tuple(
            n for (n, _), end in zip(self.groups, ends, strict=True) if end > self.lease.lease_s + 1e-6
        )


def outline(
    spec: Spec, name: str, price: Price, drafts: Iterable[Draft] | None = None, hold_s: float = 0.0
) -> Outline:
    """Design, order and price of a session's groups; `drafts` replaces what the file asks for."""
    node = spec.sessions[name].node
    work = tuple(expand(spec, name) if drafts is None else drafts)
    chosen = [choose(spec, node, draft, price) for draft in work]
    groups = tuple((c.draft.name, c) for c in chosen)
    if spec.sessions[name].anchor:
        groups = _with_anchors(spec, chosen, choose(spec, node, anchor(spec), price))
    arms = [arm.config for _, choice in groups for arm in choice.draft.arms]
    setup_s = SETUP_S[spec.nodes[node].provider] + load_s(spec, node, arms)
    work_s = sum(c.seconds for _, c in groups)
    tokens = MicroUsd(sum(c.tokens_usd(spec) for _, c in groups))
    terms = lease(work_s, setup_s, price, float(spec.nodes[node].max_hours), spec.gates, tokens, hold_s)
    return Outline(name, node, price, setup_s, groups, terms, hold_s)


def _with_anchors(spec: Spec, chosen: list[Choice], reference: Choice) -> tuple[tuple[str, Choice], ...]:
    """Anchors first, last, and between groups where the reference boots cheaply."""
    arm = reference.draft.arms[0].config
    boot_s = arm_times(arm, spec.workloads[reference.draft.workload]).boot_s
    between = spec.anchor.between and boot_s <= CHEAP_BOOT_S
    groups: list[tuple[str, Choice]] = [("anchor.first", reference)]
    for i, choice in enumerate(chosen):
        if i and between:
            groups.append((f"anchor.between{i}", reference))
        groups.append((choice.draft.name, choice))
    return (*groups, ("anchor.last", reference))


def session_plan(spec: Spec, session: Outline) -> SessionPlan:
    """Write out every boot and request."""
    terms = session.lease
    usd = apportion(terms.usd_expected, _held(session))
    arms: dict[str, ArmPlan] = {}
    groups = []
    for (name, choice), share in zip(session.groups, usd[1:-1], strict=True):
        draft = choice.draft
        arms.update({arm.name: arm for arm in draft.arms})
        groups.append(
            GroupPlan(
                name=name,
                kind=draft.kind,
                design=choice.design,
                why=choice.why,
                arms=tuple(arm.name for arm in draft.arms),
                workload=draft.workload,
                concurrency=draft.concurrency,
                rounds=build_rounds(choice.design, layout(spec, session.node, choice, name)),
                seconds=choice.seconds,
                usd_expected=share,
                load=load_plan(draft.load, draft.concurrency, spec.workloads[draft.workload].n),
                looks=draft.looks if choice.design in RESIDENT else (),
                look_quads=draft.look_quads if choice.design == "alternated" else (),
                forecast=draft.forecast,
            )
        )
    rounds = [r for g in groups for r in g.rounds]
    return SessionPlan(
        name=session.name,
        node=session.node,
        priority=spec.sessions[session.name].priority,
        arms=arms,
        groups=tuple(groups),
        comparisons=tuple(c for draft in session.drafts for c in draft.comparisons),
        boots=sum(len(r.boots) for r in rounds),
        requests=sum(len(r.warmup) + len(r.sequence) for r in rounds),
        seconds=terms.expected_s,
        usd_per_hour=session.price.usd_per_hour,
        price_source=session.price.source,
        usd_expected=terms.usd_expected,
        usd_worst=terms.usd_worst,
        worst_seconds=terms.lease_s,
        tokens_usd=terms.tokens_usd,
        hold_s=session.hold_s,
    )


def _held(session: Outline) -> list[float]:
    """Seconds the node is held for setup, each group, and teardown; nothing past the lease's end."""
    parts = [session.setup_s, *(c.seconds for _, c in session.groups)]
    ends = [min(end, session.lease.lease_s) for end in accumulate(parts, initial=0.0)]
    held = [after - before for before, after in pairwise(ends)]
    return [*held, session.hold_s + TEARDOWN_SHARE * session.price.teardown_s]
