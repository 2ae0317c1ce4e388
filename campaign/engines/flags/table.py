"""A table of what one version of an engine takes: shipped, cached by version, or read from source."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from campaign.engines.flags.source import Source, open_source
from campaign.errors import PreflightError

Values = Literal["none", "one", "many", "optional"]
PACKAGES = {"sglang": "sglang", "vllm": "vllm"}
"""Engines whose source can be read, and the package it lies in."""
NEWEST = {"sglang": "0.5.23", "vllm": "0.33.0"}
"""Pinned: what `removed` and `renamed` are told from."""
SHIPPED = (("sglang", "0.5.14"), ("sglang", "0.5.23"), ("vllm", "0.24.0"), ("vllm", "0.33.0"))
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class Flag:
    """One option string of an engine's command line."""

    values: Values = "one"
    choices: tuple[str, ...] | None = None
    """None where the source computes them, or takes anything."""
    new: str | None = None
    """What a deprecated flag says to write instead."""
    deprecated: bool = False


@dataclass(frozen=True)
class FlagTable:
    """Flags and variables of one version, and where they were read."""

    engine: str
    version: str
    source: str
    sha256: str | None
    flags: Mapping[str, Flag]
    env: frozenset[str]

    def to_json(self) -> dict[str, Any]:
        """Compact: what is a default is left out."""
        rows = {}
        for name, flag in sorted(self.flags.items()):
            row = {
                "v": None if flag.values == "one" else flag.values,
                "c": None if flag.choices is None else list(flag.choices),
                "new": flag.new,
                "old": flag.deprecated or None,
            }
            rows[name] = {k: v for k, v in row.items() if v is not None}
        return {
            "format": _FORMAT,
            "engine": self.engine,
            "version": self.version,
            "source": self.source,
            "sha256": self.sha256,
            "flags": rows,
            "env": sorted(self.env),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "FlagTable":
        """Inverse of `to_json`. Raises ValueError for another format."""
        if data.get("format") != _FORMAT:
            raise ValueError("a flag table of another format")
        flags = {
            name: Flag(
                row.get("v", "one"),
                tuple(row["c"]) if "c" in row else None,
                row.get("new"),
                bool(row.get("old", False)),
            )
            for name, row in data["flags"].items()
        }
        return FlagTable(
            data["engine"], data["version"], data["source"], data["sha256"], flags, frozenset(data["env"])
        )


def dumps(table: FlagTable) -> str:
    """One flag a line, so that a regenerated table shows what changed."""
    data = table.to_json()
    rows = ",\n".join(
        f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}" for k, v in data.pop("flags").items()
    )
    env = data.pop("env")
    head = json.dumps(data)[:-1]
    names = ",\n".join(json.dumps(name) for name in env)
    return f'{head},\n"flags":{{\n{rows}\n}},\n"env":[\n{names}\n]}}\n'


def read(source: Source, engine: str) -> FlagTable:
    """Read a table from source; ast only. Raises PreflightError where the layout is not one we know."""
    if engine == "sglang":
        from campaign.engines.flags.sglang import extract
    elif engine == "vllm":
        from campaign.engines.flags.vllm import extract
    else:
        raise PreflightError(
            f"engine {engine}: its flags cannot be read. Fix: give --engine-wheel an sglang or vllm wheel"
        )
    flags, env = extract(source)
    if not flags:
        raise PreflightError(
            f"engine source {source.name}: no flag was found where {engine} keeps them. Fix: use a version between "
            f"{SHIPPED[0][1]} and {NEWEST[engine]}, or `allow_unknown`"
        )
    return FlagTable(engine, source.version or "unknown", source.name, source.sha256, flags, env)


@cache
def shipped(engine: str, version: str) -> FlagTable | None:
    """A table of this package, or None."""
    if (engine, version) not in SHIPPED:
        return None
    text = (files("campaign.engines.flags") / "tables" / f"{engine}-{version}.json").read_text(
        encoding="utf-8"
    )
    return FlagTable.from_json(json.loads(text))


def of_version(engine: str, version: str) -> FlagTable | None:
    """The table of a version: shipped, or one that was read before."""
    found = shipped(engine, version)
    if found is not None:
        return found
    for path in sorted(cache_folder().glob(f"{engine}-{version}-*.json")):
        try:
            return FlagTable.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError):
            continue
    return None


def of_source(given: str, engine: str) -> FlagTable:
    """The table of a source, from the cache where this very wheel was read before. Raises PreflightError."""
    source = open_source(given, PACKAGES.get(engine, engine))
    if source.sha256 is None or source.version is None:
        return read(source, engine)  # a folder may change under one name
    path = cache_folder() / f"{engine}-{source.version}-{source.sha256[:16]}.json"
    try:
        return FlagTable.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError):
        table = read(source, engine)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(dumps(table), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # a read-only home: it is read again next time
    return table


def others(engine: str, version: str) -> Iterable[FlagTable]:
    """Shipped tables of the other versions of an engine."""
    for name, other in SHIPPED:
        table = shipped(name, other) if name == engine and other != version else None
        if table is not None:
            yield table


def cache_folder() -> Path:
    """Where tables that were read from wheels are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "campaign" / "flags"
