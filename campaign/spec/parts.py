"""The valid parts of a spec, for rules between fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from campaign.errors import Problem
from campaign.spec.models import (
    Anchor,
    Arm,
    ClientOptions,
    Ladder,
    Model,
    Node,
    Pair,
    RayOptions,
    Runtime,
    Session,
    Workload,
)
from campaign.spec.tree import Tree, find


@dataclass(frozen=True)
class Parts:
    """The valid entries of a spec, and the names that stand in each section, valid or not."""

    tree: Tree
    names: Mapping[str, frozenset[str] | None]
    """None for a section that is not a mapping: nothing can be said about references to it."""
    nodes: Mapping[str, Node]
    models: Mapping[str, Model]
    runtimes: Mapping[str, Runtime]
    arms: Mapping[str, Arm]
    workloads: Mapping[str, Workload]
    ladders: Mapping[str, Ladder]
    pairs: Mapping[str, Pair]
    sessions: Mapping[str, Session]
    anchor: Anchor | None
    ray: RayOptions | None
    client: ClientOptions | None
    resolved: dict[str, Arm] = field(default_factory=dict)
    """Filled by `check`: arms with their inheritance applied, those that have one."""
    values: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Filled by `check`: ladder values and varied fields, read by the type of their field."""

    def owner(self, arm: str, name: str) -> tuple[str, ...]:
        """Path of the field of an arm, in the arm that writes it."""
        at: str | None = arm
        seen: set[str] = set()
        while at is not None and at in self.arms and at not in seen:
            seen.add(at)
            if name in self.arms[at].model_fields_set:
                return ("arms", at, name)
            at = self.arms[at].from_
        return ("arms", arm)

    def problem(self, path: tuple[str | int, ...], why: str, fix: str, value: str | None = None) -> Problem:
        spot = find(self.tree, path)
        shown = value if value is not None else (spot.value if spot.inside else "")
        return Problem(spot.at.file, spot.at.line, spot.field, shown, why, fix)
