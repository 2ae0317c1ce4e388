import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW, ttost_paired

from campaign.analysis.estimate import Estimate, holm, ratio


def paired(a, b):
    d = np.log(b) - np.log(a)
    return Estimate(float(d.mean()), ((float(d.std(ddof=1) / math.sqrt(len(d))), len(d) - 1.0),))


@pytest.fixture
def two():
    rng = np.random.default_rng(5)
    a = rng.lognormal(2, 0.1, 12)
    return a, a * rng.lognormal(0.01, 0.02, 12)


def test_paired_t_agrees_with_statsmodels(two):
    a, b = two
    found, oracle = paired(a, b), DescrStatsW(np.log(b) - np.log(a))
    assert found.interval(0.95) == pytest.approx(oracle.tconfint_mean(0.05))
    assert found.p_zero() == pytest.approx(oracle.ttest_mean(0)[1])


@pytest.mark.parametrize("margin", [0.005, 0.01, 0.02, 0.05])
def test_tost_agrees_with_statsmodels(two, margin):
    a, b = two
    limit = math.log1p(margin)
    p = ttost_paired(np.log(b), np.log(a), -limit, limit)[0]
    assert paired(a, b).p_equivalent(limit) == pytest.approx(p)


def test_tost_passes_exactly_where_the_90_percent_interval_lies_inside(two):
    found = paired(*two)
    lo, hi = found.interval(0.90)
    for limit in np.linspace(0.001, 0.06, 60):
        assert (found.p_equivalent(limit) < 0.05) == (-limit < lo and hi < limit)


def test_the_widest_error_decides_interval_and_p():
    narrow, wide = (0.02, 30.0), (0.008, 1.0)
    both = Estimate(0.03, (narrow, wide))
    assert both.half_width(0.95) == Estimate(0.03, (wide,)).half_width(0.95)
    assert both.p_zero() == Estimate(0.03, (wide,)).p_zero() > Estimate(0.03, (narrow,)).p_zero()
    assert both.df(0.95) == 1.0
    assert both.df(0.5) == 30.0


def test_minimum_effect_is_harder_than_no_effect():
    found = Estimate(0.03, ((0.01, 10.0),))
    assert found.p_beyond(0.0) == pytest.approx(found.p_zero() / 2)
    assert found.p_beyond(0.02) > found.p_beyond(0.0)
    assert found.p_beyond(0.03) == pytest.approx(0.5)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_holm_agrees_with_statsmodels(size):
    for values in np.random.default_rng(size).uniform(0, 0.2, (20, size)):
        p = {f"c{i}": float(value) for i, value in enumerate(values)}
        oracle = multipletests(values, method="holm")[1]
        assert [holm(p)[k] for k in p] == pytest.approx(list(oracle))


def test_a_member_without_p_still_costs_its_share():
    assert holm({"x": 0.02, "y": None})["x"] == pytest.approx(0.04)


@given(st.one_of(st.none(), st.floats()))
def test_ratio_is_finite_or_none(x):
    assert (value := ratio(x)) is None or (math.isfinite(value) and value >= 0)
