"""Readiness: three reported timelines, driven through the loops the host itself runs, and the rules one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.engines import failures
from campaign.engines.readiness import Look, Readiness, await_ready, check_alive, watch
from campaign.testing.clock import VirtualClock

CASES = Path(__file__).parent.parent / "data" / "cases"


def timeline(name: str) -> dict[str, Any]:
    return json.loads((CASES / f"14_ready_{name}.json").read_text())


class Script:
    """A `Probe` over a timeline: every path answers what was last written for it at or before now."""

    def __init__(self, document: dict[str, Any], clock: VirtualClock, *, foreign: bool = False) -> None:
        self.events, self.clock, self.foreign = document["timeline"], clock, foreign
        self.posts = 0
        self.gets = 0

    def last(self, key: str, value: str | None = None) -> dict[str, Any] | None:
        now = self.clock.monotonic_ns() / 1e9
        hits = [e for e in self.events if key in e and value in {None, e[key]} and e["t"] <= now]
        return hits[-1] if hits else None

    async def look(self) -> Look:
        child = self.last("child") or {}
        alive = child.get("child") == "started"
        listens = any(
            ("get" in e or "post" in e) and e["t"] <= self.clock.monotonic_ns() / 1e9 for e in self.events
        )
        failure = None
        if not alive:
            failure = failures.find(child.get("stderr", ""), failures.COMMON) or failures.of_status(
                child.get("rc")
            )
        owner = "foreign" if self.foreign and listens else "ours" if listens else "none"
        return Look(alive, owner, 0, failure)

    async def get(self, path: str) -> tuple[int | None, tuple[str, ...] | None]:
        self.gets += 1
        event = self.last("get", path)
        if event is None:
            # The timelines write only what matters to them: a server that reports health lists its model.
            return (200, ("beta/target",)) if path == "/v1/models" else (None, None)
        models = tuple(m["id"] for m in event["body"]["data"]) if "body" in event else None
        return event["status"], models

    async def token(self, timeout_s: float) -> str:
        self.posts += 1
        event = self.last("post")
        if event and event["status"] == "hang":
            await self.clock.sleep(timeout_s)
            return "hung"
        return "produced" if event and event["status"] == 200 and event.get("tokens") == 1 else "refused"


def start(name: str, *, foreign: bool = False) -> tuple[Readiness, Script, VirtualClock, dict[str, Any]]:
    document, clock = timeline(name), VirtualClock()
    script = Script(document, clock, foreign=foreign)
    return Readiness(document["want_model"], 0, timeout_s=300), script, clock, document["expect"]


@pytest.mark.parametrize("sees_owner", [True, False])
async def test_a_foreign_server_on_the_port_is_not_used(sees_owner: bool) -> None:
    """Also where the socket's owner cannot be told, and only the wrong model gives it away."""
    state, script, clock, expect = start("wrong_server", foreign=sees_owner)
    failed = await await_ready(state, script, clock)
    assert failed is not None
    assert expect["ready"] is False
    assert state.ready_ns is None
    assert failed.kind == expect["reason"]
    assert script.posts == state.requests_sent == expect["requests_sent"]
    if sees_owner:
        assert script.gets == 0


async def test_a_200_before_loading_ends_is_not_ready() -> None:
    state, script, clock, expect = start("loading")
    assert await await_ready(state, script, clock) is None
    assert state.ready_ns / 1e9 == pytest.approx(expect["ready_at"], abs=0.2)


async def test_a_dead_scheduler_behind_a_200_is_found() -> None:
    state, script, clock, expect = start("dead_behind_200")
    assert await await_ready(state, script, clock) is None
    assert state.ready_ns / 1e9 == pytest.approx(expect["ready_at"], abs=0.2)
    failed = await watch(state, script, clock)
    assert failed.kind == "hung"
    assert 120 < clock.monotonic_ns() / 1e9 <= expect["declared_dead_by"]


# --- the rules


def ready(clock_s: float = 1.0) -> Readiness:
    state = Readiness("m", 0, timeout_s=10)
    now = int(clock_s * 1e9)
    state.process(now, alive=True, owner="ours", progress=1)
    state.answer(now, "/health", 200)
    state.answer(now, "/v1/models", 200, ("m",))
    assert state.next == "token"
    state.token(now, produced=True)
    assert state.poll(now)
    return state


