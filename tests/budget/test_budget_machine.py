import json
from datetime import datetime
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from campaign.budget import machine
from campaign.budget.machine import LeaseAsk, Limits, Terms, Trip
from campaign.ledger.events import PAYLOADS, Event
from campaign.ledger.state import RunState, apply
from campaign.money import MicroUsd, bill, micro

CASES = Path(__file__).parents[1] / "data" / "cases"
PRICES = {c["name"]: c for c in json.loads((CASES / "20_price.json").read_text())["cases"]}
RACES = json.loads((CASES / "23_budget_race.json").read_text())["cases"]
T0 = 1_790_000_000_000_000_000
S = 1_000_000_000
H = 3600 * S


class Book:
    """A ledger in memory: enough to ask the machine."""

    def __init__(self, cap: int, **limits) -> None:
        self.state = RunState()
        self.now = T0
        fields = {
            "heartbeat_ns": 60 * S,
            "max_consecutive_errors": 3,
            "max_void_share": 0.2,
            "drift_delta": 0.25,
        }
        self.limits = Limits(MicroUsd(cap), **{**fields, **limits})
        self.add("run_created", cap_usd_micro=cap)

    def add(self, type_: str, session: str | None = None, source: str = "controller", **payload) -> None:
        full = {**dict.fromkeys(PAYLOADS[type_]), **payload}
        seq = self.state.seq + 1
        self.state = apply(self.state, Event(seq, self.now, type_, source, seq, session, full, "", ""))

    def intent(self, ask: LeaseAsk, terms: Terms, lease: str) -> None:
        self.add(
            "lease_intent",
            ask.session,
            lease=lease,
            node=ask.node,
            provider="p",
            usd_per_hour_micro=terms.usd_per_hour,
            granularity_s=ask.granularity_s,
            max_ns=ask.max_ns,
            dead_man_ns=ask.dead_man_ns,
            teardown_ns=ask.teardown_ns,
            worst_usd_micro=terms.worst_usd,
            teardown_reserve_usd_micro=terms.teardown_reserve_usd,
            billing_from_utc_ns=self.now,
            deadline_utc_ns=self.now + ask.max_ns,
            free_allowed=ask.free_allowed,
            max_usd_per_hour_micro=self.limits.max_usd_per_hour.get(ask.node),
        )

    def admit(self, usd: str, session: str = "main") -> Terms | Trip:
        """Ask for a lease of exactly one hour that costs `usd`."""
        lease = f"L{len(self.state.leases)}"
        ask = LeaseAsk(session, "here", micro(usd), 1, H, 0, 0)
        terms = machine.admit_lease(self.state, self.limits, ask, self.now)
        if isinstance(terms, Terms):
            self.intent(ask, terms, lease)
        return terms

    def open(self, lease: str, **more) -> None:
        held = self.state.leases[lease]
        self.add(
            "lease_opened",
            held.session,
            **{
                "lease": lease,
                "node_id": "n",
                "usd_per_hour_micro": held.usd_per_hour,
                "granularity_s": held.granularity_s,
                "deadline_utc_ns": held.deadline_utc_ns,
                **more,
            },
        )

    def settle(self, lease: str, usd: int | None) -> None:
        self.add(
            "lease_settled",
            self.state.leases[lease].session,
            lease=lease,
            settled_usd_micro=usd,
            until_utc_ns=self.now,
        )

    def spend_before(self, usd: str) -> None:
        self.admit(usd)
        self.settle("L0", micro(usd))

    def gates(self) -> list[str]:
        return [t.gate for t in machine.trips(self.state, self.limits, self.now)]


# --- published cases: price


@pytest.mark.parametrize("name", ["NaN price", "zero price", "empty price", "negative", "negative zero"])
def test_what_is_no_price_is_refused(name: str) -> None:
    found = machine.freeze_price(PRICES[name]["price_at_launch"])
    assert isinstance(found, Trip)
    assert found.gate == "price"


@pytest.mark.parametrize("raw", [None, True, float("inf"), "-inf", [], "two", "1e-", Decimal("sNaN")])
def test_nor_is_this(raw: object) -> None:
    assert isinstance(machine.freeze_price(raw), Trip)
    assert isinstance(machine.freeze_price(raw, free_allowed=True), Trip)


