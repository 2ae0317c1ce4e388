"""Forecasts of depths that have not run: stored before, scored after.

`STORE/forecasts.jsonl`, one line a forecast, appended and never changed; each line holds the hash of the one before it.
A forecast is scored on the same method, depth and workload, in time order: against what ran after it was made.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign.analysis.decompose import Drafter
from campaign.analysis.forecast import (
    Forecast,
    Score,
    aggregate,
    forecast,
    forecast_json,
    mean_tau,
    none_can_win,
    score,
)
from campaign.clock import Clock, iso
from campaign.errors import CampaignError, StoreError, UserError
from campaign.plan.model import SessionPlan
from campaign.report.further import drafters, simulated_arms
from campaign.store.jsonl import describe
from campaign.store.layout import RunDir
from campaign.store.run import Run

FILE = "forecasts.jsonl"
_FIRST = "0" * 64


def make(run: Run, depths: Sequence[int], clock: Clock) -> list[dict[str, Any]]:
    """Forecast these depths for every session, method and workload of a run that ran two or more depths."""
    rows = run.requests().rows()
    found: list[dict[str, Any]] = []
    for session in run.plan().sessions:
        mine = [r for r in rows if r.session == session.name and r.phase == "measure" and r.concurrency == 1]
        arms = _real(session)
        for method in dict.fromkeys(a.method for a in arms if a.method):
            of = [a for a in arms if a.method == method]
            for workload in dict.fromkeys(r.workload for r in mine):
                here = [r for r in mine if r.workload == workload]
                ran = {a.depth for a in of if any(r.arm == a.name for r in here)}
                new = [d for d in depths if d not in ran]
                if len(ran) < 2 or not new:
                    continue
                said = forecast(here, of, new)
                best = max((v for a in of if (v := aggregate(here, a.name)) is not None), default=None)
                found += [_entry(run, session.name, method, workload, f, best, said, clock) for f in said]
    if not found:
        raise UserError(
            f"{run.name} has no two depths of one drafter on one workload, or ran all of {list(depths)}. "
            "Fix: forecast a depth that did not run, from a ladder of two or more"
        )
    return found


def _entry(
    run: Run, session: str, method: str, workload: str, f: Forecast, best: float | None, all_: Sequence[Forecast], clock: Clock
) -> dict[str, Any]:  # fmt: skip
    return {
        "at": iso(clock.utc_ns()), "at_utc_ns": clock.utc_ns(), "run": run.name, "session": session, "method": method,
        "workload": workload, "best_tok_s": best, "stop": None if best is None else none_can_win(all_, best),
    } | forecast_json(f)  # fmt: skip


def append(store: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Write them down, before anything they speak of runs."""
    store.mkdir(parents=True, exist_ok=True)
    path = store / FILE
    last = load(store)
    previous = last[-1]["hash"] if last else _FIRST
    try:
        with path.open("a", encoding="utf-8") as file:
            for entry in entries:
                body = dict(entry) | {"previous": previous}
                previous = _hash(body)
                file.write(json.dumps(body | {"hash": previous}, sort_keys=True, allow_nan=False) + "\n")
    except OSError as error:
        raise StoreError(describe(error, path)) from error


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def load(store: Path) -> list[dict[str, Any]]:
    """Every stored forecast, in order. Raises StoreError where a line was changed."""
    path = store / FILE
    if not path.is_file():
        return []
    found: list[dict[str, Any]] = []
    previous = _FIRST
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            entry = json.loads(line)
            body = {k: v for k, v in entry.items() if k != "hash"}
            whole = entry["hash"] == _hash(body) and entry["previous"] == previous
        except (ValueError, KeyError, AttributeError, TypeError):
            whole = False
        if not whole:
            raise StoreError(
                f"{path}:{number}: this forecast is not as it was written. Fix: restore the file from a copy"
            )
        previous = entry["hash"]
        found.append(entry)
    return found


