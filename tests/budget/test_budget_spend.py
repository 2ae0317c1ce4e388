import csv
import io
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from campaign.budget.spend import intervals, spend, spend_json
from campaign.cli.spend import command
from campaign.ledger.events import PAYLOADS, PHASES, Event, NewEvent
from campaign.ledger.journal import Ledger
from campaign.ledger.state import RunState, fold
from campaign.money import micro
from campaign.store.layout import RunDir
from campaign.testing.clock import VirtualClock

T0 = 1_790_000_000_000_000_000
S = 1_000_000_000


def new(type_: str, session: str | None = None, source: str = "controller", **payload) -> NewEvent:
    return NewEvent(type_, {**dict.fromkeys(PAYLOADS[type_]), **payload}, session, source)


def intent(
    lease: str = "main.1", session: str = "main", usd: str = "3.60", granularity_s: int = 1, at: int = 0
) -> NewEvent:
    return new(
        "lease_intent",
        session,
        lease=lease,
        node="here",
        provider="local",
        usd_per_hour_micro=micro(usd),
        granularity_s=granularity_s,
        max_ns=3600 * S,
        worst_usd_micro=micro(usd),
        teardown_reserve_usd_micro=0,
        billing_from_utc_ns=T0 + at * S,
        deadline_utc_ns=T0 + (at + 3600) * S,
    )


def mark(phase: str, at: float, group: str | None = None, lease: str = "main.1") -> NewEvent:
    return new(
        "phase_started",
        "main",
        "agent:main",
        lease=lease,
        phase=phase,
        at_utc_ns=T0 + round(at * S),
        group=group,
    )


def settled(usd: str | int, at: float, lease: str = "main.1") -> NewEvent:
    amount = usd if isinstance(usd, int) else micro(usd)
    return new(
        "lease_settled",
        "main",
        lease=lease,
        settled_usd_micro=amount,
        until_utc_ns=T0 + round(at * S),
        proof="gone",
    )


CREATED = new("run_created", run="r", campaign="c", cap_usd_micro=5_000_000)
STARTED = new("session_started", "main", "agent:main", lease="main.1")


def state(*events: tuple[float, NewEvent] | NewEvent) -> RunState:
    stored = []
    for n, item in enumerate(events, start=1):
        at, event = item if isinstance(item, tuple) else (0.0, item)
        stored.append(
            Event(n, T0 + round(at * S), event.type, event.source, n, event.session, event.payload, "", "")
        )
    return fold(stored)


def round_event(type_: str, attempt: int = 0, **payload) -> NewEvent:
    return new(type_, "main", "agent:main", round_id="g/r0", attempt=attempt, **payload)


def whole_run(last: tuple[NewEvent, ...]) -> RunState:
    """100 s at a tenth of a cent a second."""
    return state(
        CREATED,
        intent(),
        STARTED,
        mark("setup", 10),
        round_event("round_started"),
        mark("load", 20, "pair.kv"),
        mark("warmup", 30, "pair.kv"),
        mark("measure", 35, "pair.kv"),
        round_event("round_committed", cells=[]),
        mark("idle", 80, "pair.kv"),
        (90, new("session_finished", "main", "agent:main", state="done", reason="")),
        *last,
    )


def dollars(found) -> dict[str, int]:
    return {phase: amount for phase, amount in found.phases.items() if amount}


def test_every_phase_gets_the_time_from_its_mark_to_the_next() -> None:
    found = spend(whole_run((settled("0.10", 100),)), T0 + 10**15)
    assert dollars(found) == {
        "provision": 10_000,
        "setup": 10_000,
        "load": 10_000,
        "warmup": 5_000,
        "measure": 45_000,
        "idle": 10_000,
        "teardown": 10_000,
    }
    assert found.measured_share == pytest.approx(0.45)
    assert found.groups == {("main", "pair.kv"): 70_000}
    assert found.final
    assert found.seconds["measure"] == 45.0
    assert (found.settled_usd, found.accrued_usd, found.committed_usd) == (100_000, 0, 100_000)
    assert list(found.phases) == list(PHASES)


def test_a_settled_run_reads_the_same_for_ever() -> None:
    ended = whole_run((settled("0.10", 100),))
    first, later = (spend(ended, T0 + n * 10**15) for n in (1, 9))
    assert replace(first, as_of_utc_ns=0) == replace(later, as_of_utc_ns=0)