def test_the_probes_come_in_order_and_only_to_our_own_port() -> None:
    state = Readiness("m", 0, timeout_s=10)
    assert state.next == "process"
    state.process(1, alive=True, owner="none", progress=0)
    assert state.next == "process"
    state.process(2, alive=True, owner="ours", progress=0)
    assert state.next == "health"
    state.answer(3, "/health", 503)
    assert state.next == "health"
    state.answer(4, "/health", 200)
    assert state.next == "models"
    state.answer(5, "/v1/models", 200, ("other",))
    assert state.next == "models"
    state.answer(6, "/v1/models", 200, ("other", "m"))
    assert state.next == "token"
    assert not state.poll(7)


def test_a_token_from_a_port_that_changed_hands_proves_nothing() -> None:
    state = Readiness("m", 0, timeout_s=10)
    state.process(1, alive=True, owner="ours", progress=0)
    state.process(2, alive=True, owner="foreign", progress=0)
    state.token(3, produced=True)
    assert state.ready_ns is None
    assert state.failed.kind == "port_owned_by_other"


def test_growth_of_the_log_is_progress_and_silence_is_not() -> None:
    state = Readiness("m", 0, timeout_s=10)
    for second in range(1, 40):
        state.process(second * 10**9, alive=True, owner="none", progress=second)
        assert not state.poll(second * 10**9)
        assert state.failed is None
    for second in range(40, 60):
        state.process(second * 10**9, alive=True, owner="none", progress=39)
        state.poll(second * 10**9)
    assert state.failed.kind == "hung"
    assert "no progress for 10 s" in state.failed.why


def test_a_log_that_grows_for_ever_does_not_keep_a_boot_alive() -> None:
    state = Readiness("m", 0, timeout_s=10)
    second = 0
    while state.failed is None:
        second += 1
        state.process(second * 10**9, alive=True, owner="none", progress=second)
        state.poll(second * 10**9)
    assert second == 100
    assert "not ready in 100 s" in state.failed.why


def test_a_failure_named_by_the_log_ends_the_boot_at_once() -> None:
    state = Readiness("m", 0, timeout_s=300)
    state.process(
        10**9, alive=False, owner="none", progress=3, failure=("config", "unrecognized arguments: --x")
    )
    assert state.failed.kind == "config"


def test_a_failure_line_after_ready_does_not_kill_a_live_server() -> None:
    state = ready()
    state.process(2 * 10**9, alive=True, owner="ours", progress=3, failure=("oom", "out of memory, retrying"))
    assert state.failed is None


async def test_one_check_of_a_live_server_sends_one_token() -> None:
    state, script, clock, _ = start("loading")
    await await_ready(state, script, clock)
    posts = script.posts
    assert await check_alive(state, script, clock) is None
    assert script.posts == posts + 1


observation = st.one_of(
    st.tuples(st.just("process"), st.booleans(), st.sampled_from(["ours", "foreign", "none"])),
    st.tuples(st.just("health"), st.sampled_from([200, 503, None]), st.none()),
    st.tuples(st.just("models"), st.sampled_from([200, 404, None]), st.sampled_from([("m",), ("x",), ()])),
    st.tuples(st.just("token"), st.booleans(), st.booleans()),
)


@given(st.lists(observation, max_size=30))
def test_ready_only_with_a_token_of_our_live_child_on_its_own_port(steps: list[tuple[Any, Any, Any]]) -> None:
    state = Readiness("m", 0, timeout_s=1000)
    alive, owner = True, "none"
    for now, (kind, a, b) in enumerate(steps):
        was_ready = state.ready_ns
        if kind == "process":
            alive, owner = a, b
            state.process(now, alive=a, owner=b, progress=0)
        elif kind == "health":
            state.answer(now, "/health", a)
        elif kind == "models":
            state.answer(now, "/v1/models", a, b)
        else:
            state.token(now, produced=a, hung=b and not a)
        if state.ready_ns is not None and was_ready is None:
            assert (kind, a, alive, owner) == ("token", True, True, "ours")
        if owner == "foreign":
            assert state.next == "process"
        if state.poll(now):
            assert state.failed is None
