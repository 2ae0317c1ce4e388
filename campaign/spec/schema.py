"""The grammar for editors (JSON Schema) and for people (tables), both made from the models."""

import json
from collections.abc import Iterator
from typing import Any

from campaign.spec.models import Spec
from campaign.spec.types import VARIABLE

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """JSON Schema of experiments.yaml, for the YAML that the loader takes: every field described.

    It is a little wider than the loader (references and rules between fields are not in it), never
    narrower: `${VAR}` may stand wherever a value does, and a text field may hold an unquoted number.
    """
    schema = Spec.model_json_schema(by_alias=True, mode="validation")
    return {"$schema": DIALECT, **schema}


def markdown() -> str:
    """Reference tables: field, type, default, meaning."""
    schema = json_schema()
    sections = [("experiments.yaml", schema), *schema["$defs"].items()]
    return "\n".join(line for name, model in sections for line in _table(name, model))


def _table(name: str, model: dict[str, Any]) -> Iterator[str]:
    yield f"**{name}** {_line(model.get('description', ''))}\n"
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    required = set(model.get("required", ()))
    for field, info in model["properties"].items():
        default = "required" if field in required else _default(info.get("default"))
        yield f"| `{field}` | {_type(info)} | {default} | {_line(info.get('description', ''))} |"
    yield ""


def _default(value: Any) -> str:
    if value in (None, {}, []):
        return ""
    return (
        "see below"
        if isinstance(value, dict)
        else f"`{value if isinstance(value, str) else json.dumps(value)}`"
    )


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(info: dict[str, Any]) -> str:
    if "$ref" in info:
        return str(info["$ref"]).rpartition("/")[2]
    if "const" in info:
        return f"`{info['const']}`"
    if "enum" in info:
        return " ".join(f"`{v}`" for v in info["enum"])
    for key in ("anyOf", "oneOf"):
        if key in info:
            kinds = [_type(k) for k in info[key] if k.get("type") != "null" and not _variable(k)]
            return " or ".join(dict.fromkeys(kinds))
    return _plain(info)


def _plain(info: dict[str, Any]) -> str:
    kind = info.get("type", "any")
    if isinstance(kind, list):
        return "text"
    if kind == "array":
        inner = info.get("items") or info.get("prefixItems", [{}])[0]
        return f"list of {_type(inner)}" if inner else "list"
    if kind == "object":
        inner = info.get("additionalProperties") or next(iter(info.get("patternProperties", {}).values()), {})
        return f"map of {_type(inner)}" if isinstance(inner, dict) and inner else "map"
    if kind == "string":
        return "duration" if "examples" in info else "text"
    return ("whole number" if kind == "integer" else str(kind)) + _bounds(info)


def _bounds(info: dict[str, Any]) -> str:
    words = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    shown = [f"{sign} {info[key]:g}" for key, sign in words.items() if key in info and info[key] < 1e5]
    return f" {', '.join(shown)}" if shown else ""


def _variable(info: dict[str, Any]) -> bool:
    """A form beside the type's own: `${VAR}`, or yes/no of a boolean."""
    return str(info.get("pattern", "")).startswith((VARIABLE, "^(?:[Yy]es"))
