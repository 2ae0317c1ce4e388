"""`run --hold` and `add` with a real engine: a node that is kept, and arms that nobody registered."""

import pytest
from e2e_support import INLINE, Campaign, spec_argv, state_of, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.e2e, pytest.mark.timeout(600)]


def test_arms_are_added_to_a_node_that_is_held(campaign: Campaign) -> None:
    """One run, one lease: the plan, then an addition between anchors of its own, then a stop that ends it well."""
    folder = campaign.folder
    process = campaign.start(*spec_argv("run", INLINE), "--hold", "20m")

    def held() -> bool:
        state = state_of(folder)
        return state is not None and any(s.held_until_utc_ns for s in state.sessions.values())

    wait_for(held, process)
    (lease,) = campaign.opened.state().leases.values()
    assert lease.worst_usd is not None
    worst, deadline = lease.worst_usd, lease.deadline_utc_ns

    # Refused: nothing new in the file; a changed workload under a known name.
    same = campaign.run("add", *spec_argv("run", INLINE)[1:])
    assert same.returncode == 2
    assert "every pair and ladder of it is in the run" in same.stderr
    more = (*INLINE, "pairs.more={kind: aa, a: plain, workload: chat, boots: 2}")
    changed = campaign.run("add", *spec_argv("run", (*more, "workloads.chat.max_tokens=13"))[1:])
    assert changed.returncode == 2
    assert "workloads chat" in changed.stderr

    done = campaign.run("add", *spec_argv("run", more)[1:])
    assert done.returncode == 0, done.stderr
    assert "main.add1 runs in" in done.stdout

    def added() -> bool:
        state = state_of(folder)
        return state is not None and getattr(state.sessions.get("main.add1"), "state", "") == "done"

    wait_for(added, process)
    assert campaign.run("stop", "--why", "seen enough").returncode == 0
    process.wait(120)
    assert process.stdout is not None
    assert process.returncode == 0, process.stdout.read()

    run = campaign.opened
    state, plan = run.state(), run.plan()
    assert [s.name for s in plan.sessions] == ["main", "main.add1"]
    assert {le.id for le in state.leases.values()} == {"main.1"}
    (lease,) = state.leases.values()
    # Nothing was extended: what was added ran inside what had been admitted.
    assert (lease.worst_usd, lease.deadline_utc_ns) == (worst, deadline)
    assert lease.settled_usd is not None
    assert lease.settled_usd <= worst
    (event,) = [e for e in run.events() if e.type == "sessions_added"]
    assert event.payload["exploratory"] is True
    assert event.payload["lease"] == "main.1"
    assert [g.name for g in plan.sessions[1].groups] == ["anchor.first", "pair.more", "anchor.last"]
    rows = run.requests().rows()
    assert {r.lease for r in rows} == {"main.1"}
    assert {r.group for r in rows if r.session == "main.add1"} == {"anchor.first", "pair.more", "anchor.last"}

    report = campaign.json("report")
    by_session = {(v["session"], v["pair"]): v for v in report["verdicts"] if v["primary"]}
    assert "exploratory" in by_session["main.add1", "more"]["reasons"]
    assert all("exploratory" not in v["reasons"] for (s, _), v in by_session.items() if s == "main")

    # Resume has nothing left to do: what was added is not taken up again elsewhere.
    again = campaign.run("resume", run.dir.name)
    assert again.returncode in {0, 1}, again.stderr
    assert "nothing is left to do" in again.stdout