def test_zero_is_a_price_where_it_is_declared_and_negative_zero_never_is() -> None:
    assert machine.freeze_price(PRICES["zero price"]["price_at_launch"], free_allowed=True) == 0
    assert isinstance(machine.freeze_price(-0.0, free_allowed=True), Trip)


def test_dearer_than_the_limit_is_refused() -> None:
    assert machine.freeze_price("2.000001", max_usd_per_hour=micro(2)) == Trip(
        "price", "$2.000001/h", "$2.00/h", "dearer than max_usd_per_hour"
    )
    assert machine.freeze_price(2, max_usd_per_hour=micro(2)) == 2_000_000


@pytest.mark.parametrize("name", ["catalog changes later", "row deleted later"])
def test_the_price_is_frozen_at_launch(name: str) -> None:
    case = PRICES[name]
    book = Book(micro(100))
    book.admit(str(case["price_at_launch"]))
    book.now += case["hours"] * H
    assert machine.spent(book.state, book.now) == micro(case["expect_usd"])


@pytest.mark.parametrize("name", ["autumn clock change", "spring clock change"])
def test_durations_are_utc(name: str) -> None:
    case = PRICES[name]
    start, end = (int(datetime.fromisoformat(case[k]).timestamp()) * S for k in ("start", "end"))
    assert bill(micro(str(case["price_at_launch"])), end - start) == micro(case["expect_usd"])
    book = Book(micro(100))
    book.now = start
    book.admit("2.00")
    lease = book.state.leases["L0"]
    assert machine.settlement(lease, end) == micro(case["expect_usd"]) != micro(case["wrong"])


def test_a_settled_lease_reads_the_same_for_ever() -> None:
    case = PRICES["stopped cluster, read twice"]
    start, stop, *reads = (
        int(datetime.fromisoformat(t).timestamp()) * S
        for t in (case["start"], case["stopped"], *case["reads"])
    )
    book = Book(micro(100))
    book.now = start
    book.admit("2.00")
    book.now = stop
    book.settle("L0", machine.settlement(book.state.leases["L0"], stop))
    assert [machine.spent(book.state, read) for read in reads] == [micro("2.00")] * 2
    assert [machine.committed(book.state, read) for read in reads] == [micro("2.00")] * 2


def test_a_provider_that_bills_more_is_believed() -> None:
    case = PRICES["provider bills more"]
    book = Book(micro(100))
    book.admit("2.00")
    book.open("L0", usd_per_hour_micro=micro(str(case["provider_rate"])))
    book.now += case["hours"] * H
    assert machine.spent(book.state, book.now) == micro("2.60")
    lease = book.state.leases["L0"]
    assert machine.settlement(lease, book.now, reported_usd=micro("2.75")) == micro("2.75")
    assert machine.settlement(lease, book.now, reported_usd=micro("1.00")) == micro("2.60")


def test_a_clock_that_steps_back_takes_no_dollar_back() -> None:
    book = Book(micro(100))
    book.admit("2.00")
    book.now += H
    book.open("L0")
    assert machine.spent(book.state, book.now - H) == micro("2.00")
    book.now += H
    assert machine.committed(book.state, T0) == micro("2.00")
    assert machine.committed(book.state, book.now) == micro("4.00")


# --- published cases: the race for the cap


@pytest.mark.parametrize("case", [c for c in RACES if "asks" in c and c["spent"] is not None])
def test_asks_at_the_same_instant_never_pass_the_cap(case) -> None:
    book = Book(micro(case["cap"]))
    if micro(case["spent"]):
        book.spend_before(case["spent"])
    answers = [book.admit(ask, f"s{n}") for n, ask in enumerate(case["asks"])]
    assert sum(isinstance(a, Terms) for a in answers) == case["expect_admitted"]
    assert all(a.gate == "cost" for a in answers if isinstance(a, Trip))
    total = machine.committed(book.state, book.now)
    assert total is not None
    assert total <= micro(case["cap"])


