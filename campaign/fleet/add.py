"""The asking side of `campaign add`: plans what a file has more than a run, and hands it to the run's controller."""

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from campaign.engines.flags.spec import check_spec
from campaign.errors import InfrastructureError, UserError
from campaign.fleet import additions
from campaign.fleet.start import preflight
from campaign.ledger.journal import read_events
from campaign.ledger.lock import holder
from campaign.ledger.state import fold
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.plan.model import SessionPlan
from campaign.session.added import Added
from campaign.spec.load import Loaded, canonical_json, parse_canonical
from campaign.spec.models import Spec
from campaign.store.layout import RunDir
from campaign.workloads import packs

ANSWER_S = 60.0
"""A controller looks twice a second; a busy one may take longer."""


def ask(run_dir: RunDir, loaded: Loaded, file: Path, session: str | None, pairs: Sequence[str]) -> str:
    """The name the addition runs under. Raises UserError for what the user can fix, SpecError, PreflightError."""
    if holder(run_dir.lock) is None:
        raise UserError(
            f"run {run_dir.name} has no controller: no node of it is held. Fix: `campaign run --hold 30m`"
        )
    spec, plan = parse_canonical(run_dir.canonical.read_bytes()), codec.load(run_dir.plan.read_bytes())
    now = time.time_ns()
    there = additions.held(fold(read_events(run_dir.ledger)), now)
    host = session or (there[0] if len(there) == 1 else None)
    if host is None or host not in there:
        held = ", ".join(there) or "none"
        raise UserError(
            f"session {session or '?'} of {run_dir.name} is not held; held are: {held}. Fix: `campaign run --hold 30m`, or --session"
        )
    planned = next(s for s in plan.sessions if s.name == host)
    merged = together(spec, loaded, planned, file, pairs)
    check_spec(replace(loaded, spec=merged)).require()
    built = build(merged, declared_prices(merged))
    (addition,) = built.sessions
    _same_anchor(addition, planned, file)
    preflight(merged, replace(built, sessions=(addition,)))
    prompts = packs.load_all(replace(loaded, spec=merged), file.parent)
    used = {g.workload for g in addition.groups}
    canonical = canonical_json(merged)
    request = additions.Request(
        uuid.uuid4().hex[:12],
        Added(addition, parse_canonical(canonical), {n: p for n, p in prompts.items() if n in used}),
        str(file),
        hashlib.sha256(canonical).hexdigest(),
        host,
    )
    additions.write(run_dir, request, loaded.source, canonical)
    return _answer(run_dir, request.id)


def _answer(run_dir: RunDir, id_: str) -> str:
    end = time.monotonic() + ANSWER_S
    while time.monotonic() < end:
        said = additions.answered(run_dir, id_)
        if said is not None:
            if said["error"] is not None:
                raise UserError(f"not added: {said['error']}")
            return str(said["session"])
        time.sleep(0.2)
    raise InfrastructureError(f"the controller of {run_dir.name} has not answered within {ANSWER_S:g} s")


def together(spec: Spec, loaded: Loaded, host: SessionPlan, file: Path, pairs: Sequence[str]) -> Spec:
    """The run's spec with the arms of the file and one session of what is new. Raises UserError."""
    new = loaded.spec
    known = {*spec.pairs, *spec.ladders}
    offered = {*new.pairs, *new.ladders}
    missing = [p for p in pairs if p not in offered]
    if missing:
        raise UserError(
            f"{file}: no pair or ladder {', '.join(missing)}. Fix: one of {', '.join(sorted(offered))}"
        )
    names = set(pairs) or offered - known
    if not names:
        raise UserError(
            f"{file}: every pair and ladder of it is in the run. Fix: name one with --pair, or add one"
        )
    for kind in ("workloads", "models", "runtimes"):
        ours, theirs = getattr(spec, kind), getattr(new, kind)
        changed = sorted(n for n in ours if n in theirs and ours[n] != theirs[n])
        if changed:
            raise UserError(
                f"{file}: {kind} {', '.join(changed)} is not what the run has under that name. Fix: give it another name"
            )
    again = spec.sessions.get(host.name.split(".draw", 1)[0])
    shape = again or next(iter(spec.sessions.values()))
    session = shape.model_copy(
        update={
            "node": host.node,
            "pairs": tuple(p for p in new.pairs if p in names),
            "ladders": tuple(n for n in new.ladders if n in names),
        }
    )
    return new.model_copy(
        update={
            "nodes": spec.nodes,
            "anchor": spec.anchor,
            "gates": spec.gates,
            "statistics": spec.statistics,
            "fail_on": spec.fail_on,
            "budget": spec.budget,
            "ray": spec.ray,
            "store": spec.store,
            "campaign": spec.campaign,
            "arms": {**new.arms, spec.anchor.arm: spec.arms[spec.anchor.arm]},
            "workloads": {**spec.workloads, **new.workloads},
            "models": {**spec.models, **new.models},
            "sessions": {host.name.replace(".", "-"): session},
        }
    )


def _same_anchor(addition: SessionPlan, host: SessionPlan, file: Path) -> None:
    """The reference of an addition is the run's own: another one would be another machine check."""
    theirs = {
        a.hash for g in addition.groups if g.kind == "anchor" for n in g.arms for a in [addition.arms[n]]
    }
    ours = {a.hash for g in host.groups if g.kind == "anchor" for n in g.arms for a in [host.arms[n]]}
    if not theirs <= ours:
        raise UserError(
            f"{file}: the anchor's arm is not the run's. Fix: leave it as it is in the run's file"
        )
