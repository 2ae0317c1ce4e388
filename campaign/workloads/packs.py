"""Prompts of a workload, rendered and pinned, and the request body that carries one.

A pack is a JSON-lines file: each line `{"prompt": TEXT}` or `{"messages": [{"role": ..., "content": ...}]}`;
other keys are ignored. Slots are the first `n` lines in the file's order. The pin is the SHA-256 of the
rendered prompts, so it does not change with the spelling of the JSON.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from campaign.errors import Problem, SpecError
from campaign.spec.load import Loaded
from campaign.spec.models import Workload
from campaign.spec.problems import did_you_mean

MAX_BYTES = 64 * 1024 * 1024
_ROLES = frozenset({"system", "user", "assistant", "developer"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One slot."""

    slot: int
    messages: tuple[dict[str, str], ...] | None
    """For the chat endpoint."""
    text: str | None
    """For the completions endpoint."""
    sha256: str
    """Of its canonical JSON."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """All slots of a workload."""

    sha256: str
    """Of the canonical JSON of all prompts, one line each."""
    items: tuple[Prompt, ...]
    warmup: Prompt | None = None
    """The next prompt of the pack, for warm-up; None where the workload uses the whole pack. Not pinned."""


class _Bad(Exception):
    """A field of a workload that cannot be met."""

    def __init__(self, field: str, value: object, why: str, fix: str) -> None:
        self.field, self.value, self.why, self.fix = field, value, why, fix
        super().__init__(why)


def shipped() -> tuple[str, ...]:
    """Names of the packs in this package."""
    folder = files("campaign.workloads").joinpath("data")
    return tuple(sorted(p.name.removesuffix(".jsonl") for p in folder.iterdir() if p.name.endswith(".jsonl")))


def load(workload: Workload, base_dir: Path) -> Prompts:
    """The prompts of a workload; a file is found from `base_dir` (the spec's folder) and may not leave it.

    Raises SpecError: an unknown pack, a line that holds no prompt, fewer prompts than `n`, another pin.
    """
    try:
        return _load(workload, base_dir)
    except _Bad as bad:
        problem = Problem(
            "experiments.yaml", None, f"workloads.{bad.field}", str(bad.value), bad.why, bad.fix
        )
        raise SpecError((problem,)) from None


def load_all(loaded: Loaded, base_dir: Path) -> dict[str, Prompts]:
    """The prompts of every workload of a spec. Raises SpecError with every problem at its line."""
    found: dict[str, Prompts] = {}
    problems: list[Problem] = []
    for name, workload in loaded.spec.workloads.items():
        try:
            found[name] = _load(workload, base_dir)
        except _Bad as bad:
            path = ("workloads", name, bad.field)
            problems.append(loaded.problem(path, bad.value, bad.why, bad.fix))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(tuple(sorted(problems, key=lambda p: (p.file, p.line or 0))))
    return found


def body(workload: Workload, prompt: Prompt, seed: int, model_id: str) -> dict[str, Any]:
    """The complete OpenAI request, streaming, usage at the end of the stream included."""
    if workload.endpoint == "chat":
        text: dict[str, Any] = {"messages": [dict(m) for m in prompt.messages or ()]}
    else:
        text = {"prompt": prompt.text}
    return {
        "model": model_id,
        **text,
        "max_tokens": workload.max_tokens,
        "temperature": workload.temperature,
        "top_p": workload.top_p,
        "seed": seed,
        "ignore_eos": workload.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _load(workload: Workload, base_dir: Path) -> Prompts:
    name, lines = _read(workload.pack, base_dir)
    if len(lines) < workload.n:
        raise _Bad(
            "n", workload.n, f"{workload.pack} has {len(lines)} prompts", f"write at most {len(lines)}"
        )
    rendered = [_render(line, workload.endpoint, name, number) for number, line in lines[: workload.n + 1]]
    texts = [json.dumps(r, sort_keys=True, separators=(",", ":"), ensure_ascii=False) for r in rendered]
    slots = tuple(
        Prompt(
            slot=slot,
            messages=tuple(r["messages"]) if "messages" in r else None,
            text=r.get("prompt"),
            sha256=hashlib.sha256(text.encode()).hexdigest(),
        )
        for slot, (r, text) in enumerate(zip(rendered, texts, strict=True))
    )
    items, texts = slots[: workload.n], texts[: workload.n]
    digest = hashlib.sha256("".join(f"{t}\n" for t in texts).encode()).hexdigest()
    if workload.sha256 is not None and workload.sha256 != digest:
        why = f"the rendered prompts of {workload.pack} have SHA-256 {digest}: they are not the pinned ones"
        raise _Bad("sha256", workload.sha256, why, "restore the pinned pack, or pin the new prompts")
    return Prompts(digest, items, slots[workload.n] if len(slots) > workload.n else None)


def _read(pack: str, base_dir: Path) -> tuple[str, list[tuple[int, Any]]]:
    """(name for errors, numbered JSON values)."""
    if pack in shipped():
        return pack, _parse(pack, _shipped(pack))
    if "/" not in pack and not pack.endswith(".jsonl"):
        fix = f"{did_you_mean(pack, shipped())}; or a FILE.jsonl beside the spec"
        raise _Bad("pack", pack, "is not a shipped pack", fix)
    root = base_dir.resolve()
    path = (root / pack).resolve()
    if not path.is_relative_to(root):
        raise _Bad("pack", pack, "leaves the folder of the spec", "put the file beside the spec")
    try:
        size = path.stat().st_size
        data = path.read_bytes() if path.is_file() and size <= MAX_BYTES else None
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
        raise _Bad("pack", pack, why, "paths are relative to the folder of the spec") from None
    if data is None:
        raise _Bad("pack", pack, f"is not a file of at most {MAX_BYTES} bytes", "give a JSON-lines file")
    return str(path.relative_to(root)), _parse(pack, data)


@cache
def _shipped(pack: str) -> bytes:
    return files("campaign.workloads").joinpath("data", f"{pack}.jsonl").read_bytes()


def _parse(name: str, data: bytes) -> list[tuple[int, Any]]:
    values = []
    # Split at line feeds only: str.splitlines would also cut at U+2028 inside a JSON string.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            try:
                values.append((number, json.loads(line.decode())))
            except (ValueError, RecursionError) as error:
                raise _at(name, number, f"is not JSON: {error}", "write one JSON object a line") from None
    return values


def _render(value: Any, endpoint: str, name: str, number: int) -> dict[str, Any]:
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        fix = 'write {"prompt": TEXT} or {"messages": [...]}'
        raise _at(name, number, "has not exactly one of `prompt` and `messages`", fix)
    if "prompt" in value:
        text = _text(value["prompt"], "prompt", name, number)
        if endpoint == "completions":
            return {"prompt": text}
        return {"messages": [{"role": "user", "content": text}]}
    if endpoint == "completions":
        why = "has messages, which the completions endpoint does not take"
        raise _at(name, number, why, "give a prompt, or `endpoint: chat`")
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise _at(
            name, number, "messages is not a list of objects", 'write [{"role": "user", "content": TEXT}]'
        )
    rendered = []
    for message in messages:
        if set(message) != {"role", "content"} or message["role"] not in _ROLES:
            fix = f"each has a role ({', '.join(sorted(_ROLES))}) and a content, nothing else"
            raise _at(name, number, "has a message that is not one", fix)
        content = _text(message["content"], "content", name, number)
        rendered.append({"role": str(message["role"]), "content": content})
    return {"messages": rendered}


def _text(value: Any, field: str, name: str, number: int) -> str:
    if not isinstance(value, str) or not value:
        raise _at(name, number, f"{field} is not text, or empty", "write a JSON string")
    if any(0xD800 <= ord(c) <= 0xDFFF for c in value):
        raise _at(name, number, f"{field} is not valid Unicode", "remove the lone surrogate")
    return value


def _at(name: str, number: int, why: str, fix: str) -> SpecError:
    return SpecError((Problem(name, number, "line", "", why, fix),))


def describe(prompts: Mapping[str, Prompts]) -> dict[str, dict[str, Any]]:
    """Name to `{n, sha256}`: what is written down before a run."""
    return {name: {"n": len(p.items), "sha256": p.sha256} for name, p in prompts.items()}
