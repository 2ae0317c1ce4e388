"""The fold of a ledger's events to its state: pure, and the only way to know what a run has done.

`apply` returns the next state and shares what did not change. Events that only the controller writes
(money) are held to their order and raise LedgerError where they contradict it. Events merged from agents
never make a ledger unreadable: the last word counts, and what cannot be read counts as not done.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from campaign.errors import LedgerError
from campaign.ledger.events import PHASES, SCHEMA_VERSION, Event
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
    money,
)
from campaign.money import NOTHING, MicroUsd
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


_T = TypeVar("_T")
_K = TypeVar("_K")
_V = TypeVar("_V")


@cache
def _shape(kind: type) -> tuple[tuple[str, ...], Callable[[Any], tuple[Any, ...]]]:
    names = tuple(f.name for f in fields(kind))
    return names, attrgetter(*names)


def replace(value: _T, **changes: Any) -> _T:
    """As `dataclasses.replace`, several times quicker: folding a long ledger is mostly this."""
    kind: Any = type(value)
    names, get = _shape(kind)
    made: _T = kind(**dict(zip(names, get(value), strict=True)) | changes)
    return made


class _Owned(dict[_K, _V]):
    """A mapping that only a fold in progress holds: changed in place, which keeps a long fold linear."""


def fold(events: Iterable[Event]) -> RunState:
    """The state after `events`, from the first."""
    state = RunState(
        leases=_Owned(),
        sessions=_Owned(),
        rounds=_Owned(),
        attempt_states=_Owned(),
        boots=_Owned(),
        files=_Owned(),
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


def _put(mapping: Mapping[_K, _V], more: Mapping[_K, _V]) -> Mapping[_K, _V]:
    if isinstance(mapping, _Owned):
        mapping.update(more)
        return mapping
    return {**mapping, **more}


def _whole(payload: Mapping[str, Any], key: str, event: Event) -> int:
    value = payload.get(key)
    if type(value) is not int:
        raise LedgerError(f"event {event.seq} {event.type}: {key} = {value!r} is not a whole number")
    return value


def _seen(state: RunState, event: Event) -> RunState:
    """An agent's event shows that it lives."""
    if event.session is None or not event.source.startswith("agent:"):
        return state
    session = state.sessions.get(event.session) or Session(event.session, "planned")
    return _with_session(state, replace(session, last_seen_utc_ns=event.utc_ns))


def _with_session(state: RunState, session: Session) -> RunState:
    return replace(state, sessions=_put(state.sessions, {session.name: session}))


def _with_lease(state: RunState, lease: Lease) -> RunState:
    return replace(state, leases=_put(state.leases, {lease.id: lease}))


def _open_lease(state: RunState, event: Event) -> Lease:
    name = event.payload["lease"]
    lease = state.leases.get(name)
    if lease is None:
        raise LedgerError(f"event {event.seq} {event.type}: lease {name} has no intent")
    if lease.settled:
        raise LedgerError(f"event {event.seq} {event.type}: lease {name} is settled already")
    return lease


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
            state = _with_session(state, Session(name, "planned"))
    return replace(state, plan_sha256=event.payload.get("plan_sha256", state.plan_sha256))


def _run_finished(state: RunState, event: Event) -> RunState:
    return replace(state, finished=event.payload)


def _stop_asked(state: RunState, event: Event) -> RunState:
    return replace(state, stop_asked=event.payload)


# --- money


def _lease_intent(state: RunState, event: Event) -> RunState:
    p = event.payload
    if p["lease"] in state.leases:
        raise LedgerError(f"event {event.seq}: lease {p['lease']} has an intent already")
    price = money(p, "usd_per_hour_micro")
    lease = Lease(
        id=p["lease"],
        session=event.session,
        node=p["node"],
        provider=p["provider"],
        quoted_usd_per_hour=price,
        usd_per_hour=price,
        granularity_s=_whole(p, "granularity_s", event),
        max_ns=_whole(p, "max_ns", event),
        dead_man_ns=p.get("dead_man_ns") or 0,
        teardown_ns=p.get("teardown_ns") or 0,
        worst_usd=money(p, "worst_usd_micro"),
        teardown_reserve_usd=money(p, "teardown_reserve_usd_micro"),
        billing_from_utc_ns=_whole(p, "billing_from_utc_ns", event),
        free_allowed=bool(p.get("free_allowed")),
        max_usd_per_hour=money(p, "max_usd_per_hour_micro"),
        deadline_utc_ns=p.get("deadline_utc_ns"),
        tokens_reserve_usd=money(p, "tokens_usd_micro") or NOTHING,
    )
    return _with_lease(state, lease)


def _lease_refused(state: RunState, event: Event) -> RunState:
    return replace(state, refused=(*state.refused, {**event.payload, "session": event.session}))


