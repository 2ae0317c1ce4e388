"""Rules of what runs where: GPUs for the arm, context for the tokens, places for the requests in flight."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from campaign.errors import Problem, SpecError
from campaign.spec.models import Arm, AttachNode, LocalNode, Node, Session, Workload
from campaign.spec.parts import Parts
from campaign.spec.resolve import with_fields

ACCELERATORS = re.compile(r"[A-Za-z0-9_.-]+:([1-9][0-9]{0,2})")
"""NAME:COUNT."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An arm as a session uses it."""

    where: tuple[str, ...]
    label: str
    arm: Arm
    workload: Workload | None
    concurrency: int


def fits(parts: Parts) -> Iterator[Problem]:
    """Every arm of every session fits its node, its workload and its concurrency."""
    seen = set()
    for session in parts.sessions.values():
        node = parts.nodes.get(session.node)
        for use in _uses(parts, session):
            for problem in (_gpus(parts, session.node, node, use), _context(parts, use), _room(parts, use)):
                if problem is not None and problem not in seen:
                    seen.add(problem)
                    yield problem


def _uses(parts: Parts, session: Session) -> Iterator[_Use]:
    anchor = parts.anchor
    if anchor is not None and anchor.arm in parts.resolved:
        arm = parts.resolved[anchor.arm]
        yield _Use(("anchor",), anchor.arm, arm, parts.workloads.get(anchor.workload), 1)
    for name in session.ladders:
        ladder = parts.ladders.get(name)
        for label in () if ladder is None else dict.fromkeys((ladder.base, ladder.from_ or ladder.base)):
            if ladder is not None and label in parts.resolved:
                workload = parts.workloads.get(ladder.workload)
                yield _Use(("ladders", name), label, parts.resolved[label], workload, ladder.concurrency)
    for name in session.pairs:
        pair = parts.pairs.get(name)
        if pair is not None:
            in_flight = pair.concurrency
            most = max(in_flight, default=1) if isinstance(in_flight, tuple) else in_flight
            for label, arm in _sides(parts, name):
                yield _Use(("pairs", name), label, arm, parts.workloads.get(pair.workload), most)


def _sides(parts: Parts, name: str) -> Iterator[tuple[str, Arm]]:
    pair = parts.pairs[name]
    a = parts.resolved.get(pair.a)
    if a is not None:
        yield pair.a, a
        changes = parts.values.get(("pairs", name, "vary"))
        if changes:
            with suppress(SpecError):  # it has a problem of its own
                yield f"{name}.b", with_fields(a, changes)
    if pair.b in parts.resolved:
        yield pair.b, parts.resolved[pair.b]


def _gpus(parts: Parts, name: str, node: Node | None, use: _Use) -> Problem | None:
    if node is None or use.arm.tp is None:
        return None
    if isinstance(node, LocalNode | AttachNode):
        have, fix = len(node.gpus), f"list them in nodes.{name}.gpus, or lower tp"
        at: tuple[str, ...] = ("nodes", name)
    else:
        match = ACCELERATORS.fullmatch(node.accelerators)
        if match is None:
            return None
        have, fix, at = int(match[1]), "rent more, or lower tp", ("nodes", name, "accelerators")
    if use.arm.tp <= have:
        return None
    return parts.problem(at, f"has {have} GPUs and arm {use.label} needs {use.arm.tp} (tp)", fix)


def _context(parts: Parts, use: _Use) -> Problem | None:
    if use.workload is None or use.arm.context is None:
        return None
    prompt = use.workload.tokens[1] if use.workload.tokens else 1
    need = prompt + use.workload.max_tokens
    if use.arm.context >= need:
        return None
    why = f"arm {use.label} has a context of {use.arm.context} tokens, and prompt plus output take {need}"
    return parts.problem(use.where, why, f"raise its `context` to at least {need}")


def _room(parts: Parts, use: _Use) -> Problem | None:
    limit = use.arm.max_running_requests
    if limit is None or use.concurrency <= limit:
        return None
    why = (
        f"has {use.concurrency} requests in flight, and arm {use.label} runs {limit} at once: the rest queue"
    )
    return parts.problem(
        (*use.where, "concurrency"), why, f"raise its `max_running_requests` to {use.concurrency}"
    )