@dataclass(frozen=True, slots=True)
class Scored:
    """One forecast and what came of it."""

    entry: Mapping[str, Any]
    on: str
    """RUN/SESSION it is scored on."""
    scores: Sequence[Score]
    retrospective: bool
    """The data were recorded before the forecast was made (an import): it was not said in advance."""


def scored(store: Path) -> list[Scored]:
    """Every forecast of the store against the sessions that came after what it was made from, oldest first.

    Forecasts stand in `STORE/forecasts.jsonl`, and in the ledgers of runs whose ladders ran in stages. A session of
    another run counts where that run was created after the forecast. Sessions of one imported run have no clock of
    their own: the files' order is theirs, and what comes later in it counts, as `retrospective`.
    """
    entries = load(store)
    runs: list[tuple[int, Run, Mapping[str, Any]]] = []
    for ledger in sorted(store.glob("*/ledger.db")):
        run = Run(RunDir(ledger.parent.resolve()))
        try:
            created = run.events()[0]
            made = run.state().forecasts
        except (CampaignError, IndexError):
            continue
        runs.append((created.utc_ns, run, created.payload))
        entries += [
            {k: v for k, v in said.items() if k != "forecasts"} | {"run": run.name} | f
            for said in made
            for f in said["forecasts"]
        ]
    found: list[tuple[tuple[int, int], Scored]] = []
    for created_ns, run, payload in sorted(runs, key=lambda r: (r[0], r[1].name)) if entries else ():
        try:
            rows, sessions = run.requests().rows(), run.plan().sessions
        except CampaignError:
            continue
        order = {s.name: i for i, s in enumerate(sessions)}
        for entry in entries:
            own = entry["run"] == run.name
            imported = bool(payload.get("imported"))
            if not own and created_ns <= entry["at_utc_ns"]:
                continue
            for session in sessions:
                staged = own and "group" in entry and session.name == entry["session"]
                later = own and imported and order[session.name] > order.get(entry["session"], len(order))
                if own and not staged and not later:
                    continue
                arm = entry["arm"] if staged else _arm(_real(session), entry)
                mine = [
                    r for r in rows
                    if r.session == session.name and r.workload == entry["workload"] and r.concurrency == 1
                ]  # fmt: skip
                if arm is None or not any(r.arm == arm for r in mine):
                    continue
                scores = score(entry, mean_tau(mine, arm), aggregate(mine, arm))
                on = f"{run.name}/{session.name}"
                when = (int(entry["at_utc_ns"]), order[session.name])
                found.append((when, Scored(entry, on, scores, retrospective=imported)))
    return [s for _, s in sorted(found, key=lambda f: f[0])]


def _real(session: SessionPlan) -> list[Drafter]:
    """Without arms of simulated acceptance: they share method and depth with arms that draft."""
    made_up = simulated_arms(session)
    return [a for a in drafters(session) if a.name not in made_up]


def _arm(arms: Sequence[Drafter], entry: Mapping[str, Any]) -> str | None:
    return next((a.name for a in arms if a.method == entry["method"] and a.depth == entry["depth"]), None)


def calibration(scored_: Sequence[Scored]) -> list[dict[str, Any]]:
    """By quantity, and apart what was said in advance: how many forecasts, how many inside their 95 % interval."""
    out = []
    for quantity, before in ((q, b) for b in (False, True) for q in ("tau", "tok_s")):
        mine = [s for x in scored_ if x.retrospective == before for s in x.scores if s.quantity == quantity]
        if before and not mine:
            continue
        errors = [abs(s.came / s.said - 1) for s in mine if s.said]
        out.append(
            {
                "quantity": quantity, "retrospective": before, "n": len(mine), "inside": sum(s.inside for s in mine), "stated": 0.95,
                "mean_error_pct": 100 * math.fsum(errors) / len(errors) if errors else None,
            }
        )  # fmt: skip
    return out
