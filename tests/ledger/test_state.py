import pytest

from campaign.errors import LedgerError
from campaign.ledger.events import PAYLOADS, Event, NewEvent
from campaign.ledger.state import _HANDLERS, RunState, apply, fold
from campaign.store.base import SealedFile

T0 = 1_790_000_000_000_000_000
S = 1_000_000_000


def stored(*events: NewEvent) -> list[Event]:
    return [
        Event(n, T0 + n * S, e.type, e.source, n, e.session, e.payload, "", f"h{n}")
        for n, e in enumerate(events, start=1)
    ]


def controller(type_: str, session: str | None = None, **payload) -> NewEvent:
    return NewEvent(type_, {**dict.fromkeys(PAYLOADS[type_]), **payload}, session)


def agent(type_: str, **payload) -> NewEvent:
    return NewEvent(type_, {**dict.fromkeys(PAYLOADS[type_]), **payload}, "main", "agent:main")


CREATED = controller("run_created", run="r", campaign="c", cap_usd_micro=5_000_000, version="9.9")
INTENT = controller(
    "lease_intent",
    "main",
    lease="L",
    node="here",
    provider="local",
    usd_per_hour_micro=2_000_000,
    granularity_s=1,
    max_ns=3600 * S,
    worst_usd_micro=2_000_000,
    teardown_reserve_usd_micro=1000,
    billing_from_utc_ns=T0,
)
OPENED = controller(
    "lease_opened",
    "main",
    lease="L",
    node_id="n1",
    usd_per_hour_micro=2_000_000,
    granularity_s=1,
    deadline_utc_ns=T0 + 3600 * S,
    dead_men=["timer"],
)
SETTLED = controller(
    "lease_settled", "main", lease="L", settled_usd_micro=700, until_utc_ns=T0 + 9 * S, proof="gone"
)
CELL = {
    "cell": "g/a/w/c1/b0",
    "attempt": 0,
    "files": [{"path": "rows/x", "sha256": "ab", "rows": 4}],
    "telemetry": {},
}


def test_a_lease_from_intent_to_settlement() -> None:
    states = []
    state = RunState()
    for event in stored(
        CREATED, INTENT, OPENED, controller("lease_down_asked", lease="L", why="done"), SETTLED
    ):
        state = apply(state, event)
        states.append(state)
    assert states[0].cap_usd == 5_000_000
    assert [len(s.open_leases) for s in states] == [0, 1, 1, 1, 0]
    lease = states[1].leases["L"]
    assert (lease.session, lease.opened, lease.worst_usd, lease.teardown_reserve_usd) == (
        "main",
        False,
        2_000_000,
        1000,
    )
    assert states[2].leases["L"].deadline_utc_ns == T0 + 3600 * S
    assert states[3].leases["L"].down_why == "done"
    end = states[4].leases["L"]
    assert (end.settled_usd, end.until_utc_ns, end.proof, end.dead_men) == (
        700,
        T0 + 9 * S,
        "gone",
        ("timer",),
    )
    assert states[1].leases["L"] is lease, "an older state is never changed"
    assert state.head == "h5"
    assert state.seq == 5


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ((OPENED,), "event 1 lease_opened: lease L has no intent"),
        ((INTENT, INTENT), "event 2: lease L has an intent already"),
        ((INTENT, SETTLED, SETTLED), "event 3 lease_settled: lease L is settled already"),
        ((INTENT, SETTLED, controller("lease_extended", lease="L", deadline_utc_ns=1)), "settled already"),
        ((CREATED, CREATED), "created already"),
    ],
)
def test_money_events_out_of_order_are_refused(events, why) -> None:
    with pytest.raises(LedgerError, match=why):
        fold(stored(*events))


def test_an_unknown_type_names_the_versions() -> None:
    with pytest.raises(
        LedgerError, match=r"event 2 is of type 'lease_gifted', which version 1 .* campaign 9\.9"
    ):
        fold(stored(CREATED, NewEvent("lease_gifted", {})))


