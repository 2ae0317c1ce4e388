import asyncio
import json
import pickle
from pathlib import Path

import pytest

from campaign.budget.machine import Limits
from campaign.cloud.base import NodeHandle, Quote
from campaign.errors import LedgerError, UserError
from campaign.fleet.budget import BudgetController, BudgetPort, LeaseGrant, Refusal
from campaign.ledger.events import NewEvent
from campaign.ledger.journal import Ledger, read_events
from campaign.ledger.state import fold
from campaign.money import MicroUsd, micro
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock

RACES = json.loads((Path(__file__).parents[1] / "data" / "cases" / "23_budget_race.json").read_text())[
    "cases"
]
S = 1_000_000_000
H = 3600 * S

CREATED = NewEvent(
    "run_created",
    {
        "run": "r",
        "campaign": "c",
        "spec_sha256": "",
        "canonical_sha256": "",
        "plan_sha256": "",
        "cap_usd_micro": 5_000_000,
        "gates": {},
        "rules": {},
        "version": "0",
        "install_id": "i",
        "simulated": False,
    },
)


class Desk:
    """A controller over a real ledger and a clock that costs nothing."""

    def __init__(self, folder: Path, cap: str = "5.00", **limits) -> None:
        self.run_dir, self.clock = RunDir(folder / "run"), VirtualClock()
        fields = {
            "heartbeat_ns": 60 * S,
            "max_consecutive_errors": 3,
            "max_void_share": 0.2,
            "drift_delta": 0.25,
        }
        self.limits = Limits(micro(cap), **{**fields, **limits})
        self.budget: BudgetController = self.start(create=True)
        created = NewEvent("run_created", {**CREATED.payload, "cap_usd_micro": micro(cap)})
        self.budget._append(created)

    def start(self, *, create: bool = False) -> BudgetController:
        self.budget = BudgetController(
            Ledger.open(self.run_dir, self.clock, create=create), self.clock, self.limits
        )
        return self.budget

    async def ask(self, usd: str, session: str = "main", **quote) -> LeaseGrant | Refusal:
        fields = {"usd_per_hour": micro(usd), "granularity_s": 1, "source": "declared", "free_allowed": False}
        terms = Quote(**{**fields, "dead_man_s": 0, "teardown_s": 0, **quote})
        return await self.budget.admit_lease(
            session=session, node="here", provider="local", quote=terms, max_ns=H
        )

    async def opened(self, usd: str, session: str = "main", **handle) -> str:
        grant = await self.ask(usd, session)
        assert isinstance(grant, LeaseGrant)
        await self.budget.lease_opened(grant.lease, self.handle(grant, **handle))
        return grant.lease

    def handle(self, grant: LeaseGrant, **more) -> NodeHandle:
        fields = {
            "lease": grant.lease,
            "node_id": "n1",
            "usd_per_hour": grant.usd_per_hour,
            "granularity_s": 1,
            "price_source": "declared",
            "dead_men": (),
            "ours": False,
            "data": {},
        }
        return NodeHandle(**{**fields, **more})

    def types(self) -> list[str]:
        return [e.type for e in read_events(self.run_dir.ledger)]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def said(number: int, type_: str, **payload) -> NewEvent:
    return NewEvent(type_, payload, "main", "agent:main", number)


async def test_it_is_a_budget_port(desk: Desk) -> None:
    port: BudgetPort = desk.budget
    await port.ready()
    assert (await port.state()).cap_usd == micro("5.00")


@pytest.mark.parametrize("case", [c for c in RACES if "asks" in c and c["spent"] is not None])
async def test_parallel_sessions_cannot_pass_the_cap_together(tmp_path: Path, case) -> None:
    desk = Desk(tmp_path, case["cap"])
    if micro(case["spent"]):
        lease = await desk.opened(case["spent"], "before")
        await desk.budget.settle(lease, desk.clock.utc_ns(), "gone", reported_usd=micro(case["spent"]))
    answers = await asyncio.gather(*(desk.ask(ask, f"s{n}") for n, ask in enumerate(case["asks"])))
    assert sum(isinstance(a, LeaseGrant) for a in answers) == case["expect_admitted"]
    assert desk.types().count("lease_refused") == len(case["asks"]) - case["expect_admitted"]
    money = await desk.budget.money()
    assert money.committed <= money.cap == micro(case["cap"])


async def test_the_intent_is_in_the_ledger_before_the_grant_is_given(desk: Desk) -> None:
    grant = await desk.ask("1.00", granularity_s=60, dead_man_s=150, teardown_s=300)
    assert isinstance(grant, LeaseGrant)
    (lease,) = fold(read_events(desk.run_dir.ledger)).leases.values()
    assert (lease.id, lease.session, lease.node) == ("main.1", "main", "here")
    assert lease.billing_from_utc_ns == desk.clock.utc_ns()
    assert lease.deadline_utc_ns == grant.deadline_utc_ns == desk.clock.utc_ns() + H
    assert lease.worst_usd == grant.worst_usd == micro("1.05")
    assert lease.teardown_reserve_usd == grant.teardown_reserve_usd == micro("0.083334")
    assert (await desk.budget.money()).committed == grant.worst_usd + grant.teardown_reserve_usd


