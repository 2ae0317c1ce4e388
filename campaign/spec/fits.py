"""Rules of what runs where: GPUs for the arm, context for the tokens, places for the requests in flight."""

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from campaign.errors import Problem, SpecError
from campaign.spec.models import Arm, AttachNode, LocalNode, Node, Session, SkyNode, Workload
from campaign.spec.parts import Parts
from campaign.spec.resolve import with_fields
from campaign.spec.storage import KEEP_GB, disk_gb, fetched, models_of

ACCELERATORS = re.compile(r"[A-Za-z0-9_.-]+:([1-9][0-9]{0,2})")
"""NAME:COUNT."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An arm as a session uses it."""

    where: tuple[str, ...]
    """The anchor, ladder or pair."""
    label: str
    source: str
    """The arm of the file; another than `label` where fields are varied."""
    arm: Arm
    workload: Workload | None
    concurrency: int


@dataclass(frozen=True, slots=True)
class _Lack:
    """What a use is short of: the worst of one path is reported, once."""

    path: tuple[str, ...]
    need: int
    why: str
    fix: str


def fits(parts: Parts) -> Iterator[Problem]:
    """Every arm of every session fits its node, its workload and its concurrency."""
    worst: dict[tuple[str, ...], _Lack] = {}
    for session in parts.sessions.values():
        node = parts.nodes.get(session.node)
        for use in _uses(parts, session):
            for lack in (_gpus(session.node, node, use), _context(parts, use), _room(use)):
                if lack is not None and (lack.path not in worst or worst[lack.path].need < lack.need):
                    worst[lack.path] = lack
        lack = _disk(parts, session.node, node, [use.arm for use in _uses(parts, session)])
        if lack is not None and (lack.path not in worst or worst[lack.path].need < lack.need):
            worst[lack.path] = lack
    for lack in worst.values():
        yield parts.problem(lack.path, lack.why, lack.fix)


def _uses(parts: Parts, session: Session) -> Iterator[_Use]:
    anchor = parts.anchor
    if session.anchor and anchor is not None and anchor.arm in parts.resolved:
        arm = parts.resolved[anchor.arm]
        yield _Use(("anchor",), anchor.arm, anchor.arm, arm, parts.workloads.get(anchor.workload), 1)
    for name in session.ladders:
        ladder = parts.ladders.get(name)
        if ladder is not None:
            workload = parts.workloads.get(ladder.workload)
            for label in dict.fromkeys((ladder.base, ladder.from_ or ladder.base)):
                if label in parts.resolved:
                    arm = parts.resolved[label]
                    yield _Use(("ladders", name), label, label, arm, workload, ladder.concurrency)
    for name in session.pairs:
        pair = parts.pairs.get(name)
        if pair is not None:
            in_flight = pair.concurrency
            most = max(in_flight, default=1) if isinstance(in_flight, tuple) else in_flight
            workload = parts.workloads.get(pair.workload)
            for label, source, arm in _sides(parts, name):
                yield _Use(("pairs", name), label, source, arm, workload, most)


def _sides(parts: Parts, name: str) -> Iterator[tuple[str, str, Arm]]:
    """(label, arm of the file, configuration) of both sides."""
    pair = parts.pairs[name]
    a = parts.resolved.get(pair.a)
    if a is not None:
        yield pair.a, pair.a, a
        changes = parts.values.get(("pairs", name, "vary"))
        if changes:
            with suppress(SpecError):  # it has a problem of its own
                yield f"{name}.b", pair.a, with_fields(a, changes)
    if pair.b is not None and pair.b in parts.resolved:
        yield pair.b, pair.b, parts.resolved[pair.b]


def _gpus(name: str, node: Node | None, use: _Use) -> _Lack | None:
    if node is None or use.arm.tp is None:
        return None
    if isinstance(node, LocalNode | AttachNode):
        have, fix = len(node.gpus), f"list them in nodes.{name}.gpus, or lower tp"
        at: tuple[str, ...] = ("nodes", name)
    else:
        offered = [c.accelerators or node.accelerators for c in node.any_of or node.ordered] or [
            node.accelerators
        ]
        matches = [ACCELERATORS.fullmatch(a) for a in offered]
        if None in matches:
            return None
        have, fix, at = (
            min(int(m[1]) for m in matches if m),
            "rent more, or lower tp",
            ("nodes", name, "accelerators"),
        )
    if use.arm.tp <= have:
        return None
    return _Lack(at, use.arm.tp, f"has {have} GPUs and arm {use.label} needs {use.arm.tp} (tp)", fix)


def _disk(parts: Parts, name: str, node: Node | None, arms: list[Arm]) -> _Lack | None:
    """A rented disk must hold every model of the session at once: arms alternate, and nothing is fetched twice."""
    if not isinstance(node, SkyNode) or node.disk_gb is None:
        return None
    names = models_of(arms)
    need = disk_gb(names, parts.models)
    if need is None or need <= node.disk_gb:
        return None
    listed = ", ".join(f"{n} {parts.models[n].gb:g} GB" for n in names if fetched(parts.models[n]))
    why = f"has {node.disk_gb} GB, and a session on it fetches {listed} beside {KEEP_GB:g} GB for system and engines"
    return _Lack(
        ("nodes", name, "disk_gb"),
        math.ceil(need),
        why,
        f"raise it to at least {math.ceil(need)}, or give the models a `cache:` folder",
    )


def _context(parts: Parts, use: _Use) -> _Lack | None:
    if use.workload is None or use.arm.context is None:
        return None
    need = (use.workload.tokens[1] if use.workload.tokens else 1) + use.workload.max_tokens
    if use.arm.context >= need:
        return None
    why = f"arm {use.label} has a context of {use.arm.context} tokens, and prompt plus output take {need}"
    same = use.arm.context == parts.resolved[use.source].context
    path = parts.owner(use.source, "context") if same else (*use.where, "vary")
    return _Lack(path, need, why, f"raise `context` to at least {need}")


def _room(use: _Use) -> _Lack | None:
    limit = use.arm.max_running_requests
    if limit is None or use.concurrency <= limit:
        return None
    why = (
        f"has {use.concurrency} requests in flight, and arm {use.label} runs {limit} at once: the rest queue"
    )
    fix = f"raise its `max_running_requests` to {use.concurrency}"
    return _Lack((*use.where, "concurrency"), use.concurrency, why, fix)
