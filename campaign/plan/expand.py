"""Ladders and pairs -> arms and comparisons. Names are made here and nowhere else.

A rung is `LADDER=VALUE`, a varied arm `PAIR.b`, the second side of an A/A `ARM#2` (same hash). None of the
three can be the name of an arm in the file.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from campaign.errors import Problem, SpecError
from campaign.plan.model import ArmPlan, Comparison, GroupKind
from campaign.spec.models import Design, Load, Pair, Spec
from campaign.spec.resolve import arm_hash, resolved_arm, with_fields

_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


@dataclass(frozen=True, slots=True)
class Draft:
    """One group before it has an order: who is compared, on what, how often."""

    name: str
    kind: GroupKind
    where: str
    """Field of the spec it comes from, e.g. `ladders.depth`."""
    arms: tuple[ArmPlan, ...]
    workload: str
    concurrency: int
    boots: int
    design: Design
    comparisons: tuple[Comparison, ...]
    load: Load | None = None
    looks: tuple[int, ...] = ()
    look_quads: tuple[int, ...] = ()
    forecast: tuple[str, ...] = ()
    """Arms whose forecasts stand before this stage of a ladder."""


def expand(spec: Spec, session: str) -> tuple[Draft, ...]:
    """Groups of one session in running order: its pairs, then its ladders; anchors are not among them.

    Raises SpecError where two arms that are to be compared are the same configuration.
    """
    wanted = spec.sessions[session]
    drafts = [d for name in wanted.pairs for d in _pair(spec, name)]
    drafts += [d for name in wanted.ladders for d in _ladder(spec, name)]
    return tuple(drafts)


def anchor(spec: Spec) -> Draft:
    """The anchor, still without its position."""
    a = spec.anchor
    arm = named(spec, a.arm)
    return Draft("anchor", "anchor", "anchor", (arm,), a.workload, 1, a.boots, "auto", ())


def named(spec: Spec, name: str) -> ArmPlan:
    """An arm of the file."""
    config = resolved_arm(spec, name)
    return ArmPlan(name, arm_hash(config, spec.models, spec.runtimes), config)


def _varied(spec: Spec, name: str, source: str, fields: Mapping[str, Any]) -> ArmPlan:
    config = with_fields(resolved_arm(spec, source), dict(fields))
    return ArmPlan(name, arm_hash(config, spec.models, spec.runtimes), config)


def _pair(spec: Spec, name: str) -> list[Draft]:
    pair = spec.pairs[name]
    a, b = named(spec, pair.a), _other_side(spec, name, pair)
    if pair.kind != "aa" and a.hash == b.hash:
        raise _same(f"pairs.{name}", b.name, a.name, "let b differ in a field, or write kind: aa")
    several = isinstance(pair.concurrency, tuple) and len(pair.concurrency) > 1
    values = pair.concurrency if isinstance(pair.concurrency, tuple) else (pair.concurrency,)
    drafts = []
    for c in dict.fromkeys(values):
        label = f"{name}@c{c}" if several else name
        group = f"pair.{label}"
        comparison = Comparison(
            label, pair.kind, label, group, a.name, b.name, pair.workload, c, pair.primary, pair.margin
        )
        drafts.append(
            Draft(
                group,
                pair.kind,
                f"pairs.{name}",
                (a, b),
                pair.workload,
                c,
                pair.boots,
                pair.design,
                (comparison,),
                load=pair.load if c > 1 else None,
                looks=pair.looks if c == 1 else (),
                look_quads=pair.look_quads if c == 1 else (),
            )
        )
    return drafts


def _other_side(spec: Spec, name: str, pair: Pair) -> ArmPlan:
    if pair.kind == "aa":
        return replace(named(spec, pair.a), name=f"{pair.a}#2")
    if pair.b is not None:
        return named(spec, pair.b)
    return _varied(spec, f"{name}.b", pair.a, pair.vary or {})


def _ladder(spec: Spec, name: str) -> list[Draft]:
    ladder = spec.ladders[name]
    base = named(spec, ladder.base)
    source = ladder.from_ or ladder.base
    rungs = [
        _varied(spec, rung, source, {ladder.field: value})
        for rung, value in zip(_rung_names(name, ladder.values), ladder.values, strict=True)
    ]
    seen: dict[str, str] = {}
    for arm in (base, *rungs):
        if arm.hash in seen:
            raise _same(
                f"ladders.{name}", arm.name, seen[arm.hash], f"take that value out of ladders.{name}.values"
            )
        seen[arm.hash] = arm.name
    if not ladder.staged:
        return [_stage(spec, name, f"ladder.{name}", base, rungs)]
    # Each stage boots the base and the rung before it again: what is compared is measured in one group.
    stages = [_stage(spec, name, f"ladder.{name}", base, rungs[:2])]
    for i in range(2, len(rungs)):
        stage = _stage(spec, name, f"ladder.{name}@s{i}", base, rungs[i - 1 : i + 1])
        # The rung before met the base in its own stage.
        kept = tuple(c for c in stage.comparisons if rungs[i].name in {c.a, c.b})
        stages.append(replace(stage, comparisons=kept, forecast=tuple(r.name for r in rungs[i:])))
    return stages


def _stage(spec: Spec, name: str, group: str, base: ArmPlan, rungs: Sequence[ArmPlan]) -> Draft:
    """One group of a ladder: each rung against the base, and neighbours against each other."""
    ladder = spec.ladders[name]
    against_base = [(base.name, rung.name) for rung in rungs]
    adjacent = [(low.name, high.name) for low, high in pairwise(rungs)]
    comparisons = tuple(
        Comparison(
            f"{name}:{a}|{b}",
            "ladder",
            name,
            group,
            a,
            b,
            ladder.workload,
            ladder.concurrency,
            ladder.primary,
            ladder.margin,
        )
        for a, b in against_base + adjacent
    )
    return Draft(
        group,
        "ladder",
        f"ladders.{name}",
        (base, *rungs),
        ladder.workload,
        ladder.concurrency,
        ladder.boots,
        ladder.design,
        comparisons,
        ladder.load if ladder.concurrency > 1 else None,
        looks=ladder.looks,
        look_quads=ladder.look_quads,
    )


def _rung_names(ladder: str, values: tuple[Any, ...]) -> list[str]:
    """`LADDER=VALUE`, usable in a file name; values that look alike once shortened are numbered."""
    names: list[str] = []
    for value in values:
        if isinstance(value, dict):  # what is set, words first: `ngram-breadth1-depth3`
            said = {k: v for k, v in value.items() if v not in (None, False)}
            words = [str(v) for v in said.values() if isinstance(v, str)]
            text = "-".join([*words, *(f"{k}{v}" for k, v in said.items() if not isinstance(v, str))])
        else:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)
        short = _UNSAFE.sub("-", text).strip("-")[:40] or "empty"
        name, n = f"{ladder}={short}", 2
        while name in names:
            name, n = f"{ladder}={short}.{n}", n + 1
        names.append(name)
    return names


def _same(field: str, name: str, other: str, fix: str) -> SpecError:
    why = f"arm {name} is the same configuration as {other}, so there is nothing to compare"
    return SpecError((Problem("experiments.yaml", None, field, "", why, fix),))
