"""Figures of a row: definitions, identity, and what is unknown."""

import dataclasses
import math
import typing

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from campaign.client.base import Outcome, Usage
from campaign.client.lag import lag_counts
from campaign.client.measure import row_fields
from campaign.engines.base import StepCounts
from campaign.store.row import RequestRow

MS = 1_000_000
FIGURES = (
    "ttft_ms",
    "window_ms",
    "e2e_ms",
    "tokens_in_window",
    "decode_tok_s",
    "accept_len",
    "step_ms",
    "tpot_ms",
    "steps",
    "completion_tokens",
    "rate_definition",
)


def outcome(completion=13, first=1, window_ms=120, **kw):
    base = Outcome(
        request_id="r", state="ok", sent_ns=5, sent_utc_ns=7, first_ns=5 + 200 * MS, last_ns=5 + (200 + window_ms) * MS, done_ns=5 + 400 * MS,
        stamp_source="user", reads=3, events=4, content_chunks=2, usage=Usage(11, completion, None), first_chunk_tokens=first, finish="length",
        http_status=200, error_code=None, error=None, text_sha256="x", timings=None,
    )  # fmt: skip
    return dataclasses.replace(base, **kw)


def counts(steps=None, drafts=None, drafted=None, accepted=None, undrafted=None, reasons=(), **kw):
    return StepCounts(
        steps,
        drafts,
        undrafted,
        drafted,
        accepted,
        kw.get("accept_pos"),
        kw.get("cached"),
        "metrics",
        reasons,
    )


def test_the_keys_are_fields_of_the_row():
    fields = {f.name for f in dataclasses.fields(RequestRow)}
    row = row_fields(outcome(), None, speculative=False)
    assert set(row) <= fields
    literal = set(typing.get_args(RequestRow.__annotations__["rate_definition"])[0].__args__)
    assert {"after-first-chunk", "all-but-one"} == literal


def test_without_speculation_a_step_is_a_token():
    row = row_fields(outcome(), None, speculative=False)
    assert (row["tokens_in_window"], row["steps"], row["accept_len"]) == (12, 12, 1.0)
    assert (row["ttft_ms"], row["window_ms"], row["e2e_ms"]) == (200, 120, 400)
    assert (row["decode_tok_s"], row["step_ms"], row["tpot_ms"]) == (100.0, 10.0, 10.0)
    assert row["rate_definition"] == "after-first-chunk"
    assert row["reasons"] == ()
    assert row["counter_source"] == "none"


def test_an_assumed_first_token_is_named():
    row = row_fields(outcome(first=None), None, speculative=False)
    assert (row["rate_definition"], row["first_chunk_tokens"], row["tokens_in_window"]) == (
        "all-but-one",
        1,
        12,
    )
    assert row["reasons"] == ("first_chunk_assumed_one",)


def test_speculation_counts_drafted_and_undrafted_steps():
    row = row_fields(
        outcome(), counts(drafts=3, drafted=9, accepted=6, accept_pos=(3, 2, 1)), speculative=True
    )
    assert (row["undrafted"], row["steps"]) == (13 - 1 - 6 - 3, 6)
    assert row["accept_len"] == 2.0
    assert row["step_ms"] == 20.0
    assert row["decode_tok_s"] == 100.0
    assert (row["drafts"], row["drafted"], row["accepted"], row["accept_pos"]) == (3, 9, 6, (3, 2, 1))
    assert row["counter_source"] == "metrics"


def test_an_engine_that_counts_its_own_steps():
    row = row_fields(outcome(), counts(steps=4, undrafted=0), speculative=True)
    assert (row["steps"], row["accept_len"], row["step_ms"]) == (4, 3.0, 30.0)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (None, "absent"),
        (counts(), "absent"),
        (counts(reasons=("counter_reset",)), "counter_reset"),
        (counts(drafts=3, drafted=9, accepted=6, reasons=("engine_restarted",)), "engine_restarted"),
        (counts(reasons=("no_drafts",)), "no_drafts"),
        (counts(drafts=9, drafted=27, accepted=9), "out_of_range"),
        (counts(drafts=3, drafted=5, accepted=6), "out_of_range"),
        (counts(steps=0), "out_of_range"),
    ],
)
def test_steps_that_are_not_known_leave_the_rate(given, reason):
    row = row_fields(outcome(), given, speculative=True)
    assert (row["steps"], row["undrafted"], row["accept_len"], row["step_ms"]) == (None, None, None, None)
    assert row["decode_tok_s"] == 100.0
    assert reason in row["reasons"]


def test_a_drafter_that_never_offered_anything():
    row = row_fields(
        outcome(), counts(drafts=0, drafted=0, accepted=0, reasons=("no_drafts",)), speculative=True
    )
    assert (row["undrafted"], row["steps"], row["accept_len"]) == (12, 12, 1.0)


@pytest.mark.parametrize(("lag_us", "flagged"), [(100, False), (500, True)])
def test_lag_is_held_against_the_chunks_where_nobody_counted_steps(lag_us, flagged):
    """Requests that overlap and draft have no step of their own: 12 gaps of 10 ms stand in, and only flag."""
    late = outcome(content_chunks=13, lag=lag_counts([lag_us * 1000] * 20))
    row = row_fields(late, None, speculative=True)
    assert row["step_ms"] is None
    assert ("client_lag" in row["reasons"]) is flagged