async def test_a_refusal_says_what_was_asked_and_what_there_is(desk: Desk) -> None:
    refusal = await desk.ask("5.000001")
    assert isinstance(refusal, Refusal)
    assert refusal.why == (
        "gate cost: $5.000001 against limit $5.00 (campaign: $0.00 committed and $5.000001 asked for)"
    )
    event = read_events(desk.run_dir.ledger)[-1]
    assert event.type == "lease_refused"
    assert event.payload["worst_usd_micro"] == 5_000_001
    assert event.payload["cap_usd_micro"] == 5_000_000


async def test_an_unreadable_quote_is_refused_and_written(desk: Desk) -> None:
    refusal = await desk.ask("1.00", usd_per_hour=float("nan"))
    assert isinstance(refusal, Refusal)
    assert refusal.trip.gate == "price"
    assert read_events(desk.run_dir.ledger)[-1].payload["worst_usd_micro"] is None


async def test_overshoot_is_settled_at_what_it_cost_halts_and_is_written(tmp_path: Path) -> None:
    (case,) = [c for c in RACES if "actual" in c]
    desk = Desk(tmp_path, case["cap"])
    before = await desk.opened(case["spent"], "before")
    await desk.budget.settle(before, desk.clock.utc_ns(), "gone", reported_usd=micro(case["spent"]))
    lease = await desk.opened(case["reserved"][0])
    settlement = await desk.budget.settle(
        lease, desk.clock.utc_ns(), "gone", reported_usd=micro(case["actual"])
    )
    assert settlement.usd == micro(case["actual"])
    (trip,) = settlement.trips
    assert (trip.gate, trip.value, trip.limit) == ("cost", "$5.10", "$5.00")
    assert desk.types()[-2:] == ["lease_settled", "gate_tripped"]
    assert isinstance(await desk.ask("0.000001"), Refusal)
    assert await desk.budget.settle(lease, 0, "again") == type(settlement)(lease, micro(case["actual"]), ())
    assert desk.types().count("lease_settled") == 2


async def test_a_dearer_node_is_billed_dearer_and_stops_where_the_cap_is_passed(desk: Desk) -> None:
    grant = await desk.ask("2.00")
    assert isinstance(grant, LeaseGrant)
    assert await desk.budget.lease_opened(grant.lease, desk.handle(grant, usd_per_hour=micro("2.60"))) == []
    money = await desk.budget.money()
    assert money.committed == micro("2.60")
    assert "the provider bills $0.60/h more than it quoted" in money.notes[-1]
    other = await desk.ask("2.00", "other")
    assert isinstance(other, LeaseGrant)
    (trip,) = await desk.budget.lease_opened(other.lease, desk.handle(other, usd_per_hour=micro("2.400001")))
    assert trip.gate == "cost"
    assert desk.types()[-1] == "gate_tripped"


async def test_silence_and_the_deadline_trip_once_on_record_and_for_all_who_ask(desk: Desk) -> None:
    lease = await desk.opened("1.00")
    await desk.budget.observe([said(1, "session_started", lease=lease, plan_sha256=None)])
    assert await desk.budget.tick() == []
    desk.clock.advance(61)
    first, second = await desk.budget.tick(), await desk.budget.tick()
    assert [t.gate for t in first] == [t.gate for t in second] == ["heartbeat"]
    assert first[0].lease == lease
    assert desk.types().count("gate_tripped") == 1
    desk.clock.advance(3600)
    assert {t.gate for t in await desk.budget.tick()} == {"heartbeat", "lease_time"}
    assert desk.types().count("gate_tripped") == 2
    decision = await desk.budget.admit_round(lease, "g/r0", 1.0)
    assert not decision.admitted


async def test_rounds_are_admitted_while_they_fit(desk: Desk) -> None:
    lease = await desk.opened("1.00")
    assert (await desk.budget.admit_round(lease, "g/r0", 3000.0)).admitted
    late = await desk.budget.admit_round(lease, "g/r0", 3500.0)
    assert not late.admitted
    assert late.why == (
        "gate lease_time: 3850 s against limit 3600 s left "
        "(round g/r0: the next round does not fit before the lease's deadline)"
    )
    assert not (await desk.budget.admit_round(lease, "g/r0", float("nan"))).admitted


async def test_an_extension_is_written_only_if_it_fits(desk: Desk) -> None:
    lease = await desk.opened("2.00")
    start = desk.clock.utc_ns()
    granted = await desk.budget.admit_extension(lease, start + 2 * H)
    assert not isinstance(granted, Refusal)
    assert granted.worst_usd == micro("4.00")
    assert isinstance(await desk.budget.admit_extension(lease, start + 3 * H), Refusal)
    assert (await desk.budget.state()).leases[lease].deadline_utc_ns == start + 2 * H


