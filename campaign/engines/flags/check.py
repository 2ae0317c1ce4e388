"""A command line and an environment, held against a flag table. Pure."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from campaign.engines.flags.table import Flag, FlagTable

Kind = Literal[
    "unknown", "removed", "renamed", "ambiguous", "abbreviated", "not_yet", "choice", "value", "unread"
]

_PREFIXES = {"sglang": ("SGLANG_", "SGL_"), "vllm": ("VLLM_",)}
"""Variables that only the engine itself could read."""
_LIBRARIES = re.compile(
    r"^(?:CUDA|NCCL|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|HF|HUGGING_FACE|TRANSFORMERS|TOKENIZERS|OMP|MKL|KMP|GOTO"
    r"|OPENBLAS|PYTHON[A-Z0-9]*|FLASHINFER|DG|NVSHMEM|UCX|GLOO|CUBLAS|CUDNN|CUTE|CUTLASS|RAY|LD|XDG|NVTE|MALLOC|SAFETENSORS"
    r"|DEEP_GEMM|DEEPGEMM|CUTE_DSL|TILELANG|ROCR?|HIP|GPU|NVIDIA|TRTLLM|MC|SGLANG|SGL|VLLM|LC|MIMALLOC|TCMALLOC)(?:_|$)"
)
"""Variables that libraries below an engine read; their source is not looked at."""
_PLAIN = frozenset(
    {"PATH", "HOME", "TMPDIR", "LANG", "USER", "TERM", "NO_PROXY", "HTTP_PROXY", "HTTPS_PROXY"}
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One word of a command line, or one variable, that the engine would not take as meant."""

    kind: Kind
    word: str
    value: str
    why: str
    fix: str


def check(
    table: FlagTable,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    others: Iterable[FlagTable] = (),
    allow: Iterable[str] = (),
) -> list[Finding]:
    """Every problem of argv and env. `others` are tables of other versions: they tell removed from misspelt.

    `allow` names flags and variables to accept as they are.
    """
    known = tuple(others)
    accepted = frozenset(allow)
    found: list[Finding] = []
    for word, values in options(argv):
        name = _normal(table, word)
        if word not in accepted and name not in accepted:
            found += _flag(table, known, name, word, values)
    for name in env:
        if name not in accepted:
            found += _variable(table, known, name, env[name])
    return found


def options(argv: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(option, values) in order. What follows an option up to the next one are its values."""
    word: str | None = None
    values: list[str] = []
    for item in argv:
        # A negative number is a value.
        if item.startswith("-") and not re.fullmatch(r"-\d[\d.e+-]*|-", item):
            if word is not None:
                yield word, tuple(values)
            head, eq, tail = item.partition("=")
            word, values = head, [tail] if eq else []
        elif word is not None:
            values.append(item)
    if word is not None:
        yield word, tuple(values)


def _normal(table: FlagTable, word: str) -> str:
    """The name as the table has it: vLLM takes `_` for `-` in names, and `--config.key` for one key of a JSON flag."""
    if table.engine == "vllm" and word.startswith("--"):
        return word.partition(".")[0].replace("_", "-")
    return word


def _flag(
    table: FlagTable, others: tuple[FlagTable, ...], name: str, word: str, values: tuple[str, ...]
) -> Iterator[Finding]:
    flag = table.flags.get(name)
    shown = " ".join(values)
    where = f"{table.engine} {table.version}"
    if flag is None:
        yield _missing(table, others, name, word, shown)
        return
    if flag.deprecated and flag.new is not None:
        yield Finding("renamed", word, shown, f"is deprecated in {where}", f"write {flag.new}")
    elif flag.deprecated:
        yield Finding("renamed", word, shown, f"is deprecated in {where} and does nothing", "remove it")
    yield from _values(flag, word, values, where)


def _values(flag: Flag, word: str, values: tuple[str, ...], where: str) -> Iterator[Finding]:
    if flag.values == "none" and values:
        yield Finding("value", word, " ".join(values), f"takes no value in {where}", "leave the value out")
    elif flag.values == "one" and not values:
        yield Finding("value", word, "", f"needs a value in {where}", "give it one")
    elif flag.values == "one" and len(values) > 1:
        why = f"takes one value in {where}, and {len(values)} follow"
        yield Finding("value", word, " ".join(values), why, "quote them as one item, or remove the rest")
    for value in values if flag.choices is not None and flag.values != "none" else ():
        if value not in (flag.choices or ()):
            close = difflib.get_close_matches(value, flag.choices or (), n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}? " if close else ""
            yield Finding(
                "choice",
                word,
                value,
                f"is not one of its choices in {where}",
                f"{hint}One of: {', '.join(flag.choices or ())}",
            )


def _missing(table: FlagTable, others: tuple[FlagTable, ...], name: str, word: str, value: str) -> Finding:
    where = f"{table.engine} {table.version}"
    older = [t for t in others if name in t.flags and _release(t.version) < _release(table.version)]
    newer = [t for t in others if name in t.flags and _release(t.version) > _release(table.version)]
    if older:
        new = next((t.flags[name].new for t in older if t.flags[name].new), None)
        if new is not None:
            return Finding(
                "renamed",
                word,
                value,
                f"is no longer in {where}; it was renamed after {older[-1].version}",
                f"write {new}",
            )
        close = _close(name, table)
        fix = f"remove it{f', or write {close}' if close else ''}"
        return Finding(
            "removed", word, value, f"was removed: {older[-1].version} has it, {where} has not", fix
        )
    if newer:
        why = f"is not in {where} yet: {newer[0].version} has it"
        return Finding("not_yet", word, value, why, "remove it, or use that version")
    full = sorted({f for f in table.flags if f.startswith(name) and name.startswith("--")})
    if len(full) == 1:
        return Finding("abbreviated", word, value, f"is an abbreviation in {where}", f"write {full[0]}")
    if full:
        return Finding(
            "ambiguous",
            word,
            value,
            f"is an ambiguous abbreviation in {where}",
            f"write one of {', '.join(full[:6])}",
        )
    close = _close(name, table)
    fix = f"did you mean {close}?" if close else "remove it, or name it in `allow_unknown` if a fork has it"
    return Finding("unknown", word, value, f"is no flag of {where}", fix)


def _close(name: str, table: FlagTable) -> str | None:
    return next(iter(difflib.get_close_matches(name, list(table.flags), n=1, cutoff=0.8)), None)


def _variable(table: FlagTable, others: tuple[FlagTable, ...], name: str, value: str) -> Iterator[Finding]:
    if name in table.env or name in _PLAIN:
        return
    own = name.startswith(_PREFIXES.get(table.engine, ()))
    if not own and _LIBRARIES.match(name) and not name.startswith(("SGLANG_", "SGL_", "VLLM_")):
        return
    where = f"{table.engine} {table.version}"
    known = [t.version for t in others if name in t.env]
    close = next(iter(difflib.get_close_matches(name, sorted(table.env), n=1, cutoff=0.8)), None)
    why = f"nothing in {where} reads it" + (f" ({', '.join(known)} did)" if known else "")
    fix = (
        f"did you mean {close}?"
        if close
        else "remove it, or name it in `allow_unknown` if a library reads it"
    )
    yield Finding("unread", name, value, why, fix)


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:4])
