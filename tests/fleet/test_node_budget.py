"""The budget as a node keeps it: the same machine, inside one lease."""

from campaign.budget.machine import Limits
from campaign.cloud.base import LeaseTerms
from campaign.fleet.node_budget import NodeBudget
from campaign.ledger.events import NewEvent
from campaign.money import micro
from campaign.testing.clock import VirtualClock

LIMITS = Limits(micro(100), 60 * 10**9, 3, 0.2, 0.1)


def budget(clock: VirtualClock, minutes: int = 10) -> NodeBudget:
    now = clock.utc_ns()
    deadline = now + minutes * 60 * 10**9
    terms = LeaseTerms("s.1", "s", "n", "sky", micro(24), 1, now, deadline, micro(6), micro(2))
    return NodeBudget(terms, LIMITS, clock)


def test_admits_what_fits_before_the_deadline_and_nothing_after() -> None:
    clock = VirtualClock()
    it = budget(clock)
    assert it.admit(300) is None
    clock.advance(400)
    refused = it.admit(300)
    assert refused is not None
    assert refused.gate == "lease_time"
    clock.advance(400)
    assert it.admit(1) is not None


def test_gate_of_its_own_journal_stops_it() -> None:
    it = budget(VirtualClock())
    payload = {"gate": "anchor_drift", "value": "9 %", "limit": "1 %", "detail": "anchor first"}
    it.observe(NewEvent("gate_tripped", payload, "s", "agent:s", 1))
    refused = it.admit(1)
    assert refused is not None
    assert refused.gate == "anchor_drift"


def test_only_a_later_deadline_extends() -> None:
    clock = VirtualClock()
    it = budget(clock)
    before = it.deadline_utc_ns
    it.extend(before - 1, micro(1))
    assert it.deadline_utc_ns == before
    it.extend(before + 600 * 10**9, micro(7))
    assert it.deadline_utc_ns == before + 600 * 10**9
