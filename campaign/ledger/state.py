"""The fold of a ledger's events to its state: pure, and the only way to know what a run has done.

`apply` returns the next state and shares what did not change. Events that only the controller writes
(money) are held to their order and raise LedgerError where they contradict it. Events merged from agents
never make a ledger unreadable: the last word counts, and what cannot be read counts as not done.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

from campaign.errors import LedgerError
from campaign.ledger.events import SCHEMA_VERSION, Event
from campaign.ledger.model import (
    AnchorJudged,
    Boot,
    BootState,
    Cell,
    Gate,
    Lease,
    Override,
    PhaseMark,
    Round,
    RoundState,
    RunState,
    Session,
)
from campaign.ledger.moneyfold import MONEY, Handler, Owned, put, replace, with_lease, with_session
from campaign.store.base import SealedFile

__all__ = [
    "AnchorJudged",
    "Boot",
    "Cell",
    "Gate",
    "Lease",
    "Override",
    "PhaseMark",
    "Round",
    "RunState",
    "Session",
    "apply",
    "fold",
]


def fold(events: Iterable[Event]) -> RunState:
    """The state after `events`, from the first."""
    state = RunState(
        leases=Owned(),
        sessions=Owned(),
        rounds=Owned(),
        attempt_states=Owned(),
        boots=Owned(),
        files=Owned(),
    )
    for event in events:
        state = apply(state, event)
    return replace(
        state,
        leases=dict(state.leases),
        sessions=dict(state.sessions),
        rounds=dict(state.rounds),
        attempt_states=dict(state.attempt_states),
        boots=dict(state.boots),
        files=dict(state.files),
    )


def apply(state: RunState, event: Event) -> RunState:
    """The state after one more event.

    Raises LedgerError for a type this version does not know, and for a money event that contradicts what
    stands before it.
    """
    handler = _HANDLERS.get(event.type)
    if handler is None:
        wrote = (state.created or {}).get("version", "unknown")
        raise LedgerError(
            f"event {event.seq} is of type {event.type!r}, which version {SCHEMA_VERSION} of the ledger does "
            f"not know (the run was made by campaign {wrote}). Read it with a newer campaign"
        )
    state = handler(_seen(state, event), event)
    return replace(
        state,
        seq=event.seq,
        head=event.hash,
        latest_utc_ns=max(state.latest_utc_ns, event.utc_ns),
    )


def _seen(state: RunState, event: Event) -> RunState:
    """An agent's event shows that it lives."""
    if event.session is None or not event.source.startswith("agent:"):
        return state
    session = state.sessions.get(event.session) or Session(event.session, "planned")
    return with_session(state, replace(session, last_seen_utc_ns=event.utc_ns))


# --- the run


def _run_created(state: RunState, event: Event) -> RunState:
    if state.created is not None:
        raise LedgerError(f"event {event.seq}: the run was created already")
    plan = event.payload["plan_sha256"]
    return replace(state, created=event.payload, created_at_utc_ns=event.utc_ns, plan_sha256=plan)


def _controller_started(state: RunState, event: Event) -> RunState:
    return replace(
        state,
        controllers=state.controllers + 1,
        controller_since_seq=event.seq,
        controller_since_utc_ns=event.utc_ns,
        stop_asked=None,
        finished=None,
    )


def _controller_stopped(state: RunState, event: Event) -> RunState:  # noqa: ARG001  # one signature for all
    return state


def _sessions_added(state: RunState, event: Event) -> RunState:
    for name in event.payload["sessions"] or ():
        if name not in state.sessions:
            state = with_session(state, Session(name, "planned"))
    return replace(state, plan_sha256=event.payload.get("plan_sha256", state.plan_sha256))


def _run_finished(state: RunState, event: Event) -> RunState:
    return replace(state, finished=event.payload)


def _stop_asked(state: RunState, event: Event) -> RunState:
    return replace(state, stop_asked=event.payload)


# --- the node


def _session_started(state: RunState, event: Event) -> RunState:
    name = event.session or "?"
    session = state.sessions.get(name) or Session(name, "planned")
    return with_session(
        state,
        replace(session, state="running", lease=event.payload["lease"], reason=None, open_round=None),
    )


def _session_held(state: RunState, event: Event) -> RunState:
    name, until = event.session or "?", event.payload["until_utc_ns"]
    session = state.sessions.get(name) or Session(name, "planned")
    return with_session(state, replace(session, held_until_utc_ns=until if type(until) is int else None))