def test_unknown_spend_admits_nothing() -> None:
    (case,) = [c for c in RACES if c["spent"] is None]
    book = Book(micro(case["cap"]))
    book.admit("1.00")
    book.settle("L0", None)
    assert machine.committed(book.state, book.now) is None
    for ask in case["asks"]:
        refused = book.admit(ask)
        assert isinstance(refused, Trip)
        assert (refused.gate, refused.value) == ("cost", "unknown")
    assert "cost" in book.gates()


def test_overshoot_is_settled_at_what_it_cost_and_halts() -> None:
    (case,) = [c for c in RACES if "actual" in c]
    book = Book(micro(case["cap"]))
    book.spend_before(case["spent"])
    assert isinstance(book.admit(case["reserved"][0]), Terms)
    book.settle("L1", micro(case["actual"]))
    assert machine.spent(book.state, book.now) == micro("5.10")
    (trip,) = machine.trips(book.state, book.limits, book.now)
    assert (trip.gate, trip.value, trip.limit) == ("cost", "$5.10", "$5.00")
    assert "$0.10 over the cap" in trip.detail
    assert isinstance(book.admit("0.000001"), Trip)


# --- admission


def test_dead_man_and_teardown_are_part_of_the_worst_case() -> None:
    book = Book(micro("10"))
    ask = LeaseAsk("main", "here", micro(6), 60, 30 * 60 * S, 150 * S, 61 * S)
    terms = machine.admit_lease(book.state, book.limits, ask, book.now)
    assert terms == Terms(micro(6), micro("3.30"), micro("0.20"))
    book.intent(ask, terms, "L0")
    assert machine.committed(book.state, book.now) == micro("3.50")
    book.open("L0")
    longer = machine.admit_extension(book.state, book.limits, "L0", book.now + H, book.now)
    assert longer == Terms(micro(6), micro("6.30"), micro("0.20"))


def test_a_session_cap_holds_for_its_session_only() -> None:
    book = Book(micro("10"), session_cap_usd={"main": micro("1.00")})
    assert isinstance(book.admit("0.60"), Terms)
    refused = book.admit("0.50")
    assert isinstance(refused, Trip)
    assert "session main" in refused.detail
    assert isinstance(book.admit("0.50", "other"), Terms)
    assert isinstance(book.admit("0.40"), Terms)


def test_the_registered_cap_is_not_raised_by_an_edit() -> None:
    book = Book(micro("1"))
    book.limits = Limits(micro("100"), 60 * S, 3, 0.2, 0.25)
    assert isinstance(book.admit("2"), Trip)


@pytest.mark.parametrize("price", [None, 1.5, "2", True, -1, 0])
def test_a_lease_at_no_price_is_refused(price: object) -> None:
    book = Book(micro("10"), free_nodes=frozenset({"free"}))
    ask = LeaseAsk("main", "here", price, 1, H, 0, 0, free_allowed=True)
    refused = machine.admit_lease(book.state, book.limits, ask, book.now)
    assert isinstance(refused, Trip)
    assert refused.gate == "price"


def test_free_only_where_both_the_spec_and_the_provider_say_so() -> None:
    book = Book(micro("10"), free_nodes=frozenset({"free"}))
    ask = LeaseAsk("main", "free", 0, 1, H, 0, 0, free_allowed=True)
    assert machine.admit_lease(book.state, book.limits, ask, book.now) == Terms(
        MicroUsd(0), MicroUsd(0), MicroUsd(0)
    )
    dear = LeaseAsk("main", "free", 0, 1, H, 0, 0, free_allowed=False)
    assert isinstance(machine.admit_lease(book.state, book.limits, dear, book.now), Trip)


def test_nothing_is_admitted_without_a_registered_cap_or_after_a_stop() -> None:
    book = Book(micro("10"))
    empty = machine.admit_lease(RunState(), book.limits, LeaseAsk("m", "n", 1, 1, H, 0, 0), T0)
    assert isinstance(empty, Trip)
    assert empty.gate == "missing_input"
    book.add("stop_asked", by="user", why="enough")
    stopped = book.admit("1")
    assert isinstance(stopped, Trip)
    assert stopped.gate == "stop"
    book.add("controller_started")
    assert isinstance(book.admit("1"), Terms)


