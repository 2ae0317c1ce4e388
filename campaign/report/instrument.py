"""What the client's stamps were worth: the self-check of each lease, and the cells that stand out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from campaign.client.lag import FLAG, VOID
from campaign.ledger.events import Event
from campaign.report.facts import plain
from campaign.store.layout import RunDir, flat


def instrument(run_dir: RunDir, leases: Iterable[tuple[str, str]], events: Sequence[Event]) -> dict[str, Any]:
    """`{selfchecks: [..], cells: [..], sentences: [..]}` of a run.

    `leases` are (session, lease). A cell is `{cell, attempt}` and its `client` object (docs/CONTRACTS.md).
    """
    checks = []
    for session, lease in leases:
        found = _read(run_dir, session, lease)
        if found is not None:
            checks.append({"session": session, "lease": lease, **found})
    cells = [
        {"cell": cell["cell"], "attempt": cell["attempt"], **cell["client"]}
        for event in events
        if event.type == "round_committed"
        for cell in event.payload["cells"]
        if cell.get("client")
    ]
    sentences = [*map(_check, checks), *_late(cells), *_rates(cells)]
    return {"selfchecks": checks, "cells": cells, "sentences": [plain(s) for s in sentences]}


def _read(run_dir: RunDir, session: str, lease: str) -> dict[str, Any] | None:
    path = run_dir.provenance / f"{flat(f'{session}/selfcheck-{lease}')}.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _check(check: Mapping[str, Any]) -> str:
    head = f"{check['session']}: "
    reasons = "; ".join(map(str, check.get("reasons") or ()))
    if check.get("lag_p99_us") is None:
        return f"{head}no self-check of the client ({reasons or 'nothing is known'})."
    text = (
        f"{head}{check['stamp_source']} stamps, lag p50 {check['lag_p50_us']:g} us, "
        f"p99 {check['lag_p99_us']:g} us; start error p99 {check['start_err_p99_us']:g} us; "
        f"{check['chunks_per_cpu_s']:,} chunks per CPU second."
    )
    return text if check.get("ok") else f"{text} Not as it should be: {reasons}."


def _late(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence each for cells that are flagged and cells that are void."""
    said = []
    for verdict, limit, what in (("flag", FLAG, "flagged"), ("void", VOID, "void")):
        bad = [c for c in cells if c.get("verdict") == verdict]
        if bad:
            worst = max(bad, key=lambda c: c["lag_p99_us"] / c["median_step_ms"])
            share = worst["lag_p99_us"] / worst["median_step_ms"] / 1000
            said.append(
                f"{len(bad)} cell(s) {what} for lag above {limit:.0%} of a step; the worst: {worst['cell']}, "
                f"p99 {worst['lag_p99_us']:g} us, {share:.0%} of {worst['median_step_ms']:.3g} ms."
            )
    return said


def _rates(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Open-loop cells: what was asked for against what was done."""
    return [
        f"{c['cell']}: {c['requested_rate']:.3g} requests/s asked for, {_number(c['achieved_rate'])} achieved, "
        f"start error p99 {_number(c['start_err_p99_us'])} us."
        for c in cells
        if c.get("requested_rate") is not None
    ]


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"
