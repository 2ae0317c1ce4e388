"""What an arm is once inheritance is applied, with a field changed, and as a hash."""

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from campaign.errors import Problem, SpecError
from campaign.spec.models import Arm, Model, Runtime, Spec

FIXED = frozenset({"from", "from_", "estimate"})
"""Fields of an arm that say nothing about the server, so that nothing can be compared along them."""


class NoSuchField(Exception):
    """A dotted path that no arm has; the message names the step, `known` what could stand there."""

    def __init__(self, why: str, known: tuple[str, ...] = ()) -> None:
        self.why, self.known = why, known
        super().__init__(why)


def resolved_arm(spec: Spec, name: str) -> Arm:
    """The arm with everything it inherits, `from` gone. Raises SpecError for an unknown name or a cycle."""
    return inherited(spec.arms, name)


def inherited(arms: Mapping[str, Arm], name: str) -> Arm:
    """`resolved_arm` on a mapping of arms.

    A field that an arm writes replaces the inherited field whole, nested mappings included; a written
    null unsets it.
    """
    chain: list[Arm] = []
    seen: list[str] = []
    at: str | None = name
    while at is not None:
        if at in seen:
            path = " from ".join([*seen[seen.index(at) :], at])
            raise _error(f"arms.{name}.from", at, f"inherits from itself ({path})", "break the circle")
        if at not in arms:
            raise _error(f"arms.{at}", at, "is not defined", "define it under `arms`")
        seen.append(at)
        chain.append(arms[at])
        at = arms[at].from_
    fields: dict[str, Any] = {}
    for arm in reversed(chain):
        fields.update({f: getattr(arm, f) for f in arm.model_fields_set if f != "from_"})
    return Arm(**fields)


def with_fields(arm: Arm, changes: Mapping[str, Any]) -> Arm:
    """The arm with dotted fields replaced, e.g. `{"speculation.depth": 5, "env.OMP_NUM_THREADS": "1"}`.

    Raises SpecError for a field that an arm does not have, or a value that it does not take.
    """
    data = arm.model_dump(by_alias=False, exclude_unset=True)
    for field, value in changes.items():
        try:
            field_adapter(field)
            _assign(data, field, value)
        except NoSuchField as error:
            raise _error(field, "", error.why, f"known: {', '.join(error.known)}") from None
    try:
        return Arm.model_validate(data, by_alias=False, by_name=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, first["loc"]))
        why, fix = (
            first.get("ctx", {}).get("why", first["msg"]),
            first.get("ctx", {}).get("fix", "see the grammar"),
        )
        raise _error(name, str(first["input"]), str(why), str(fix)) from None


def _assign(data: dict[str, Any], field: str, value: Any) -> None:
    *parents, last = field.split(".")
    for depth, step in enumerate(parents):
        below = data.get(step)
        if step == "env":
            below = dict(below or {})
        if below is None:
            at = ".".join(parents[: depth + 1])
            raise NoSuchField(f"the arm has no {at}, so {field} cannot be set", ())
        data[step] = dict(below)
        data = data[step]
    data[last] = value


@lru_cache(maxsize=256)
def field_adapter(field: str) -> TypeAdapter[Any]:
    """What reads values of a dotted field of an arm. Raises NoSuchField."""
    owner: Any = Arm
    steps = field.split(".")
    adapter: TypeAdapter[Any] | None = None
    for depth, step in enumerate(steps):
        if isinstance(owner, type) and issubclass(owner, BaseModel):
            known = tuple(n for n in owner.model_fields if n not in FIXED)
            if step not in known:
                why = f"an arm has no field {'.'.join(steps[: depth + 1])}"
                raise NoSuchField(why, tuple(".".join([*steps[:depth], n]) for n in known))
            info = owner.model_fields[step]
            annotation: Any = info.annotation
            for extra in info.metadata:
                annotation = Annotated[annotation, extra]
            adapter = TypeAdapter(annotation)
            inner = [a for a in get_args(info.annotation) if a is not type(None)] or [info.annotation]
            owner = inner[0] if isinstance(inner[0], type) else info.annotation
        elif get_origin(owner) is dict:
            owner = get_args(owner)[1]
            adapter = TypeAdapter(owner)
        else:
            raise NoSuchField(f"{'.'.join(steps[:depth])} has no fields", (".".join(steps[:depth]),))
    assert adapter is not None
    return adapter


def arm_hash(arm: Arm, models: Mapping[str, Model], runtimes: Mapping[str, Runtime] | None = None) -> str:
    """First 16 hex digits of the SHA-256 of what the arm is; `from`, `estimate` and all names left out.

    The entries of `models` (and of `runtimes`, where given) stand in for their names, so that two specs
    which call the same thing differently agree. Fields at their default are left out, so that a later
    field does not change the hash of an arm that does not use it.
    """
    config = arm.model_dump(mode="json", exclude={"from_", "estimate"}, exclude_defaults=True)
    if arm.model is not None and arm.model in models:
        config["model"] = _entry(models[arm.model])
    draft = arm.speculation.draft_model if arm.speculation is not None else None
    if draft is not None and draft in models:
        config["speculation"]["draft_model"] = _entry(models[draft])
    if runtimes and arm.runtime is not None and arm.runtime in runtimes:
        config["runtime"] = _entry(runtimes[arm.runtime])
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _entry(entry: BaseModel) -> dict[str, Any]:
    return entry.model_dump(mode="json", exclude_defaults=True)


def _error(field: str, value: str, why: str, fix: str) -> SpecError:
    return SpecError((Problem("experiments.yaml", None, field, value, why, fix),))
