"""Leases and what they cost: the part of the fold that only the controller writes, held to its order.

Also what the rest of the fold uses to change a state: mappings that a fold in progress owns are changed in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from campaign.errors import LedgerError
from campaign.ledger.events import PHASES, Event
from campaign.ledger.model import Lease, PhaseMark, RunState, Session, money
from campaign.money import NOTHING, MicroUsd

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


class Owned(dict[_K, _V]):
    """A mapping that only a fold in progress holds: changed in place, which keeps a long fold linear."""


def put(mapping: Mapping[_K, _V], more: Mapping[_K, _V]) -> Mapping[_K, _V]:
    """The mapping with more in it."""
    if isinstance(mapping, Owned):
        mapping.update(more)
        return mapping
    return {**mapping, **more}


def whole(payload: Mapping[str, Any], key: str, event: Event) -> int:
    """A whole number of an event. Raises LedgerError."""
    value = payload.get(key)
    if type(value) is not int:
        raise LedgerError(f"event {event.seq} {event.type}: {key} = {value!r} is not a whole number")
    return value


def with_session(state: RunState, session: Session) -> RunState:
    """The state with this session as it is now."""
    return replace(state, sessions=put(state.sessions, {session.name: session}))


def with_lease(state: RunState, lease: Lease) -> RunState:
    """The state with this lease as it is now."""
    return replace(state, leases=put(state.leases, {lease.id: lease}))


def open_lease(state: RunState, event: Event) -> Lease:
    """The lease an event speaks of. Raises LedgerError where it has no intent, or is settled."""
    name = event.payload["lease"]
    lease = state.leases.get(name)
    if lease is None:
        raise LedgerError(f"event {event.seq} {event.type}: lease {name} has no intent")
    if lease.settled:
        raise LedgerError(f"event {event.seq} {event.type}: lease {name} is settled already")
    return lease


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
        granularity_s=whole(p, "granularity_s", event),
        max_ns=whole(p, "max_ns", event),
        dead_man_ns=p.get("dead_man_ns") or 0,
        teardown_ns=p.get("teardown_ns") or 0,
        worst_usd=money(p, "worst_usd_micro"),
        teardown_reserve_usd=money(p, "teardown_reserve_usd_micro"),
        billing_from_utc_ns=whole(p, "billing_from_utc_ns", event),
        free_allowed=bool(p.get("free_allowed")),
        max_usd_per_hour=money(p, "max_usd_per_hour_micro"),
        deadline_utc_ns=p.get("deadline_utc_ns"),
        tokens_reserve_usd=money(p, "tokens_usd_micro") or NOTHING,
    )
    return with_lease(state, lease)


def _lease_refused(state: RunState, event: Event) -> RunState:
    return replace(state, refused=(*state.refused, {**event.payload, "session": event.session}))


def _lease_opened(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, open_lease(state, event)
    price = money(p, "usd_per_hour_micro")
    dearer = price is not None and lease.usd_per_hour is not None and price > lease.usd_per_hour
    worst = money(p, "worst_usd_micro") if "worst_usd_micro" in p else lease.worst_usd
    reserve = (
        money(p, "teardown_reserve_usd_micro")
        if "teardown_reserve_usd_micro" in p
        else lease.teardown_reserve_usd
    )
    return with_lease(
        state,
        replace(
            lease,
            opened_at_utc_ns=event.utc_ns,
            node_id=p["node_id"],
            # What is billed is never less than what was promised; an unreadable price stays unreadable.
            usd_per_hour=price if price is None or dearer else lease.usd_per_hour,
            granularity_s=max(whole(p, "granularity_s", event), lease.granularity_s),
            deadline_utc_ns=p["deadline_utc_ns"],
            dead_men=tuple(p["dead_men"] or ()),
            price_source=p["price_source"],
            worst_usd=worst,
            teardown_reserve_usd=reserve,
        ),
    )


def _lease_extended(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, open_lease(state, event)
    return with_lease(
        state,
        replace(lease, deadline_utc_ns=p["deadline_utc_ns"], worst_usd=money(p, "worst_usd_micro")),
    )


def _lease_down_asked(state: RunState, event: Event) -> RunState:
    lease = open_lease(state, event)
    if lease.down_asked_at_utc_ns is not None:
        return state
    return with_lease(state, replace(lease, down_asked_at_utc_ns=event.utc_ns, down_why=event.payload["why"]))


def _lease_unreachable(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, open_lease(state, event)
    since = lease.unreachable_since_utc_ns
    return with_lease(
        state,
        replace(
            lease,
            unreachable_since_utc_ns=event.utc_ns if since is None else since,
            unreachable_why=p["why"],
            check_by_hand=p["check_by_hand"],
        ),
    )


def _lease_settled(state: RunState, event: Event) -> RunState:
    p, lease = event.payload, open_lease(state, event)
    return with_lease(
        state,
        replace(
            lease,
            settled=True,
            settled_usd=money(p, "settled_usd_micro"),
            until_utc_ns=whole(p, "until_utc_ns", event),
            proof=p["proof"],
        ),
    )


def _tokens_billed(state: RunState, event: Event) -> RunState:
    lease, more = state.leases.get(event.payload["lease"]), money(event.payload, "usd_micro")
    # A settled lease keeps its amount: the settlement was made after all that its agent had journalled.
    if lease is None or lease.settled or more is None:
        return state
    return with_lease(state, replace(lease, tokens_usd=MicroUsd(lease.tokens_usd + more)))


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
    return with_lease(state, replace(lease, marks=(*lease.marks, mark)))


Handler = Callable[[RunState, Event], RunState]

MONEY: Final[Mapping[str, Handler]] = {
    "lease_intent": _lease_intent,
    "lease_refused": _lease_refused,
    "lease_opened": _lease_opened,
    "lease_extended": _lease_extended,
    "lease_down_asked": _lease_down_asked,
    "lease_unreachable": _lease_unreachable,
    "lease_settled": _lease_settled,
    "phase_started": _phase_started,
    "tokens_billed": _tokens_billed,
}
