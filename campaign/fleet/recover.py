"""Picks up a run whose controller died: merges what agents journalled, supersedes half-done rounds, settles.

Nothing finished is lost and nothing is done twice: a round that was committed stays; a round that was
begun is kept as `superseded` and planned again under the next attempt.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from campaign.clock import Clock
from campaign.errors import LedgerError
from campaign.fleet.budget import AGENT_MAY_SAY
from campaign.ledger.agent import read as read_agent
from campaign.ledger.events import NewEvent
from campaign.ledger.model import Lease, RunState
from campaign.money import bill
from campaign.plan.model import CampaignPlan
from campaign.store.base import Recovered
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir


@dataclass(frozen=True, slots=True)
class Left:
    """What is left to do of a plan."""

    finished: frozenset[str]
    """Sessions of which every round is committed."""
    done: Mapping[str, tuple[str, ...]]
    """Session -> round ids that are committed."""
    attempts: Mapping[str, Mapping[str, int]]
    """Session -> round id -> the next attempt number."""


def agent_events(run_dir: RunDir) -> list[NewEvent]:
    """Everything the agents journalled; the ledger skips what it has merged already.

    Raises LedgerError where a journal says what is not an agent's to say.
    """
    events = [
        event for path in sorted(run_dir.journals.glob("*.jsonl"), key=_age) for event in read_agent(path)
    ]
    for event in events:
        if event.type not in AGENT_MAY_SAY:
            raise LedgerError(f"{event.source} may not write {event.type} into the ledger")
    return events


def _age(journal: Path) -> tuple[int, str]:
    # `main.10` comes after `main.2`.
    return len(journal.name), journal.name


def check_registered(run_dir: RunDir, state: RunState) -> None:
    """What was registered before the first request must still stand there. Raises LedgerError."""
    created = state.created or {}
    with contextlib.suppress(OSError):
        if sha256(run_dir.next_plan.read_bytes()).hexdigest() == state.plan_sha256:
            run_dir.next_plan.replace(run_dir.plan)
    wanted = {
        run_dir.canonical: created.get("canonical_sha256"),
        run_dir.plan: state.plan_sha256,
        **{
            run_dir.root / "workloads" / f"{name}.json": digest
            for name, digest in (created.get("workloads_sha256") or {}).items()
        },
    }
    for path, digest in wanted.items():
        try:
            found = sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise LedgerError(f"cannot read {path}: {error.strerror}. Fix: restore it from a copy") from error
        if found != digest:
            raise LedgerError(
                f"{path} is not what the ledger registered before the first request (SHA-256 {found[:12]}... against "
                f"{str(digest)[:12]}...). Fix: restore it from a copy; a changed file is a new run"
            )


def supersede(store: FolderStore, state: RunState) -> list[NewEvent]:
    """Seal the rows of rounds that were begun and not committed as superseded, and say so."""
    rounds: dict[tuple[str, str, int], list[Recovered]] = {}
    for cell in store.recover():
        rounds.setdefault((cell.session, _round_of(cell), cell.boot_attempt), []).append(cell)
    for key, how in state.attempt_states.items():
        if how == "begun":
            rounds.setdefault(key, [])
    # Sealed just before a crash, and not in any commit: whole files that must not read as valid.
    for name, file in store.sealed_cells():
        if file.path not in state.files and not _void(store.run_dir.root / file.path):
            store.open_cell(name.session, name.cell, name.boot_attempt).seal("superseded")
    events = []
    for (session, round_id, attempt), cells in rounds.items():
        if state.attempt_states.get((session, round_id, attempt)) == "committed":
            continue
        sealed = [
            {
                "cell": cell.cell,
                "files": [f.path for f in store.open_cell(session, cell.cell, attempt).seal("superseded")],
                "rows": len(cell.rows),
            }
            for cell in cells
        ]
        if state.attempt_states.get((session, round_id, attempt)) == "superseded":
            continue
        payload = {
            "round_id": round_id,
            "attempt": attempt,
            "cells": sealed,
            "possibly_spent": sum(len(cell.possibly_spent) for cell in cells),
            "torn_bytes": sum(cell.torn_bytes for cell in cells),
        }
        events.append(NewEvent("round_superseded", payload, session))
    return events


def _void(path: Path) -> bool:
    """Whether a sealed cell was voided: it says why its rows were lost, and keeps saying it."""
    from campaign.store import parquet

    return {row.validity for row in parquet.load(path).rows()} <= {"void"}


def _round_of(cell: Recovered) -> str:
    """The round of a recovered cell: `GROUP/rINDEX`, from its rows or its begin records."""
    group = cell.cell.split("/", 1)[0]
    if cell.rows:
        return f"{group}/r{cell.rows[0].round}"
    return next(
        (f"{group}/r{begin['round']}" for begin in cell.possibly_spent if "round" in begin), f"{group}/r?"
    )


def settle_abandoned(state: RunState, clock: Clock, seen_utc_ns: int) -> list[NewEvent]:
    """Leases whose controller died. A local one bills to now or to its deadline, whichever comes first.

    What came after `seen_utc_ns`, the last sign of life, is phase `lost`. A lease of another provider is left open: it
    bills until that provider shows the node gone.
    """
    events = []
    for lease in state.open_leases:
        if lease.provider == "local":
            events += _settle_local(lease, clock.utc_ns(), seen_utc_ns)
    return events


def _settle_local(lease: Lease, now: int, seen: int) -> list[NewEvent]:
    if lease.usd_per_hour is None:
        raise LedgerError(f"lease {lease.id} has no readable price: it cannot be settled")
    deadline = lease.deadline_utc_ns or lease.billing_from_utc_ns + lease.max_ns
    until = max(lease.billing_from_utc_ns, min(now, deadline))
    lost_from = min(max(seen, lease.billing_from_utc_ns), until)
    mark = {"lease": lease.id, "phase": "lost", "at_utc_ns": lost_from}
    settled = {
        "lease": lease.id,
        # Tokens of priced endpoints are spent whatever became of the rounds they were for.
        "settled_usd_micro": bill(lease.usd_per_hour, until - lease.billing_from_utc_ns, lease.granularity_s)
        + lease.tokens_usd,
        "until_utc_ns": until,
        "proof": "its controller is dead and its processes ended with it; the machine is not ours to end",
    }
    return [NewEvent("phase_started", mark, lease.session), NewEvent("lease_settled", settled, lease.session)]


def left_to_do(state: RunState, plan: CampaignPlan) -> Left:
    """What of the plan is not committed yet."""
    done = {s.name: state.done(s.name) for s in plan.sessions}
    planned = {s.name: {r.id for g in s.groups for r in g.rounds} for s in plan.sessions}
    return Left(
        finished=frozenset(name for name, rounds in planned.items() if rounds <= set(done[name])),
        done=done,
        attempts={s.name: state.attempts(s.name) for s in plan.sessions},
    )
