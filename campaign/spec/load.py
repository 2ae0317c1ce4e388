"""experiments.yaml to a frozen `Spec`, its canonical form and its hash. Every problem at once."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from campaign.errors import Problem, SpecError
from campaign.spec.check import check
from campaign.spec.models import Anchor, ClientOptions, RayOptions, Spec
from campaign.spec.parts import Parts
from campaign.spec.problems import explain
from campaign.spec.tree import Place, Table, Tree, lines, override, parse, python, shown, substitute

M = TypeVar("M", bound=BaseModel)
_SECTIONS = ("nodes", "models", "runtimes", "arms", "workloads", "ladders", "pairs", "sessions")


@dataclass(frozen=True)
class Loaded:
    """A spec that was read, and what identifies it."""

    spec: Spec
    """Resolved: every default in place, `from` of arms gone, mappings ordered by name.

    It is what `parse_canonical(canonical)` gives, so nothing that the hash does not cover can reach a plan.
    """
    source: str
    """The file as given."""
    canonical: bytes
    """UTF-8 JSON: sorted keys, no spaces, defaults resolved, variables and `--set` applied."""
    source_sha256: str
    canonical_sha256: str
    file: str = "experiments.yaml"
    places: Mapping[tuple[str, ...], Place] = field(default_factory=dict, repr=False)
    """Where each written value stands, by path."""

    def problem(self, path: tuple[str, ...], value: object, why: str, fix: str) -> Problem:
        """A problem at a field, at its line, or that of the nearest thing above it that was written."""
        at = next((self.places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.places), None)
        place = at or Place(self.file, None)
        return Problem(place.file, place.line, ".".join(path), shown(value), why, fix)

    def defaults(self) -> dict[str, Any]:
        """What the file left out and what it got: dotted path to JSON value, unset fields not listed."""
        found: dict[str, Any] = {}

        def walk(value: Any, path: tuple[str, ...]) -> None:
            if path[:1] == ("arms",) or value in (None, {}, []):
                return
            if isinstance(value, dict):
                for key, inner in value.items():
                    walk(inner, (*path, key))
            elif path not in self.places:
                found[".".join(path)] = value

        walk(json.loads(self.canonical), ())
        return found


def load(path: Path, sets: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Loaded:
    """Read a spec file; `sets` are `a.b.c=VALUE` overrides, `env` defaults to the process environment.

    Raises SpecError with every problem, sorted by line.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        fix = "check the path, or write a starter file with `campaign init`"
        raise SpecError(
            (Problem(str(path), None, "file", "", error.strerror or "cannot be read", fix),)
        ) from None
    return load_bytes(data, str(path), sets, os.environ if env is None else env)


