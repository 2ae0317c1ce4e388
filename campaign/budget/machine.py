"""The budget as a state machine: what the ledger says and a question in, a decision out. Pure.

    committed = settled + sum over open leases of
                max(worst case to the deadline, dead-man granularity included, + teardown reserve; accrued)

No admission raises `committed` above the cap. All amounts are integers of micro-dollars, so sums are
exact. Whatever is unknown, NaN or unreadable trips: the budget fails closed. What a decision needs of
time comes in as `now_utc_ns`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from campaign.budget.rules import (
    GATES,
    STANDING,
    UNKNOWN,
    Decision,
    Limits,
    Trip,
    check_price,
    dollars,
    errors_trip,
    finite,
    freeze_price,
    limits,
    over,
    registration,
    rules_hash,
    void_share_trip,
)
from campaign.ledger.state import Lease, RunState
from campaign.money import NOTHING, MicroUsd, bill

__all__ = [
    "GATES",
    "STANDING",
    "Decision",
    "LeaseAsk",
    "Limits",
    "Terms",
    "Trip",
    "accrued",
    "admit_extension",
    "admit_lease",
    "admit_round",
    "at_risk",
    "check_price",
    "committed",
    "cost",
    "dollars",
    "errors_trip",
    "finite",
    "freeze_price",
    "in_force",
    "limits",
    "over",
    "registration",
    "round_fits",
    "rules_hash",
    "settled",
    "settlement",
    "spent",
    "standing",
    "trips",
    "unreachable",
    "void_share_trip",
    "worst_case",
]


# --- sums


def accrued(lease: Lease, now_utc_ns: int) -> MicroUsd | None:
    """What an open lease has cost so far, by its billing granularity; None where its price is unknown.

    Tokens of priced endpoints are in it.
    """
    held = _held(lease, now_utc_ns)
    return None if held is None else MicroUsd(held + lease.tokens_usd)


def _held(lease: Lease, now_utc_ns: int) -> MicroUsd | None:
    if lease.usd_per_hour is None:
        return None
    return bill(lease.usd_per_hour, now_utc_ns - lease.billing_from_utc_ns, lease.granularity_s)


def _tokens(lease: Lease) -> int:
    """What tokens may still come to, or have come to where that is more."""
    return max(lease.tokens_reserve_usd, lease.tokens_usd)


def cost(lease: Lease, now_utc_ns: int) -> MicroUsd | None:
    """What a lease has cost: its settled amount, the same at every later read, or what has accrued."""
    return lease.settled_usd if lease.settled else accrued(lease, now_utc_ns)


def at_risk(lease: Lease, now_utc_ns: int) -> MicroUsd | None:
    """What an open lease may still come to: never less than what it has cost. None is unknown."""
    so_far = _held(lease, now_utc_ns)
    if so_far is None or lease.worst_usd is None or lease.teardown_reserve_usd is None:
        return None
    return MicroUsd(max(lease.worst_usd + lease.teardown_reserve_usd, so_far) + _tokens(lease))


def settled(state: RunState, session: str | None = None) -> MicroUsd | None:
    """Sum of what is settled, of one session or of all."""
    return _sum(lease.settled_usd for lease in _leases(state, session) if lease.settled)


def spent(state: RunState, now_utc_ns: int, session: str | None = None) -> MicroUsd | None:
    """Settled plus accrued."""
    now = max(now_utc_ns, state.latest_utc_ns)
    return _sum(cost(lease, now) for lease in _leases(state, session))


def committed(state: RunState, now_utc_ns: int, session: str | None = None) -> MicroUsd | None:
    """Settled plus what open leases may still come to. None where any part of it is unknown."""
    now = max(now_utc_ns, state.latest_utc_ns)
    return _sum(
        lease.settled_usd if lease.settled else at_risk(lease, now) for lease in _leases(state, session)
    )


def unreachable(state: RunState, now_utc_ns: int) -> MicroUsd | None:
    """What has accrued on leases whose node cannot be reached: counted in `spent`, and shown apart."""
    now = max(now_utc_ns, state.latest_utc_ns)
    return _sum(accrued(le, now) for le in state.open_leases if le.unreachable_since_utc_ns is not None)


def _leases(state: RunState, session: str | None) -> list[Lease]:
    return [le for le in state.leases.values() if session is None or le.session == session]


def _sum(parts: Iterable[MicroUsd | None]) -> MicroUsd | None:
    total = 0
    for part in parts:
        if part is None:
            return None
        total += part
    return MicroUsd(total)


def settlement(lease: Lease, until_utc_ns: int, reported_usd: MicroUsd | None = None) -> MicroUsd:
    """What a lease is settled at: its bill to `until_utc_ns`, or what the provider reports if that is more.

    A lease whose price is unknown settles at its worst case, so that no dollar goes missing. A launch whose answer never
    came costs the most it may: nobody said what it costs.
    """
    until = max(until_utc_ns, lease.opened_at_utc_ns or 0)
    at_most = None
    if not lease.opened and lease.max_usd_per_hour is not None:
        at_most = bill(lease.max_usd_per_hour, until - lease.billing_from_utc_ns, lease.granularity_s)
    known = [amount for amount in (accrued(lease, until), at_most, reported_usd) if amount is not None]
    if known:
        return max(known)
    return MicroUsd((lease.worst_usd or 0) + (lease.teardown_reserve_usd or 0))


# --- admission


@dataclass(frozen=True, slots=True)
class LeaseAsk:
    """A lease somebody would like to take."""

    session: str
    node: str
    usd_per_hour: object
    """Micro-dollars per hour, as quoted; anything else trips."""
    granularity_s: int
    max_ns: int
    """Length: the deadline is this long after billing begins."""
    dead_man_ns: int
    """Longest a node outlives its deadline while one dead-man works."""
    teardown_ns: int
    free_allowed: bool = False
    tokens_usd: MicroUsd = NOTHING
    """Most that tokens of priced endpoints may come to."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What an admitted lease or extension puts at risk."""

    usd_per_hour: MicroUsd
    worst_usd: MicroUsd
    teardown_reserve_usd: MicroUsd


