"""For each planned comparison, the cheapest design that would resolve its margin."""

from dataclasses import replace

from campaign.money import MicroUsd, micro
from campaign.plan.cheapest import Costs, cheapest
from campaign.plan.cost import arm_times
from campaign.plan.model import Cheapest, SessionPlan
from campaign.plan.power import Prior, default_prior
from campaign.spec.models import Spec


def proposals(spec: Spec, session: SessionPlan, prior: Prior | None) -> list[Cheapest]:
    """One for each comparison at concurrency 1; what no design resolves is left out."""
    groups = {g.name: g for g in session.groups}
    found: list[Cheapest] = []
    known: dict[tuple[object, ...], list[tuple[str, int, int, float, float]]] = {}
    for c in session.comparisons:
        group = groups[c.group]
        if c.concurrency != 1 or not group.rounds:
            continue
        on_gpu = any(b.gpus for r in group.rounds for b in r.boots)
        used = prior or default_prior("gpu" if on_gpu else "cpu")
        declared = spec.statistics.boot_sd.get(c.primary)
        boots_known = c.primary in used.boot_df
        if declared is not None and not boots_known:
            used, boots_known = replace(used, boot_sd={**used.boot_sd, c.primary: declared}), True
        workload = spec.workloads[c.workload]
        times = [arm_times(session.arms[a].config, workload) for a in (c.a, c.b)]
        request_s = sum(
            t.ttft_ms / 1e3 + workload.max_tokens / t.accept_len * t.step_ms / 1e3 for t in times
        ) / len(times)
        boot_s = sum(t.boot_s for t in times) / len(times)
        resident = any(len(r.boots) > 1 for r in group.rounds)
        key = (c.primary, c.margin, on_gpu, resident, boots_known, round(boot_s, 3), round(request_s, 3))
        if key not in known:
            costs = Costs(boot_s, request_s, session.usd_per_hour / 1e6)
            known[key] = [
                (p.design, p.boots, p.slots, p.minutes, p.usd)
                for p in cheapest(
                    c.primary,
                    c.margin,
                    used,
                    costs,
                    # What cannot reside on this node is not proposed for it.
                    designs=(
                        *(("alternated",) if resident else ()),
                        "blocks",
                        *(("bracketed",) if boots_known else ()),
                    ),
                    at_most_boots=16,
                )
            ]
        for design, boots, n, minutes, dollars in known[key][:1]:
            found.append(
                Cheapest(
                    pair=c.pair,
                    metric=c.primary,
                    difference_pct=round(100 * c.margin, 4),
                    design=design,  # type: ignore[arg-type]  # one of the planned designs by construction
                    boots=boots,
                    n=n,
                    minutes=round(minutes, 2),
                    usd=MicroUsd(micro(f"{dollars:.6f}")),
                    usd_planned=group.usd_expected,
                )
            )
    return found
