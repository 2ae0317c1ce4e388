"""Steps of requests that overlap, from the counters of their wave, or of their cell.

Above concurrency 1 a server's counters belong to no single request, so a row has no steps of its own. Their sum
over a wave (over a cell, where it was scraped only around the cell) is exact, where the counters gained as many
tokens as the requests were given. Each request gets the share of its tokens; sums over the window are the
counters', and `step_ms` and `accept_len` of a row are those of its window: one cell-wide acceptance has no spread of
its own. Such rows exist in the analysis alone and carry `counters_of_wave` or `counters_of_cell`. A steady or open
loop is scraped around all of it: its ramp and tail are in the acceptance (`counters_with_ramp`), and their steps are
given to no row.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from campaign.store.row import RequestRow

CellCounters = Mapping[tuple[str, str], Mapping[str, Any]]
"""(session, cell) -> what its round committed: `overlapping` and `waves`, or `counters` (docs/CONTRACTS.md)."""


def shared(rows: Sequence[RequestRow], cells: CellCounters, depths: Mapping[str, int]) -> list[RequestRow]:
    """`rows` in their order, those of overlapping requests with the steps that their window's counters give.

    depths: arm -> draft depth, of arms that draft. Rows that have steps, rows that are not measured, and windows
    whose counters do not add up are left as they are.
    """
    by_cell: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        if row.concurrency > 1 and row.phase == "measure" and row.validity != "superseded":
            by_cell[row.session, row.cell].append(i)
    out = list(rows)
    for key, places in by_cell.items():
        depth = depths.get(rows[places[0]].arm)
        if depth is None or any(rows[i].steps is not None for i in places):
            continue
        for code, members, window in _windows(cells.get(key, {}), [rows[i] for i in places], depth):
            mine = [i for i in places if rows[i].block in members]
            for i, row in zip(mine, _given([rows[i] for i in mine], window, code), strict=True):
                out[i] = row
    return out


def _windows(
    cell: Mapping[str, Any], rows: Sequence[RequestRow], depth: int
) -> Iterable[tuple[str, set[str], Mapping[str, Any]]]:
    """(reason code, blocks, counters) of each window that adds up: waves where all do, else the cell."""
    blocks = sorted({r.block for r in rows}, key=lambda b: (int(b[1:]) if b[1:].isdigit() else 0, b))
    waves = cell.get("waves") or []
    if len(waves) == len(blocks) and all(w.get("steps") for w in waves):
        return [("counters_of_wave", {b}, w) for b, w in zip(blocks, waves, strict=True)]
    whole = cell.get("overlapping") or _whole(cell.get("counters") or {}, rows, depth)
    return [("counters_of_cell", set(blocks), whole)] if whole.get("steps") else []


def _whole(counters: Mapping[str, int], rows: Sequence[RequestRow], depth: int) -> Mapping[str, Any]:
    """A cell's window from the growth of its counters alone: verify calls (SGLang), one for each request-step."""
    tokens = [r.completion_tokens for r in rows if r.state in {"ok", "short"}]
    steps = counters.get("verify_steps")
    if len(tokens) != len(rows) or None in tokens or counters.get("generated") != sum(t or 0 for t in tokens):
        return {}
    decoded = sum(t or 0 for t in tokens) - len(rows)
    if not steps or not 0 < steps <= decoded:
        return {}
    return {
        "requests": len(rows), "tokens": decoded + len(rows),
        "steps": steps, "drafts": steps, "drafted": steps * depth, "accepted": decoded - steps,
    }  # fmt: skip


def _given(rows: Sequence[RequestRow], window: Mapping[str, Any], code: str) -> list[RequestRow]:
    tokens = [r.tokens_in_window or 0 for r in rows]
    total = sum(tokens)
    names = ("steps", "drafts", "drafted", "accepted", "tokens", "requests")
    if total <= 0 or any(window.get(name) is None for name in names):
        return list(rows)
    decoded = int(window["tokens"]) - int(window["requests"])
    if total > decoded:
        return list(rows)
    codes = (code,) if int(window["requests"]) == len(rows) else (code, "counters_with_ramp")
    shares = {name: _apportioned(int(window[name]), tokens, decoded) for name in names[:4]}
    accept_len = decoded / window["steps"]
    return [
        replace(
            row,
            steps=shares["steps"][i],
            drafts=shares["drafts"][i],
            undrafted=max(0, shares["steps"][i] - shares["drafts"][i]),
            drafted=shares["drafted"][i],
            accepted=shares["accepted"][i],
            accept_len=accept_len,
            step_ms=None if not row.decode_tok_s else 1000 * accept_len / row.decode_tok_s,
            reasons=(*row.reasons, *codes),
        )
        for i, row in enumerate(rows)
    ]


def _apportioned(amount: int, tokens: Sequence[int], total: int) -> list[int]:
    """The rows' part of `amount` of `total` tokens, in whole parts; each end rounded down, so that they add up."""
    ends, run = [0], 0
    for n in tokens:
        run += n
        ends.append(amount * run // total)
    return [b - a for a, b in pairwise(ends)]
