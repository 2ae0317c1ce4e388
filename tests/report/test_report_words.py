"""Sentences: direction, interval, digits, and what is not claimed."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.report import words


def test_slower_is_said_in_the_direction_it_is_read(verdict):
    v = verdict("d", "plain", "depth=5", "step_ms", 1.312, 0.045, "slower")
    assert words.sentence(v, {}) == "depth 5 is 31 % slower per step than plain [27, 36] - slower"


def test_faster_turns_estimate_and_interval_together(verdict):
    v = verdict("kv", "plain", "kv.b", "step_ms", 0.941, 0.022, "faster")
    assert words.sentence(v, {"kv.b": "kv_dtype q8_0"}) == (
        "kv_dtype q8_0 takes 6 % less time per step than plain [4, 8] - faster"
    )


@pytest.mark.parametrize(
    ("metric", "ratio", "word", "claim"),
    [
        ("decode_tok_s", 1.2, "faster", "decodes 20 % more tokens per second than"),
        ("decode_tok_s", 0.8, "slower", "decodes 20 % fewer tokens per second than"),
        ("accept_len", 1.2, "higher", "yields 20 % more tokens per step than"),
        ("ttft_ms", 1.2, "slower", "takes 20 % longer to its first token than"),
        ("ttft_ms", 0.8, "faster", "takes 20 % less time to its first token than"),
    ],
)
def test_each_metric_has_its_own_words(verdict, metric, ratio, word, claim):
    assert claim in words.sentence(verdict("p", "a", "b", metric, ratio, 0.05, word), {})


def test_unresolved_claims_no_direction_and_says_why(verdict):
    v = verdict("p", "a", "b", "step_ms", 1.05, 0.08, "unresolved", reasons=("too_few_blocks",))
    assert words.sentence(v, {}) == "b against a: step time +5 % [-3, 13] - unresolved (too few blocks)"


def test_without_boot_variance_the_interval_is_labelled(verdict):
    from dataclasses import replace

    v = verdict("p", "a", "b", "step_ms", 1.05, 0.06, "unresolved", reasons=("boot_sd_unknown",))
    v = replace(v, lo=None, hi=None)
    assert "[3, 7] these boots only - unresolved (boot variance unknown)" in words.sentence(v, {})
    v = replace(v, boot_sd_overturn=0.0123)
    assert "[3, 7] these boots only; a boot sd of 1.2 % would overturn it - unresolved" in words.sentence(
        v, {}
    )


def test_equivalence_prints_the_interval_that_proves_it(verdict):
    v = verdict("p", "a", "a#2", "step_ms", 1.003, 0.01, "equivalent", kind="aa")
    assert words.sentence(v, {}) == (
        "a (again) and a are the same within 2 %: step time +0.3 % [-0.5, 1.1] at 90 % - equivalent"
    )


def test_invalid_claims_no_number_even_where_there_is_one(verdict):
    v = verdict("p", "a", "b", "step_ms", 1.5, 0.01, "invalid", reasons=("drift",))
    text = words.sentence(v, {})
    assert "50" not in text
    assert text == "b against a: no number is claimed - invalid (the machine drifted)"


def test_a_null_that_differs_is_a_surprise(verdict):
    v = verdict("p", "a", "a#2", "step_ms", 1.3, 0.05, "slower", kind="aa")
    assert "(no difference was expected)" in words.sentence(v, {})


def test_an_adjusted_verdict_that_is_weaker_is_said(verdict):
    v = verdict("p", "a", "b", "step_ms", 1.3, 0.05, "slower", family="depth", verdict_adjusted="unresolved")
    assert words.sentence(v, {}).endswith("- slower; adjusted over depth: unresolved")


def test_overrides_are_named():
    assert words.reason("gate_overridden:drift") == "gate drift overridden"
    assert words.reason("a_new_code") == "a new code"


def test_a_ladder_that_agrees_is_one_sentence_against_its_base(report):
    headline = words.headlines(report)[0]
    assert headline.text == (
        "every rung is slower per step than plain: 3 by 18 % [14, 23], 5 by 31 % [27, 36], "
        "8 by 52 % [48, 57] - slower"
    )
    assert headline.words == ("slower",)
    assert headline.claim.endswith("[48, 57]")


def test_a_ladder_that_disagrees_names_each_rung(build, verdict):
    common = {"kind": "ladder", "family": "depth"}
    report = build(
        verdicts=(
            verdict("depth:plain|depth=3", "plain", "depth=3", "step_ms", 1.2, 0.05, "slower", **common),
            verdict("depth:plain|depth=5", "plain", "depth=5", "step_ms", 1.01, 0.05, "unresolved", **common),
        )
    )
    (headline,) = words.headlines(report)
    assert headline.words == ("slower", "unresolved")
    assert "depth 3 is 20 % slower" in headline.text
    assert "depth 5 against plain: step time +1 % [-4, 6] - unresolved" in headline.text


def test_sessions_are_named_only_where_there_are_several(build, verdict):
    one = verdict("p", "a", "b", "step_ms", 1.2, 0.05, "slower")
    two = verdict("p", "a", "b", "step_ms", 1.2, 0.05, "slower", session="rerun1")
    assert [h.title for h in words.headlines(build(verdicts=(one, two)))] == ["main / p", "rerun1 / p"]
    assert [h.title for h in words.headlines(build(verdicts=(one,)))] == ["p"]


@given(st.floats(0.01, 100), st.floats(0.0001, 3))
def test_a_printed_interval_contains_the_printed_estimate(ratio, half):
    lo, hi = ratio / (1 + half), ratio * (1 + half)
    low, high = (float(x) for x in words.interval(lo, hi).strip("[]").split(","))
    shown = float(words.signed(ratio, lo, hi))
    assert low <= shown <= high
    assert "e" not in words.signed(ratio, lo, hi)


@given(st.floats(1e-6, 1e9))
def test_numbers_keep_three_digits_and_no_exponent(value):
    text = words.number(value)
    assert "e" not in text
    assert math.isclose(float(text.replace(",", "")), value, rel_tol=0.01, abs_tol=6e-7)


def test_unknown_is_a_dash_never_zero():
    assert (
        words.number(None), words.signed(None), words.interval(None, 1.0), words.dollars(None), words.duration(None)
    ) == ("–",) * 5  # fmt: skip


def test_no_minus_zero():
    assert words.signed(0.99999, 0.97, 1.03) == "0"
    assert words.interval(0.9999, 1.06).startswith("[0,")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 00 s"), (425, "7 min 05 s"), (12000, "3 h 20 min")]
)
def test_durations(seconds, text):
    assert words.duration(seconds) == text


def test_small_dollars_keep_their_digits():
    assert (words.dollars(0), words.dollars(0.0123), words.dollars(12.5), words.dollars(1234.5)) == (
        "$0.00", "$0.0123", "$12.50", "$1,234.50",
    )  # fmt: skip


def test_kept_text_breaks_only_between_words():
    assert words.keep("by 31 % [27, 36], 8 by 5 %") == "by 31\xa0% [27,\xa036], 8 by 5\xa0%"


def test_an_unfinished_ladder_is_one_sentence_too(build, verdict):
    common = {"kind": "ladder", "family": "depth", "reasons": ("partial",)}
    report = build(
        verdicts=tuple(
            verdict(
                f"depth:plain|depth={d}", "plain", f"depth={d}", "step_ms", r, 0.03, "unresolved", **common
            )
            for d, r in ((3, 1.2), (5, 1.4))
        )
    )
    (headline,) = words.headlines(report)
    assert (
        headline.text == "step time against plain: 3 +20 % [17, 23], 5 +40 % [37, 43] - unresolved (partial)"
    )


def test_reasons_are_not_repeated_for_every_metric(verdict):
    first = verdict("p", "a", "b", "step_ms", 1.2, 0.05, "unresolved", reasons=("partial",))
    other = verdict("p", "a", "b", "accept_len", 1.0, 0, "unresolved", reasons=("no_spread", "partial"))
    assert words.further(first, first) == "partial"
    assert words.further(other, first) == "no spread"