def test_during_a_run_the_last_phase_grows_and_is_not_final() -> None:
    going = state(CREATED, intent(), STARTED, mark("measure", 10, "g"))
    for at in (20, 40):
        found = spend(going, T0 + at * S)
        assert dollars(found) == {"provision": 10_000, "measure": (at - 10) * 1000}
        assert not found.final
        (lease,) = found.open_leases
        assert lease.accrued_usd == at * 1000
    assert found.committed_usd == micro("3.60")


def test_what_the_lease_costs_is_spread_whatever_the_granularity() -> None:
    by_hour = state(CREATED, intent(granularity_s=3600), STARTED, mark("measure", 1), settled("3.60", 3))
    assert dollars(spend(by_hour, T0)) == {"provision": 1_200_000, "measure": 2_400_000}


@pytest.mark.parametrize("ending", ["round_voided", "round_superseded"])
def test_a_round_that_does_not_count_is_lost(ending: str) -> None:
    found = spend(
        state(
            CREATED,
            intent(),
            STARTED,
            round_event("round_started"),
            mark("load", 10, "g"),
            mark("measure", 20, "g"),
            round_event(ending, reason="died", cells=[]),
            mark("idle", 50, "g"),
            round_event("round_started", attempt=1),
            mark("measure", 60, "g"),
            round_event("round_committed", attempt=1, cells=[]),
            mark("idle", 90, "g"),
            settled("0.10", 100),
        ),
        T0,
    )
    assert dollars(found) == {"provision": 10_000, "lost": 40_000, "idle": 20_000, "measure": 30_000}


def test_a_round_left_behind_when_its_lease_ended_is_lost() -> None:
    begun = [CREATED, intent(), STARTED, round_event("round_started"), mark("measure", 10, "g")]
    assert dollars(spend(state(*begun), T0 + 100 * S)) == {"provision": 10_000, "measure": 90_000}
    assert dollars(spend(state(*begun, settled("0.10", 100)), T0)) == {"provision": 10_000, "lost": 90_000}


def test_an_unreachable_node_bills_on_as_lost_and_is_counted_apart() -> None:
    found = spend(
        state(
            CREATED,
            intent(),
            STARTED,
            mark("measure", 10),
            (50, new("lease_down_asked", "main", lease="main.1", why="drift")),
            mark("teardown", 50),
            (70, new("lease_unreachable", "main", lease="main.1", why="ssh", check_by_hand="sky status")),
        ),
        T0 + 6000 * S,
    )
    assert dollars(found) == {"provision": 10_000, "measure": 40_000, "teardown": 20_000, "lost": 5_930_000}
    assert found.unreachable_usd == 6_000_000
    assert found.over_cap_usd == 1_000_000
    assert found.open_leases[0].check_by_hand == "sky status"


def test_sessions_and_leases_add_up() -> None:
    found = spend(
        state(
            CREATED,
            intent(),
            settled("0.10", 100),
            intent("main.2", at=200),
            settled("0.05", 250, "main.2"),
            intent("other.1", "other", at=300),
        ),
        T0 + 400 * S,
    )
    assert [(s.session, s.settled_usd, s.accrued_usd) for s in found.sessions] == [
        ("main", 150_000, 0),
        ("other", 0, 100_000),
    ]
    assert found.total_usd == sum(found.phases.values()) == 250_000


def test_a_free_node_has_its_share_in_time_and_no_dollars() -> None:
    found = spend(state(CREATED, intent(usd="0"), STARTED, mark("measure", 25), settled(0, 100)), T0)
    assert found.total_usd == 0
    assert found.measured_share == 0.75


def test_nothing_spent_is_unknown_share_and_zero_dollars() -> None:
    found = spend(state(CREATED), T0)
    assert found.measured_share is None
    assert found.usd_per_verdict is None
    assert found.reasons == ("no_lease",)


def test_dollars_per_verdict_are_rounded_up() -> None:
    assert spend(whole_run((settled("0.10", 100),)), T0, answered=3).usd_per_verdict == 33_334


