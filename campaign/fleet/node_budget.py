"""The budget as a node keeps it for its own lease: the same state machine, with no controller behind it.

The controller hands over the terms of one lease. The node may not spend past them, whatever it is told later
but by a signed extension; silence never extends.
"""

from campaign.budget import machine
from campaign.budget.rules import Limits, Trip
from campaign.clock import Clock
from campaign.cloud.base import LeaseTerms
from campaign.ledger.events import Event, NewEvent
from campaign.ledger.state import RunState, apply


class NodeBudget:
    """Admits rounds of one session inside one lease."""

    def __init__(self, terms: LeaseTerms, limits: Limits, clock: Clock) -> None:
        self._terms, self._limits, self._clock = terms, limits, clock
        self._state = RunState()
        cap = terms.worst_usd_micro + terms.teardown_reserve_usd_micro
        for event in _opening(terms, min(cap, limits.cap_usd)):
            self._apply(event)

    @property
    def deadline_utc_ns(self) -> int:
        """The lease's deadline as it stands."""
        return self._state.leases[self._terms.lease].deadline_utc_ns or self._terms.deadline_utc_ns

    def observe(self, event: NewEvent) -> None:
        """An event of the node's own journal: gates it trips hold here as they hold at the controller."""
        self._apply(event)

    def extend(self, deadline_utc_ns: int, worst_usd_micro: int) -> None:
        """The controller has admitted a later deadline, and signed it."""
        if deadline_utc_ns > self.deadline_utc_ns:
            payload = {
                "lease": self._terms.lease,
                "deadline_utc_ns": deadline_utc_ns,
                "worst_usd_micro": worst_usd_micro,
            }
            self._apply(NewEvent("lease_extended", payload, self._terms.session))

    def admit(self, expected_s: float) -> Trip | None:
        """None admits a round of `expected_s`; a Trip says why not."""
        return machine.admit_round(
            self._state, self._limits, self._terms.lease, expected_s * 1e9, self._clock.utc_ns()
        )

    def _apply(self, event: NewEvent) -> None:
        seq = self._state.seq + 1
        entry = Event(
            seq, self._clock.utc_ns(), event.type, event.source, seq, event.session, event.payload, "", ""
        )
        self._state = apply(self._state, entry)


def _opening(terms: LeaseTerms, cap: int) -> list[NewEvent]:
    lease = {"lease": terms.lease, "node": terms.node}
    created = {"cap_usd_micro": cap, "run": "", "campaign": "", "version": "", "plan_sha256": ""}
    intent = {
        **lease,
        "provider": terms.provider,
        "usd_per_hour_micro": terms.usd_per_hour_micro,
        "granularity_s": terms.granularity_s,
        "max_ns": terms.deadline_utc_ns - terms.billing_from_utc_ns,
        "worst_usd_micro": terms.worst_usd_micro,
        "teardown_reserve_usd_micro": terms.teardown_reserve_usd_micro,
        "billing_from_utc_ns": terms.billing_from_utc_ns,
        "deadline_utc_ns": terms.deadline_utc_ns,
        "free_allowed": terms.usd_per_hour_micro == 0,
    }
    opened = {
        **lease,
        "node_id": terms.node,
        "usd_per_hour_micro": terms.usd_per_hour_micro,
        "granularity_s": terms.granularity_s,
        "deadline_utc_ns": terms.deadline_utc_ns,
        "dead_men": [],
        "price_source": "granted",
    }
    return [
        NewEvent("run_created", created),
        NewEvent("lease_intent", intent, terms.session),
        NewEvent("lease_opened", opened, terms.session),
    ]