def test_extensions_are_admitted_up_to_the_cap_exactly() -> None:
    book = Book(micro("3.00"))
    book.admit("1.00")
    lease = book.state.leases["L0"]
    assert isinstance(machine.admit_extension(book.state, book.limits, "L0", T0 + 2 * H, book.now), Trip), (
        "not open"
    )
    book.open("L0")
    assert machine.admit_extension(book.state, book.limits, "L0", T0 + 3 * H, book.now) == Terms(
        micro(1), micro("3.00"), MicroUsd(0)
    )
    too_long = machine.admit_extension(book.state, book.limits, "L0", T0 + 3 * H + S, book.now)
    assert isinstance(too_long, Trip)
    assert too_long.gate == "cost"
    for bad in (lease.deadline_utc_ns, T0):
        assert isinstance(machine.admit_extension(book.state, book.limits, "L0", bad, book.now), Trip)
    assert isinstance(
        machine.admit_extension(book.state, book.limits, "nobody's", T0 + 2 * H, book.now), Trip
    )
    book.now = T0 + H
    late = machine.admit_extension(book.state, book.limits, "L0", T0 + 2 * H, book.now)
    assert isinstance(late, Trip)


@pytest.mark.parametrize(
    ("expected", "margin", "gate"),
    [
        (3600 * S, 0, None),
        (3600.0 * S, 0, None),
        (3600 * S, 1, "lease_time"),
        (3000 * S, None, None),
        (3500 * S, None, "lease_time"),
        (float("nan"), 0, "missing_input"),
        (float("inf"), 0, "missing_input"),
        (None, 0, "missing_input"),
        (-1, 0, "missing_input"),
    ],
)
def test_a_round_must_fit_with_its_margin(expected, margin, gate) -> None:
    book = Book(micro("3.00"))
    book.admit("1.00")
    book.open("L0")
    trip = machine.admit_round(book.state, book.limits, "L0", expected, book.now, margin)
    assert (trip.gate if trip else None) == gate


def test_rounds_need_a_lease_that_is_open() -> None:
    book = Book(micro("3.00"))
    for prepare in (
        lambda: None,
        lambda: book.admit("1.00"),
        lambda: (book.open("L0"), book.add("lease_down_asked", lease="L0", why="")),
        lambda: book.settle("L0", 1),
    ):
        prepare()
        assert isinstance(machine.admit_round(book.state, book.limits, "L0", S, book.now), Trip)


# --- gates


def running(book: Book) -> None:
    book.admit("1.00")
    book.open("L0")
    book.add("session_started", "main", "agent:main", lease="L0")


def test_silence_trips_the_heartbeat_at_its_limit_and_a_new_controller_waits_anew() -> None:
    book = Book(micro("3.00"))
    running(book)
    book.now += 60 * S
    assert book.gates() == []
    book.now += 1
    assert book.gates() == ["heartbeat"]
    book.add("agent_heartbeat", "main", "agent:main", cell="c", done=1, total=2)
    assert book.gates() == []
    book.now += 61 * S
    book.add("controller_started")
    assert book.gates() == []
    book.now += 61 * S
    assert book.gates() == ["heartbeat"]
    book.add("session_finished", "main", "agent:main", state="done", reason="")
    assert book.gates() == []


def test_the_deadline_trips_lease_time() -> None:
    book = Book(micro("3.00"))
    running(book)
    book.now += H
    assert "lease_time" in book.gates()
    book.add("lease_down_asked", "main", lease="L0", why="")
    assert book.gates() == []


def test_an_unreadable_or_too_dear_price_trips_at_launch() -> None:
    book = Book(micro("300"), max_usd_per_hour={"here": micro("2.00")})
    book.admit("2.00")
    book.open("L0", usd_per_hour_micro=micro("2.000001"), worst_usd_micro=micro("2.000001"))
    assert book.gates() == ["price"]
    book = Book(micro("300"))
    book.admit("2.00")
    book.open("L0", usd_per_hour_micro=None)
    assert set(book.gates()) == {"price", "cost"}


def test_a_dearer_price_that_passes_the_cap_trips_cost() -> None:
    book = Book(micro("2.50"))
    book.admit("2.00")
    assert book.gates() == []
    book.open("L0", usd_per_hour_micro=micro("2.60"), worst_usd_micro=micro("2.60"))
    assert book.gates() == ["cost"]


