"""Where the dollars went: every micro-dollar of every lease in exactly one phase. Pure.

A lease's amount (settled, or accrued so far) is spread over its time from before the launch call to its end,
in proportion to nanoseconds, rounded so that the parts add up to the amount exactly. The time is cut by:

- before the first mark: `provision`;
- from a mark to the next: that mark's phase;
- after its agent has ended, or the node was asked down: `teardown`, unless a later mark says otherwise;
- from the moment the node could not be reached: `lost`;
- a mark of a round that was voided, superseded, or left behind when the lease ended: `lost`, whatever it was.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from campaign.budget.machine import accrued, at_risk, committed
from campaign.clock import iso
from campaign.ledger.events import PHASES
from campaign.ledger.state import Lease, PhaseMark, RunState
from campaign.money import MicroUsd, usd

_LOST_ROUNDS: Final = frozenset({"voided", "superseded"})


@dataclass(frozen=True, slots=True)
class Interval:
    """A piece of a lease's time, and what it cost."""

    lease: str
    session: str
    phase: str
    group: str | None
    start_utc_ns: int
    end_utc_ns: int
    usd: MicroUsd
    owner: str | None = None
    """The session whose group it is, where that was added to the lease's own."""


@dataclass(frozen=True, slots=True)
class SessionSpend:
    """One session, all its leases together."""

    session: str
    settled_usd: MicroUsd
    accrued_usd: MicroUsd
    phases: Mapping[str, MicroUsd]
    measured_share: float | None
    hours: float


@dataclass(frozen=True, slots=True)
class OpenLease:
    """A lease that still bills."""

    lease: str
    session: str
    node: str
    usd_per_hour: MicroUsd | None
    accrued_usd: MicroUsd | None
    at_risk_usd: MicroUsd | None
    deadline_utc_ns: int | None
    unreachable: bool
    check_by_hand: str | None


