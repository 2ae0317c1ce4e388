from datetime import timedelta
from decimal import Decimal
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.money import MicroUsd, bill, micro
from campaign.plan.cost import (
    ROUND_S,
    SAFETY,
    STOP_S,
    ArmTimes,
    Price,
    apportion,
    arm_times,
    billed,
    declared_prices,
    group_seconds,
    lease,
)
from campaign.plan.order import Layout, build_rounds, waves
from campaign.spec.models import Arm, Gates, Workload

FREE = Price(MicroUsd(0), 1, "declared", 0, 5)
prices = st.builds(
    Price,
    st.integers(0, 500_000_000).map(MicroUsd),
    st.sampled_from([1, 60, 3600]),
    st.just("cap"),
    st.integers(0, 600),
    st.integers(0, 600),
)
WORKLOAD = Workload(pack="copy", n=8, max_tokens=64)


def arm(**fields):
    return Arm.model_validate({"engine": "llamacpp", **fields})


# --- times


def test_a_plain_llamacpp_arm_takes_the_table():
    times = arm_times(arm(), WORKLOAD)
    assert (times.boot_s, times.ttft_ms, times.step_ms, times.accept_len) == (1.5, 800, 14, 1)
    assert times.source == "default"


def test_each_further_verified_token_costs_eleven_ms_where_half_the_steps_draft():
    by_depth = {d: arm_times(arm(speculation={"method": "ngram", "depth": d}), WORKLOAD) for d in (3, 5, 8)}
    assert [by_depth[d].step_ms for d in (3, 5, 8)] == [14 + 11 * d / 2 for d in (3, 5, 8)]
    # Measured: W=3 gives 0.73 of plain tok/s, W=8 0.51 +-0.13; the defaults must not promise a gain.
    plain = arm_times(arm(), WORKLOAD)
    speed = {d: (t.accept_len / t.step_ms) * plain.step_ms for d, t in by_depth.items()}
    assert 0.6 < speed[3] < 0.85
    assert 0.3 < speed[8] < 0.65


def test_depth_zero_is_plain_decoding():
    none = arm_times(arm(speculation={"method": "ngram", "depth": 0}), WORKLOAD)
    assert (none.step_ms, none.accept_len) == (14, 1)


def test_an_estimate_wins_field_by_field():
    times = arm_times(arm(estimate={"step_ms": 9.0}), WORKLOAD)
    assert (times.step_ms, times.ttft_ms, times.source) == (9, 800, "estimate+default")
    full = {"boot_s": 2.0, "ttft_ms": 5.0, "step_ms": 3.0, "accept_len": 2.0}
    assert arm_times(arm(estimate=full), WORKLOAD) == ArmTimes(2, 5, 3, 2, "estimate")


def test_longer_prompts_take_longer_to_the_first_token():
    long = WORKLOAD.model_copy(update={"tokens": (900, 1000)})
    assert arm_times(arm(), long).ttft_ms > 10 * arm_times(arm(), WORKLOAD).ttft_ms


def test_a_request_is_prefill_and_steps():
    assert ArmTimes(0, 500, 10, 2, "default").request_s(WORKLOAD) == pytest.approx(0.5 + 63 / 2 * 0.01)


