import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.analysis.describe import median, percentile, percentile_needs

CASES = Path(__file__).parents[1] / "data" / "cases"
SMALL = {c["name"]: c for c in json.loads((CASES / "38_small_sets.json").read_text())["cases"]}
WARMUP = json.loads((CASES / "35_warmup.json").read_text())


@pytest.mark.parametrize("name", ["even count", "two values"])
def test_median_of_an_even_count_is_the_mean_of_the_middle_two(name):
    assert median(SMALL[name]["values"]) == SMALL[name]["expect_median"]


def test_median_of_nothing_is_none():
    assert median([]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_median_agrees_with_numpy(values):
    assert median(values) == pytest.approx(float(np.median(values)))


@pytest.mark.parametrize(("q", "n"), [(0.99, 662), (0.90, 64), (0.50, 11)])
def test_smallest_n_is_that_of_mlperf(q, n):
    assert percentile_needs(q) == n


def test_no_p99_of_four_values():
    assert percentile(SMALL["p99 of four"]["values"], 0.99) is None


def test_p99_appears_with_662_values_and_not_before():
    values = list(range(662))
    assert percentile(values[:-1], 0.99) is None
    assert percentile(values, 0.99) == 661


def test_the_bound_covers_the_percentile():
    rng = np.random.default_rng(1)
    true = math.log(10)  # p90 of a unit exponential
    held = [percentile(list(rng.exponential(size=200)), 0.9) >= true for _ in range(600)]
    assert np.mean(held) > 0.975


def test_a_cold_first_wave_inside_the_cell_moves_the_tail_and_not_the_median():
    ttft = WARMUP["ttft_s_in_issue_order"]
    rest = ttft[WARMUP["concurrency"] :]
    assert median(ttft) == pytest.approx(WARMUP["all"]["p50"], abs=0.01)
    assert median(rest) == pytest.approx(WARMUP["without_first_wave"]["p50"], abs=0.01)
    # 100 values support no p99: neither the poisoned nor the clean one is printed.
    assert percentile(ttft, 0.99) is None
    assert percentile(rest, 0.99) is None