def test_every_type_has_a_place_in_the_fold() -> None:
    assert _HANDLERS.keys() == PAYLOADS.keys()


def test_a_provider_that_bills_more_than_it_quoted_is_billed_at_what_it_says() -> None:
    dearer = NewEvent("lease_opened", {**OPENED.payload, "usd_per_hour_micro": 2_600_000}, "main")
    lease = fold(stored(INTENT, dearer)).leases["L"]
    assert (lease.quoted_usd_per_hour, lease.usd_per_hour) == (2_000_000, 2_600_000)
    cheaper = NewEvent("lease_opened", {**OPENED.payload, "usd_per_hour_micro": 1_000_000}, "main")
    assert fold(stored(INTENT, cheaper)).leases["L"].usd_per_hour == 2_000_000
    silent = NewEvent("lease_opened", {**OPENED.payload, "usd_per_hour_micro": None}, "main")
    assert fold(stored(INTENT, silent)).leases["L"].usd_per_hour is None


def test_rounds_are_committed_once_and_redone_under_the_next_attempt() -> None:
    begun = agent("round_started", round_id="g/r0", attempt=0)
    state = fold(stored(begun))
    assert state.attempts("main") == {"g/r0": 1}
    assert state.done("main") == ()
    superseded = controller(
        "round_superseded", "main", round_id="g/r0", attempt=0, possibly_spent=1, torn_bytes=7
    )
    again = agent("round_started", round_id="g/r0", attempt=1)
    voided = agent("round_voided", round_id="g/r0", attempt=1, reason="died")
    state = fold(stored(begun, superseded, again, voided))
    assert state.attempts("main") == {"g/r0": 2}
    assert state.rounds["main", "g/r0"].possibly_spent == 1
    committed = agent("round_committed", round_id="g/r0", attempt=2, cells=[{**CELL, "attempt": 2}])
    state = fold(
        stored(
            begun, superseded, again, voided, agent("round_started", round_id="g/r0", attempt=2), committed
        )
    )
    assert state.done("main") == ("g/r0",)
    assert state.attempts("main") == {}
    assert state.files == {"rows/x": SealedFile("rows/x", "ab", 4)}
    assert [state.attempt_states["main", "g/r0", n] for n in (0, 1, 2)] == [
        "superseded",
        "voided",
        "committed",
    ]
    later = [begun, committed, controller("round_superseded", "main", round_id="g/r0", attempt=0)]
    assert fold(stored(*later)).done("main") == ("g/r0",), "what is committed stays"
    late = agent("round_committed", round_id="g/r0", attempt=0, cells=[CELL])
    state = fold(stored(begun, superseded, late))
    assert state.done("main") == (), "what was given away does not count when it comes after all"
    assert state.files == {}


def test_rounds_of_two_sessions_with_one_id_are_two_rounds() -> None:
    other = NewEvent(
        "round_committed", {"round_id": "g/r0", "attempt": 0, "cells": []}, "other", "agent:other"
    )
    state = fold(stored(agent("round_started", round_id="g/r0", attempt=0), other))
    assert state.done("other") == ("g/r0",)
    assert state.attempts("main") == {"g/r0": 1}


def test_a_commit_whose_hashes_cannot_be_read_commits_nothing() -> None:
    bad = agent(
        "round_committed", round_id="g/r0", attempt=0, cells=[{"cell": "x", "files": [{"path": "p"}]}]
    )
    state = fold(stored(bad))
    assert state.rounds["main", "g/r0"].state == "voided"
    assert state.files == {}
    assert state.attempts("main") == {"g/r0": 1}


def test_marks_know_the_round_they_were_written_in() -> None:
    def mark(phase: str, at: int) -> NewEvent:
        return agent("phase_started", lease="L", phase=phase, at_utc_ns=at, group="g")

    state = fold(
        stored(
            INTENT,
            agent("session_started", lease="L"),
            mark("setup", T0),
            agent("round_started", round_id="g/r0", attempt=0),
            mark("load", T0 + 1),
            agent("round_committed", round_id="g/r0", attempt=0, cells=[]),
            mark("idle", T0 + 2),
            mark("holiday", T0 + 3),
            agent("phase_started", lease="nobody's", phase="load", at_utc_ns=1),
        )
    )
    assert [(m.phase, m.round) for m in state.leases["L"].marks] == [
        ("setup", None),
        ("load", ("main", "g/r0", 0)),
        ("idle", None),
    ]