def worst_case(
    usd_per_hour: MicroUsd, length_ns: int, dead_man_ns: int, teardown_ns: int, granularity_s: int
) -> Terms:
    """The lease to its deadline and one dead-man's delay, and the teardown beside it, each rounded up."""
    return Terms(
        usd_per_hour,
        bill(usd_per_hour, length_ns + dead_man_ns, granularity_s),
        bill(usd_per_hour, teardown_ns, granularity_s),
    )


def admit_lease(state: RunState, limit: Limits, ask: LeaseAsk, now_utc_ns: int) -> Terms | Trip:
    """Whether a lease may be taken. A lease that brings `committed` to exactly the cap is admitted."""
    halted = _halted(state, limit, ask.session, now_utc_ns)
    if halted is not None:
        return halted
    price = check_price(
        ask.usd_per_hour,
        free_allowed=ask.free_allowed and ask.node in limit.free_nodes,
        max_usd_per_hour=None
        if state.is_overridden("price", ask.session)
        else limit.max_usd_per_hour.get(ask.node),
    )
    if isinstance(price, Trip):
        return Trip(price.gate, price.value, price.limit, f"node {ask.node}: {price.detail}", ask.session)
    if min(ask.max_ns, ask.granularity_s) <= 0 or min(ask.dead_man_ns, ask.teardown_ns) < 0:
        return Trip("missing_input", str(ask), "positive durations", f"node {ask.node}", ask.session)
    # What a launch really costs is known once it is there: until then it may cost all that it is allowed to.
    ceiling = max(price, limit.max_usd_per_hour.get(ask.node, price))
    at_most = worst_case(ceiling, ask.max_ns, ask.dead_man_ns, ask.teardown_ns, ask.granularity_s)
    terms = Terms(price, at_most.worst_usd, at_most.teardown_reserve_usd)
    more = terms.worst_usd + terms.teardown_reserve_usd + ask.tokens_usd
    return _over_cap(state, limit, ask.session, more, now_utc_ns) or terms


def admit_extension(
    state: RunState, limit: Limits, lease_id: str, deadline_utc_ns: int, now_utc_ns: int
) -> Terms | Trip:
    """Whether a lease's deadline may move to `deadline_utc_ns`. Silence never extends: it has to be asked."""
    lease = state.leases.get(lease_id)
    trouble = _not_usable(lease, lease_id, now_utc_ns)
    if trouble is not None or lease is None or lease.deadline_utc_ns is None or lease.usd_per_hour is None:
        return trouble or Trip("missing_input", UNKNOWN, "a lease with price and deadline", lease_id)
    halted = _halted(state, limit, lease.session, now_utc_ns)
    if halted is not None:
        return halted
    if deadline_utc_ns <= lease.deadline_utc_ns:
        return Trip("lease_time", "no later than now", "a later deadline", lease_id, lease.session, lease_id)
    length = deadline_utc_ns - lease.billing_from_utc_ns
    terms = Terms(
        lease.usd_per_hour,
        bill(lease.usd_per_hour, length + lease.dead_man_ns, lease.granularity_s),
        lease.teardown_reserve_usd or MicroUsd(0),
    )
    old = at_risk(lease, now_utc_ns)
    new = terms.worst_usd + terms.teardown_reserve_usd + _tokens(lease)
    if old is None:
        return Trip("cost", UNKNOWN, dollars(limit.cap_usd), f"lease {lease_id}", lease.session, lease_id)
    return _over_cap(state, limit, lease.session, max(0, new - old), now_utc_ns) or terms