def load_bytes(
    data: bytes, file: str, sets: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Loaded:
    """`load` of bytes already read; `file` is the name that errors show."""
    tree = _tree(data, file, sets, env or {})
    problems = list(tree[1])
    if isinstance(tree[0], Table):
        spec, found = _spec(tree[0])
        problems += found
        if spec is not None and not problems:
            canonical = canonical_json(spec)
            return Loaded(
                spec=parse_canonical(canonical),
                source=data.decode("utf-8-sig"),
                canonical=canonical,
                source_sha256=hashlib.sha256(data).hexdigest(),
                canonical_sha256=hashlib.sha256(canonical).hexdigest(),
                file=file,
                places=lines(tree[0]),
            )
    elif tree[0] is not None:
        problems.append(Problem(file, 1, "file", "", "must be a mapping", "start with `campaign init`"))
    raise _all(problems)


def load_model(model: type[M], data: bytes | str, file: str) -> M:
    """Read any model of the grammar by the same rules (no variables, no rules between fields).

    Raises SpecError.
    """
    tree, problems = parse(data, file)
    if tree is not None:
        try:
            value = model.model_validate(python(tree), by_alias=True, by_name=False)
            if not problems:
                return value
        except ValidationError as error:
            problems += explain(model, tree, error.errors(include_url=False))
    raise _all(problems)


def _tree(
    data: bytes, file: str, sets: Sequence[str], env: Mapping[str, str]
) -> tuple[Tree | None, list[Problem]]:
    tree, problems = parse(data, file)
    if tree is None:
        return None, problems
    for argument in sets:
        tree, found = override(tree, argument)
        problems += found
    tree, found = substitute(tree, env)
    return tree, problems + found


def _spec(tree: Table) -> tuple[Spec | None, list[Problem]]:
    """The resolved spec, or its problems."""
    data = python(tree)
    problems: list[Problem] = []
    spec: Spec | None = None
    bad: set[tuple[str | int, ...]] = set()
    try:
        spec = Spec.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        problems += explain(Spec, tree, errors)
        bad = {e["loc"][:n] for e in errors for n in (1, 2)}
    parts = _parts(tree, data, bad)
    problems += check(parts)
    if spec is None or problems:
        return None, problems
    return _resolved(spec, parts), []


@cache
def _adapter(section: str) -> TypeAdapter[Any]:
    """What reads one entry of a section."""
    return TypeAdapter(get_args(Spec.model_fields[section].annotation)[1])


def _parts(tree: Table, data: Mapping[str, Any], bad: set[tuple[str | int, ...]]) -> Parts:
    names: dict[str, frozenset[str] | None] = {}
    valid: dict[str, Any] = {}
    for section in _SECTIONS:
        entries = data.get(section, {})
        names[section] = frozenset(entries) if isinstance(entries, dict) else None
        adapter = _adapter(section)
        valid[section] = {
            name: adapter.validate_python(entry, by_alias=True, by_name=False)
            for name, entry in (entries.items() if isinstance(entries, dict) else ())
            if (section, name) not in bad
        }
    for name, model in (("anchor", Anchor), ("ray", RayOptions), ("client", ClientOptions)):
        there = name in data and (name,) not in bad
        valid[name] = model.model_validate(data[name], by_alias=True, by_name=False) if there else None
    return Parts(tree=tree, names=names, **valid)


def _resolved(spec: Spec, parts: Parts) -> Spec:
    ladders = {
        name: ladder.model_copy(
            update={
                "values": tuple(parts.values["ladders", name, "values"]),
                "from_": ladder.from_ or ladder.base,
            }
        )
        for name, ladder in spec.ladders.items()
    }
    pairs = {
        name: pair
        if pair.vary is None
        else pair.model_copy(update={"vary": parts.values["pairs", name, "vary"]})
        for name, pair in spec.pairs.items()
    }
    return spec.model_copy(update={"arms": parts.resolved, "ladders": ladders, "pairs": pairs})


def canonical_json(spec: Spec) -> bytes:
    """Canonical form of a spec whose arms are resolved."""
    data = spec.model_dump(mode="json", by_alias=True)
    for arm in data["arms"].values():
        del arm["from"]
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_canonical(data: bytes) -> Spec:
    """The spec of a canonical form (`canonical.json` of a run). Raises SpecError."""
    file = "canonical.json"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands twice")
        return dict(pairs)

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        fix = "restore it from the run's backup; it is written once and never edited"
        raise SpecError((Problem(file, None, "file", "", f"is not canonical JSON: {error}", fix),)) from None
    try:
        return Spec.model_validate(value, by_alias=True, by_name=False)
    except ValidationError as error:
        raise _all(explain(Spec, Table(Place(file, None), {}), error.errors(include_url=False))) from None


def _all(problems: Sequence[Problem]) -> SpecError:
    """All problems by line, the first of several at one place only; `--set` ones last."""
    first: dict[tuple[str, int | None, str], Problem] = {}
    for problem in problems:
        first.setdefault((problem.file, problem.line, problem.field), problem)
    ordered = sorted(first.values(), key=lambda p: (p.file.startswith("--set"), p.line or 0))
    return SpecError(tuple(ordered))
