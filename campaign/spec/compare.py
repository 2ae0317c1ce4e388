"""Rules of ladders and pairs: each compares two configurations that exist and differ."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from campaign.errors import Problem, SpecError
from campaign.spec.models import Arm, Ladder, Pair
from campaign.spec.parts import Parts
from campaign.spec.problems import did_you_mean
from campaign.spec.resolve import NoSuchField, arm_hash, field_adapter, with_fields
from campaign.spec.tree import SECRET

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def env_problems(parts: Parts, at: tuple[str, ...], names: Iterable[str]) -> Iterator[Problem]:
    """Names of environment variables that no process can have, or whose values must not be stored."""
    for name in names:
        if not _ENV_NAME.fullmatch(name):
            yield parts.problem((*at, name), "is not the name of a variable", "use letters, digits and _", "")
        elif SECRET.search(name):
            why = f"{name} is a secret that would be stored with the run"
            yield parts.problem((*at, name), why, "keep it out of the file", "")


def ladders(parts: Parts) -> Iterator[Problem]:
    """Fields exist, values are read by the field's type and stored, no rung repeats another or the base."""
    for key, ladder in parts.ladders.items():
        at = ("ladders", key)
        if not ladder.values:
            yield parts.problem((*at, "values"), "has no values", "list at least one, e.g. [3, 5]")
        read = []
        try:
            adapter = field_adapter(ladder.field)
        except NoSuchField as error:
            yield parts.problem((*at, "field"), error.why, did_you_mean(ladder.field, error.known))
            continue
        if ladder.field.startswith("env."):
            yield from env_problems(parts, (*at, "field"), [ladder.field.removeprefix("env.")])
        for i, value in enumerate(ladder.values):
            try:
                read.append(adapter.dump_python(adapter.validate_python(value), mode="json"))
            except ValidationError as error:
                yield _of_value(parts, (*at, "values", i), error)
        parts.values["ladders", key, "values"] = read
        if len(read) == len(ladder.values):
            yield from _rungs(parts, key, ladder, read)


def _rungs(parts: Parts, key: str, ladder: Ladder, values: list[Any]) -> Iterator[Problem]:
    source, base = parts.resolved.get(ladder.from_ or ladder.base), parts.resolved.get(ladder.base)
    if source is None:
        return
    seen = {} if base is None else {arm_hash(base, parts.models, parts.runtimes): "the base"}
    for i, value in enumerate(values):
        try:
            rung = arm_hash(with_fields(source, {ladder.field: value}), parts.models, parts.runtimes)
        except SpecError as error:
            why = error.problems[0].why
            yield parts.problem(("ladders", key, "field"), why, "give `from:` an arm that has it")
            return
        if rung in seen:
            base_too = seen[rung] == "the base"
            fix = "leave it out; the base is measured anyway" if base_too else "keep one"
            why = f"makes the same configuration as {seen[rung]}"
            yield parts.problem(("ladders", key, "values", i), why, fix)
        seen.setdefault(rung, f"value {i + 1}")


def _of_value(parts: Parts, path: tuple[str | int, ...], error: ValidationError) -> Problem:
    first = error.errors(include_url=False)[0]
    ctx = first.get("ctx", {})
    why, fix = ctx.get("why", first["msg"].lower()), ctx.get("fix", "see `campaign schema`")
    return parts.problem((*path, *first["loc"]), str(why), str(fix))


def pairs(parts: Parts) -> Iterator[Problem]:
    """Exactly one of `b` and `vary` (neither in an A/A), and b is another configuration than a."""
    for key, pair in parts.pairs.items():
        yield from _sides(parts, key, pair)
        at = ("pairs", key, "concurrency")
        if isinstance(pair.concurrency, tuple):
            if not pair.concurrency:
                yield parts.problem(at, "is an empty list", "write 1")
            if len(set(pair.concurrency)) != len(pair.concurrency):
                yield parts.problem(at, "names a value twice", "keep one")


def loads(parts: Parts) -> Iterator[Problem]:
    """A load shape has what it needs, and a concurrency to hold it."""
    for section, items in (("pairs", parts.pairs), ("ladders", parts.ladders)):
        for key, item in items.items():
            if item.load is not None:
                yield from _load(parts, (section, key), item)