def test_a_lease_that_outlives_its_reserve_is_counted_as_it_runs() -> None:
    book = Book(micro("1.50"))
    running(book)
    book.add("lease_unreachable", "main", lease="L0", why="ssh", check_by_hand="sky status")
    book.now += 2 * H
    assert (
        machine.committed(book.state, book.now) == micro("2.00") == machine.unreachable(book.state, book.now)
    )
    assert "cost" in book.gates()


@pytest.mark.parametrize(
    ("anchor", "gate"),
    [
        ({"step_ms": 5.0, "ok": True}, None),
        ({"step_ms": 5.0, "ok": None}, None),
        ({"step_ms": 5.0, "ok": False, "drift": 0.3}, "anchor_drift"),
        ({"step_ms": 5.0, "ok": "yes"}, "anchor_drift"),
        ({"step_ms": None, "ok": None}, "anchor_quality"),
        ({"step_ms": "5", "ok": True}, "anchor_quality"),
    ],
)
def test_only_proven_drift_and_missing_numbers_trip_an_anchor(anchor, gate) -> None:
    book = Book(micro("3.00"))
    running(book)
    book.add("anchor_judged", "main", "agent:main", position="last", **anchor)
    assert book.gates() == ([gate] if gate else [])
    book.add("controller_started")
    assert book.gates() == ([gate] if gate else []), "a finding stands after a resume"
    if gate:
        assert isinstance(book.admit("0.10"), Trip)
        assert isinstance(book.admit("0.10", "other"), Terms), "another session is not touched by it"
        book.add("gate_overridden", gate=gate, reason="known", by="me")
        assert book.gates() == []
        assert isinstance(book.admit("0.10"), Terms)


def test_conditions_are_judged_anew_by_the_next_controller() -> None:
    book = Book(micro("3.00"))
    running(book)
    book.add(
        "gate_tripped", "main", "agent:main", gate="max_consecutive_errors", value="3", limit="3", detail=""
    )
    assert isinstance(book.admit("0.10"), Trip)
    book.add("controller_started")
    assert isinstance(book.admit("0.10"), Terms)


def test_an_override_lets_a_gate_pass_but_never_raises_the_cap() -> None:
    book = Book(micro("1.00"))
    book.add("gate_overridden", gate="cost", reason="rich", by="me")
    assert isinstance(book.admit("1.01"), Trip)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", True, 0.200001])
def test_values_that_are_over_or_unreadable_trip(value) -> None:
    assert machine.over("max_void_share", value, 0.2, "cell") is not None


def test_values_at_the_limit_are_within_it() -> None:
    limits = Book(micro(1)).limits
    assert machine.over("max_void_share", 0.2, 0.2, "cell") is None
    assert machine.errors_trip(2, limits) is None
    assert machine.errors_trip(3, limits) is not None
    assert machine.void_share_trip(1, 5, limits) is None
    assert machine.void_share_trip(2, 5, limits) is not None
    assert machine.void_share_trip(0, 0, limits) is not None


@pytest.mark.parametrize(
    ("amount", "text"), [(0, "$0.00"), (5_000_000, "$5.00"), (1, "$0.000001"), (4_750_000, "$4.75")]
)
def test_dollars(amount: int, text: str) -> None:
    assert machine.dollars(amount) == text


def test_the_rules_hash_ignores_order_and_nothing_else() -> None:
    one = machine.rules_hash({"a": 1, "b": 2}, {"x": [1, 2]})
    assert one == machine.rules_hash({"b": 2, "a": 1}, {"x": [1, 2]})
    assert one != machine.rules_hash({"b": 2, "a": 1}, {"x": [2, 1]})


# --- any interleaving of several sessions


