"""The budget controller: the one that writes the ledger, and the only one that lets money be spent.

A plain asyncio class around `campaign.budget.machine`; a Ray actor may wrap it. Decision and entry are one
step: between reading the state and the ledger's transaction nothing else runs, so parallel sessions cannot
pass the cap together.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from campaign.budget import machine
from campaign.budget.machine import GATES, Decision, LeaseAsk, Limits, Terms, Trip
from campaign.clock import Clock
from campaign.cloud.base import NodeHandle, Quote
from campaign.errors import LedgerError, UserError
from campaign.ledger.canon import check
from campaign.ledger.events import PHASES, Event, NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import Lease, RunState, apply, fold
from campaign.money import MicroUsd
from campaign.spec.models import Spec

AGENT_MAY_SAY: Final = frozenset(
    {
        "phase_started",
        "tokens_billed",
        "boot_started",
        "boot_ready",
        "boot_failed",
        "boot_stopped",
        "round_started",
        "round_committed",
        "round_voided",
        "group_stopped",
        "forecast_made",
        "anchor_judged",
        "agent_heartbeat",
        "session_started",
        "session_finished",
        "session_held",
        "gate_tripped",
    }
)
"""Money, overrides and the run itself are the controller's to write."""

_NOTES = 20


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """A lease that was admitted; its intent is in the ledger."""

    lease: str
    session: str
    deadline_utc_ns: int
    usd_per_hour: MicroUsd
    worst_usd: MicroUsd
    teardown_reserve_usd: MicroUsd


@dataclass(frozen=True, slots=True)
class Refusal:
    """A lease or extension that was not admitted."""

    trip: Trip

    @property
    def why(self) -> str:
        """One sentence."""
        return self.trip.why


@dataclass(frozen=True, slots=True)
class Extension:
    """An extension that was admitted."""

    lease: str
    deadline_utc_ns: int
    worst_usd: MicroUsd


@dataclass(frozen=True, slots=True)
class Settlement:
    """What a lease came to, and the gates that this tripped."""

    lease: str
    usd: MicroUsd
    trips: tuple[Trip, ...]


@dataclass(frozen=True, slots=True)
class Money:
    """Where the money stands now."""

    cap: MicroUsd
    settled: MicroUsd
    accrued: MicroUsd
    spent: MicroUsd
    """Settled plus accrued."""
    committed: MicroUsd
    unreachable: MicroUsd
    """Part of `accrued` that runs on nodes which cannot be reached."""
    unknown: bool
    """Something is not known; the sums then hold the known parts only, and nothing more is admitted."""
    notes: tuple[str, ...]
    """Newest last."""


class BudgetPort(Protocol):
    """A BudgetController, or the actor that holds one. Everything it returns can be pickled."""

    async def admit_lease(
        self, *, session: str, node: str, provider: str, quote: Quote, max_ns: int, tokens_usd: int = 0
    ) -> LeaseGrant | Refusal: ...
    async def lease_opened(self, lease: str, handle: NodeHandle) -> list[Trip]: ...
    async def admit_extension(self, lease: str, deadline_utc_ns: int) -> Extension | Refusal: ...
    async def admit_round(
        self, lease: str, round_id: str, expected_s: float, margin_s: float | None = None
    ) -> Decision: ...
    async def observe(self, events: Sequence[NewEvent]) -> list[Trip]: ...
    async def tick(self) -> list[Trip]: ...
    async def mark_phase(self, lease: str, phase: str, group: str | None = None) -> None: ...
    async def settle(
        self, lease: str, until_utc_ns: int, proof: str, reported_usd: MicroUsd | None = None
    ) -> Settlement: ...
    async def record(self, *events: NewEvent) -> None: ...
    async def override(
        self, gate: str, reason: str, by: str = "user", session: str | None = None
    ) -> None: ...
    async def ask_stop(self, by: str, why: str) -> None: ...
    async def state(self) -> RunState: ...
    async def ready(self) -> None: ...
    async def close(self) -> None: ...
    async def money(self) -> Money: ...


