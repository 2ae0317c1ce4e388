"""Names of continuations, and attempts that are never numbered twice."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from campaign.fleet.again import next_name, rest_of, root_of
from campaign.fleet.budget import AGENT_MAY_SAY
from campaign.ledger.events import Event
from campaign.ledger.state import RunState, Session, apply
from campaign.testing import drill


def event(seq: int, type_: str, session: str, **payload: object) -> Event:
    return Event(seq, seq, type_, f"agent:{session}.{seq}", 1, session, payload, "", "")


@given(st.sets(st.integers(2, 9)), st.booleans())
def test_a_continuation_never_takes_a_name_that_the_ledger_knows(draws: set[int], others: bool) -> None:
    names = {"s1", *(f"s1.draw{n}" for n in draws), *(["s10.draw12", "s1-rerun1"] if others else [])}
    state = RunState(sessions={name: Session(name, "planned") for name in names})
    name = next_name("s1", state)
    assert name not in names
    assert root_of(name) == "s1"
    assert name == f"s1.draw{max({1, *draws}) + 1}"


def test_a_plan_that_is_behind_the_ledger_names_no_session_twice() -> None:
    _, plan, _ = drill._template()
    state = RunState()
    for seq, name in enumerate(("s1", "s1.draw2", "s1.draw3"), start=1):
        state = apply(state, event(seq, "session_started", name, lease=f"{name}.1", plan_sha256=None))
        intent = {
            "lease": f"{name}.1", "node": "n1", "provider": "sky", "usd_per_hour_micro": 1, "granularity_s": 1,
            "max_ns": 1, "worst_usd_micro": 1, "teardown_reserve_usd_micro": 1, "billing_from_utc_ns": 1,
        }  # fmt: skip
        state = apply(state, replace(event(seq, "lease_intent", name), payload=intent))
    rest = rest_of(plan, state, frozenset())
    assert [s.name for s in rest.sessions] == ["s1.draw4", "s2"]


def test_what_is_committed_stays_whoever_uses_its_number_again() -> None:
    state = RunState()
    words = [
        ("round_started", {}),
        ("round_committed", {"cells": []}),
        ("round_started", {}),
        ("round_superseded", {"cells": [], "possibly_spent": 0, "torn_bytes": 0}),
        ("round_voided", {"reason": "x"}),
    ]
    for seq, (type_, more) in enumerate(words, start=1):
        state = apply(state, event(seq, type_, "s", round_id="g/r0", attempt=0, **more))
        if seq >= 2:
            assert state.attempt_states["s", "g/r0", 0] == "committed"
            assert state.done("s") == ("g/r0",)


def test_agents_may_say_all_that_they_say() -> None:
    """Every event that the session room emits is one the controller merges."""
    import ast
    from pathlib import Path

    room = Path(__file__).parents[2] / "campaign" / "session"
    said = {
        node.args[0].value
        for file in room.glob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "emit"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    }
    assert "round_committed" in said
    assert said <= AGENT_MAY_SAY