def test_sessions_boots_anchors_gates_and_the_end() -> None:
    state = fold(
        stored(
            CREATED,
            controller("sessions_added", sessions=["main", "other"]),
            controller("controller_started", pid=1),
            INTENT,
            agent("session_started", lease="L"),
            agent("boot_started", boot_id="b", arm="a", arm_hash="h", place="p0"),
            agent("boot_ready", boot_id="b", boot_ns=5, provenance={}),
            agent("boot_stopped", boot_id="b"),
            agent("boot_started", boot_id="c", arm="a"),
            agent("boot_failed", boot_id="c", kind="oom", error="e"),
            agent("boot_stopped", boot_id="c"),
            agent("anchor_judged", position="first", step_ms=5.0, ok=True),
            agent("agent_heartbeat", cell="x", done=3, total=9),
            agent("gate_tripped", gate="anchor_drift", value="+30%", limit="25%", detail="anchor last"),
            controller("gate_overridden", gate="anchor_drift", reason="known", by="me"),
            agent("session_finished", state="tripped", reason="drift"),
            controller("stop_asked", by="me", why="enough"),
            controller("run_finished", exit_code=3, reason="gate"),
        )
    )
    assert state.sessions["other"].state == "planned"
    main = state.sessions["main"]
    assert (main.state, main.reason, main.done, main.total, main.lease) == ("tripped", "drift", 3, 9, "L")
    assert main.last_seen_utc_ns == T0 + 16 * S
    assert (state.boots["b"].state, state.boots["b"].boot_ns) == ("stopped", 5)
    assert (state.boots["c"].state, state.boots["c"].kind) == ("failed", "oom")
    assert state.anchors[0].position == "first"
    assert state.tripped[0].gate == "anchor_drift"
    assert state.is_overridden("anchor_drift", "main")
    assert not state.is_overridden("cost", "main")
    assert state.stop_asked is not None
    assert state.finished == {"exit_code": 3, "reason": "gate"}
    assert state.leases["L"].agent_ended_at_utc_ns == T0 + 16 * S
    resumed = apply(
        state,
        Event(
            19, T0, "controller_started", "controller", 9, None, {"pid": 2, "host": "", "mode": ""}, "", ""
        ),
    )
    assert resumed.stop_asked is None
    assert resumed.finished is None
    assert resumed.latest_utc_ns == state.latest_utc_ns, "a clock that steps back takes nothing back"


def test_what_agent_and_controller_both_saw_is_one_trip_until_the_next_controller() -> None:
    seen = {"gate": "anchor_drift", "value": "+30%", "limit": "25%", "detail": "anchor last"}
    both = (controller("gate_tripped", "main", **seen), agent("gate_tripped", **seen))
    assert len(fold(stored(*both)).tripped) == 1
    assert len(fold(stored(*both, controller("gate_tripped", "other", **seen))).tripped) == 2
    assert (
        len(fold(stored(*both, controller("controller_started"), agent("gate_tripped", **seen))).tripped) == 2
    )


def test_a_fold_and_one_event_at_a_time_agree_and_share_nothing_that_changes() -> None:
    events = stored(
        CREATED,
        INTENT,
        agent("session_started", lease="L"),
        agent("round_started", round_id="g/r0", attempt=0),
        agent("boot_started", boot_id="b"),
        agent("round_committed", round_id="g/r0", attempt=0, cells=[CELL]),
        OPENED,
    )
    state = RunState()
    seen = []
    for event in events:
        state = apply(state, event)
        seen.append(state)
    assert [fold(events[: n + 1]) for n in range(len(events))] == seen
    before = fold(events[:3])
    apply(before, events[3])
    assert before == seen[2]
    assert type(before.rounds) is dict
