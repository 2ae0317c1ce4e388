"""How the arms of a group share the node, what each way costs, and which one is taken."""

from dataclasses import dataclass
from typing import assert_never

from campaign.errors import Problem, SpecError
from campaign.money import MicroUsd
from campaign.plan import sharing
from campaign.plan.arrivals import load_plan, offsets_ns
from campaign.plan.cost import Price, arm_times, billed, group_seconds, group_tokens_usd
from campaign.plan.expand import Draft
from campaign.plan.model import PlannedDesign
from campaign.plan.order import Layout, waves
from campaign.plan.text import dollars, span
from campaign.spec.models import Arm, Candidate, Node, SkyNode, Spec

_RESIDENT: tuple[PlannedDesign, ...] = ("alternated", "duet")
_FREE_OF_GPU = frozenset({"llamacpp", "api"})


@dataclass(frozen=True, slots=True)
class Choice:
    """A group with its design."""

    draft: Draft
    design: PlannedDesign
    boots: int
    """Per arm; `bracketed` takes one and `blocks` at least two, whatever was asked."""
    seconds: float
    why: str
    notes: tuple[str, ...]
    """What the design asked for costs in strength, for the plan's warnings."""

    def tokens_usd(self, spec: Spec) -> MicroUsd:
        """Tokens of priced endpoints, each round done once."""
        draft = self.draft
        return group_tokens_usd(
            [arm.config for arm in draft.arms],
            spec.workloads[draft.workload],
            boots=self.boots,
            waves=waves(self.boots, draft.concurrency),
            concurrency=draft.concurrency,
        )


def node_gpus(node: Node) -> tuple[int, ...]:
    """GPU indexes of a node: the ones it lists, or those that every candidate has.

    Which candidate will be had is not known before the launch: where one of them is smaller, the larger ones' further
    GPUs stay idle; where all have eight, a pair of 4-GPU arms runs on both halves.
    """
    if not isinstance(node, SkyNode):
        return tuple(node.gpus)
    counts = [
        (c.accelerators or node.accelerators).partition(":")[2]
        for c in node.any_of or node.ordered or (Candidate(),)
    ]
    return tuple(range(min(int(count) if count.isdigit() else 1 for count in counts)))


def gpus_needed(arm: Arm, available: int) -> int:
    """GPUs an arm takes for itself; none for llama.cpp on CPU and for an endpoint.

    Its tensor times its pipeline parallel size, times its data parallel size unless that lies inside the
    tensor ranks (SGLang's attention).
    """
    if arm.engine in _FREE_OF_GPU:
        return 0
    inside = arm.engine == "sglang" and "--enable-dp-attention" in arm.extra_args
    return (arm.tp or min(1, available)) * (arm.pp or 1) * (1 if inside else arm.dp or 1)


def choose(spec: Spec, node_name: str, draft: Draft, price: Price) -> Choice:
    """Take the design asked for, or the strongest that fits. Raises SpecError where an arm does not fit."""
    gpus = node_gpus(spec.nodes[node_name])
    needs = [gpus_needed(arm.config, len(gpus)) for arm in draft.arms]
    for arm, need in zip(draft.arms, needs, strict=True):
        if need > len(gpus):
            raise _too_wide(arm.name, need, node_name, len(gpus))
    if draft.kind == "anchor":
        seconds = _seconds(spec, draft, "anchor", draft.boots)
        why = "the reference arm alone: step time now against step time at the first anchor"
        return Choice(draft, "anchor", draft.boots, seconds, why, ())
    blocker = _blocker(draft, needs, len(gpus))
    if draft.design == "auto":
        design, reason = _strongest(draft, blocker, on_gpus=sum(needs) > 0)
    else:
        design, reason = draft.design, "asked for in the file"
    boots = _boots(design, draft.boots)
    shared = design in _RESIDENT and sum(needs) > len(gpus)
    if shared:
        sharing.require(draft)
    stagger_s = _stagger_s(spec, node_name) if shared else None
    seconds = _seconds(spec, draft, design, boots, stagger_s)
    return Choice(
        draft,
        design,
        boots,
        seconds,
        f"{reason}; {_alternatives(spec, draft, design, price, resident=blocker is None, stagger_s=stagger_s)}",
        (*_notes(draft, design, boots, blocker), *(sharing.notes(draft) if shared else ())),
    )


def _stagger_s(spec: Spec, node_name: str) -> float | None:
    stagger = getattr(spec.nodes[node_name], "boot_stagger", None)
    return None if stagger is None else float(stagger.total_seconds())