async def test_agents_events_are_merged_once_and_judged(desk: Desk) -> None:
    lease = await desk.opened("1.00")
    judged = {"reference_ms": None, "drift": 0.3, "lo": 0.28, "hi": 0.32, "reasons": []}
    events = [
        said(1, "session_started", lease=lease, plan_sha256=None),
        said(2, "anchor_judged", position="last", step_ms=5.0, ok=False, **judged),
    ]
    (trip,) = await desk.budget.observe(events)
    assert (trip.gate, trip.session, trip.detail) == ("anchor_drift", "main", "anchor last")
    assert await desk.budget.observe(events) == []
    assert desk.types().count("anchor_judged") == 1
    assert desk.types().count("gate_tripped") == 1
    await desk.budget.override("anchor_drift", "a noisy machine")
    assert await desk.budget.tick() == []
    (override,) = (await desk.budget.state()).overridden
    assert (override.gate, override.reason, override.by) == ("anchor_drift", "a noisy machine", "user")


async def test_an_agent_may_not_write_money(desk: Desk) -> None:
    lease = await desk.opened("1.00")
    settle = said(1, "lease_settled", lease=lease, settled_usd_micro=0, until_utc_ns=0, proof="trust me")
    with pytest.raises(LedgerError, match="agent:main may not write lease_settled"):
        await desk.budget.observe([settle])
    with pytest.raises(LedgerError, match="controller may not write agent_heartbeat"):
        await desk.budget.observe([NewEvent("agent_heartbeat", {"cell": "", "done": 0, "total": 0}, "main")])


async def test_what_contradicts_the_ledger_is_refused_before_it_is_written(desk: Desk) -> None:
    opened = {"lease": "ghost", "why": "?"}
    with pytest.raises(LedgerError, match="lease ghost has no intent"):
        await desk.budget.record(
            NewEvent("stop_asked", {"by": "a", "why": "b"}), NewEvent("lease_down_asked", opened)
        )
    with pytest.raises(LedgerError, match="lacks why"):
        await desk.budget.record(NewEvent("lease_down_asked", {"lease": "ghost"}))
    assert desk.types() == ["run_created"]


async def test_overrides_need_a_known_gate_and_a_reason(desk: Desk) -> None:
    with pytest.raises(UserError, match="no such gate"):
        await desk.budget.override("drfit", "x")
    with pytest.raises(UserError, match="needs a reason"):
        await desk.budget.override("anchor_drift", "  ")


async def test_a_stop_admits_nothing_more_but_is_no_gate(desk: Desk) -> None:
    lease = await desk.opened("1.00")
    await desk.budget.ask_stop("user", "lunch")
    assert isinstance(await desk.ask("1.00"), Refusal)
    assert not (await desk.budget.admit_round(lease, "g/r0", 1.0)).admitted
    assert await desk.budget.tick() == []


async def test_money_is_counted_as_time_goes_on_and_phases_are_marked(desk: Desk) -> None:
    lease = await desk.opened("3.60")
    desk.clock.advance(100)
    await desk.budget.mark_phase(lease, "measure", "pair.kv")
    with pytest.raises(ValueError, match="not a phase"):
        await desk.budget.mark_phase(lease, "lunch")
    money = await desk.budget.money()
    assert (money.settled, money.accrued, money.spent) == (0, micro("0.10"), micro("0.10"))
    assert not money.unknown
    settlement = await desk.budget.settle(lease, desk.clock.utc_ns(), "gone")
    assert settlement.usd == micro("0.10")
    money = await desk.budget.money()
    assert (money.settled, money.accrued, money.committed) == (micro("0.10"), 0, micro("0.10"))


async def test_a_controller_that_dies_anywhere_leaves_its_leases_to_the_next(desk: Desk) -> None:
    lease = await desk.opened("2.00")
    state = await desk.budget.state()
    desk.budget._ledger._lock.release()  # as the kernel does for a dead process
    desk.budget._ledger._db.close()
    desk.start()
    again = await desk.budget.state()
    assert again == state
    assert [le.id for le in again.open_leases] == [lease]
    refusal = await desk.ask("3.01", "other")
    assert isinstance(refusal, Refusal)
    grant = await desk.ask("3.00", "other")
    assert isinstance(grant, LeaseGrant)
    second = await desk.ask("0.000001", "main")
    assert isinstance(second, Refusal)
    await desk.budget.settle(lease, desk.clock.utc_ns() + S, "gone")
    third = await desk.ask("1.00", "main")
    assert isinstance(third, LeaseGrant)
    assert third.lease == "main.2", "a lease id is never used again"
    await desk.budget.close()


async def test_everything_returned_crosses_a_process(desk: Desk) -> None:
    lease = await desk.opened("1.00")
    values = [
        await desk.ask("9.00"),
        await desk.ask("1.00", "other"),
        await desk.budget.admit_round(lease, "g/r0", 1e9),
        await desk.budget.admit_extension(lease, desk.clock.utc_ns() + 2 * H),
        await desk.budget.money(),
        await desk.budget.state(),
        await desk.budget.settle(lease, desk.clock.utc_ns(), "gone", reported_usd=MicroUsd(6_000_000)),
    ]
    assert pickle.loads(pickle.dumps(values)) == values
