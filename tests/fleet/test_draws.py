"""Bad draws, preemption, parallel sessions and additions, told with the simulated cloud and the product's classes."""

import asyncio
from collections.abc import Callable

import pytest

from campaign.ledger.journal import Ledger
from campaign.ledger.state import RunState, fold
from campaign.testing import drill


def played(faults: Callable[[str], str | None] = lambda _: None, *, cap: float = 3.0, hold: bool = False):
    """One campaign without chance: two sessions, no crash, only these faults."""
    seed = next(s for s in range(10_000) if (drill.Random(f"{s} is held").random() < 0.3) is hold)
    world = drill.World(seed)
    _, plan, _ = drill._template(None, drill.HOLD_S if hold else 0.0)
    worst = sum(s.usd_worst for s in plan.sessions)
    world.cap = drill.MicroUsd(int(worst * cap))
    spec = world.spec
    budget = spec.budget.model_copy(update={"cap_usd": drill._dollars(world.cap)})
    world.spec = spec.model_copy(update={"budget": budget})
    world.limits = drill.limits(world.spec)
    world.plan = drill.replace(plan, cap_usd=world.cap)
    world.crashing, world.rate = False, 0.0
    world.cloud.faults = faults
    world.cloud.round_s, world.cloud.preempt_after_s = (lambda: 20.0), (lambda: None)
    world.cloud.launch_s = 60.0
    out = asyncio.run(world.run())
    events = Ledger.over(world.db, world.clock).events()
    assert all(e.type != "lease_extended" for e in events)
    state = fold(events)
    world.db.close()
    assert not out.problems
    return out, state, world


def names(state: RunState) -> list[str]:
    return [le.id for le in state.leases.values()]


def test_a_bad_draw_is_abandoned_and_drawn_again() -> None:
    left = ["bad_draw"]
    out, state, _ = played(lambda call: left.pop() if call == "run_agent" and left else None)
    assert out.ending.startswith("0")
    assert sorted(names(state)) == ["s1.1", "s1.draw2.1", "s2.1"]
    # Nothing was paired on the bad node, and everything on the next one.
    assert all("pair" not in r for r in state.done("s1"))
    assert {r for r in state.done("s1.draw2") if "pair" in r}


def test_draws_are_limited() -> None:
    out, state, _ = played(lambda call: "bad_draw" if call == "run_agent" else None)
    assert out.ending.startswith("3 gate anchor_drift")
    assert sorted(names(state)) == [
        *[f"s1{d}.1" for d in ("", ".draw2", ".draw3")], *[f"s2{d}.1" for d in ("", ".draw2", ".draw3")],
    ]  # fmt: skip


def test_a_redraw_stays_within_the_budget() -> None:
    """Money for one session only: the second draw is refused, and nothing is spent on it."""
    out, state, world = played(lambda call: "bad_draw" if call == "run_agent" else None, cap=0.5)
    assert out.ending.startswith("3")
    assert out.spent_micro <= world.cap
    assert any(r["gate"] == "cost" for r in state.refused)


@pytest.mark.parametrize("fault", ["dearer", "price_nan"])
def test_a_price_that_is_too_high_or_none_takes_the_node_down_at_once(fault: str) -> None:
    left = [fault]
    out, state, world = played(lambda call: left.pop() if call == "launch" and left else None)
    assert out.ending.startswith("3 gate ")
    assert "price" in {g.gate for g in state.tripped}
    first = world.cloud.nodes[state.leases["s1.1"].node_id or ""]
    assert first.ended_by == "down"
    assert first.journal == []


def test_a_silent_agent_trips_the_heartbeat() -> None:
    left = ["silent"]
    out, state, _ = played(lambda call: left.pop() if call == "run_agent" and left else None)
    assert out.ending.startswith("3 gate heartbeat")
    assert {g.gate for g in state.tripped} == {"heartbeat"}


def test_parallel_sessions_share_one_cap() -> None:
    """Both at once where the money is there, one after the other where it is not; never more than the cap."""

    def overlap(state: RunState) -> bool:
        one, two = state.leases["s1.1"], state.leases["s2.1"]
        assert one.until_utc_ns is not None
        return one.billing_from_utc_ns <= two.billing_from_utc_ns < one.until_utc_ns

    out, state, _ = played(cap=1.2)
    assert out.ending.startswith("0")
    assert overlap(state)
    out, state, world = played(cap=0.8)
    assert out.ending.startswith("0")
    assert not overlap(state)
    assert out.spent_micro <= world.cap


def test_what_is_added_runs_on_the_held_lease() -> None:
    # The hold was part of what was admitted: `played` has seen that no lease was ever extended.
    out, state, _ = played(hold=True)
    assert out.added >= 1
    added = [n for n in state.sessions if ".add" in n]
    assert added
    for name in added:
        session = state.sessions[name]
        assert session.state in {"done", "stopped", "tripped"}
        assert session.lease in state.leases
        assert name.startswith(state.leases[session.lease].session or "?")