class BudgetController:
    """Implements BudgetPort over an open ledger, which `close` closes. Limits are those of a spec."""

    def __init__(self, ledger: Ledger, clock: Clock, limits: Limits | Spec) -> None:
        self._ledger, self._clock = ledger, clock
        self._limits = limits if isinstance(limits, Limits) else machine.limits(limits)
        self._lock = asyncio.Lock()
        self._notes: deque[str] = deque(maxlen=_NOTES)
        self._state = fold(ledger.events())

    # --- leases

    async def admit_lease(
        self, *, session: str, node: str, provider: str, quote: Quote, max_ns: int, tokens_usd: int = 0
    ) -> LeaseGrant | Refusal:
        """Admit a lease of `max_ns` from now, or refuse it; either is one transaction of the ledger.

        The caller launches only after a grant. Billing runs from here, before the launch call.
        """
        async with self._lock:
            now = self._clock.utc_ns()
            ask = LeaseAsk(
                session=session,
                node=node,
                usd_per_hour=quote.usd_per_hour,
                granularity_s=quote.granularity_s,
                max_ns=max_ns,
                dead_man_ns=quote.dead_man_s * 1_000_000_000,
                teardown_ns=quote.teardown_s * 1_000_000_000,
                free_allowed=quote.free_allowed,
                tokens_usd=MicroUsd(tokens_usd),
            )
            terms = machine.admit_lease(self._state, self._limits, ask, now)
            if isinstance(terms, Trip):
                self._append(self._refused(ask, terms, now))
                return Refusal(terms)
            lease = f"{session}.{1 + sum(le.session == session for le in self._state.leases.values())}"
            deadline = now + max_ns
            self._append(
                NewEvent(
                    "lease_intent",
                    {
                        "lease": lease,
                        "node": node,
                        "provider": provider,
                        "usd_per_hour_micro": terms.usd_per_hour,
                        "granularity_s": quote.granularity_s,
                        "max_ns": max_ns,
                        "dead_man_ns": ask.dead_man_ns,
                        "teardown_ns": ask.teardown_ns,
                        "worst_usd_micro": terms.worst_usd,
                        "teardown_reserve_usd_micro": terms.teardown_reserve_usd,
                        "tokens_usd_micro": tokens_usd,
                        "billing_from_utc_ns": now,
                        "deadline_utc_ns": deadline,
                        "price_source": quote.source,
                        "free_allowed": quote.free_allowed and node in self._limits.free_nodes,
                        "max_usd_per_hour_micro": self._limits.max_usd_per_hour.get(node),
                    },
                    session,
                )
            )
            return LeaseGrant(
                lease,
                session,
                deadline,
                terms.usd_per_hour,
                terms.worst_usd,
                terms.teardown_reserve_usd,
            )

    async def lease_opened(self, lease: str, handle: NodeHandle) -> list[Trip]:
        """The node is there. Its price is frozen at what the provider says now, if that is more.

        Returns the gates this trips: a price above the limit, or a worst case above the cap.
        """
        async with self._lock:
            held = self._lease(lease)
            payload: dict[str, Any] = {
                "lease": lease,
                "node_id": handle.node_id,
                "usd_per_hour_micro": _whole_or_none(handle.usd_per_hour),
                "granularity_s": handle.granularity_s,
                "deadline_utc_ns": held.deadline_utc_ns,
                "dead_men": list(handle.dead_men),
                "price_source": handle.price_source,
            }
            dearer = max(_whole_or_none(handle.usd_per_hour) or 0, held.usd_per_hour or 0)
            granularity = max(handle.granularity_s, held.granularity_s)
            reserved = max(held.max_usd_per_hour or 0, held.usd_per_hour or 0)
            known = payload["usd_per_hour_micro"] is not None  # an unknown one may be all that is allowed
            if known and (dearer, granularity) != (reserved, held.granularity_s):
                # The reserve was made at the most a launch may cost; now the price is known.
                terms = machine.worst_case(
                    MicroUsd(dearer), held.max_ns, held.dead_man_ns, held.teardown_ns, granularity
                )
                payload["worst_usd_micro"] = terms.worst_usd
                payload["teardown_reserve_usd_micro"] = terms.teardown_reserve_usd
            if dearer != held.usd_per_hour:
                quoted = held.quoted_usd_per_hour or 0
                payload["price_gap_usd_per_hour_micro"] = dearer - quoted
                gap = machine.dollars(dearer - quoted)
                self._notes.append(f"lease {lease}: the provider bills {gap}/h more than it quoted")
            self._append(NewEvent("lease_opened", payload, held.session))
            return self._judge(held.session)

    async def admit_extension(self, lease: str, deadline_utc_ns: int) -> Extension | Refusal:
        """Move a lease's deadline, if what that may cost still fits under the cap."""
        async with self._lock:
            now = self._clock.utc_ns()
            terms = machine.admit_extension(self._state, self._limits, lease, deadline_utc_ns, now)
            if isinstance(terms, Trip):
                return Refusal(terms)
            payload = {
                "lease": lease,
                "deadline_utc_ns": deadline_utc_ns,
                "worst_usd_micro": terms.worst_usd,
            }
            self._append(NewEvent("lease_extended", payload, self._lease(lease).session))
            return Extension(lease, deadline_utc_ns, terms.worst_usd)

    async def admit_round(
        self, lease: str, round_id: str, expected_s: float, margin_s: float | None = None
    ) -> Decision:
        """Whether a round of `expected_s` fits the lease, the money and the gates. Writes nothing."""
        async with self._lock:
            trip = machine.admit_round(
                self._state,
                self._limits,
                lease,
                expected_s * 1e9,
                self._clock.utc_ns(),
                None if margin_s is None else round(margin_s * 1e9),
            )
            if trip is not None:
                trip = replace(trip, detail=f"round {round_id}: {trip.detail}")
            return Decision(trip is None, trip)

    async def settle(
        self, lease: str, until_utc_ns: int, proof: str, reported_usd: MicroUsd | None = None
    ) -> Settlement:
        """End a lease: what it came to until the node was proven gone, or what the provider reports if more.

        A settlement above the reserve stands as it is; if it passes the cap, the `cost` gate is tripped and
        written down. Settling twice returns the first settlement.
        """
        async with self._lock:
            held = self._lease(lease)
            if held.settled:
                return Settlement(lease, held.settled_usd or MicroUsd(0), ())
            amount = machine.settlement(held, until_utc_ns, reported_usd)
            payload = {
                "lease": lease,
                "settled_usd_micro": amount,
                "until_utc_ns": max(until_utc_ns, held.billing_from_utc_ns),
                "proof": proof,
                "reported_usd_micro": reported_usd,
            }
            self._append(NewEvent("lease_settled", payload, held.session))
            return Settlement(lease, amount, tuple(self._judge(held.session)))

    # --- what happens meanwhile

    async def observe(self, events: Sequence[NewEvent]) -> list[Trip]:
        """Merge events of an agent's journal and judge them; returns what stops the sessions they are of.

        Events merged before are skipped. Raises LedgerError where an agent says what is not its to say.
        """
        async with self._lock:
            for event in events:
                if event.type not in AGENT_MAY_SAY or not event.source.startswith("agent:"):
                    raise LedgerError(f"{event.source} may not write {event.type} into the ledger")
            merged = self._append(*events)
            found: dict[Any, Trip] = {}
            for session in dict.fromkeys(e.session for e in merged if e.session is not None):
                found |= {trip.key: trip for trip in self._judge(session)}
            return list(found.values())

    async def tick(self) -> list[Trip]:
        """Judge what time alone can trip; returns every trip in force, of all sessions."""
        async with self._lock:
            return self._judge(None)

    async def mark_phase(self, lease: str, phase: str, group: str | None = None) -> None:
        """From now on the lease's dollars belong to `phase`."""
        if phase not in PHASES:
            raise ValueError(f"not a phase: {phase!r}; one of {', '.join(PHASES)}")
        async with self._lock:
            payload = {"lease": lease, "phase": phase, "at_utc_ns": self._clock.utc_ns(), "group": group}
            self._append(NewEvent("phase_started", payload, self._lease(lease).session))

    async def record(self, *events: NewEvent) -> None:
        """Write events as they are, in one transaction."""
        async with self._lock:
            self._append(*events)

    async def override(self, gate: str, reason: str, by: str = "user", session: str | None = None) -> None:
        """Let a gate pass, on record: printed beside every verdict it touches. The cap stays the cap.

        Raises UserError for an unknown gate or an empty reason.
        """
        if gate not in GATES:
            raise UserError(f"--override {gate}: no such gate. Fix: one of {', '.join(GATES)}")
        if not reason.strip():
            raise UserError(f"--override {gate} needs a reason. Fix: add --reason TEXT")
        async with self._lock:
            self._append(NewEvent("gate_overridden", {"gate": gate, "reason": reason, "by": by}, session))

    async def ask_stop(self, by: str, why: str) -> None:
        """Write down that a stop was asked for; from then on nothing is admitted."""
        async with self._lock:
            self._append(NewEvent("stop_asked", {"by": by, "why": why}))

    async def state(self) -> RunState:
        """Everything the ledger says now."""
        return self._state

    async def money(self) -> Money:
        """Where the money stands now."""
        now = max(self._clock.utc_ns(), self._state.latest_utc_ns)
        leases = self._state.leases.values()
        settled = MicroUsd(sum(le.settled_usd or 0 for le in leases if le.settled))
        accrued = MicroUsd(sum(machine.accrued(le, now) or 0 for le in leases if not le.settled))
        risk = MicroUsd(sum(machine.at_risk(le, now) or 0 for le in leases if not le.settled))
        committed = machine.committed(self._state, now)
        return Money(
            cap=self._limits.cap_usd,
            settled=settled,
            accrued=accrued,
            spent=MicroUsd(settled + accrued),
            committed=MicroUsd(settled + risk),
            unreachable=machine.unreachable(self._state, now) or MicroUsd(0),
            unknown=committed is None,
            notes=tuple(self._notes),
        )

    async def ready(self) -> None:
        """Answers once the ledger is open and folded."""

    async def close(self) -> None:
        """Close the ledger and let go of the run. Idempotent."""
        async with self._lock:
            self._ledger.close()

    # --- one step: check, write, apply

    def _append(self, *events: NewEvent) -> tuple[Event, ...]:
        # The fold refuses what contradicts the ledger; asked before writing, since nothing can be taken back.
        trial, now = self._state, self._clock.utc_ns()
        for event in events:
            check(event)
            if event.source_seq is None:
                draft = Event(
                    trial.seq + 1, now, event.type, event.source, 0, event.session, event.payload, "", ""
                )
                trial = apply(trial, draft)
        stored = self._ledger.append(*events)
        for entry in stored:
            self._state = apply(self._state, entry)
            self._note(entry)
        return stored

    def _judge(self, session: str | None) -> list[Trip]:
        """Record trips that are new, and return those in force for `session` (None: for all)."""
        now = self._clock.utc_ns()
        known = {
            Trip(g.gate, g.value, g.limit, g.detail, g.session, g.lease).key
            for g in self._state.tripped
            if g.gate in machine.STANDING or g.seq > self._state.controller_since_seq
        }
        new = {t.key: t for t in machine.trips(self._state, self._limits, now) if t.key not in known}
        if new:
            self._append(*(_tripped(trip) for trip in new.values()))
        return list(machine.in_force(self._state, self._limits, now, session))

    def _refused(self, ask: LeaseAsk, trip: Trip, now: int) -> NewEvent:
        price = _whole_or_none(ask.usd_per_hour)
        terms: Terms | None = None
        if price is not None and price >= 0 and ask.granularity_s > 0:
            terms = machine.worst_case(
                MicroUsd(price), ask.max_ns, ask.dead_man_ns, ask.teardown_ns, ask.granularity_s
            )
        payload = {
            "node": ask.node,
            "worst_usd_micro": None if terms is None else terms.worst_usd + terms.teardown_reserve_usd,
            "committed_usd_micro": machine.committed(self._state, now),
            "cap_usd_micro": self._limits.cap_usd,
            "why": trip.why,
            "gate": trip.gate,
        }
        return NewEvent("lease_refused", payload, ask.session)

    def _lease(self, lease: str) -> Lease:
        held = self._state.leases.get(lease)
        if held is None:
            raise LedgerError(f"lease {lease} is not in the ledger")
        return held

    def _note(self, event: Event) -> None:
        p, where = event.payload, f"{event.session}: " if event.session else ""
        if event.type == "gate_tripped":
            self._notes.append(f"{where}gate {p['gate']} tripped: {p['value']} against {p['limit']}")
        elif event.type == "anchor_judged":
            step, words = p["step_ms"], {True: "ok", False: "drifted"}.get(p["ok"], "unproven")
            shown = f"{step:.2f} ms" if isinstance(step, (int, float)) else "no step time"
            self._notes.append(f"{where}anchor {p['position']} {shown}, {words}")
        elif event.type == "session_finished":
            why = f": {p['reason']}" if p["reason"] else ""
            self._notes.append(f"session {event.session}: {p['state']}{why}")
        elif event.type == "round_committed":
            self._notes.append(f"{where}{p['round_id']} committed")
        elif event.type in {"round_voided", "lease_refused", "lease_unreachable"}:
            self._notes.append(f"{where}{event.type.replace('_', ' ')}: {p.get('reason') or p.get('why')}")


def _tripped(trip: Trip) -> NewEvent:
    payload = {
        "gate": trip.gate,
        "value": trip.value,
        "limit": trip.limit,
        "detail": trip.detail,
        "lease": trip.lease,
    }
    return NewEvent("gate_tripped", payload, trip.session)


def _whole_or_none(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