def _session_finished(state: RunState, event: Event) -> RunState:
    name = event.session or "?"
    session = state.sessions.get(name) or Session(name, "planned")
    lease = state.leases.get(session.lease or "")
    if lease is not None and lease.session in {None, name} and lease.agent_ended_at_utc_ns is None:
        state = with_lease(state, replace(lease, agent_ended_at_utc_ns=event.utc_ns))
    return with_session(
        state,
        replace(
            session,
            state=str(event.payload["state"]),
            reason=event.payload["reason"],
            open_round=None,
            held_until_utc_ns=None,
        ),
    )


def _agent_heartbeat(state: RunState, event: Event) -> RunState:
    p = event.payload
    session = state.sessions.get(event.session or "?") or Session(event.session or "?", "planned")
    return with_session(
        state, replace(session, cell=p["cell"] or "", done=p["done"] or 0, total=p["total"] or 0)
    )


def _round(state: RunState, event: Event, new: RoundState) -> tuple[RunState, Round]:
    """The state with this attempt's ending on record, and the round to go on with."""
    session, id_ = event.session or "?", event.payload["round_id"]
    attempt = event.payload["attempt"] or 0
    known = state.rounds.get((session, id_))
    if state.attempt_states.get((session, id_, attempt)) != "committed":
        # What is committed stays: a word that comes later, under the same number, takes no rows away.
        state = replace(state, attempt_states=put(state.attempt_states, {(session, id_, attempt): new}))
    at = state.sessions.get(session)
    if at is not None:
        open_round = (session, id_, attempt) if new == "begun" else None
        state = with_session(state, replace(at, open_round=open_round))
    if known is not None and known.attempt == attempt:
        return state, known
    return state, Round(
        session,
        id_,
        attempt,
        new,
        event.utc_ns if new == "begun" else None,
        possibly_spent=known.possibly_spent if known else 0,
        torn_bytes=known.torn_bytes if known else 0,
    )


def _with_round(state: RunState, round_: Round) -> RunState:
    known = state.rounds.get(round_.key)
    if known is not None and known.state == "committed" and round_.state != "committed":
        # What is committed stays: nothing that comes later takes rows away.
        return state
    return replace(state, rounds=put(state.rounds, {round_.key: round_}))


def _round_started(state: RunState, event: Event) -> RunState:
    state, round_ = _round(state, event, "begun")
    return _with_round(state, replace(round_, state="begun", begun_at_utc_ns=event.utc_ns))


def _cells(payload: Mapping[str, Any]) -> tuple[Cell, ...]:
    cells = []
    for data in payload["cells"]:
        files = tuple(SealedFile(f["path"], f["sha256"], f["rows"]) for f in data["files"])
        cells.append(Cell(data["cell"], data.get("attempt", payload["attempt"]), files, data))
    return tuple(cells)


def _round_committed(state: RunState, event: Event) -> RunState:
    known = state.rounds.get((event.session or "?", event.payload["round_id"]))
    if known is not None and known.state == "committed":
        return state
    attempt = (event.session or "?", event.payload["round_id"], event.payload["attempt"] or 0)
    if state.attempt_states.get(attempt) == "superseded":
        # It came too late: the round was given to another attempt or node, and must not count twice.
        return state
    try:
        cells = _cells(event.payload)
    except (KeyError, TypeError) as error:
        # Rows whose hashes cannot be read are not valid, and the round is done again.
        state, round_ = _round(state, event, "voided")
        reason = f"its commit event cannot be read: {error!r}"
        return _with_round(
            state, replace(round_, state="voided", reason=reason, ended_at_utc_ns=event.utc_ns)
        )
    state, round_ = _round(state, event, "committed")
    files = {f.path: f for cell in cells for f in cell.files}
    state = _with_round(state, replace(round_, state="committed", cells=cells, ended_at_utc_ns=event.utc_ns))
    state = replace(state, files=put(state.files, files))
    stop = event.payload.get("group_stopped")
    return state if stop is None else _stopped_early(state, event.session, stop)


def _round_voided(state: RunState, event: Event) -> RunState:
    state, round_ = _round(state, event, "voided")
    return _with_round(
        state,
        replace(round_, state="voided", reason=event.payload["reason"], ended_at_utc_ns=event.utc_ns),
    )


