"""Every printed number of a run, recomputed from its raw rows.

An imported run: the published statistics against the rows, by the published formulas. Any run: the hashes of
the sealed files, each row's derived columns against its own stamps and counters, and the numbers of
`report.json` against a report made anew. The pages print what `report.json` holds.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from campaign.errors import StoreError
from campaign.interop import restate, stage
from campaign.interop.imported import FOLDER
from campaign.interop.restate import Difference, Tally
from campaign.store.row import RequestRow
from campaign.store.run import Run

RELATIVE = 1e-9
_VOLATILE = frozenset({"as_of", "ledger"})
"""Keys of a report that say when it was made."""


def documents(run: Run) -> list[Mapping[str, Any]]:
    """The published statistics an imported run keeps, by session; empty for an ordinary run.

    Raises StoreError where one is not what the ledger committed.
    """
    found = []
    for sealed in run.state().files.values():
        if not sealed.path.startswith(f"{FOLDER}/"):
            continue
        path = (run.dir.root / sealed.path).resolve()
        if not path.is_relative_to(run.dir.root.resolve()):
            raise StoreError(f"the ledger names a file outside the run: {sealed.path}")
        try:
            data = path.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {path}: {error.strerror or error}") from error
        if hashlib.sha256(data).hexdigest() != sealed.sha256:
            raise StoreError(f"{path} is not the file the ledger committed. Fix: import the file again")
        found.append(json.loads(data))
    return found


def verify(
    run: Run, printed: Mapping[str, Any] | None, again: Mapping[str, Any]
) -> tuple[Tally, list[Difference]]:
    """(counts, differences). printed: `report.json` as it stands, None where there is none; again: made anew."""
    tally = Tally()
    rows = run.requests(valid_only=False).rows()
    # Hashes: reading valid rows hashes every committed file, and raises where one was changed.
    tally.checked += len(run.state().files)
    run.requests()
    tally.matched += len(run.state().files)
    found: list[Difference] = []
    docs = documents(run)
    by_session = {_stem(doc): doc for doc in docs}
    cells: dict[str, dict[tuple[str, str], list[RequestRow]]] = {}
    for row in rows:
        if row.session in by_session:
            cells.setdefault(row.session, {}).setdefault((row.arm, row.workload), []).append(row)
    for session, doc in by_session.items():
        mine = cells.get(session, {})
        for tag, arm in doc["arms"].items():
            for name, kept in arm["cells"].items():
                where = (doc["file"], tag, name)
                got = mine.get((tag, name), [])
                if got:
                    found += restate.cell(where, kept["stats"], got, kept["tok_s"], kept["row_tau"], tally)
                else:
                    tally.checked += 1
                    found.append(
                        Difference(
                            *where, "rows", kept["stats"].get("n"), 0, "the file holds no rows of this cell"
                        )
                    )
            if not arm["cells"]:
                tally.checked += 1
                why = f"no cells were published: {arm['error'] or 'no reason given'}"
                found.append(Difference(doc["file"], tag, None, "cells", None, None, why))
        found += stage.stage(doc, mine, tally)
    for row in rows:
        found += _row(row, tally)
    if printed is not None:
        found += _report(printed, again, tally)
    return tally, found


def _stem(doc: Mapping[str, Any]) -> str:
    name = str(doc["file"])
    return name.rsplit(".", 1)[0] if "." in name else name


def _row(row: RequestRow, tally: Tally) -> list[Difference]:
    """A row's derived columns against its stamps and counters."""
    found = []

    def check(field: str, stored: float | None, derived: float | None) -> None:
        if stored is None:
            return
        tally.checked += 1
        if derived is not None and math.isclose(stored, derived, rel_tol=RELATIVE, abs_tol=1e-9):
            tally.matched += 1
            return
        why = "the row's own stamps and counters give another value"
        found.append(
            Difference(
                f"rows:{row.session}", row.arm, row.cell, f"slot {row.slot}.{field}", stored, derived, why
            )
        )

    if row.first_ns is not None:
        check("ttft_ms", row.ttft_ms, (row.first_ns - row.sent_ns) / 1e6)
    if row.first_ns is not None and row.last_ns is not None:
        check("window_ms", row.window_ms, (row.last_ns - row.first_ns) / 1e6)
    window, tokens, steps = row.window_ms, row.tokens_in_window, row.steps
    if window and tokens:
        check("decode_tok_s", row.decode_tok_s, 1000 * tokens / window)
        check("tpot_ms", row.tpot_ms, window / tokens)
        if steps:
            check("accept_len", row.accept_len, tokens / steps)
            check("step_ms", row.step_ms, window / steps)
    return found