@given(
    amount=st.integers(0, 10**9),
    length=st.integers(0, 10_000),
    marks=st.lists(
        st.tuples(st.sampled_from(PHASES), st.integers(-100, 11_000), st.sampled_from([None, "a", "b"])),
        max_size=12,
    ),
    finished=st.none() | st.integers(0, 11_000),
    is_settled=st.booleans(),
)
def test_each_micro_dollar_is_in_exactly_one_phase(amount, length, marks, finished, is_settled) -> None:
    events: list = [CREATED, intent(), STARTED, *(mark(p, at / 10, g) for p, at, g in marks)]
    if finished is not None:
        events.append((finished / 10, new("session_finished", "main", "agent:main", state="done", reason="")))
    if is_settled:
        events.append(settled(amount, length / 10))
    ledger = state(*events)
    now = T0 + 2000 * S
    found = spend(ledger, now)
    expected = amount if is_settled else found.accrued_usd
    assert sum(found.phases.values()) == found.total_usd == expected
    assert sum(sum(s.phases.values()) for s in found.sessions) == expected
    assert all(v >= 0 for v in found.phases.values())
    pieces = intervals(ledger, ledger.leases["main.1"], now)
    assert all(a.end_utc_ns == b.start_utc_ns for a, b in itertools.pairwise(pieces))
    if pieces:
        assert pieces[0].start_utc_ns == T0


def test_json_is_the_contract() -> None:
    value = spend_json(spend(whole_run((settled("0.10", 100),)), T0))
    assert {"cap_usd", "committed_usd", "settled_usd", "measured_share", "phases", "sessions"} <= value.keys()
    assert (value["cap_usd"], value["settled_usd"]) == (5.0, 0.1)
    assert value["phases"]["measure"] == 0.045
    assert value["sessions"][0]["session"] == "main"
    assert json.loads(json.dumps(value, allow_nan=False)) == value
    unknown = spend_json(
        spend(
            state(
                CREATED,
                intent(),
                settled("0.10", 5),
                intent("x"),
                new("lease_settled", lease="x", until_utc_ns=T0),
            ),
            T0,
        )
    )
    assert unknown["committed_usd"] is None
    assert "spend_unknown" in unknown["reasons"]


# --- the command


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    found = RunDir(tmp_path / "results" / "r1")
    with Ledger.open(found, VirtualClock(T0), create=True) as ledger:
        ledger.append(
            CREATED,
            intent(),
            STARTED,
            mark("setup", 10),
            mark("measure", 40, "g"),
            mark("lost", 80),
            settled("0.10", 100),
        )
    found.canonical.write_text("{}")
    return found


def test_the_table_shows_phases_shares_and_the_total(run_dir: RunDir) -> None:
    out = CliRunner().invoke(command, [str(run_dir.root)], env={"COLUMNS": "120"})
    assert out.exit_code == 0, out.output
    lines = {line.split()[0]: line for line in out.output.splitlines() if line.strip()}
    assert "40.0 %" in lines["measure"]
    assert "$0.0400" in lines["measure"]
    assert "█" in lines["measure"]
    assert "100 %" in lines["total"]
    assert "$0.1000" in lines["total"]
    assert "warmup" not in lines
    assert "$0.1000 settled of a cap of $5.00" in out.output
    assert "40 % of it measuring" in out.output


def test_json_and_csv(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.root.parents[1])
    value = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert value["settled_usd"] == 0.1
    rows = list(csv.DictReader(io.StringIO(CliRunner().invoke(command, ["r1", "--csv"]).output)))
    assert {r["phase"]: r["usd"] for r in rows}["measure"] == "0.040000"
    assert len(rows) == len(PHASES)
    assert CliRunner().invoke(command, ["--json", "--csv"]).exit_code == 2


def test_it_works_while_the_run_goes_on_and_says_so(tmp_path: Path) -> None:
    found = RunDir(tmp_path / "r2")
    with Ledger.open(found, VirtualClock(T0), create=True) as ledger:
        ledger.append(CREATED, intent())
        unreachable = new(
            "lease_unreachable", "main", lease="main.1", why="x", check_by_hand="sky status [all]"
        )
        ledger.append(unreachable)
        out = CliRunner().invoke(command, [str(found.root)], env={"COLUMNS": "200"})
    assert "still running" in out.output
    assert "committed: what it may come to at most" in out.output
    assert "check by hand: sky status [all]" in out.output


def test_a_run_that_took_no_lease(tmp_path: Path) -> None:
    found = RunDir(tmp_path / "r3")
    with Ledger.open(found, VirtualClock(T0), create=True) as ledger:
        ledger.append(CREATED)
    assert "Nothing has been spent" in CliRunner().invoke(command, [str(found.root)]).output