def _lease_opened(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, _open_lease(state, event)
    price = money(p, "usd_per_hour_micro")
    dearer = price is not None and lease.usd_per_hour is not None and price > lease.usd_per_hour
    worst = money(p, "worst_usd_micro") if "worst_usd_micro" in p else lease.worst_usd
    reserve = (
        money(p, "teardown_reserve_usd_micro")
        if "teardown_reserve_usd_micro" in p
        else lease.teardown_reserve_usd
    )
    return _with_lease(
        state,
        replace(
            lease,
            opened_at_utc_ns=event.utc_ns,
            node_id=p["node_id"],
            # What is billed is never less than what was promised; an unreadable price stays unreadable.
            usd_per_hour=price if price is None or dearer else lease.usd_per_hour,
            granularity_s=max(_whole(p, "granularity_s", event), lease.granularity_s),
            deadline_utc_ns=p["deadline_utc_ns"],
            dead_men=tuple(p["dead_men"] or ()),
            price_source=p["price_source"],
            worst_usd=worst,
            teardown_reserve_usd=reserve,
        ),
    )


def _lease_extended(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, _open_lease(state, event)
    return _with_lease(
        state,
        replace(lease, deadline_utc_ns=p["deadline_utc_ns"], worst_usd=money(p, "worst_usd_micro")),
    )


def _lease_down_asked(state: RunState, event: Event) -> RunState:
    lease = _open_lease(state, event)
    if lease.down_asked_at_utc_ns is not None:
        return state
    return _with_lease(
        state, replace(lease, down_asked_at_utc_ns=event.utc_ns, down_why=event.payload["why"])
    )


def _lease_unreachable(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, _open_lease(state, event)
    since = lease.unreachable_since_utc_ns
    return _with_lease(
        state,
        replace(
            lease,
            unreachable_since_utc_ns=event.utc_ns if since is None else since,
            unreachable_why=p["why"],
            check_by_hand=p["check_by_hand"],
        ),
    )


def _lease_settled(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, _open_lease(state, event)
    return _with_lease(
        state,
        replace(
            lease,
            settled=True,
            settled_usd=money(p, "settled_usd_micro"),
            until_utc_ns=_whole(p, "until_utc_ns", event),
            proof=p["proof"],
        ),
    )


def _tokens_billed(state: RunState, event: Event) -> RunState:
    lease, more = state.leases.get(event.payload["lease"]), money(event.payload, "usd_micro")
    # A settled lease keeps its amount: the settlement was made after all that its agent had journalled.
    if lease is None or lease.settled or more is None:
        return state
    return _with_lease(state, replace(lease, tokens_usd=MicroUsd(lease.tokens_usd + more)))


def _phase_started(state: RunState, event: Event) -> RunState:
    p = event.payload
    lease = state.leases.get(p["lease"])
    # A mark of a lease nobody knows, or in words nobody knows, cannot move money between phases.
    if lease is None or p["phase"] not in PHASES or type(p["at_utc_ns"]) is not int:
        return state
    session = state.sessions.get(event.session or "")
    mark = PhaseMark(
        p["phase"], p["at_utc_ns"], p.get("group"), session.open_round if session else None, event.session
    )
    return _with_lease(state, replace(lease, marks=(*lease.marks, mark)))


# --- the node


def _session_started(state: RunState, event: Event) -> RunState:
    name = event.session or "?"
    session = state.sessions.get(name) or Session(name, "planned")
    return _with_session(
        state,
        replace(session, state="running", lease=event.payload["lease"], reason=None, open_round=None),
    )


def _session_held(state: RunState, event: Event) -> RunState:
    name, until = event.session or "?", event.payload["until_utc_ns"]
    session = state.sessions.get(name) or Session(name, "planned")
    return _with_session(state, replace(session, held_until_utc_ns=until if type(until) is int else None))


def _session_finished(state: RunState, event: Event) -> RunState:
    name = event.session or "?"
    session = state.sessions.get(name) or Session(name, "planned")
    lease = state.leases.get(session.lease or "")
    if lease is not None and lease.session in {None, name} and lease.agent_ended_at_utc_ns is None:
        state = _with_lease(state, replace(lease, agent_ended_at_utc_ns=event.utc_ns))
    return _with_session(
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
    return _with_session(
        state, replace(session, cell=p["cell"] or "", done=p["done"] or 0, total=p["total"] or 0)
    )


def _round(state: RunState, event: Event, new: RoundState) -> tuple[RunState, Round]:
    """The state with this attempt's ending on record, and the round to go on with."""
    session, id_ = event.session or "?", event.payload["round_id"]
    attempt = event.payload["attempt"] or 0
    known = state.rounds.get((session, id_))
    if state.attempt_states.get((session, id_, attempt)) != "committed":
        # What is committed stays: a word that comes later, under the same number, takes no rows away.
        state = replace(state, attempt_states=_put(state.attempt_states, {(session, id_, attempt): new}))
    at = state.sessions.get(session)
    if at is not None:
        open_round = (session, id_, attempt) if new == "begun" else None
        state = _with_session(state, replace(at, open_round=open_round))
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
    return replace(state, rounds=_put(state.rounds, {round_.key: round_}))


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
    return replace(state, files=_put(state.files, files))


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
    return replace(state, boots=_put(state.boots, {id_: replace(known, state=now, **changes)}))


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
    key = event.session or "?", str(event.payload["group"])
    if key in state.stopped_early:
        return state
    return replace(state, stopped_early=_put(state.stopped_early, {key: event.payload}))


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


_HANDLERS: Final[Mapping[str, Callable[[RunState, Event], RunState]]] = {
    "run_created": _run_created,
    "controller_started": _controller_started,
    "controller_stopped": _controller_stopped,
    "sessions_added": _sessions_added,
    "run_finished": _run_finished,
    "lease_intent": _lease_intent,
    "lease_refused": _lease_refused,
    "lease_opened": _lease_opened,
    "lease_extended": _lease_extended,
    "lease_down_asked": _lease_down_asked,
    "lease_unreachable": _lease_unreachable,
    "lease_settled": _lease_settled,
    "phase_started": _phase_started,
    "tokens_billed": _tokens_billed,
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
    "agent_heartbeat": _agent_heartbeat,
    "session_started": _session_started,
    "session_finished": _session_finished,
    "session_held": _session_held,
    "gate_tripped": _gate_tripped,
    "gate_overridden": _gate_overridden,
    "stop_asked": _stop_asked,
}