def _strongest(draft: Draft, blocker: str | None, *, on_gpus: bool) -> tuple[PlannedDesign, str]:
    count = {2: "both arms fit"}.get(len(draft.arms), f"all {len(draft.arms)} arms fit")
    if blocker is None:
        where = "on GPUs of their own" if on_gpus else "on the CPU"
        return "alternated", f"{count} on the node at once, {where}, so drift hits all alike"
    if draft.boots >= 2:
        return "blocks", f"{blocker}, and {draft.boots} boots an arm allow A B B A by boot"
    return "bracketed", f"{blocker}, and one boot an arm leaves A B between anchors, the weakest design"


def _blocker(draft: Draft, needs: list[int], available: int) -> str | None:
    """Why the arms cannot be resident together, or None."""
    if sum(needs) > available:
        return f"the arms need {sum(needs)} GPUs together and the node has {available}"
    homeless = [
        arm.name
        for arm, need in zip(draft.arms, needs, strict=True)
        if need == 0 and arm.config.engine not in _FREE_OF_GPU
    ]
    if homeless:
        return f"{' and '.join(homeless)} cannot be shown to fit beside others on a node that lists no GPUs"
    return None


def _boots(design: PlannedDesign, asked: int) -> int:
    match design:
        case "bracketed":
            return 1
        case "blocks":
            return max(2, asked)
        case "alternated" | "duet" | "anchor":
            return asked
        case _:
            assert_never(design)


def _seconds(
    spec: Spec, draft: Draft, design: PlannedDesign, boots: int, stagger_s: float | None = None
) -> float:
    workload = spec.workloads[draft.workload]
    in_flight = min(draft.concurrency, workload.n)
    times = [arm_times(arm.config, workload, in_flight) for arm in draft.arms]
    plan = load_plan(draft.load, draft.concurrency, workload.n)
    sets = waves(boots, draft.concurrency) + (2 * plan.cut_sets if plan is not None else 0)
    seconds = group_seconds(
        design,
        times,
        workload,
        boots=boots,
        waves=sets,
        concurrency=draft.concurrency,
        stagger_s=stagger_s,
    )
    if plan is None or not plan.open or draft.load is None:
        return seconds
    # An open loop lasts as long as its plan does, however fast the engine is.
    last = offsets_ns(draft.load, sets * workload.n, "")[-1] or 0
    return max(seconds, boots * len(times) * last / 1e9 + seconds)


def _alternatives(
    spec: Spec,
    draft: Draft,
    taken: PlannedDesign,
    price: Price,
    *,
    resident: bool,
    stagger_s: float | None,
) -> str:
    feasible: tuple[PlannedDesign, ...] = ("blocks", "bracketed")
    feasible = (*_RESIDENT, *feasible) if resident else feasible
    shown = []
    for design in (taken, *(d for d in feasible if d != taken)):
        seconds = _seconds(spec, draft, design, _boots(design, draft.boots), stagger_s)
        cost = f"{span(seconds)} and {dollars(billed(price, seconds))}"
        shown.append(cost if design == taken else f"{design} {cost}")
    return f"{shown[0]} (instead: {', '.join(shown[1:])})"


def _notes(draft: Draft, design: PlannedDesign, boots: int, blocker: str | None) -> tuple[str, ...]:
    notes = []
    if boots > draft.boots:
        notes.append(f"{draft.where}: design blocks takes {boots} boots an arm, not boots: {draft.boots}")
    if boots < draft.boots:
        notes.append(f"{draft.where}: design bracketed boots each arm once, not boots: {draft.boots} times")
    if design in _RESIDENT and blocker is not None:
        notes.append(f"{draft.where}: design {design} was asked for, but {blocker}")
    if design == "bracketed" and draft.design == "auto":
        notes.append(
            f"{draft.where}: one boot an arm cannot tell the arm from its boot; set boots to 2 or more"
        )
    return tuple(notes)


def layout(spec: Spec, node_name: str, choice: Choice, name: str) -> Layout:
    """What the order of this group depends on; `name` is the group's."""
    draft = choice.draft
    workload = spec.workloads[draft.workload]
    gpus = node_gpus(spec.nodes[node_name])
    return Layout(
        group=name,
        arms=tuple(arm.name for arm in draft.arms),
        gpus=gpus,
        needs=tuple(gpus_needed(arm.config, len(gpus)) for arm in draft.arms),
        slots=workload.n,
        boots=choice.boots,
        concurrency=draft.concurrency,
        workload=draft.workload,
        workload_seed=workload.seed,
        sides=(0, 1) if draft.kind == "aa" else (0,) * len(draft.arms),
        load=draft.load,
    )


def _too_wide(arm: str, need: int, node: str, available: int) -> SpecError:
    return SpecError(
        (
            Problem(
                "experiments.yaml",
                None,
                f"arms.{arm.partition('#')[0]}.tp",
                str(need),
                f"node {node} has {available} GPUs to use",
                f"lower tp, or list more GPUs in nodes.{node}",
            ),
        )
    )
