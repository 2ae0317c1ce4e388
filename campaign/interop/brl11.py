"""Reader of the schema in which BRL-2026-11 published its stages (one JSON file a session).

    {campaign, arms: {TAG: {cfg?, cmd?, cells: {CELL: {statistics..., rows: [...]}}} | {error}}, gates?, ...}

or, for a provider's API, `{meta, arms: [{name, rows, summary}]}`. Rows: `slot`, `ctok`, `ttft_ms`, `tok_s` =
(ctok - 1) / (t_last - t_first); vLLM `dr`, `ac`, `dtok`, `pp_raw`; SGLang `sg_deltas`. Facts about the format: the
public repository `brainsless/the-decoding-step`.

A file is never trusted: what cannot be read raises ImportProblem with file, line or path and the fix; what can
be read and is odd (an arm without cells, rows out of order, an incomplete row) is kept and marked.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from campaign.errors import Problem, UserError
from campaign.interop.published import PublishedArm, PublishedCell, PublishedFile, PublishedRow

LARGEST = 64 * 2**20
"""Bytes. A stage has half a megabyte; more is some other file."""
_SHAPE = "a BRL-2026-11 stage is an object with `campaign` and `arms`"
_VERSIONS = (None, 1, "1")


class ImportProblem(UserError):
    """A published file cannot be read: says which, where, and what to do."""


class _Reader:
    def __init__(self, file: str) -> None:
        self.file = file
        self.marks: list[str] = []

    def bad(
        self, place: str, value: object, why: str, fix: str = "restore the file as published"
    ) -> NoReturn:
        raise ImportProblem(str(Problem(self.file, None, place, repr(value)[:80], why, fix)))

    def mark(self, place: str, what: str) -> None:
        self.marks.append(f"{Path(self.file).name}: {place}: {what}")

    def mapping(self, value: object, place: str) -> Mapping[str, Any]:
        if not isinstance(value, dict):
            self.bad(place, value, "must be an object")
        return value

    def items(self, value: object, place: str) -> Sequence[Any]:
        if not isinstance(value, list):
            self.bad(place, value, "must be a list")
        return value

    def number(self, value: object, place: str, *, positive: bool = False) -> float | None:
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.bad(place, value, "must be a number or null")
        found = float(value) if abs(value) < 1e15 else math.inf
        if not math.isfinite(found) or found < 0 or (positive and found == 0):
            self.bad(place, value, f"must be finite and {'above 0' if positive else '0 or more'}")
        return found

    def count(self, value: object, place: str) -> int | None:
        found = self.number(value, place)
        if found is not None and found != int(found):
            self.bad(place, value, "must be a whole number")
        return None if found is None else int(found)

    def name(self, value: object, place: str) -> str:
        """A tag: it becomes part of file names, so nothing that could leave a folder."""
        found = self.text(value, place)
        if not found.strip() or len(found) > 120 or not found.isprintable() or set(found) & set("/\\|:@"):
            self.bad(place, value, "is not a usable name", "letters, digits, - _ . and spaces, at most 120")
        return found

    def text(self, value: object, place: str) -> str:
        if not isinstance(value, str):
            self.bad(place, value, "must be text")
        return value


def read(path: Path) -> PublishedFile:
    """One published file. Raises ImportProblem."""
    reader = _Reader(str(path))
    try:
        if path.stat().st_size > LARGEST:
            reader.bad(
                "file", path.stat().st_size, f"is above {LARGEST >> 20} MiB", f"give a stage file; {_SHAPE}"
            )
        data = path.read_bytes()
    except OSError as error:
        reader.bad("file", path.name, error.strerror or str(error), "give a file that exists and can be read")
    top = reader.mapping(_json(data, reader), "file")
    for key in ("schema_version", "schema", "version"):
        if top.get(key) not in _VERSIONS:
            reader.bad(key, top[key], "is another version of the schema; this reader knows version 1")
    if "arms" not in top:
        reader.bad("arms", None, "is missing", f"give a stage file; {_SHAPE}")
    digest = hashlib.sha256(data).hexdigest()
    if isinstance(top["arms"], list):
        return _provider(top, path, digest, reader)
    campaign = reader.text(top.get("campaign"), "campaign")
    arms = tuple(_arm(tag, value, reader) for tag, value in reader.mapping(top["arms"], "arms").items())
    if not any(c.rows for a in arms for c in a.cells):
        reader.bad("arms", None, "hold no rows at all", f"give a stage file; {_SHAPE}")
    return PublishedFile(
        name=path.name,
        session=path.stem,
        sha256=digest,
        campaign=campaign,
        engine="sglang" if str(top.get("engine", "")).startswith("sglang") else "vllm",
        arms=arms,
        extra={k: v for k, v in top.items() if k != "arms"},
        marks=tuple(reader.marks),
    )


def _json(data: bytes, reader: _Reader) -> object:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
            raise ValueError(f"the key {twice!r} stands twice in one object")
        return found

    def constant(word: str) -> NoReturn:
        raise ValueError(f"{word} is not a number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as error:
        why = f"is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
        if error.pos >= len(data.rstrip()) - 1:
            why += " (cut off?)"
        raise ImportProblem(
            str(Problem(reader.file, error.lineno, "file", "", why, "restore the file as published"))
        ) from None
    except UnicodeDecodeError as error:
        reader.bad("file", "", f"is not UTF-8 at byte {error.start}")
    except (ValueError, RecursionError) as error:
        reader.bad("file", "", f"is not plain JSON: {error}")


def _arm(tag: str, value: object, reader: _Reader) -> PublishedArm:
    place = f"arms.{reader.name(tag, 'arms')}"
    arm = reader.mapping(value, place)
    settings = reader.mapping(arm.get("cfg") or {}, f"{place}.cfg")
    command = "" if arm.get("cmd") is None else reader.text(arm["cmd"], f"{place}.cmd")
    error = arm.get("error")
    if arm.get("cells") is None:
        reader.mark(place, f"no cells: {error or 'the file does not say why'}")
        return PublishedArm(tag, settings, command, (), None if error is None else str(error))
    cells = tuple(
        _cell(name, cell, f"{place}.cells.{name}", reader)
        for name, cell in reader.mapping(arm["cells"], f"{place}.cells").items()
    )
    if not cells:
        reader.mark(place, "no cells: the list is empty")
    return PublishedArm(tag, settings, command, cells, None if error is None else str(error))


def _cell(name: str, value: object, place: str, reader: _Reader) -> PublishedCell:
    reader.name(name, place)
    cell = reader.mapping(value, place)
    stats = {k: v for k, v in cell.items() if k != "rows"}
    if cell.get("rows") is None:
        reader.mark(place, "no rows")
        return PublishedCell(name, (), stats)
    rows = [
        _row(row, f"{place}.rows[{i}]", reader)
        for i, row in enumerate(reader.items(cell["rows"], f"{place}.rows"))
    ]
    _ordered(rows, place, reader)
    said = reader.count(cell.get("n"), f"{place}.n")
    if said is not None and said != len(rows):
        reader.mark(f"{place}.n", f"says {said}, there are {len(rows)} rows")
    return PublishedCell(name, tuple(sorted(rows, key=lambda r: r.slot)), stats)


def _ordered(rows: Sequence[PublishedRow], place: str, reader: _Reader) -> None:
    seen: dict[int, str] = {}
    for row in rows:
        if row.slot in seen:
            reader.bad(row.place, row.slot, f"slot {row.slot} stands in {seen[row.slot]} too")
        seen[row.slot] = row.place
    slots = [r.slot for r in rows]
    if slots != sorted(slots):
        reader.mark(f"{place}.rows", "rows out of order; sorted by slot")
    if slots and sorted(slots) != list(range(len(slots))):
        missing = sorted(set(range(max(slots) + 1)) - set(slots))
        reader.mark(f"{place}.rows", f"slots {missing} are missing")


def _row(value: object, place: str, reader: _Reader) -> PublishedRow:
    row = reader.mapping(value, place)
    slot = reader.count(row.get("slot"), f"{place}.slot")
    if slot is None:
        reader.bad(f"{place}.slot", None, "is missing: a row without its prompt pairs with nothing")
    tokens = reader.count(row.get("ctok"), f"{place}.ctok")
    rate = reader.number(row.get("tok_s"), f"{place}.tok_s", positive=True)
    if tokens is None or rate is None:
        reader.mark(place, "incomplete: kept, and void in every comparison")
    deltas = reader.mapping(row.get("sg_deltas") or {}, f"{place}.sg_deltas")
    prompt = reader.count(deltas.get("prompt_tokens_total"), f"{place}.sg_deltas.prompt_tokens_total")
    fresh = reader.count(
        deltas.get("uncached_prompt_tokens_histogram_sum"),
        f"{place}.sg_deltas.uncached_prompt_tokens_histogram_sum",
    )
    positions = row.get("pp_raw")
    drafts = reader.count(row.get("dr"), f"{place}.dr")
    accepted = reader.count(row.get("ac"), f"{place}.ac")
    drafted = reader.count(row.get("dtok"), f"{place}.dtok")
    if accepted is not None and drafted is not None and accepted > drafted:
        reader.mark(place, f"accepted {accepted} of {drafted} drafted: out of range")
    return PublishedRow(
        place=place,
        slot=slot,
        completion_tokens=tokens,
        ttft_ms=reader.number(row.get("ttft_ms"), f"{place}.ttft_ms"),
        tok_s=rate,
        window_ms=1000 * (tokens - 1) / rate if tokens is not None and rate is not None else None,
        prompt_tokens=prompt,
        cached_tokens=max(0, prompt - fresh) if prompt is not None and fresh is not None else None,
        drafts=drafts,
        accepted=accepted,
        drafted=drafted,
        accept_pos=None if positions is None else _positions(positions, f"{place}.pp_raw", reader),
        verify_calls=reader.count(
            deltas.get("spec_verify_calls_total"), f"{place}.sg_deltas.spec_verify_calls_total"
        ),
        tau=reader.number(row.get("tau"), f"{place}.tau"),
    )


def _positions(value: object, place: str, reader: _Reader) -> tuple[int, ...]:
    found = reader.mapping(value, place)
    if sorted(found) != sorted(str(i) for i in range(len(found))):
        reader.bad(place, list(found), "must have the positions 0, 1, ... as keys")
    counts = [reader.count(found[str(i)], f"{place}.{i}") for i in range(len(found))]
    return tuple(c or 0 for c in counts)


def _provider(top: Mapping[str, Any], path: Path, digest: str, reader: _Reader) -> PublishedFile:
    arms: list[PublishedArm] = []
    for i, value in enumerate(reader.items(top["arms"], "arms")):
        arm = reader.mapping(value, f"arms[{i}]")
        tag = reader.name(arm.get("name"), f"arms[{i}].name")
        if tag in {a.tag for a in arms}:
            reader.bad(f"arms[{i}].name", tag, "stands twice")
        rows = [
            _provider_row(row, f"arms[{i}].rows[{j}]", reader)
            for j, row in enumerate(reader.items(arm.get("rows") or [], f"arms[{i}].rows"))
        ]
        _ordered(rows, f"arms[{i}]", reader)
        stats = reader.mapping(arm.get("summary") or {}, f"arms[{i}].summary")
        cells = (PublishedCell("api", tuple(sorted(rows, key=lambda r: r.slot)), stats),)
        if not rows:
            reader.mark(f"arms[{i}]", "no rows")
        settings = {"model": arm.get("model"), "extra": arm.get("extra")}
        arms.append(PublishedArm(tag, settings, "", cells if rows else ()))
    if not any(a.cells for a in arms):
        reader.bad("arms", None, "hold no rows at all", f"give a stage file; {_SHAPE}")
    return PublishedFile(
        name=path.name,
        session=path.stem,
        sha256=digest,
        campaign="provider",
        engine="api",
        arms=tuple(arms),
        extra={k: v for k, v in top.items() if k != "arms"},
        marks=tuple(reader.marks),
    )


def _provider_row(value: object, place: str, reader: _Reader) -> PublishedRow:
    row = reader.mapping(value, place)
    slot = reader.count(row.get("prompt_idx"), f"{place}.prompt_idx")
    if slot is None:
        reader.bad(f"{place}.prompt_idx", None, "is missing: a row without its prompt pairs with nothing")
    tokens = reader.count(row.get("completion_tokens"), f"{place}.completion_tokens")
    window = reader.number(row.get("decode_window_s"), f"{place}.decode_window_s", positive=True)
    if tokens is None or window is None:
        reader.mark(place, "incomplete: kept, and void in every comparison")
    return PublishedRow(
        place=place,
        slot=slot,
        completion_tokens=tokens,
        ttft_ms=reader.number(row.get("ttft_ms"), f"{place}.ttft_ms"),
        tok_s=reader.number(row.get("decode_tok_s"), f"{place}.decode_tok_s", positive=True),
        window_ms=None if window is None else 1000 * window,
        prompt_tokens=reader.count(row.get("prompt_tokens"), f"{place}.prompt_tokens"),
        cached_tokens=None,
        drafts=None,
        accepted=None,
        drafted=None,
        accept_pos=None,
        verify_calls=None,
        tau=None,
    )
