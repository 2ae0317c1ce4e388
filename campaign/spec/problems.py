"""pydantic's errors as problems a person can act on: place, field, value, why, fix."""

import difflib
import re
from collections.abc import Iterable, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from campaign.errors import Problem
from campaign.spec.tree import Tree, find


def choices(names: Iterable[str]) -> str:
    """Names as a list in a sentence; a long list is cut."""
    ordered = sorted(names)
    more = f" and {len(ordered) - 12} more" if len(ordered) > 12 else ""
    return (", ".join(ordered[:12]) + more) if ordered else "(none)"


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The fix for a word that is not one of `names`."""
    known = list(names)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if not close and word.lower() in {n.lower() for n in known}:
        close = [n for n in known if n.lower() == word.lower()][:1]
    return f"did you mean {close[0]}? Known: {choices(known)}" if close else f"use one of: {choices(known)}"


def explain(
    model: type[BaseModel], tree: Tree, errors: Sequence[ErrorDetails], prefix: tuple[str | int, ...] = ()
) -> list[Problem]:
    """One problem for each error of validating `tree` (at `prefix`, where it is a part) against `model`."""
    return [_explain(model, tree, error, (*prefix, *error["loc"])) for error in errors]


def _explain(model: type[BaseModel], tree: Tree, error: ErrorDetails, loc: tuple[str | int, ...]) -> Problem:
    kind = error["type"]
    if kind in {"union_tag_invalid", "union_tag_not_found"}:
        return _tag(model, tree, error, loc)
    spot = find(tree, [step for step in loc if step != "[key]"])
    value = spot.value if spot.inside and loc[-1:] != ("[key]",) else ""
    why, fix = _words(model, error, loc, value)
    return Problem(spot.at.file, spot.at.line, spot.field, value, why, fix)


def _words(
    model: type[BaseModel], error: ErrorDetails, loc: tuple[str | int, ...], value: str
) -> tuple[str, str]:
    """Why and fix."""
    kind, ctx = error["type"], error.get("ctx", {})
    if kind == "campaign":
        if loc == ("version",):
            return "is not a version of the grammar that this campaign knows", "write `version: 1`"
        return ("the name " if loc[-1:] == ("[key]",) else "") + str(ctx["why"]), str(ctx["fix"])
    if kind == "extra_forbidden":
        owner = _model_at(model, loc[:-1])
        names = [] if owner is None else [f.alias or n for n, f in owner.model_fields.items()]
        return "is not a field here", did_you_mean(str(loc[-1]), names)
    if kind == "literal_error":
        return "is not one of the choices", did_you_mean(
            value, re.findall(r"'([^']*)'", str(ctx["expected"]))
        )
    return _missing(model, loc) if kind == "missing" else _shapes(error, value)


def _missing(model: type[BaseModel], loc: tuple[str | int, ...]) -> tuple[str, str]:
    if isinstance(loc[-1], int):
        return "has too few values", f"add value {loc[-1] + 1}"
    return "is required and missing", f"add `{loc[-1]}: ...`{_about(model, loc)}"


def _shapes(error: ErrorDetails, value: str) -> tuple[str, str]:
    """Why and fix of a value of the wrong YAML kind."""
    kind, ctx = error["type"], error.get("ctx", {})
    if kind in {"dict_type", "model_type", "model_attributes_type", "dict_attributes_type"}:
        none = kind != "dict_type" and value.lower() in {"off", "no", "none", "false"}
        fix = "write `key: value` lines below it, or {key: value}"
        return "must be a mapping", "write null for none, or leave it out" if none else fix
    if kind in {"tuple_type", "list_type"}:
        return "must be a list", f"write [{value or 'a, b'}]"
    if kind in {"too_long", "too_short"}:
        n = ctx.get("max_length", ctx.get("min_length"))
        return "has the wrong number of values", f"write {n} values"
    if kind == "campaign_choice":
        return str(error["msg"]), "write one of the two"
    return str(error["msg"])[:100], "see `campaign schema`"


def _tag(model: type[BaseModel], tree: Tree, error: ErrorDetails, loc: tuple[str | int, ...]) -> Problem:
    """A union whose member cannot be told: the field that tells it is missing or unknown."""
    key = str(error["ctx"]["discriminator"]).strip("'")
    names = [str(v) for t in _types_at(model, loc) for v in get_args(t.model_fields[key].annotation)]
    spot = find(tree, (*loc, key))
    if not spot.inside:
        fix = f"add `{key}: ...`, one of: {choices(names)}"
        return Problem(spot.at.file, spot.at.line, spot.field, "", "is required and missing", fix)
    fix = did_you_mean(spot.value, names)
    return Problem(spot.at.file, spot.at.line, spot.field, spot.value, "is not one of the choices", fix)


def _about(model: type[BaseModel], loc: Sequence[str | int]) -> str:
    owner = _model_at(model, loc[:-1])
    for name, info in owner.model_fields.items() if owner else ():
        if loc[-1] in (name, info.alias) and info.description:
            return f" ({' '.join(info.description.split()).rstrip('.')})"
    return ""


def _members(kind: Any) -> list[Any]:
    """The types a field may have: Annotated and unions opened, None left out."""
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [m for arg in get_args(kind) for m in _members(arg)]
    return [] if kind is NoneType else [kind]


def _types_at(model: type[BaseModel], loc: Sequence[str | int]) -> list[Any]:
    """The types that may stand at a path; a union tag in the path picks its member."""
    here: list[Any] = [model]
    for step in loc:
        tagged = [t for t in here if _is_model(t) and step in _tag_values(t)]
        if tagged:
            here = tagged
            continue
        below: list[Any] = []
        for kind in here:
            if _is_model(kind):
                for name, info in kind.model_fields.items():
                    if step in (name, info.alias):
                        below += _members(info.annotation)
            elif get_origin(kind) in (dict, tuple):
                below += _members([a for a in get_args(kind) if a is not Ellipsis][-1])
        here = below or here
    return here


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _tag_values(kind: type[BaseModel]) -> tuple[Any, ...]:
    info = kind.model_fields.get("provider")
    return get_args(info.annotation) if info is not None and get_origin(info.annotation) is Literal else ()


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel] | None:
    found = [t for t in _types_at(model, loc) if _is_model(t)]
    return found[0] if found else None
