"""Load shapes: what is planned when, what is cut, and that nothing else of the plan moves."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.plan.arrivals import load_plan, offsets_ns, ramp_s
from campaign.plan.order import Layout, build_rounds
from campaign.spec.models import Load


def layout(load, *, slots=4, boots=2, concurrency=3):
    return Layout("pair.x", ("a", "b"), (), (0, 0), slots, boots, concurrency, "w", 1, (0, 0), load)


@given(st.sampled_from(["alternated", "blocks"]), st.integers(1, 6), st.integers(2, 4), st.integers(2, 9))
def test_steady_cuts_whole_slot_sets_that_hold_the_concurrency(design, slots, boots, c):
    plan = load_plan(Load(shape="steady"), c, slots)
    assert plan.cut_sets * slots >= c
    plain = build_rounds(design, layout(None, slots=slots, boots=boots, concurrency=c))
    rounds = build_rounds(design, layout(Load(shape="steady"), slots=slots, boots=boots, concurrency=c))
    assert len(rounds) == len(plain)
    for round_, before in zip(rounds, plain, strict=True):
        for boot in round_.boots:
            mine = [q for q in round_.sequence if q.arm == boot.arm]
            kept = [q for q in mine if not q.cut]
            # As many are kept as waves would have; ramp first, tail last, one arm after the other.
            assert len(kept) == sum(q.arm == boot.arm for q in before.sequence)
            edge = plan.cut_sets * slots
            assert [q.cut for q in mine] == [True] * edge + [False] * len(kept) + [True] * edge
            assert [q.order for q in mine] == list(range(mine[0].order, mine[0].order + len(mine)))
        assert len({(q.arm, q.slot, q.seed) for q in round_.sequence}) == len(round_.sequence)


def test_waves_and_no_load_are_the_same_plan():
    assert build_rounds("alternated", layout(Load())) == build_rounds("alternated", layout(None))


def test_constant_and_schedule():
    assert offsets_ns(Load(shape="constant", rate=4), 3, "k") == (0, 250_000_000, 500_000_000)
    load = Load(shape="schedule", at_s=(0, 0.5, 2))
    assert offsets_ns(load, 99, "k") == (0, 500_000_000, 2_000_000_000)
    (first, _) = build_rounds("alternated", layout(load))
    mine = [q for q in first.sequence if q.arm == "a"]
    assert [(q.slot, q.at_ns, q.cut) for q in mine] == [
        (0, 0, False),
        (1, 500_000_000, False),
        (2, 2_000_000_000, False),
    ]
    assert load_plan(load, 3, 4).rate == 1.0


@given(st.floats(0.5, 500), st.text(max_size=5))
def test_poisson_has_the_rate_and_is_the_same_for_both_arms(rate, key):
    load = Load(shape="poisson", rate=rate)
    times = offsets_ns(load, 4000, key)
    assert times == offsets_ns(load, 4000, key)
    assert list(times) == sorted(times)
    # 4000 gaps: the mean is within 8 % (5 standard errors).
    assert (len(times) - 1) / times[-1] * 1e9 == pytest.approx(rate, rel=0.08)


def test_both_arms_see_the_same_arrivals_and_boots_others():
    rounds = build_rounds("alternated", layout(Load(shape="poisson", rate=5)))
    seen = [{arm: [q.at_ns for q in r.sequence if q.arm == arm] for arm in ("a", "b")} for r in rounds]
    assert all(s["a"] == s["b"] for s in seen)
    assert seen[0]["a"] != seen[1]["a"]


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.integers(2, 300))
def test_a_ramp_goes_from_one_rate_to_the_other(first, last, count):
    at = ramp_s(first, last, count)
    whole = 2 * count / (first + last)
    assert at[0] == 0
    assert all(a < b for a, b in itertools.pairwise(at))
    assert at[-1] < whole
    slope = (last - first) / whole
    # Requests up to each moment, by the integral of the rate.
    assert [first * t + slope * t * t / 2 for t in at] == pytest.approx(list(range(count)), abs=1e-6 * count)
    load = Load(shape="ramp", rate=first, to_rate=last)
    plan = load_plan(load, 8, 4)
    assert (plan.cut_sets, plan.open, plan.rate) == (0, True, (first + last) / 2)
    assert offsets_ns(load, count, "k") == tuple(round(t * 1e9) for t in at)
