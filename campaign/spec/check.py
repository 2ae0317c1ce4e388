"""Rules between fields: references, inheritance, comparisons that compare something, contexts that hold.

Every rule looks only at entries that are valid by themselves, so one mistake is reported once, not
through everything that refers to it.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress

from campaign.errors import Problem, SpecError
from campaign.spec.compare import env_problems, ladders, loads, pairs
from campaign.spec.fits import ACCELERATORS, fits
from campaign.spec.models import Arm, AttachNode, Ladder, Pair, SkyNode
from campaign.spec.parts import Parts
from campaign.spec.problems import did_you_mean
from campaign.spec.resolve import inherited
from campaign.spec.traps import arm_traps, file_traps

_PINNED = re.compile(r"==|@ |\.whl$")
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")
_TAG = re.compile(r":[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")
RUNTIME_SOURCES = ("pip", "lock", "image", "venv")
_NEEDS_MODEL = frozenset({"llamacpp", "sglang", "vllm"})


Rule = Callable[[Parts], Iterator[Problem]]


def check(parts: Parts) -> list[Problem]:
    """All problems between fields. Fills `parts.resolved` and `parts.values`."""
    return [problem for rule in _RULES for problem in rule(parts)]


_REFERENCES = (
    ("arms", "from_", "arms"),
    ("arms", "model", "models"),
    ("arms", "runtime", "runtimes"),
    ("arms", "speculation.draft_model", "models"),
    ("ladders", "base", "arms"),
    ("ladders", "from_", "arms"),
    ("ladders", "workload", "workloads"),
    ("pairs", "a", "arms"),
    ("pairs", "b", "arms"),
    ("pairs", "workload", "workloads"),
    ("sessions", "node", "nodes"),
    ("sessions", "pairs", "pairs"),
    ("sessions", "ladders", "ladders"),
)
"""Section, field that names something, section where it must be defined."""


def _references(parts: Parts) -> Iterator[Problem]:
    entries: list[tuple[tuple[str, ...], object, str, str]] = [
        ((section, key), entry, name, target)
        for section, name, target in _REFERENCES
        for key, entry in getattr(parts, section).items()
    ]
    if parts.anchor is not None:
        entries += [
            (("anchor",), parts.anchor, "arm", "arms"),
            (("anchor",), parts.anchor, "workload", "workloads"),
        ]
    for at, entry, name, target in entries:
        value: object = entry
        for step in name.split("."):
            value = getattr(value, step, None)
        path = (*at, *(step.rstrip("_") for step in name.split(".")))
        named: list[tuple[tuple[str | int, ...], str]] = (
            [((*path, i), v) for i, v in enumerate(value)]
            if isinstance(value, tuple)
            else [(path, str(value))] * (value is not None)
        )
        known = parts.names[target]
        for where, word in named:
            if known is not None and word not in known:
                yield parts.problem(
                    where, f"is not defined under `{target}`", did_you_mean(word, known), word
                )


def _nodes(parts: Parts) -> Iterator[Problem]:
    for key, node in parts.nodes.items():
        at = ("nodes", key)
        if isinstance(node, AttachNode) and (node.ssh is None) == (node.cluster is None):
            yield parts.problem(at, "needs exactly one of `ssh` and `cluster`", "keep one of the two")
        if isinstance(node, SkyNode):
            if not ACCELERATORS.fullmatch(node.accelerators):
                yield parts.problem((*at, "accelerators"), "is not NAME:COUNT", "write one such as H200:1")
            if node.any_of and node.ordered:
                yield parts.problem((*at, "ordered"), "cannot stand beside `any_of`", "keep one of the two")
        elif len(set(node.gpus)) != len(node.gpus):
            yield parts.problem((*at, "gpus"), "names a GPU twice", "list each index once")


def _models(parts: Parts) -> Iterator[Problem]:
    for key, model in parts.models.items():
        at = ("models", key)
        if sum(v is not None for v in (model.hub, model.path, model.package)) != 1:
            yield parts.problem(
                at, "needs exactly one of `hub`, `path` and `package`", "keep one of the three"
            )
        elif model.hub is not None and model.revision is None:
            fix = "add `revision: COMMIT` (the repository's page shows it); `main` moves"
            yield parts.problem((*at, "hub"), "has no pinned revision", fix)
        elif model.hub is None and model.revision is not None:
            yield parts.problem(
                (*at, "revision"), "pins a hub model, and there is none", "remove it, or use `sha256`"
            )


def _runtimes(parts: Parts) -> Iterator[Problem]:
    for key, runtime in parts.runtimes.items():
        at = ("runtimes", key)
        if sum(getattr(runtime, name) is not None for name in RUNTIME_SOURCES) != 1:
            fix = "keep one; make one entry for each runtime"
            yield parts.problem(at, f"needs exactly one of {', '.join(RUNTIME_SOURCES)}", fix)
        elif runtime.pip is not None and not _PINNED.search(runtime.pip):
            yield parts.problem((*at, "pip"), "is not pinned", f"write {runtime.pip}==VERSION")
        elif runtime.image is not None and not (_DIGEST.search(runtime.image) or _TAG.search(runtime.image)):
            fix = "write NAME@sha256:64_HEX_DIGITS, or NAME:TAG, which is resolved to its digest when planned"
            yield parts.problem((*at, "image"), "has neither a digest nor a tag", fix)


def _arms(parts: Parts) -> Iterator[Problem]:
    for key in _in_circles(parts):
        chain = [key]
        while (parent := parts.arms[chain[-1]].from_) is not None and parent != key:
            chain.append(parent)
        why = f"inherits from itself ({' from '.join([*chain, key])})"
        yield parts.problem(("arms", key, "from"), why, "break the circle")
    for key, arm in parts.arms.items():
        yield from env_problems(parts, ("arms", key, "env"), arm.env)
        with suppress(SpecError):  # a circle, or a parent that is unknown or invalid: it has its own problem
            resolved = inherited(parts.arms, key)
            problems = list(_whole_arm(parts, key, resolved))
            if not problems:
                parts.resolved[key] = resolved
            elif arm.from_ is None or not list(_whole_arm(parts, key, inherited(parts.arms, arm.from_))):
                yield from problems  # else the parent has the same one


def _in_circles(parts: Parts) -> Iterator[str]:
    """The first arm, in the file's order, of every circle of `from`."""
    done: set[str] = set()
    for start in parts.arms:
        trail: list[str] = []
        at: str | None = start
        while at is not None and at in parts.arms and at not in done:
            done.add(at)
            trail.append(at)
            at = parts.arms[at].from_
        if at in trail:
            circle = trail[trail.index(at) :]
            yield next(name for name in parts.arms if name in circle)