def admit_round(
    state: RunState,
    limit: Limits,
    lease_id: str,
    expected_ns: object,
    now_utc_ns: int,
    margin_ns: int | None = None,
) -> Trip | None:
    """None admits a round: nothing is tripped, money is within the cap, and it fits before the deadline.

    `margin_ns` defaults to a tenth of `expected_ns`.
    """
    lease = state.leases.get(lease_id)
    trouble = _not_usable(lease, lease_id, now_utc_ns)
    if trouble is not None or lease is None:
        return trouble
    halted = _halted(state, limit, lease.session, now_utc_ns)
    if halted is not None:
        return halted
    return _over_cap(state, limit, lease.session, 0, now_utc_ns) or round_fits(
        expected_ns,
        now_utc_ns,
        lease.deadline_utc_ns,
        margin_ns,
        session=lease.session,
        lease=lease_id,
    )


def round_fits(
    expected_ns: object,
    now_utc_ns: int,
    deadline_utc_ns: int | None,
    margin_ns: int | None = None,
    *,
    session: str | None = None,
    lease: str | None = None,
) -> Trip | None:
    """None where a round and its margin end before the deadline. An agent asks this of its own lease."""
    if isinstance(expected_ns, float) and math.isfinite(expected_ns):
        expected_ns = math.ceil(expected_ns)
    if type(expected_ns) is not int or expected_ns < 0:
        return Trip(
            "missing_input", str(expected_ns), "a duration", "expected time of a round", session, lease
        )
    if deadline_utc_ns is None:
        return Trip("missing_input", UNKNOWN, "a deadline", f"lease {lease}", session, lease)
    margin = expected_ns // 10 if margin_ns is None else margin_ns
    left = deadline_utc_ns - now_utc_ns
    if expected_ns + margin <= left:
        return None
    needs = f"{(expected_ns + margin) / 1e9:.0f} s"
    detail = "the next round does not fit before the lease's deadline"
    return Trip("lease_time", needs, f"{left / 1e9:.0f} s left", detail, session, lease)


def _not_usable(lease: Lease | None, lease_id: str, now_utc_ns: int) -> Trip | None:
    if lease is None:
        return Trip("missing_input", UNKNOWN, "a lease in the ledger", f"lease {lease_id}")
    wrong = None
    if lease.settled:
        wrong = "settled"
    elif not lease.opened:
        wrong = "not open yet"
    elif lease.down_asked_at_utc_ns is not None:
        wrong = "being taken down"
    elif lease.unreachable_since_utc_ns is not None:
        wrong = "unreachable"
    elif lease.deadline_utc_ns is not None and now_utc_ns >= lease.deadline_utc_ns:
        wrong = "past its deadline"
    if wrong is None:
        return None
    return Trip("lease_time", wrong, "an open lease", f"lease {lease_id}", lease.session, lease_id)


def _over_cap(state: RunState, limit: Limits, session: str | None, more: int, now_utc_ns: int) -> Trip | None:
    """A Trip where `more` would bring the campaign, or the session, above its cap."""
    caps: list[tuple[str | None, MicroUsd]] = [(None, _cap(state, limit))]
    if session is not None and session in limit.session_cap_usd:
        caps.append((session, limit.session_cap_usd[session]))
    for scope, cap in caps:
        now = committed(state, now_utc_ns, scope)
        whose = "campaign" if scope is None else f"session {scope}"
        if now is None:
            return Trip("cost", UNKNOWN, dollars(cap), f"what the {whose} has spent is unknown", session)
        if now + more > cap:
            return Trip(
                "cost",
                dollars(now + more),
                dollars(cap),
                f"{whose}: {dollars(now)} committed and {dollars(more)} asked for",
                session,
            )
    return None


def _cap(state: RunState, limit: Limits) -> MicroUsd:
    """The lower of what was registered and what the spec says now: a cap is never raised by an edit."""
    registered = state.cap_usd
    return limit.cap_usd if registered is None else min(limit.cap_usd, registered)


def _halted(state: RunState, limit: Limits, session: str | None, now_utc_ns: int) -> Trip | None:
    """Why nothing may begin: a stop that was asked for, or a gate in force."""
    if state.stop_asked is not None:
        return Trip("stop", "asked", "none", f"{state.stop_asked['by']}: {state.stop_asked['why']}", session)
    return next(iter(in_force(state, limit, now_utc_ns, session)), None)