def _round_superseded(state: RunState, event: Event) -> RunState:
    state, round_ = _round(state, event, "superseded")
    p = event.payload
    return _with_round(
        state,
        replace(
            round_,
            state="superseded",
            ended_at_utc_ns=event.utc_ns,
            possibly_spent=round_.possibly_spent + (p["possibly_spent"] or 0),
            torn_bytes=round_.torn_bytes + (p["torn_bytes"] or 0),
        ),
    )


def _boot(state: RunState, event: Event, now: BootState, **changes: Any) -> RunState:
    id_ = event.payload["boot_id"]
    known = state.boots.get(id_) or Boot(id_, event.session, None, None, None, now)
    return replace(state, boots=put(state.boots, {id_: replace(known, state=now, **changes)}))


def _boot_started(state: RunState, event: Event) -> RunState:
    p = event.payload
    return _boot(state, event, "starting", arm=p["arm"], arm_hash=p["arm_hash"], place=p["place"])


def _boot_ready(state: RunState, event: Event) -> RunState:
    p = event.payload
    return _boot(state, event, "ready", boot_ns=p["boot_ns"], provenance=p["provenance"])


def _boot_failed(state: RunState, event: Event) -> RunState:
    p = event.payload
    return _boot(state, event, "failed", kind=p["kind"], error=p["error"], log_tail=p["log_tail"])


def _boot_stopped(state: RunState, event: Event) -> RunState:
    known = state.boots.get(event.payload["boot_id"])
    return state if known is not None and known.state == "failed" else _boot(state, event, "stopped")


def _anchor_judged(state: RunState, event: Event) -> RunState:
    judged = AnchorJudged(
        event.seq, event.utc_ns, event.session, str(event.payload["position"]), event.payload
    )
    return replace(state, anchors=(*state.anchors, judged))


def _group_stopped(state: RunState, event: Event) -> RunState:
    return _stopped_early(state, event.session, event.payload)


def _stopped_early(state: RunState, session: str | None, said: Mapping[str, Any]) -> RunState:
    key = session or "?", str(said["group"])
    if key in state.stopped_early:
        return state
    return replace(state, stopped_early=put(state.stopped_early, {key: said}))


def _forecast_made(state: RunState, event: Event) -> RunState:
    said = {"session": event.session, "at_utc_ns": event.utc_ns} | dict(event.payload)
    # A session that was resumed may say it again; the first word counts.
    if any((f["session"], f["group"]) == (said["session"], said["group"]) for f in state.forecasts):
        return state
    return replace(state, forecasts=(*state.forecasts, said))


# --- gates


def _gate_tripped(state: RunState, event: Event) -> RunState:
    p = event.payload
    at = state.sessions.get(event.session or "") if event.source.startswith("agent:") else None
    gate = Gate(
        event.seq,
        event.utc_ns,
        event.session,
        p.get("lease") or (at.lease if at else None),
        str(p["gate"]),
        str(p["value"]),
        str(p["limit"]),
        str(p["detail"]),
    )
    # The agent and the controller both judge; what both saw is one trip.
    if any(
        (g.gate, g.session, g.detail) == (gate.gate, gate.session, gate.detail)
        for g in state.tripped
        if g.seq > state.controller_since_seq
    ):
        return state
    return replace(state, tripped=(*state.tripped, gate))


def _gate_overridden(state: RunState, event: Event) -> RunState:
    p = event.payload
    override = Override(event.seq, event.session, str(p["gate"]), str(p["reason"]), str(p["by"]))
    return replace(state, overridden=(*state.overridden, override))


_HANDLERS: Final[Mapping[str, Handler]] = {
    **MONEY,
    "run_created": _run_created,
    "controller_started": _controller_started,
    "controller_stopped": _controller_stopped,
    "sessions_added": _sessions_added,
    "run_finished": _run_finished,
    "boot_started": _boot_started,
    "boot_ready": _boot_ready,
    "boot_failed": _boot_failed,
    "boot_stopped": _boot_stopped,
    "round_started": _round_started,
    "round_committed": _round_committed,
    "round_voided": _round_voided,
    "round_superseded": _round_superseded,
    "anchor_judged": _anchor_judged,
    "group_stopped": _group_stopped,
    "forecast_made": _forecast_made,
    "agent_heartbeat": _agent_heartbeat,
    "session_started": _session_started,
    "session_finished": _session_finished,
    "session_held": _session_held,
    "gate_tripped": _gate_tripped,
    "gate_overridden": _gate_overridden,
    "stop_asked": _stop_asked,
}