def _load(parts: Parts, at: tuple[str, str], item: Pair | Ladder) -> Iterator[Problem]:
    load = item.load
    assert load is not None
    rated = load.shape in {"constant", "poisson", "ramp"}
    if (load.shape == "ramp") != (load.to_rate is not None):
        fix = "write `rate: 1` and `to_rate: 5` with `shape: ramp`, or no `to_rate`"
        yield parts.problem((*at, "load"), "a ramp and its `to_rate` go together", fix)
    if rated and load.rate is None:
        yield parts.problem(
            (*at, "load"), f"has no `rate`, which {load.shape} needs", "write `rate: 5`, requests per second"
        )
    if not rated and load.rate is not None:
        yield parts.problem(
            (*at, "load", "rate"), f"means nothing to {load.shape}", "remove it, or write `shape: poisson`"
        )
    if (load.shape == "schedule") != bool(load.at_s):
        fix = "write `at_s: [0, 0.5, ...]` with `shape: schedule`, or neither"
        yield parts.problem((*at, "load"), "a schedule and its `at_s` go together", fix)
    if any(later < earlier for earlier, later in pairwise(load.at_s)):
        yield parts.problem((*at, "load", "at_s"), "is not in order", "sort it")
    values = item.concurrency if isinstance(item.concurrency, tuple) else (item.concurrency,)
    if load.shape != "waves" and 1 in values:
        fix = "raise `concurrency`: it is the most requests in flight"
        yield parts.problem((*at, "load"), f"{load.shape} needs a concurrency above 1", fix)
    if load.shape != "waves" and item.design == "duet":
        yield parts.problem(
            (*at, "design"), f"a duet cannot be {load.shape}", "leave `design` out, or `load`"
        )


def _sides(parts: Parts, key: str, pair: Pair) -> Iterator[Problem]:
    at = ("pairs", key)
    if pair.kind == "aa":
        for name in ("b", "vary"):
            if getattr(pair, name) is not None:
                why = "has no place in an A/A, whose second side is its first"
                yield parts.problem((*at, name), why, "remove it, or change `kind`")
    elif (pair.b is None) == (pair.vary is None):
        why = "has neither `b` nor `vary`" if pair.b is None else "has both `b` and `vary`"
        yield parts.problem(at, why, "keep one: `b: ARM`, or `vary: {FIELD: VALUE}` (or `kind: aa`)")
    elif pair.vary is not None:
        yield from _varied(parts, key, pair, pair.vary)
    elif pair.b is not None:
        a, b = parts.resolved.get(pair.a), parts.resolved.get(pair.b)
        if a is not None and b is not None:
            yield from _same(parts, (*at, "b"), a, b)


def _varied(parts: Parts, key: str, pair: Pair, vary: Mapping[str, Any]) -> Iterator[Problem]:
    at = ("pairs", key, "vary")
    if not vary:
        yield parts.problem(at, "changes nothing", "name a field and its value, e.g. {kv_dtype: q8_0}")
        return
    read: dict[str, Any] = {}
    for name, value in vary.items():
        try:
            adapter = field_adapter(name)
            read[name] = adapter.dump_python(adapter.validate_python(value), mode="json")
        except NoSuchField as error:
            yield parts.problem((*at, name), error.why, did_you_mean(name, error.known), "")
        except ValidationError as error:
            yield _of_value(parts, (*at, name), error)
    parts.values[at] = read
    a = parts.resolved.get(pair.a)
    if a is None or len(read) < len(vary):
        return
    try:
        b = with_fields(a, read)
    except SpecError as error:
        yield parts.problem(at, error.problems[0].why, "vary the whole field, e.g. {speculation: {...}}")
        return
    problems = [p for r in read.items() for p in _named(parts, at, *r)]
    problems += env_problems(parts, at, b.env.keys() - a.env.keys())
    yield from problems or _same(parts, at, a, b)


def _named(parts: Parts, at: tuple[str, ...], name: str, value: Any) -> Iterator[Problem]:
    """A varied `model` or `runtime` must exist too."""
    section = {"model": "models", "runtime": "runtimes", "speculation.draft_model": "models"}.get(name)
    known = parts.names[section] if section else None
    if known is not None and value is not None and value not in known:
        yield parts.problem((*at, name), f"is not defined under `{section}`", did_you_mean(value, known))


def _same(parts: Parts, at: tuple[str, ...], a: Arm, b: Arm) -> Iterator[Problem]:
    if arm_hash(a, parts.models, parts.runtimes) == arm_hash(b, parts.models, parts.runtimes):
        why = "makes the same configuration as `a`: there is nothing to compare"
        yield parts.problem(at, why, "change a field, or write `kind: aa` for an A/A null")
