"""What `run`, `resume` and `rerun` have in common: from a file or a folder to something to drive."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from campaign.budget import machine
from campaign.clock import Clock, SystemClock
from campaign.cloud.base import Provider
from campaign.engines.flags.spec import check_spec
from campaign.engines.registry import get as get_engine
from campaign.errors import BudgetRefused, UserError
from campaign.fleet.again import rest_of
from campaign.fleet.budget import BudgetController
from campaign.fleet.create import create_run, install_id, registered_id
from campaign.fleet.drive import Drive, GrownPlan, remote_providers, scope_of
from campaign.fleet.reconcile import Reconciled, Reconciler
from campaign.fleet.recover import (
    agent_events,
    check_registered,
    left_to_do,
    settle_abandoned,
    supersede,
)
from campaign.fleet.supervisor import SessionJob
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import RunState, fold
from campaign.money import micro
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import CampaignPlan, SessionPlan
from campaign.spec.load import Loaded, parse_canonical
from campaign.spec.models import Spec
from campaign.store import atomic, ballast
from campaign.store.folder import FolderStore
from campaign.store.layout import RunDir
from campaign.workloads import packs

DRIVEN = frozenset({"local", "attach", "sky"})
"""Providers this version can rent from or run on."""


def preflight(spec: Spec, plan: CampaignPlan) -> None:
    """Everything that can be checked before money is spent. Raises UserError or PreflightError."""
    for session in plan.sessions:
        node = spec.nodes[session.node]
        if node.provider not in DRIVEN:
            raise UserError(
                f"session {session.name}: node {session.node} has provider {node.provider!r}, which this version plans "
                f"but cannot launch. Fix: run it on a `provider: local` node, or use `campaign plan` only"
            )
        for arm in session.arms.values():
            get_engine(arm.config.engine or "").preflight(arm.config, spec.models)


def new_drive(
    loaded: Loaded,
    plan: CampaignPlan,
    base_dir: Path,
    results: Path,
    overrides: Sequence[NewEvent],
    only: str | None = None,
) -> Drive:
    """A new run: preflight, prompts pinned, folder written. Nothing has been spent yet."""
    clock, spec = SystemClock(), loaded.spec
    check_spec(loaded).require()
    preflight(spec, plan)
    prompts = packs.load_all(loaded, base_dir)
    run_dir, created = create_run(loaded, plan, prompts, results, clock, only)
    jobs = make_jobs(
        run_dir, loaded.canonical, plan.sessions, spec, created.payload,
        done={}, attempts={}, overrides=gates_of(overrides),
    )  # fmt: skip
    return Drive(run_dir, spec, plan, jobs, [created, *overrides], create=True)


def recovered(run_dir: RunDir, ledger: Ledger, clock: Clock) -> RunState:
    """Bring a ledger up to what really happened: merge, supersede, settle. Raises LedgerError."""
    before = fold(ledger.events())
    check_registered(run_dir, before)
    ledger.append(*agent_events(run_dir))
    ledger.append(*supersede(FolderStore(run_dir), fold(ledger.events())))
    ledger.append(*settle_abandoned(fold(ledger.events()), clock, before.latest_utc_ns))
    return fold(ledger.events())


def resumed_drive(run_dir: RunDir, overrides: Sequence[NewEvent], clock: Clock | None = None) -> Drive:
    """A run whose controller is gone: bring its ledger up to date, and plan what is left.

    Raises LedgerLocked where its controller is alive.
    """
    clock = clock or SystemClock()
    reconcile_run(run_dir, parse_canonical(run_dir.canonical.read_bytes()), clock)
    with Ledger.open(run_dir, clock) as ledger:
        state = recovered(run_dir, ledger, clock)
        canonical = run_dir.canonical.read_bytes()
        spec, plan = parse_canonical(canonical), codec.load(run_dir.plan.read_bytes())
        left = left_to_do(state, plan)
        stays = frozenset(name for name, node in spec.nodes.items() if node.provider == "local")
        rest = rest_of(plan, state, stays)
        plan, sessions = rest.plan, rest.sessions
        if rest.added:
            grown = GrownPlan(run_dir)
            digest = grown.begin(plan)
            ledger.append(*(replace(e, payload={**e.payload, "plan_sha256": digest}) for e in rest.added))
            grown.commit()
        if not sessions and state.finished is None:
            # It died after its last round: all that was missing is the last word.
            ledger.append(
                NewEvent("run_finished", {"exit_code": 0, "reason": "completed before it was resumed"})
            )
    run_dir.stop_file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        ballast.take(run_dir)
    gates = [*(o.gate for o in state.overridden), *gates_of(overrides)]
    jobs = make_jobs(
        run_dir, canonical, sessions, spec, state.created,
        done=left.done, attempts=left.attempts, overrides=gates,
    )  # fmt: skip
    return Drive(run_dir, spec, plan, jobs, list(overrides), create=False)


def reconcile_run(
    run_dir: RunDir,
    spec: Spec,
    clock: Clock,
    elsewhere: Callable[[], Mapping[str, str]] = dict,
    providers: Mapping[str, Provider] | None = None,
) -> Reconciled:
    """Take down and settle what a dead controller left on nodes that are not this machine, rows first.

    Raises LedgerLocked where the controller is alive: its leases are its own.
    """
    scope = scope_of(run_dir, spec)
    if not scope.providers:
        return Reconciled()

    async def work() -> Reconciled:
        budget = BudgetController(Ledger.open(run_dir, clock), clock, spec)
        try:
            given = remote_providers() if providers is None else providers
            return await Reconciler(budget, given, scope, clock, known_elsewhere=elsewhere).run()
        finally:
            await budget.close()

    return asyncio.run(work())


def rerun_drive(run_dir: RunDir, pair: str, clock: Clock | None = None) -> Drive:
    """Both arms of one pair (or all of one ladder) and the anchors again, in a new session; supersedes nothing.

    Raises BudgetRefused, with nothing written, where its worst case does not fit what is left under the cap.
    """
    clock = clock or SystemClock()
    with Ledger.open(run_dir, clock) as ledger:
        state = recovered(run_dir, ledger, clock)
        canonical = run_dir.canonical.read_bytes()
        spec, plan = parse_canonical(canonical), codec.load(run_dir.plan.read_bytes())
        cut = only(spec, pair)
        again = build(cut, declared_prices(cut)).sessions[0]
        taken = {s.name for s in plan.sessions}
        name = next(n for n in (f"{again.name}-rerun{i}" for i in range(1, 1000)) if n not in taken)
        session = replace(again, name=name)
        _affordable(session, state, spec, clock)
        plan = replace(plan, sessions=(*plan.sessions, session))
        payload = {"sessions": [name], "reason": f"rerun of {pair}", "plan_sha256": codec.plan_hash(plan)}
        # Beside the plan in force, until the ledger names it: a crash between the two can be picked up.
        atomic.write(run_dir.next_plan, codec.dump(plan))
        ledger.append(NewEvent("sessions_added", payload))
        run_dir.next_plan.replace(run_dir.plan)
    run_dir.stop_file.unlink(missing_ok=True)
    gates = [o.gate for o in state.overridden]
    jobs = make_jobs(
        run_dir, canonical, [session], spec, state.created, done={}, attempts={}, overrides=gates
    )
    return Drive(run_dir, spec, plan, jobs, [], create=False)


def _affordable(session: SessionPlan, state: RunState, spec: Spec, clock: Clock) -> None:
    cap, now = micro(spec.budget.cap_usd), clock.utc_ns()
    committed = machine.committed(state, now)
    if committed is None or committed + session.usd_worst > cap:
        known = "unknown" if committed is None else machine.dollars(committed)
        raise BudgetRefused(
            "cost",
            f"{known} committed and {machine.dollars(session.usd_worst)} asked for",
            machine.dollars(cap),
            f"session {session.name}: the cap was fixed when the run was created; start a new run for more",
        )


def only(spec: Spec, pair: str) -> Spec:
    """The spec cut down to one pair, ladder or session. Raises UserError naming what there is."""
    if pair in spec.sessions and pair not in spec.pairs and pair not in spec.ladders:
        return spec.model_copy(update={"sessions": {pair: spec.sessions[pair]}})
    if pair not in spec.pairs and pair not in spec.ladders:
        names = ", ".join(sorted([*spec.pairs, *spec.ladders, *spec.sessions]))
        raise UserError(f"no pair, ladder or session {pair!r}. Fix: one of {names}")
    sessions = {}
    for name, session in spec.sessions.items():
        kept = session.model_copy(
            update={
                "pairs": tuple(p for p in session.pairs if p == pair),
                "ladders": tuple(n for n in session.ladders if n == pair),
            }
        )
        if kept.pairs or kept.ladders:
            sessions[name] = kept
    return spec.model_copy(update={"sessions": sessions})


def _seconds(wait: timedelta | None) -> float:
    return 0.0 if wait is None else wait.total_seconds()


def gates_of(overrides: Sequence[NewEvent]) -> list[str]:
    """The gates that override events name."""
    return [event.payload["gate"] for event in overrides]


def make_jobs(
    run_dir: RunDir,
    canonical: bytes,
    sessions: Sequence[SessionPlan],
    spec: Spec,
    created: Mapping[str, Any] | None,
    *,
    done: Mapping[str, tuple[str, ...]],
    attempts: Mapping[str, Mapping[str, int]],
    overrides: Sequence[str],
) -> list[SessionJob]:
    """One job a session. `created`: the payload of `run_created`, whose installation names the nodes."""
    return [
        SessionJob(
            run=run_dir.name,
            campaign=spec.campaign,
            install_id=registered_id(created) or install_id(),
            wait_for_capacity_s=_seconds(spec.budget.wait_for_capacity),
            run_dir=str(run_dir.root),
            plan=session,
            node=spec.nodes[session.node],
            spec_json=canonical.decode(),
            attempts=dict(attempts.get(session.name, {})),
            done=done.get(session.name, ()),
            overrides=tuple(overrides),
            stored="://" in spec.store,
        )
        for session in sessions
    ]