class Interleaved(RuleBasedStateMachine):
    """Sessions ask, open, extend, run on and settle in any order; the cap holds and sums are exact."""

    @initialize(cap=st.integers(0, 60_000_000), session_cap=st.integers(0, 30_000_000))
    def begin(self, cap: int, session_cap: int) -> None:
        self.cap, self.session_cap = cap, session_cap
        self.book = Book(cap, session_cap_usd={"s0": MicroUsd(session_cap)})

    @rule(
        session=st.sampled_from(["s0", "s1", "s2"]),
        price=st.integers(1, 20_000_000),
        minutes=st.integers(1, 240),
        granularity=st.sampled_from([1, 60, 3600]),
        dead_man=st.sampled_from([0, 150]),
        teardown=st.sampled_from([0, 5, 300]),
    )
    def ask(self, session, price, minutes, granularity, dead_man, teardown) -> None:
        book = self.book
        ask = LeaseAsk(session, "n", price, granularity, minutes * 60 * S, dead_man * S, teardown * S)
        before = machine.committed(book.state, book.now)
        terms = machine.admit_lease(book.state, book.limits, ask, book.now)
        more = bill(MicroUsd(price), ask.max_ns + ask.dead_man_ns, granularity) + bill(
            MicroUsd(price), ask.teardown_ns, granularity
        )
        mine = machine.committed(book.state, book.now, session)
        assert before is not None
        assert mine is not None
        fits = before + more <= self.cap and (session != "s0" or mine + more <= self.session_cap)
        assert isinstance(terms, Terms) == fits, "admitted exactly when it fits"
        if isinstance(terms, Terms):
            book.intent(ask, terms, f"L{len(book.state.leases)}")

    @rule(data=st.data())
    def open(self, data) -> None:
        waiting = [le.id for le in self.book.state.open_leases if not le.opened]
        if waiting:
            self.book.open(data.draw(st.sampled_from(waiting)))

    @rule(data=st.data(), minutes=st.integers(1, 120))
    def extend(self, data, minutes) -> None:
        held = [le for le in self.book.state.open_leases if le.opened]
        if held:
            lease = data.draw(st.sampled_from(held))
            deadline = (lease.deadline_utc_ns or 0) + minutes * 60 * S
            terms = machine.admit_extension(
                self.book.state, self.book.limits, lease.id, deadline, self.book.now
            )
            if isinstance(terms, Terms):
                self.book.add(
                    "lease_extended",
                    lease.session,
                    lease=lease.id,
                    deadline_utc_ns=deadline,
                    worst_usd_micro=terms.worst_usd,
                )

    @rule(seconds=st.integers(1, 3600))
    def wait(self, seconds) -> None:
        # Time goes on, but no dead-man lets a lease pass its deadline unsettled.
        deadlines = [le.deadline_utc_ns for le in self.book.state.open_leases if le.deadline_utc_ns]
        self.book.now = min([self.book.now + seconds * S, *(d - 1 for d in deadlines)])

    @rule(data=st.data(), late=st.booleans())
    def settle(self, data, late) -> None:
        if not self.book.state.open_leases:
            return
        lease = data.draw(st.sampled_from(self.book.state.open_leases))
        # At worst it ends one dead-man and one teardown after its deadline.
        latest = (lease.deadline_utc_ns or 0) + lease.dead_man_ns + lease.teardown_ns
        until = latest if late else self.book.now
        amount = machine.settlement(lease, until)
        risk = machine.at_risk(lease, self.book.now)
        assert risk is not None
        assert amount <= risk
        self.book.settle(lease.id, amount)

    @invariant()
    def the_cap_holds(self) -> None:
        if not hasattr(self, "book"):
            return
        now = self.book.now
        total, so_far = machine.committed(self.book.state, now), machine.spent(self.book.state, now)
        assert total is not None
        assert so_far is not None
        assert so_far <= total <= self.cap
        parts = [machine.committed(self.book.state, now, s) for s in ("s0", "s1", "s2")]
        assert sum(p or 0 for p in parts) == total
        assert (parts[0] or 0) <= self.session_cap
        assert self.book.gates() == []


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 10_000_000), max_size=6), st.integers(0, 30_000_000))
def test_parallel_asks_fill_the_cap_greedily_and_exactly(asks, cap) -> None:
    book = Book(cap)
    left = cap
    for n, ask in enumerate(asks):
        usd = Decimal(ask) / 1_000_000
        admitted = isinstance(book.admit(str(usd), f"s{n}"), Terms)
        assert admitted == (ask <= left)
        left -= ask if admitted else 0