def _whole_arm(parts: Parts, key: str, arm: Arm) -> Iterator[Problem]:
    at = ("arms", key)
    if arm.engine is None:
        yield parts.problem(at, "has no `engine`", "add `engine: ...` here or in the arm it is `from`")
    elif arm.engine in _NEEDS_MODEL and arm.model is None:
        yield parts.problem(at, "has no `model`", "add `model: NAME`, an entry of `models`")
    if arm.engine == "sglang" and arm.speculation is not None and arm.max_running_requests is None:
        why = "has speculation and no `max_running_requests`, which SGLang then silently sets to 48"
        yield parts.problem(at, why, "pin it, in the arms it is compared with too")
    yield from arm_traps(parts, key, arm)


def _names(parts: Parts) -> Iterator[Problem]:
    both = (parts.names["pairs"] or frozenset()) & (parts.names["ladders"] or frozenset())
    for name in sorted(both):
        yield parts.problem(("pairs", name), "is the name of a ladder too", "rename one of the two", "")


def _looks(parts: Parts) -> Iterator[Problem]:
    for section, entries in (("pairs", parts.pairs), ("ladders", parts.ladders)):
        for key, entry in entries.items():
            yield from _looks_of(parts, (section, key), entry)


def _looks_of(parts: Parts, where: tuple[str, str], entry: Pair | Ladder) -> Iterator[Problem]:
    workload = parts.workloads.get(entry.workload)
    quads = math.inf if workload is None else entry.boots * (workload.n // 2) - 1
    for name, first, last in (("looks", 2, entry.boots - 1), ("look_quads", 3, quads)):
        values: tuple[int, ...] = getattr(entry, name)
        at, unit = (*where, name), "rounds" if name == "looks" else "quads"
        if any(not first <= n <= last for n in values):
            fix = "a look at the end stops nothing; raise boots"
            yield parts.problem(at, f"looks after {unit} {first} to {last} only", fix)
        elif list(values) != sorted(set(values)):
            yield parts.problem(at, "is not in order, or names a look twice", f"write {sorted(set(values))}")
        elif values and entry.concurrency != 1:
            yield parts.problem(at, "needs concurrency 1: above it waves are the blocks", f"leave {name} out")


def _staged(parts: Parts) -> Iterator[Problem]:
    for key, ladder in parts.ladders.items():
        if not ladder.staged:
            continue
        at = ("ladders", key, "staged")
        depths = list(parts.values.get(("ladders", key, "values"), ()))
        if ladder.field != "speculation.depth":
            yield parts.problem(
                at, "forecasts depths, and the rungs are not along speculation.depth", "leave staged out"
            )
        elif depths != sorted(depths) or len(depths) < 3:
            yield parts.problem(
                at, "needs three depths or more, the shallow ones first", f"order values: {sorted(depths)}"
            )
        elif ladder.concurrency != 1:
            yield parts.problem(at, "needs concurrency 1, where steps are counted", "leave staged out")


def _sessions(parts: Parts) -> Iterator[Problem]:
    if parts.names["sessions"] == frozenset():
        yield parts.problem(
            ("sessions",), "is empty: nothing would run", "add one, e.g. main: {node: here, pairs: [...]}"
        )
    for key, session in parts.sessions.items():
        at = ("sessions", key)
        if not session.pairs and not session.ladders:
            yield parts.problem(at, "has neither pairs nor ladders", "name at least one")
        for section in ("pairs", "ladders"):
            names = getattr(session, section)
            for i, name in enumerate(names):
                if name in names[:i]:
                    yield parts.problem((*at, section, i), "stands twice", "keep one")


def _workloads(parts: Parts) -> Iterator[Problem]:
    for key, workload in parts.workloads.items():
        if workload.tokens is not None and workload.tokens[0] > workload.tokens[1]:
            at = ("workloads", key, "tokens")
            yield parts.problem(at, "has its bounds the wrong way round", f"write {sorted(workload.tokens)}")


def _ray(parts: Parts) -> Iterator[Problem]:
    ray = parts.ray
    if ray is None or ray.address is None:
        return
    at = ("ray", "address")
    if ray.mode == "inline":
        yield parts.problem(at, "has no use in inline mode", "remove it, or set mode: local")
    elif not re.fullmatch(r"[A-Za-z0-9_.\[\]:-]+:[0-9]{1,5}", ray.address):
        yield parts.problem(
            at, "does not say which cluster", "write host:port of its head; `auto` is refused"
        )


def _client(parts: Parts) -> Iterator[Problem]:
    proxy = parts.client.proxy if parts.client is not None else None
    if proxy is not None and not re.fullmatch(r"http://[A-Za-z0-9_.\[\]:-]+", proxy):
        fix = "write http://host:port; a user and a password do not belong in this file"
        yield parts.problem(("client", "proxy"), "is not the address of an HTTP proxy", fix)


_RULES: tuple[Rule, ...] = (
    _references,
    _nodes,
    _models,
    _runtimes,
    _arms,
    _workloads,
    ladders,
    pairs,
    loads,
    _names,
    _looks,
    _staged,
    _sessions,
    fits,
    file_traps,
    _ray,
    _client,
)