def _report(printed: Mapping[str, Any], again: Mapping[str, Any], tally: Tally) -> list[Difference]:
    """Each number (and word) of report.json against the report made anew from the rows."""
    fresh = dict(_leaves({k: v for k, v in again.items() if k not in _VOLATILE}))
    found = []
    for path, value in _leaves({k: v for k, v in printed.items() if k not in _VOLATILE}):
        if path.rsplit(".", 1)[-1] in _VOLATILE:
            continue
        tally.checked += 1
        now = fresh.get(path)
        if _same(value, now):
            tally.matched += 1
        else:
            why = (
                "a report made anew from the rows and the ledger says otherwise"
                if path in fresh
                else "is in no report made from these rows"
            )
            found.append(Difference("report.json", None, None, path, value, now, why))
    return found


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{path}[{_label(item, i)}]")
    else:
        yield path, value


def _label(item: Any, i: int) -> str:
    """A verdict is found by what it compares, so that a missing one does not shift the rest."""
    if isinstance(item, dict) and "pair" in item and "metric" in item:
        return f"{item.get('session')}/{item['pair']}/{item['metric']}"
    return str(i)


def _same(a: Any, b: Any) -> bool:
    numbers = isinstance(a, (int, float)) and isinstance(b, (int, float))
    if numbers and not isinstance(a, bool) and not isinstance(b, bool):
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=1e-12)
    return bool(a == b)


def cells(run: Run) -> list[dict[str, Any]]:
    """The contract of `campaign cells --json`: one entry per session, arm and cell, of valid rows."""
    docs = {_stem(doc): str(doc["file"]) for doc in documents(run)}
    groups: dict[tuple[str, str, str], list[RequestRow]] = {}
    for row in run.requests().rows():
        if row.phase in {"measure", "anchor"}:
            name = row.workload if row.session in docs else row.cell
            groups.setdefault((row.session, row.arm, name), []).append(row)
    return [_cell(docs.get(s, s), arm, name, rows) for (s, arm, name), rows in groups.items()]


def _cell(file: str, arm: str, name: str, rows: Sequence[RequestRow]) -> dict[str, Any]:
    from campaign.analysis.describe import median

    good = restate.usable(rows)
    known = [r for r in good if r.steps]
    window = math.fsum(r.window_ms or 0 for r in known)
    steps = sum(r.steps or 0 for r in known)
    tokens = sum(r.tokens_in_window or 0 for r in known)
    definitions = sorted({r.rate_definition for r in good if r.rate_definition})
    return {
        "file": file,
        "arm": arm,
        "cell": name,
        "n": len(good),
        "decode_tok_s_median": median([r.decode_tok_s for r in good if r.decode_tok_s]),
        "decode_tok_s_agg": restate.aggregate(good),
        "accept_len": tokens / steps if steps else None,
        "step_ms": window / steps if steps else None,
        "tau_as_published": restate.tau(good),
        "step_ms_as_published": restate.step(good),
        "ttft_ms_median": median([r.ttft_ms for r in good if r.ttft_ms is not None]),
        "rate_definition": definitions[0] if len(definitions) == 1 else None,
        "concurrency": sorted({r.concurrency for r in good}),
        "boots": len({r.boot_id for r in good}),
        "reasons": sorted({c for r in rows for c in r.reasons}),
        "verify_ms_as_published": restate.verify(good),
    }