@dataclass(frozen=True, slots=True)
class Spend:
    """A run's money at `as_of_utc_ns`. None is unknown; `reasons` says why."""

    cap_usd: MicroUsd | None
    committed_usd: MicroUsd | None
    settled_usd: MicroUsd
    accrued_usd: MicroUsd
    """On open leases, as of now."""
    as_of_utc_ns: int
    final: bool
    """Nothing bills any more: a later read gives the same numbers."""
    phases: Mapping[str, MicroUsd]
    """Every phase; they add up to settled + accrued exactly."""
    seconds: Mapping[str, float]
    """Billed time by phase."""
    measured_share: float | None
    """Dollars of `measure` over all dollars; of time where everything is free."""
    sessions: tuple[SessionSpend, ...]
    groups: Mapping[tuple[str, str], MicroUsd]
    """By (session, group); what no mark gave to a group is in none."""
    open_leases: tuple[OpenLease, ...]
    unreachable_usd: MicroUsd
    over_cap_usd: MicroUsd
    price_gaps: Mapping[str, MicroUsd]
    """Lease -> dollars per hour the provider bills above its quote."""
    intervals: tuple[Interval, ...]
    """In order of time: the running total over them is the spend curve."""
    reasons: tuple[str, ...] = ()
    answered: int | None = None
    """Comparisons whose rounds are all committed, where the plan is known."""

    @property
    def total_usd(self) -> MicroUsd:
        """Settled plus accrued."""
        return MicroUsd(self.settled_usd + self.accrued_usd)

    @property
    def usd_per_verdict(self) -> MicroUsd | None:
        """All dollars over answered comparisons, rounded up; None where there is none yet."""
        return MicroUsd(-(-self.total_usd // self.answered)) if self.answered else None


def spend(state: RunState, now_utc_ns: int, *, answered: int | None = None) -> Spend:
    """The money of a run as of `now_utc_ns`. Settled leases give the same amounts at every later read."""
    now = max(now_utc_ns, state.latest_utc_ns)
    pieces = [p for lease in state.leases.values() for p in intervals(state, lease, now)]
    phases = _by_phase(pieces)
    settled = MicroUsd(sum(le.settled_usd or 0 for le in state.leases.values() if le.settled))
    running = MicroUsd(sum(accrued(le, now) or 0 for le in state.open_leases))
    groups: dict[tuple[str, str], MicroUsd] = {}
    for piece in pieces:
        if piece.group is not None:
            key = piece.owner or piece.session, piece.group
            groups[key] = MicroUsd(groups.get(key, 0) + piece.usd)
    risk = committed(state, now)
    cap = state.cap_usd
    over = max(0, settled + running - cap) if cap is not None else 0
    return Spend(
        cap_usd=cap,
        committed_usd=risk,
        settled_usd=settled,
        accrued_usd=running,
        as_of_utc_ns=now,
        final=not state.open_leases,
        phases=phases,
        seconds=_seconds(pieces),
        measured_share=_share(pieces),
        sessions=_sessions(state, pieces, now),
        groups=groups,
        open_leases=tuple(_open(lease, now) for lease in state.open_leases),
        unreachable_usd=MicroUsd(
            sum(accrued(le, now) or 0 for le in state.open_leases if le.unreachable_since_utc_ns is not None)
        ),
        over_cap_usd=MicroUsd(over),
        price_gaps={le.id: gap for le in state.leases.values() if (gap := price_gap(le)) > 0},
        intervals=tuple(sorted(pieces, key=lambda p: (p.start_utc_ns, p.end_utc_ns))),
        reasons=_reasons(state, risk),
        answered=answered,
    )


def price_gap(lease: Lease) -> MicroUsd:
    """What the provider bills per hour above what it quoted; 0 where either is unknown."""
    if lease.usd_per_hour is None or lease.quoted_usd_per_hour is None:
        return MicroUsd(0)
    return MicroUsd(max(0, lease.usd_per_hour - lease.quoted_usd_per_hour))


def intervals(state: RunState, lease: Lease, now_utc_ns: int) -> list[Interval]:
    """A lease's time in pieces whose dollars add up to its amount exactly."""
    start = lease.billing_from_utc_ns
    end = max(start, lease.until_utc_ns or start if lease.settled else now_utc_ns)
    total = (lease.settled_usd if lease.settled else accrued(lease, now_utc_ns)) or MicroUsd(0)
    cuts = _cuts(state, lease, start, end)
    pieces: list[Interval] = []
    given = 0
    for (at, phase, group, owner), until in zip(cuts, [c[0] for c in cuts[1:]] + [end], strict=True):
        last = until == end
        upto = total if last else total * (until - start) // max(1, end - start)
        if until > at or upto > given:
            amount = MicroUsd(upto - given)
            pieces.append(Interval(lease.id, lease.session or "?", phase, group, at, until, amount, owner))
        given = upto
        if last:
            break
    return pieces


def _cuts(
    state: RunState, lease: Lease, start: int, end: int
) -> list[tuple[int, str, str | None, str | None]]:
    """(time, phase, group, session) of every change, in order, inside [start, end]; the first is at `start`."""
    marks = sorted(lease.marks, key=lambda m: m.at_utc_ns)
    changes: list[tuple[int, str, str | None, str | None]] = [(start, "provision", None, None)]
    changes += [(m.at_utc_ns, _phase(state, lease, m), m.group, m.session) for m in marks]
    ends = [t for t in (lease.agent_ended_at_utc_ns, lease.down_asked_at_utc_ns) if t is not None]
    if ends:
        # Only if no mark comes after it: `lost` or a new agent's marks know better.
        wound_down = min(ends)
        if not marks or marks[-1].at_utc_ns < wound_down:
            changes.append((wound_down, "teardown", None, None))
    if lease.unreachable_since_utc_ns is not None:
        gone = lease.unreachable_since_utc_ns
        changes = [c for c in changes if c[0] < gone or c[0] == start] + [(gone, "lost", None, None)]
    clipped = [(min(max(at, start), end), phase, group, who) for at, phase, group, who in changes]
    return sorted(clipped, key=lambda change: change[0])


def _phase(state: RunState, lease: Lease, mark: PhaseMark) -> str:
    if mark.round is None:
        return mark.phase
    ended = state.attempt_states.get(mark.round)
    left_behind = ended == "begun" and lease.settled
    return "lost" if ended in _LOST_ROUNDS or left_behind else mark.phase


def _by_phase(pieces: Iterable[Interval]) -> dict[str, MicroUsd]:
    found = {phase: MicroUsd(0) for phase in PHASES}
    for piece in pieces:
        found[piece.phase] = MicroUsd(found[piece.phase] + piece.usd)
    return found


def _seconds(pieces: Iterable[Interval]) -> dict[str, float]:
    found = dict.fromkeys(PHASES, 0)
    for piece in pieces:
        found[piece.phase] += piece.end_utc_ns - piece.start_utc_ns
    return {phase: ns / 1e9 for phase, ns in found.items()}


def _share(pieces: Iterable[Interval]) -> float | None:
    pieces = list(pieces)
    money = sum(p.usd for p in pieces)
    if money:
        return sum(p.usd for p in pieces if p.phase == "measure") / money
    time = sum(p.end_utc_ns - p.start_utc_ns for p in pieces)
    if not time:
        return None
    return sum(p.end_utc_ns - p.start_utc_ns for p in pieces if p.phase == "measure") / time


def _sessions(state: RunState, pieces: list[Interval], now: int) -> tuple[SessionSpend, ...]:
    found = []
    for name in dict.fromkeys(lease.session or "?" for lease in state.leases.values()):
        leases = [le for le in state.leases.values() if (le.session or "?") == name]
        own = [p for p in pieces if p.session == name]
        found.append(
            SessionSpend(
                session=name,
                settled_usd=MicroUsd(sum(le.settled_usd or 0 for le in leases if le.settled)),
                accrued_usd=MicroUsd(sum(accrued(le, now) or 0 for le in leases if not le.settled)),
                phases=_by_phase(own),
                measured_share=_share(own),
                hours=sum(p.end_utc_ns - p.start_utc_ns for p in own) / 3.6e12,
            )
        )
    return tuple(found)


def _open(lease: Lease, now: int) -> OpenLease:
    return OpenLease(
        lease=lease.id,
        session=lease.session or "?",
        node=lease.node,
        usd_per_hour=lease.usd_per_hour,
        accrued_usd=accrued(lease, now),
        at_risk_usd=at_risk(lease, now),
        deadline_utc_ns=lease.deadline_utc_ns,
        unreachable=lease.unreachable_since_utc_ns is not None,
        check_by_hand=lease.check_by_hand,
    )


def _reasons(state: RunState, risk: MicroUsd | None) -> tuple[str, ...]:
    found = []
    if state.cap_usd is None:
        found.append("no_cap")
    if risk is None:
        found.append("spend_unknown")
    if not state.leases:
        found.append("no_lease")
    return tuple(found)


def spend_json(spent: Spend) -> dict[str, Any]:
    """The contract of `campaign spend --json` (docs/CONTRACTS.md), and more keys beside it."""
    return {
        "cap_usd": _usd(spent.cap_usd),
        "committed_usd": _usd(spent.committed_usd),
        "settled_usd": usd(spent.settled_usd),
        "accrued_usd": usd(spent.accrued_usd),
        "spent_usd": usd(spent.total_usd),
        "unreachable_usd": usd(spent.unreachable_usd),
        "over_cap_usd": usd(spent.over_cap_usd),
        "as_of": iso(spent.as_of_utc_ns),
        "final": spent.final,
        "measured_share": spent.measured_share,
        "usd_per_verdict": _usd(spent.usd_per_verdict),
        "verdicts_answered": spent.answered,
        "phases": _phases(spent.phases),
        "seconds": {phase: round(s, 3) for phase, s in spent.seconds.items()},
        "sessions": [
            {
                "session": s.session,
                "settled_usd": usd(s.settled_usd),
                "accrued_usd": usd(s.accrued_usd),
                "spent_usd": usd(s.settled_usd + s.accrued_usd),
                "measured_share": s.measured_share,
                "hours": round(s.hours, 6),
                "phases": _phases(s.phases),
            }
            for s in spent.sessions
        ],
        "groups": [{"session": s, "group": g, "usd": usd(amount)} for (s, g), amount in spent.groups.items()],
        "open_leases": [
            {
                "lease": o.lease,
                "session": o.session,
                "node": o.node,
                "usd_per_hour": _usd(o.usd_per_hour),
                "accrued_usd": _usd(o.accrued_usd),
                "at_risk_usd": _usd(o.at_risk_usd),
                "deadline": None if o.deadline_utc_ns is None else iso(o.deadline_utc_ns),
                "unreachable": o.unreachable,
                "check_by_hand": o.check_by_hand,
            }
            for o in spent.open_leases
        ],
        "price_gaps": [{"lease": lease, "usd_per_hour": usd(gap)} for lease, gap in spent.price_gaps.items()],
        "reasons": list(spent.reasons),
    }


def _phases(phases: Mapping[str, MicroUsd]) -> dict[str, float]:
    return {phase: usd(amount) for phase, amount in phases.items()}


def _usd(amount: MicroUsd | None) -> float | None:
    return None if amount is None else usd(amount)