def test_steps_before_the_window_are_not_guessed():
    row = row_fields(outcome(first=4), counts(drafts=3, drafted=9, accepted=6), speculative=True)
    assert row["steps"] is None
    assert "steps_outside_window" in row["reasons"]
    assert row["decode_tok_s"] == 1000 * 9 / 120


@pytest.mark.parametrize("speculative", [True, False])
def test_one_token_has_a_ttft_and_no_rate(speculative):
    row = row_fields(
        outcome(completion=1, window_ms=0), counts(drafts=0, drafted=0, accepted=0), speculative=speculative
    )
    assert row["ttft_ms"] == 200
    assert (row["decode_tok_s"], row["tpot_ms"], row["step_ms"], row["accept_len"]) == (
        None,
        None,
        None,
        None,
    )
    assert "one_token" in row["reasons"]


def test_everything_in_one_read_has_no_rate():
    row = row_fields(outcome(window_ms=0), None, speculative=False)
    assert (row["window_ms"], row["decode_tok_s"], row["tpot_ms"]) == (0, None, None)
    assert "zero_window" in row["reasons"]


def test_without_usage_there_is_no_rate():
    row = row_fields(
        outcome(usage=None, reasons=("no_usage",)), counts(drafts=3, drafted=9, accepted=6), speculative=True
    )
    assert row["ttft_ms"] == 200
    assert (row["completion_tokens"], row["decode_tok_s"], row["tokens_in_window"], row["steps"]) == (
        None,
        None,
        None,
        None,
    )
    assert row["reasons"] == ("no_usage",)


@pytest.mark.parametrize("state", ["failed", "cancelled", "truncated", "incomplete"])
def test_a_request_that_did_not_end_well_has_no_figures(state):
    row = row_fields(
        outcome(state=state, error_code="x", reasons=("timeout",)),
        counts(drafts=3, drafted=9, accepted=6),
        speculative=True,
    )
    assert all(row[name] is None for name in FIGURES)
    assert (row["drafted"], row["accepted"], row["cached_tokens"]) == (None, None, None)
    assert row["first_ns"] == 5 + 200 * MS  # raw stamps stay
    assert row["reasons"] == ("timeout",)
    assert row["error_code"] == "x"


def test_an_empty_answer_has_a_count_and_no_times():
    row = row_fields(
        outcome(
            state="empty", completion=0, first_ns=None, last_ns=None, content_chunks=0, reasons=("no_tokens",)
        ),
        None,
        speculative=False,
    )
    assert row["completion_tokens"] == 0
    assert (row["ttft_ms"], row["window_ms"], row["decode_tok_s"]) == (None, None, None)


def test_a_short_answer_keeps_its_figures():
    row = row_fields(outcome(state="short", reasons=("short",)), None, speculative=False)
    assert row["decode_tok_s"] == 100.0
    assert row["reasons"] == ("short",)


def test_text_with_a_count_of_none_is_a_contradiction():
    row = row_fields(outcome(completion=0), None, speculative=False)
    assert row["decode_tok_s"] is None
    assert "out_of_range" in row["reasons"]


@pytest.mark.parametrize("first", [0, 14])
def test_a_first_chunk_out_of_range_is_not_used(first):
    row = row_fields(outcome(first=first), None, speculative=False)
    assert (row["rate_definition"], row["tokens_in_window"]) == ("all-but-one", 12)


def test_cached_tokens_from_usage_then_from_counters():
    told = row_fields(outcome(usage=Usage(11, 13, 4)), counts(steps=4, cached=9), speculative=True)
    assert told["cached_tokens"] == 4
    scraped = row_fields(outcome(), counts(steps=4, cached=9), speculative=True)
    assert scraped["cached_tokens"] == 9


@given(
    completion=st.none() | st.integers(0, 5000),
    first=st.none() | st.integers(0, 40),
    window=st.integers(0, 10**11),
    drafts=st.none() | st.integers(0, 3000),
    accepted=st.none() | st.integers(0, 3000),
    drafted=st.none() | st.integers(0, 9000),
    speculative=st.booleans(),
)
def test_the_identity_holds_exactly_and_nothing_is_nan(
    completion, first, window, drafts, accepted, drafted, speculative
):
    seen = outcome(completion=completion, first=first)
    seen = dataclasses.replace(seen, last_ns=seen.first_ns + window)
    given_counts = counts(drafts=drafts, drafted=drafted, accepted=accepted)
    row = row_fields(seen, given_counts, speculative=speculative)
    for value in row.values():
        assert not isinstance(value, float) or math.isfinite(value)
    if row["step_ms"] is not None:
        assert row["decode_tok_s"] == 1000 * row["accept_len"] / row["step_ms"]
        assert row["accept_len"] == row["tokens_in_window"] / row["steps"]
        assert row["step_ms"] == row["window_ms"] / row["steps"]
    if row["decode_tok_s"] is None:
        assert row["reasons"]
        return
    assert row["decode_tok_s"] > 0
    assert row["decode_tok_s"] == pytest.approx(1e9 * row["tokens_in_window"] / window)
    assume(speculative and row["steps"] is not None)
    assert row["undrafted"] >= 0
    assert row["steps"] == row["drafts"] + row["undrafted"]
