"""What the planned comparisons can resolve, and where a plan is weaker than what is asked of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from campaign.plan.cost import SAFETY
from campaign.plan.model import Comparison, GroupPlan, Power, SessionPlan
from campaign.plan.outline import Outline
from campaign.plan.power import RESIDENT, Prior, default_prior, resolvable, session_boot_df
from campaign.plan.text import span
from campaign.spec.models import Metric, Spec

_TRY_BOOTS = (4, 6, 8, 12, 16, 24, 32)


@dataclass
class Resolution:
    """Power of a session's comparisons; remembers what it has solved, since arms share designs."""

    spec: Spec
    session: SessionPlan
    prior: Prior | None
    _known: dict[tuple[object, ...], float] = field(default_factory=dict)

    def rows(self) -> tuple[tuple[Power, ...], tuple[str, ...]]:
        """(power, warnings) of every comparison: its primary metric, and decode_tok_s beside it."""
        groups = {g.name: g for g in self.session.groups}
        power: list[Power] = []
        warnings: list[str] = []
        for comparison in self.session.comparisons:
            group = groups[comparison.group]
            n, boots = self._blocks(group)
            if n < 2:
                warnings.append(
                    f"{comparison.pair}: {n} block cannot resolve anything; set n of workload "
                    f"{group.workload} to 2 or more"
                )
                continue
            metrics: tuple[Metric, ...] = (comparison.primary, "decode_tok_s")
            for metric in dict.fromkeys(metrics):
                prior, df = self._boots_known(group, metric)
                found = self._resolvable(metric, group, prior, n=n, boots=boots, df=df)
                row = Power(
                    comparison.pair,
                    metric,
                    n,
                    boots,
                    round(100 * found, 2),
                    round(100 * comparison.margin, 4),
                    prior.source,
                )
                power.append(row)
                if metric == comparison.primary:
                    warnings += self._judge(comparison, group, row, prior, df)
        return tuple(power), tuple(warnings)

    def _judge(
        self, comparison: Comparison, group: GroupPlan, row: Power, prior: Prior, df: float
    ) -> list[str]:
        warnings = []
        if df == 0 and row.metric not in self.spec.statistics.boot_sd and prior.source == "default":
            warnings.append(
                f"{row.pair}: one boot an arm and no statistics.boot_sd.{row.metric}: the verdict will be "
                "unresolved (boot_sd_unknown); set boots to 2 or more"
            )
        if row.resolvable_pct > row.rule_pct:
            enough = next(
                (
                    b
                    for b in _TRY_BOOTS
                    if b > row.boots
                    and self._resolvable(row.metric, group, prior, n=row.n, boots=b, df=None)
                    <= comparison.margin
                ),
                None,
            )
            advice = (
                f"about {enough} boots would" if enough else "more boots alone would not; widen the margin"
            )
            warnings.append(
                f"{row.pair}: {row.metric} resolves {row.resolvable_pct:.1f} % at 80 % power, the margin "
                f"asks for {row.rule_pct:g} % ({advice})"
            )
        return warnings

    def _blocks(self, group: GroupPlan) -> tuple[int, int]:
        """(blocks, boots per arm): slots at concurrency 1, waves of a boot above."""
        first = group.rounds[0].sequence
        name = first[0].arm
        own = [r for r in first if r.arm == name and not r.cut]
        boots = sum(b.arm == name for r in group.rounds for b in r.boots)
        return len({r.slot if group.concurrency == 1 else r.wave for r in own}), boots

    def _boots_known(self, group: GroupPlan, metric: Metric) -> tuple[Prior, float]:
        """The prior, and the degrees of freedom the boot deviation will rest on (0: declared or unknown)."""
        on_gpu = any(b.gpus for r in group.rounds for b in r.boots)
        prior = self.prior or default_prior("gpu" if on_gpu else "cpu")
        df = session_boot_df(self.session.groups, resident=group.design in RESIDENT)
        declared = self.spec.statistics.boot_sd.get(metric)
        if declared is not None and (df == 0 or prior.source == "default"):
            known = replace(prior, boot_sd={**prior.boot_sd, metric: declared}, source="declared")
            return known, 0.0
        return prior, df + prior.boot_df.get(metric, 0.0)

    def _resolvable(
        self, metric: Metric, group: GroupPlan, prior: Prior, *, n: int, boots: int, df: float | None
    ) -> float:
        key = (metric, n, boots, group.design, df, prior.boot_sd[metric])
        if key not in self._known:
            self._known[key] = resolvable(metric, n, boots, prior, group.design, df_boot=df)
        return self._known[key]


def shape_warnings(spec: Spec, session: SessionPlan, outlined: Outline) -> tuple[str, ...]:
    """Where order, places, load or the lease are weaker than they could be."""
    found: list[str] = []
    for _, choice in outlined.groups:
        found += choice.notes
        draft = choice.draft
        workload = spec.workloads[draft.workload]
        if draft.concurrency > workload.n:
            found.append(
                f"{draft.where}: concurrency {draft.concurrency} with n {workload.n} prompts puts at most "
                f"{workload.n} in flight"
            )
        odd = draft.concurrency == 1 and workload.n % 2 == 1 and choice.boots % 2 == 1
        if odd and choice.design in RESIDENT:
            found.append(
                f"{draft.where}: n {workload.n} and boots {choice.boots} are both odd, so the order is not in "
                "whole ABBA quads; make one of them even"
            )
        if draft.look_quads and choice.design != "alternated":
            found.append(
                f"{draft.where}: look_quads are taken only where arms alternate; {choice.design} has no quads"
            )
        if draft.looks and choice.design not in RESIDENT:
            found.append(
                f"{draft.where}: looks are taken only where both arms are resident; {choice.design} runs whole"
            )
    found += _no_aa(session.groups)
    if outlined.lease.wanted_s > outlined.lease.lease_s:
        found.append(
            f"session {session.name} wants {span(outlined.lease.wanted_s)} and nodes.{session.node}.max_hours "
            f"allows {span(outlined.lease.lease_s)}: {', '.join(outlined.unreached())} will not finish; "
            f"set nodes.{session.node}.max_hours to {_hours(spec, outlined):g}"
        )
    return tuple(dict.fromkeys(found))


def _hours(spec: Spec, outlined: Outline) -> float:
    """What `max_hours` would hold the lease that the plan asks for, in hours, rounded up."""
    margin = spec.gates.boot_timeout.total_seconds() + spec.gates.request_timeout.total_seconds()
    return math.ceil((outlined.lease.wanted_s * SAFETY + margin) / 36) / 100


def _no_aa(groups: Sequence[GroupPlan]) -> list[str]:
    compared = [g for g in groups if g.design in RESIDENT and g.kind != "aa"]
    if not compared or any(g.kind == "aa" and g.design in RESIDENT for g in groups):
        return []
    return [
        (
            f"{', '.join(g.name for g in compared)}: arms are compared in two places of a node with no A/A in the "
            "same places; add a pair of kind aa (places on one GPU differed by 1 %)"
        )
    ]
