"""A spec and prices -> a plan: every boot and request, what it may cost, and what it can resolve."""

from collections.abc import Mapping

from campaign.money import micro
from campaign.plan.admit import admit, cuts
from campaign.plan.cost import SAFETY, TYPICAL, ArmTimes, Price, arm_times
from campaign.plan.model import CampaignPlan, Power, SessionPlan
from campaign.plan.outline import Outline, outline, session_plan
from campaign.plan.power import Prior
from campaign.plan.propose import proposals
from campaign.plan.rules import Resolution, shape_warnings
from campaign.plan.storage import weights_line
from campaign.spec.models import Spec


def build(
    spec: Spec, prices: Mapping[str, Price], prior: Prior | None = None, hold_s: float = 0.0
) -> CampaignPlan:
    """Plan a campaign. The same arguments give the same plan, byte for byte.

    `hold_s`: how long each node is kept after its last anchor; the lease asked for is that much longer.

    `prices`: by node name, e.g. `campaign.plan.cost.declared_prices(spec)`. `prior`: variance components
    from earlier rows; without it the stated defaults are used, and the power rows say so.

    A plan of which no session fits is returned with `admitted == ()` and what to `cut`;
    `campaign.plan.admit.require_admitted` turns it into BudgetRefused. Raises SpecError where arms cannot
    be compared or do not fit their node.
    """
    cap = micro(spec.budget.cap_usd)
    names = sorted(spec.sessions, key=lambda name: spec.sessions[name].priority)
    outlines = [outline(spec, name, prices[spec.sessions[name].node], hold_s=hold_s) for name in names]
    admitted, waiting = admit(outlines, cap)
    sessions: list[SessionPlan] = []
    power: list[Power] = []
    warnings: list[str] = []
    for outlined in outlines:
        session = session_plan(spec, outlined)
        rows, weak = Resolution(spec, session, prior).rows()
        sessions.append(session)
        power += rows
        warnings += [*shape_warnings(spec, session, outlined), *weak]
    return CampaignPlan(
        campaign=spec.campaign,
        cap_usd=cap,
        sessions=tuple(sessions),
        admitted=admitted,
        power=tuple(power),
        warnings=tuple(dict.fromkeys([*waiting, *warnings])),
        cut=cuts(spec, outlines, cap) if outlines and not admitted else (),
        assumptions=(*_assumptions(spec, outlines), *_variance(spec, prior)),
        cheapest=tuple(p for s in sessions for p in proposals(spec, s, prior)),
    )


def _variance(spec: Spec, prior: Prior | None) -> tuple[str, ...]:
    declared = ", ".join(f"{m} {sd:g}" for m, sd in spec.statistics.boot_sd.items())
    if prior is not None and prior.said:
        return (f"variance components: estimated from {prior.said}",)
    if declared:
        return (f"boot sd: declared ({declared}); other variance components: stated defaults",)
    return (
        "variance components: stated defaults; boot sd unknown (no earlier run in the store, none declared)",
    )


def _assumptions(spec: Spec, outlines: list[Outline]) -> tuple[str, ...]:
    """What the times and dollars rest on: arms that are taken to be alike share a line."""
    alike: dict[tuple[str, ArmTimes], dict[str, None]] = {}
    tables: dict[str, None] = {}
    for outlined in outlines:
        for _, choice in outlined.groups:
            workload = choice.draft.workload
            for arm in choice.draft.arms:
                times = arm_times(arm.config, spec.workloads[workload])
                alike.setdefault((workload, times), {})[arm.name] = None
                if times.source != "estimate":
                    engine = arm.config.engine or "command"
                    tables[f"default for {engine}: {TYPICAL[engine].source}"] = None
    gates = spec.gates
    return (
        *(
            f"{', '.join(arms)} on {workload}: boot {times.boot_s:g} s, TTFT {times.ttft_ms:.0f} ms, "
            f"step {times.step_ms:.1f} ms, {times.accept_len:.2g} tok/step ({times.source})"
            for (workload, times), arms in alike.items()
        ),
        *tables,
        *(f"runtime {name}: {r.image}" for name, r in spec.runtimes.items() if r.image is not None),
        *(line for o in outlines if (line := weights_line(spec, o)) is not None),
        (
            f"a lease asks for {SAFETY:g} x the expected time + {gates.boot_timeout.total_seconds():g} s "
            f"(boot_timeout) + {gates.request_timeout.total_seconds():g} s (request_timeout), at most max_hours"
        ),
    )
