"""Requested against effective: what an arm set, and what the server says is in force."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from campaign.spec.models import Arm

_IGNORED = re.compile(
    r"(?i)\b(?:not known|unknown|unrecogni[sz]ed|not recogni[sz]ed|ignor(?:ed|ing)|has no effect|no longer"
    r"|not supported|unsupported|deprecated and)\b"
)
_CHANGED = re.compile(
    r"(?i)\b(?:cut|reduced|lowered|raised|clamped|capped|limited|truncated|adjusted|rounded|forced|changed"
    r"|overrid\w+|overwrit\w+|falling back|set)\b"
)


_ASKED = (
    "threads", "context", "kv_dtype", "tp", "dp", "ep", "pp", "attention_backend", "moe_backend", "graphs",
    "prefill_graphs", "memory_fraction", "quantization", "dtype", "load_format", "max_running_requests",
    "prefix_cache",
)  # fmt: skip
_ASKED_SPECULATION = (
    "method", "depth", "ngram_size", "steps", "topk", "draft_tokens", "breadth", "draft_quantization", "draft_tp",
    "simulated_acceptance",
)  # fmt: skip


_DUMP = 2000


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was asked for and is not in force."""

    field: str
    requested: str
    effective: str

    def __str__(self) -> str:
        return f"{self.field}: asked for {self.requested}, in force is {self.effective}"


def requested(arm: Arm) -> dict[str, Any]:
    """The fields of an arm that a server can be asked about, dotted; only those that are set."""
    spec = arm.speculation
    fields: dict[str, Any] = {name: getattr(arm, name) for name in _ASKED}
    fields["graph_sizes"] = None if arm.graph_sizes is None else list(arm.graph_sizes)
    fields["trust_remote_code"] = arm.trust_remote_code or None
    if spec is not None and spec.depth > 0:
        fields |= {f"speculation.{name}": getattr(spec, name) for name in _ASKED_SPECULATION}
        fields["speculation.adaptive"] = spec.adaptive or None
    return {k: v for k, v in fields.items() if v is not None}


def diff(asked: Mapping[str, Any], effective: Mapping[str, Any]) -> tuple[Difference, ...]:
    """Fields whose value in force is known and another one; speculation that nobody asked for is one too."""
    out = [
        Difference(name, str(value), str(effective[name]))
        for name, value in asked.items()
        if effective.get(name) is not None and effective[name] != value
    ]
    drafter = effective.get("speculation.method")
    if drafter not in {None, "none"} and "speculation.method" not in asked:
        out.append(Difference("speculation.method", "none", str(drafter)))
    if drafter == "none" and "speculation.method" in asked:
        return tuple(d for d in out if not d.field.startswith("speculation.") or d.field.endswith("method"))
    return tuple(out)


def unconfirmed(asked: Mapping[str, Any], effective: Mapping[str, Any]) -> tuple[str, ...]:
    """Fields that were set and of which the server says nothing."""
    return tuple(name for name in asked if effective.get(name) is None)


def table(asked: Mapping[str, Any], effective: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Requested beside in force, a row a field: `{field, requested, effective, state}`.

    `state` is `honoured`, `changed`, `unconfirmed` (the server says nothing) or `resolved` (nobody asked: the
    engine's own default).
    """
    rows = []
    for name in dict.fromkeys((*asked, *effective)):
        said = effective.get(name)
        if name not in asked:
            state = "resolved"
        elif said is None:
            state = "unconfirmed"
        else:
            state = "honoured" if said == asked[name] else "changed"
        rows.append({"field": name, "requested": asked.get(name), "effective": said, "state": state})
    return rows


def log_differences(log: str, env: Mapping[str, str], args: Sequence[str]) -> tuple[Difference, ...]:
    """Log lines in which a server says that it ignores or changes a variable or flag we set.

    Only lines that name the variable, or the flag in any spelling (`--max-capture`, `max_capture`, `max
    capture`), count: engines warn about many things that were never asked for.
    """
    out: list[Difference] = []
    # A dump of every argument names them all and denies none.
    lines = [line for line in log.splitlines() if len(line) <= _DUMP]
    for name, value in env.items():
        word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])")
        line = next((s for s in lines if word.search(s) and (_IGNORED.search(s) or _CHANGED.search(s))), None)
        if line:
            out.append(Difference(f"env {name}", value, f"not so, says the log: {line.strip()}"))
    for flag, value in _flags(args):
        words = "[-_ ]".join(re.escape(word) for word in re.split("[-_]", flag.lstrip("-")))
        word = re.compile(rf"(?i)(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])")
        for line in lines:
            if not word.search(line):
                continue
            # "set to 42" confirms what was asked; "set to 40" denies it.
            kept = bool(value) and re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", line)
            if _IGNORED.search(line) or (_CHANGED.search(line) and not kept):
                out.append(Difference(flag, value, f"not so, says the log: {line.strip()}"))
                break
    return tuple(out)


def _flags(args: Sequence[str]) -> list[tuple[str, str]]:
    out: list[tuple[str, str]] = []
    for i, word in enumerate(args):
        if not word.startswith("--"):
            continue
        flag, eq, value = word.partition("=")
        following = args[i + 1] if i + 1 < len(args) else ""
        out.append((flag, value if eq else "" if following.startswith("--") else following))
    return out