@given(
    design=st.sampled_from(["alternated", "blocks", "anchor"]),
    arms=st.integers(1, 4),
    slots=st.integers(1, 6),
    boots=st.integers(1, 5),
    concurrency=st.sampled_from([1, 3]),
)
def test_group_seconds_is_what_its_rounds_add_up_to(design, arms, slots, boots, concurrency):
    """Walk the rounds that are really built: every boot, warm-up and wave at its price in seconds."""
    workload = WORKLOAD.model_copy(update={"n": slots})
    times = {
        n: ArmTimes(2.0 + i, 300 + 10 * i, 8 + i, 1 + i / 2, "default") for i, n in enumerate("abcd"[:arms])
    }
    layout = Layout("g", tuple(times), (), (0,) * arms, slots, boots, concurrency, "copy", 1, (0,) * arms)
    total = 0.0
    for rnd in build_rounds(design, layout):
        total += ROUND_S + sum(times[b.arm].boot_s + STOP_S for b in rnd.boots)
        in_flight = min(concurrency, slots)
        # A boot's warm-up is one wave, in flight together.
        total += sum(times[b.arm].request_s(workload, in_flight) for b in rnd.boots)
        for (name, _), wave in groupby(rnd.sequence, key=lambda q: (q.arm, q.wave)):
            size = len(list(wave))
            batches = size if concurrency == 1 else -(-size // in_flight)
            total += batches * times[name].request_s(workload, in_flight)
    found = group_seconds(
        design,
        list(times.values()),
        workload,
        boots=boots,
        waves=waves(boots, concurrency),
        concurrency=concurrency,
    )
    assert found == pytest.approx(total)


def test_a_duet_is_as_long_as_its_slower_arm():
    fast, slow = ArmTimes(1, 100, 10, 1, "default"), ArmTimes(1, 100, 20, 1, "default")
    shape = {"boots": 1, "waves": 1, "concurrency": 1}
    both = group_seconds("duet", [fast, slow], WORKLOAD, **shape)
    apart = group_seconds("alternated", [fast, slow], WORKLOAD, **shape)
    assert apart - both == pytest.approx(8 * fast.request_s(WORKLOAD))


# --- money


def test_a_rented_node_is_priced_at_its_cap(rented, quickstart):
    assert declared_prices(rented()) == {"four": Price(MicroUsd(12_000_000), 60, "cap", 150, 300)}
    assert declared_prices(quickstart()) == {"here": Price(MicroUsd(600_000), 1, "declared", 0, 5)}


@given(work=st.floats(0, 1e6), setup=st.floats(0, 3600), price=prices, max_hours=st.floats(0.001, 720))
def test_the_worst_case_is_never_less_than_the_expected(work, setup, price, max_hours):
    terms = lease(work, setup, price, max_hours, Gates())
    assert isinstance(terms.usd_expected, int)
    assert isinstance(terms.usd_worst, int)
    assert 0 <= terms.usd_expected <= terms.usd_worst
    assert terms.lease_s <= max_hours * 3600
    assert terms.expected_s <= min(terms.lease_s, terms.wanted_s)


def test_the_lease_has_room_for_a_boot_and_a_request_that_time_out():
    gates = Gates(boot_timeout=timedelta(seconds=100), request_timeout=timedelta(seconds=20))
    terms = lease(596, 4, Price(micro(Decimal("3.6")), 1, "declared", 0, 5), 2, gates)
    assert terms.lease_s == 600 * SAFETY + 120
    assert terms.usd_worst == 1_025_000  # 1020 s + 5 s at $0.001 a second


def test_the_worst_case_counts_the_dead_man_and_the_teardown_by_whole_units():
    price = Price(micro(12), 60, "cap", 150, 300)
    terms = lease(3000, 420, price, 3, Gates())
    length = 3420 * 1.5 + 420
    minutes = -(-(length + 150) // 60) + 5
    assert terms.usd_worst == minutes * 200_000


def test_a_free_node_costs_nothing():
    terms = lease(1e5, 4, FREE, 100, Gates())
    assert (terms.usd_expected, terms.usd_worst) == (0, 0)


@given(price=prices, seconds=st.floats(0, 1e6))
def test_a_bill_is_never_understated(price, seconds):
    assert billed(price, seconds) * 3600 >= price.usd_per_hour * seconds * (1 - 1e-12)
    assert billed(price, seconds) >= bill(price.usd_per_hour, int(seconds * 1e9), 1)


@given(
    total=st.integers(0, 10**12),
    weights=st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=20),
)
def test_shares_add_up_to_the_whole(total, weights):
    shares = apportion(MicroUsd(total), weights)
    assert sum(shares) == total
    assert all(isinstance(s, int) and s >= 0 for s in shares)
    whole = sum(weights)
    if whole > 0:
        for share, weight in zip(shares, weights, strict=True):
            assert share == pytest.approx(total * weight / whole, rel=1e-6, abs=2 + total * 1e-9)
