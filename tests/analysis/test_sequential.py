"""Looks that may stop a pair: the interval holds at every look, under an estimated variance."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.analysis.looks import take
from campaign.analysis.sequential import e_value, half_width, look, quads, saved
from campaign.analysis.validity import cold_start

CASES = Path(__file__).parents[1] / "data" / "cases"
units = st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=24).filter(lambda v: np.var(v) > 1e-8)


def test_quads_take_slots_two_by_two():
    assert quads([0.0, 0.0, 1.0, 5.0, 9.0], [1.0, 3.0, 1.0, 5.0, 0.0]) == [2.0, 0.0]
    with pytest.raises(ValueError, match="same slots"):
        quads([1.0], [])


@given(units)
def test_the_interval_is_where_the_evidence_is_below_the_bound(x):
    half = half_width(x, 0.05)
    if half is None:
        return
    mean = sum(x) / len(x)
    assert e_value(x, mean + half) == pytest.approx(20.0, rel=1e-5)
    assert e_value(x, mean + 0.9 * half) < 20 < e_value(x, mean + 1.1 * half)


@given(units, st.floats(0.1, 10))
def test_evidence_does_not_depend_on_the_unit(x, scale):
    assert e_value([v * scale for v in x]) == pytest.approx(e_value(x), rel=1e-6)


def test_a_plain_t_interval_stops_an_equal_pair_far_too_often_and_this_one_does_not():
    rng = np.random.default_rng(3)
    stops = naive = 0
    for _ in range(300):
        x = rng.normal(0, 0.01, 30)
        stops += any(e_value(list(x[:n])) >= 20 for n in range(2, 31))
        naive += any(abs(x[:n].mean()) > 2.1 * x[:n].std(ddof=1) / math.sqrt(n) for n in range(4, 31))
    assert stops <= 21
    assert naive > 45


def test_a_large_difference_is_found_and_boots_limit_it():
    rng = np.random.default_rng(4)
    x = list(rng.normal(0.05, 0.01, 16))
    quiet = look(x, looks=2, boots=2, boot_sd=0.002, limit=0.02)
    loud = look(x, looks=2, boots=2, boot_sd=0.05, limit=0.02)
    unknown = look(x, looks=2, boots=2, boot_sd=None, limit=0.02)
    assert (quiet.stop, quiet.why) == (True, "differs")
    assert (loud.stop, unknown.stop, unknown.lo) == (False, False, None)
    same = look(list(rng.normal(0, 0.004, 40)), looks=2, boots=4, boot_sd=0.0005, limit=0.02)
    assert (same.stop, same.why) == (True, "equivalent")


def test_no_spread_stops_nothing():
    assert look([0.1] * 8, looks=1, boots=2, boot_sd=0.001, limit=0.02).stop is False


def test_saved_counts_what_was_not_run():
    found = saved(100, 60, 8, 4, 10.0)
    assert (found.requests, found.boots, found.usd) == (40, 4, 4.0)


def test_a_cold_first_wave_is_flagged():
    case = json.loads((CASES / "35_warmup.json").read_text())
    ttft = [1000 * v for v in case["ttft_s_in_issue_order"]]
    assert cold_start(ttft, case["concurrency"])
    assert not cold_start(ttft[case["concurrency"] :], case["concurrency"])


def test_a_look_stops_a_resident_pair_whose_rows_differ(make):
    """Four rounds planned, a look after two: the rows of two rounds decide, on the pair's primary metric."""
    slots, rng = 8, np.random.default_rng(9)
    group = make.group("pair.p", "pair", ("a", "b"), boots=4, slots=slots, design="alternated")
    group = replace(group, looks=(2,))
    comparison = make.comparison(group, "a", "b")

    def rows(shift):
        return [
            make.row(
                arm=arm, boot_index=k, round=k, slot=s, block=f"s{s}", group="pair.p",
                step_ms=10 * math.exp(rng.normal(0, 0.004) + shift * (arm == "b")),
            )
            for k in range(2) for arm in "ab" for s in range(slots)
        ]  # fmt: skip

    declared = {"step_ms": 0.002}
    found = take(rows(0.1), group, comparison, 2, declared=declared)
    assert (found.stop, found.why, found.n) == (True, "differs", slots)
    assert found.lo < 0.1 < found.hi
    assert take(rows(0.1), group, comparison, 3, declared=declared).stop is False
    assert take(rows(0.1), replace(group, design="blocks"), comparison, 2, declared=declared).stop is False
    assert take(rows(0.0), group, comparison, 2, declared={"step_ms": 0.03}).stop is False