# --- gates


def in_force(state: RunState, limit: Limits, now_utc_ns: int, session: str | None = None) -> tuple[Trip, ...]:
    """Trips that stop `session` (or anything, if None): judged now, and recorded ones that still count."""
    found = [*trips(state, limit, now_utc_ns), *standing(state)]
    mine = [t for t in found if session is None or t.session in {None, session}]
    return tuple({t.key: t for t in reversed(mine)}.values())[::-1]


def standing(state: RunState) -> tuple[Trip, ...]:
    """Recorded trips that count and are not overridden.

    Findings about the data stand for good; conditions stand until the next controller judges them anew.
    """
    return tuple(
        Trip(g.gate, g.value, g.limit, g.detail, g.session, g.lease)
        for g in state.tripped
        if (g.gate in STANDING or g.seq > state.controller_since_seq)
        and not state.is_overridden(g.gate, g.session)
    )


def trips(state: RunState, limit: Limits, now_utc_ns: int) -> tuple[Trip, ...]:
    """Every gate that is beyond its limit now, overridden ones left out; recorded or not."""
    now = max(now_utc_ns, state.latest_utc_ns)
    found: list[Trip] = []
    if state.created is None or state.cap_usd is None:
        found.append(Trip("missing_input", UNKNOWN, "run_created with a cap", "the ledger"))
    found += _cost_trips(state, limit, now)
    for lease in state.open_leases:
        found += _lease_trips(state, limit, lease, now)
    found += _anchor_trips(state, limit)
    return tuple(t for t in found if not state.is_overridden(t.gate, t.session))


def _cost_trips(state: RunState, limit: Limits, now: int) -> list[Trip]:
    found = []
    scopes: list[tuple[str | None, MicroUsd]] = [(None, _cap(state, limit)), *limit.session_cap_usd.items()]
    for session, cap in scopes:
        risk, so_far = committed(state, now, session), spent(state, now, session)
        whose = "campaign" if session is None else f"session {session}"
        if risk is None or so_far is None:
            found.append(
                Trip("cost", UNKNOWN, dollars(cap), f"what the {whose} has spent is unknown", session)
            )
        elif risk > cap:
            word, amount = ("spent", so_far) if so_far > cap else ("committed", risk)
            detail = f"{whose}: {word} {dollars(amount - cap)} over the cap"
            found.append(Trip("cost", dollars(amount), dollars(cap), detail, session))
    return found


def _lease_trips(state: RunState, limit: Limits, lease: Lease, now: int) -> list[Trip]:
    def trip(gate: str, value: str, bound: str, detail: str) -> Trip:
        return Trip(gate, value, bound, detail, lease.session, lease.id)

    found = []
    price = check_price(
        lease.usd_per_hour, free_allowed=lease.free_allowed, max_usd_per_hour=lease.max_usd_per_hour
    )
    if isinstance(price, Trip):
        found.append(trip("price", price.value, price.limit, f"lease {lease.id}: {price.detail}"))
    if lease.down_asked_at_utc_ns is not None:
        return found  # it is on its way out: time and silence ask for nothing more
    if lease.deadline_utc_ns is None:
        found.append(trip("missing_input", UNKNOWN, "a deadline", f"lease {lease.id}"))
    elif now >= lease.deadline_utc_ns:
        found.append(trip("lease_time", "deadline reached", "the lease", lease.id))
    session = state.sessions.get(lease.session or "")
    if session is not None and session.state == "running" and session.lease == lease.id:
        seen = max(session.last_seen_utc_ns or 0, state.controller_since_utc_ns or 0)
        if now - seen > limit.heartbeat_ns:
            bound = f"{limit.heartbeat_ns / 1e9:g} s"
            found.append(trip("heartbeat", f"silent for more than {bound}", bound, f"lease {lease.id}"))
    return found


def _anchor_trips(state: RunState, limit: Limits) -> list[Trip]:
    found = []
    for anchor in state.anchors:
        data, detail = anchor.data, f"anchor {anchor.position}"
        if finite(data.get("step_ms")) is None:
            why = ", ".join(map(str, data.get("reasons") or ()))
            found.append(
                Trip("anchor_quality", "no valid step time", "a number", why or detail, anchor.session)
            )
        elif data.get("ok") is not None and data["ok"] is not True:
            drift = finite(data.get("drift"))
            shown = UNKNOWN if drift is None else f"{drift:+.1%}"
            found.append(Trip("anchor_drift", shown, f"{limit.drift_delta:.1%}", detail, anchor.session))
    return found
