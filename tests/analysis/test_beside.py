"""Champions, composites, sessions, bootstrap, economics, across: each against what is known."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.analysis.bootstrap import bca
from campaign.analysis.champion import champion, replicates
from campaign.analysis.composite import composite
from campaign.analysis.economics import Point, economics, gpus, iso, pareto
from campaign.analysis.estimate import Estimate
from campaign.analysis.sessions import over_sessions
from campaign.analysis.variance import Boot
from campaign.plan.cheapest import Costs, cheapest, price
from campaign.plan.power import default_prior, resolvable


def test_bca_agrees_with_scipy():
    from scipy import stats

    x = np.random.default_rng(1).gamma(2, 1, 20)
    lo, hi = bca(list(x))
    theirs = stats.bootstrap(
        (x,), np.mean, n_resamples=20000, method="BCa", random_state=1
    ).confidence_interval
    assert (lo, hi) == pytest.approx((theirs.low, theirs.high), abs=0.06)
    assert hi - x.mean() > x.mean() - lo


def test_bca_claims_nothing_without_spread_or_of_two():
    assert bca([1.0, 1.0, 1.0]) is None
    assert bca([1.0, 2.0]) is None
    assert bca([1.0, 2.0, 3.0]) == bca([1.0, 2.0, 3.0])


def boots(rng, arms, k, n, effects):
    return [
        Boot(a, j, j, {f"s{i}": float(v) for i, v in enumerate(rng.normal(effects.get(a, 0.0), 0.05, n))})
        for a in arms
        for j in range(k)
    ]


def test_the_best_of_four_equal_arms_is_not_better():
    rng = np.random.default_rng(2)
    sd = 0.05 / math.sqrt(16)
    raw, adjusted = [], []
    for _ in range(400):
        found = champion(boots(rng, "abcd", 1, 16, {}), higher=True)
        raw.append(math.log(found.raw) / sd)
        adjusted.append(math.log(found.adjusted) / sd)
    assert 0.9 < np.mean(raw) < 1.15
    assert abs(np.mean(adjusted)) < 0.2
    assert "boot_luck_not_removed" in found.reasons


def test_a_real_champion_keeps_its_value():
    found = champion(boots(np.random.default_rng(5), "abcd", 3, 12, {"c": 0.3}), higher=True)
    assert (found.arm, found.part, found.picked) == ("c", "boot", {"c": 1.0})
    assert found.adjusted == pytest.approx(found.raw)
    assert champion([], higher=True) is None


def test_replicates_are_pooled_with_their_spread():
    found = replicates(
        "h", {"s1": math.log(487.2), "s2": math.log(511.6), "s3": math.log(484.4), "s4": math.log(474.2)}
    )
    assert found.value == pytest.approx(489.2, abs=0.2)
    assert found.highest == pytest.approx(511.6)
    assert found.sd == pytest.approx(0.0323, abs=5e-4)


def test_several_sessions_use_t_on_their_means():
    from scipy import stats

    x = [0.01, 0.03, 0.02, 0.015]
    found = over_sessions(x)
    theirs = stats.ttest_1samp(x, 0.0).confidence_interval(0.95)
    assert found.estimate.interval(0.95) == pytest.approx((theirs.low, theirs.high))
    assert over_sessions([]) is None
    assert over_sessions([0.1]).estimate is None


def test_a_composite_needs_acceptance_that_does_not_move():
    step, accept = Estimate(0.05, ((0.002, 15.0),)), Estimate(0.08, ((0.01, 60.0),))
    still = (Estimate(0.001, ((0.003, 60.0),)), Estimate(0.0, ((0.003, 60.0),)))
    found = composite(step, accept, still, margin=0.02)
    assert found.ratio == pytest.approx(math.exp(0.03))
    assert found.lo < found.ratio < found.hi
    assert found.reasons == ("composite",)
    moved = composite(step, accept, (Estimate(0.06, ((0.003, 60.0),)),), margin=0.02)
    assert (moved.ratio, moved.reasons) == (None, ("composite", "accept_moves"))
    loud = composite(step, accept, (Estimate(0.0, ((0.05, 60.0),)),), margin=0.02)
    assert (loud.ratio, loud.reasons) == (None, ("composite", "accept_may_move"))


def test_the_cheapest_design_resolves_and_no_neighbour_is_cheaper():
    prior, costs = default_prior("gpu"), Costs(480.0, 4.6, 24.0)
    best = cheapest("step_ms", 0.02, prior, costs, df_boot=24)[0]
    assert resolvable("step_ms", best.slots, best.boots, prior, best.design, df_boot=24) <= 0.02
    assert best.usd == pytest.approx(price(costs, best.boots, best.slots))
    if best.slots > 3:
        assert resolvable("step_ms", best.slots - 1, best.boots, prior, best.design, df_boot=24) > 0.02
    # Boots cost dollars and requests cents: many requests on few boots.
    rate = cheapest("decode_tok_s", 0.02, prior, costs, df_boot=24)[0]
    assert rate.boots == 2
    assert rate.slots > 100


def test_two_prices_of_a_token(make):
    row = make.row(
        completion_tokens=1001, tokens_in_window=1000, window_ms=2000.0, ttft_ms=500.0, e2e_ms=2500.0,
        decode_tok_s=500.0, steps=1000, accept_len=1.0, step_ms=2.0, gpu_set="0,1", joules=3003.0,
    )  # fmt: skip
    cell = economics([row], usd_per_hour={"main": 9.0}, usd_by_group={("main", "pair.p"): 0.1})[0]
    assert cell.tok_s == pytest.approx(1001 / 2.5)
    assert cell.usd_per_mtok_node == pytest.approx(9 / 3600 / (1001 / 2.5) * 1e6)
    assert cell.usd_per_mtok_spent == pytest.approx(0.1 / 1001 * 1e6)
    assert (cell.accelerators, cell.tok_s_per_gpu, cell.joules_per_token) == (
        2,
        pytest.approx(200.2),
        pytest.approx(3.0),
    )
    bare = economics([replace(row, joules=None)], usd_per_hour={}, usd_by_group={})[0]
    assert (bare.usd_per_mtok_node, bare.usd_per_mtok_spent, bare.joules_per_token) == (None, None, None)
    assert set(bare.reasons) == {"no_spend", "no_node_rate", "power_not_sampled"}
    assert gpus("cpu") is None


def test_frontiers_are_compared_where_they_overlap():
    a = [Point(20, 4.0, 0.01), Point(40, 8.0, 0.01), Point(80, 16.0, 0.01)]
    b = [replace(p, usd_per_mtok=p.usd_per_mtok * 0.8) for p in a]
    held = iso(a, b, at=50, hold="interactivity")
    assert held.ratio == pytest.approx(0.8)
    assert held.lo < 0.8 < held.hi
    cost = iso(a, b, at=8.0, hold="cost")
    assert cost.ratio == pytest.approx(1.25)
    assert iso(a, b, at=500, hold="interactivity").reasons == ("no_overlap",)
    assert iso(a[:1], b, at=50, hold="cost").ratio is None
    with pytest.raises(ValueError, match="hold is"):
        iso(a, b, at=1, hold="luck")


@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=8))
def test_no_point_of_a_frontier_is_beaten(points):
    all_ = [Point(x, y, 0.0) for x, y in points]
    for kept in pareto(all_):
        assert not any(
            p.interactivity > kept.interactivity and p.usd_per_mtok < kept.usd_per_mtok for p in all_
        )
