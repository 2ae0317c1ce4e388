"""Counters of overlapping requests: steps and acceptance of the wave, on recorded pages and by construction."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.engines import prometheus
from campaign.engines.base import Counters
from campaign.session.cell import LOOK_S, CellWindow, show_loading, whole
from campaign.session.round import Progress
from campaign.testing.clock import VirtualClock

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"


def page(name: str) -> Counters:
    return prometheus.read((FIXTURES / name).read_text())


def test_sglang_on_its_recorded_pages() -> None:
    # 60 requests, many of them eight at a time: 13,744 tokens by usage, 9,477 verify calls.
    window = CellWindow(
        page("sglang_ngram4.metrics_before.txt"), page("sglang_ngram4.metrics_after.txt"), 60, 13744
    )
    found = window.to_json(3)
    assert found["steps"] == 9639 - 162
    assert found["accept_len"] == pytest.approx((13744 - 60) / 9477)
    assert found["accepted"] == 13744 - 60 - 9477
    assert found["drafted"] == 3 * 9477
    assert found["reasons"] == []
    # One token more or less, and somebody else was served too.
    other = replace(window, tokens=13743).to_json(3)
    assert (other["steps"], other["accept_len"], other["reasons"]) == (None, None, ["other_traffic"])


def test_the_first_verify_call_of_a_process_falls_into_the_window() -> None:
    before = page("sglang_base.metrics_before.txt")
    after = replace(before, verify_steps=10, generated=(before.generated or 0) + 34)
    found = CellWindow(before, after, 2, 34).to_json(3)
    assert (found["steps"], found["accept_len"]) == (10, 3.2)


def test_vllm_on_its_recorded_page() -> None:
    after = page("vllm_cpu_metrics.txt")
    before = replace(after, drafts=0, drafted=0, accepted=0, accept_pos=(0, 0, 0), generated=0)
    found = CellWindow(before, after, 3, 112).to_json(3)
    # 109 tokens after the first of three requests; 27 came accepted, every other one took a step.
    assert (found["steps"], found["drafts"], found["accepted"]) == (82, 17, 27)
    assert found["accept_pos"] == [12, 8, 7]


def test_without_speculation_a_token_is_a_step() -> None:
    found = CellWindow(None, None, 4, 100).to_json(None)
    assert (found["steps"], found["accept_len"], found["reasons"]) == (96, 1.0, [])


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (None, Counters(), "absent"),
        (Counters(drafts=5, accepted=9, generated=50), Counters(drafts=1, accepted=1, generated=3), "counter_reset"),
        (Counters(drafts=1, accepted=1, started=1.0), Counters(drafts=9, accepted=9, started=2.0), "engine_restarted"),
    ],
)  # fmt: skip
def test_unknown_is_null_with_its_reason(before, after, reason) -> None:
    found = CellWindow(before, after, 2, 10).to_json(3)
    assert found["steps"] is None
    assert found["accept_len"] is None
    assert reason in found["reasons"]


def test_a_request_without_usage_makes_the_wave_unknown() -> None:
    window = CellWindow(Counters(drafts=0, drafted=0, accepted=0, generated=0),
                        Counters(drafts=4, drafted=12, accepted=6, generated=12))  # fmt: skip
    window.add(12, finished=True)
    window.add(None, finished=True)
    assert window.to_json(3)["reasons"] == ["no_usage"]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), min_size=1, max_size=30),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_waves_add_up_to_their_cell(steps, requests, cut) -> None:
    """By construction: every step accepts 0 to 3 of 3; the last one may count tokens past the end of its request."""
    windows, now = [], Counters(drafts=0, drafted=0, accepted=0, generated=0)
    for drafts, accepted in steps:
        tokens = requests + drafts + min(accepted * drafts, 3 * drafts)
        after = Counters(
            drafts=(now.drafts or 0) + drafts,
            drafted=(now.drafted or 0) + 3 * drafts,
            accepted=(now.accepted or 0) + min(accepted * drafts + (cut if accepted < 3 else 0), 3 * drafts),
            generated=(now.generated or 0) + tokens,
        )
        windows.append(CellWindow(now, after, requests, tokens))
        now = after
    parts = [w.to_json(3) for w in windows]
    assert [p["steps"] for p in parts] == [drafts for drafts, _ in steps]
    assert whole(windows).to_json(3)["steps"] == sum(drafts for drafts, _ in steps)


async def test_shards_and_time_left_are_shown_while_weights_load() -> None:
    clock, shown, seen = VirtualClock(), Progress(state="booting"), []
    says = iter([{}, {"shards": 3, "of": 7, "left": "00:16"}, {"shards": 7, "of": 7, "left": None}])

    class Loads:
        async def loading(self, boot_id: str) -> dict[str, object]:
            seen.append(shown.state)
            try:
                return next(says)
            except StopIteration:
                raise RuntimeError("its actor is gone") from None

    await show_loading(Loads(), "b", clock, shown)
    assert seen == ["booting", "booting", "loading shard 3/7, 00:16 left", "loading shard 7/7"]
    assert clock.monotonic_ns() == 3 * LOOK_S * 1e9
    await show_loading(object(), "b", clock, shown)
