import math

import numpy as np
import pytest
from scipy import stats

from campaign.analysis.drift import Past, judge
from campaign.spec.models import Reference


@pytest.fixture
def rows(make):
    """Rows of one anchor position, by true drift on the log scale."""

    def build(position, shift=0.0, *, seed=1, boots=2, slots=8, **effects):
        base = {"slot_sd": 0.01, "boot_sd": 0.002, "residual_sd": 0.003, **effects}
        return make.rows_of(
            make.anchor_group(position, boots=boots, slots=slots),
            {"a": make.effects(shift=shift, **base)},
            seed,
        )

    return build


def run(make, position, positions, **fields):
    anchor = make.anchor(**fields.pop("anchor", {}))
    base = {"session": "main", "anchor": anchor, "declared_boot_sd": None, "prior_boot_sd": None}
    return judge(position, positions, **{**base, **fields})


def test_the_first_anchor_establishes(make, rows):
    found = run(make, "first", {"first": rows("first")})
    assert (found.ok, found.reasons, found.drift) == (None, ("established",), None)
    assert found.step_ms == pytest.approx(10, rel=0.05)
    assert (found.n, found.boots) == (8, 2)


@pytest.mark.parametrize(("shift", "ok"), [(0.0, True), (0.3, False), (-0.3, False)])
def test_a_value_is_a_reference(make, rows, shift, ok):
    anchor = {"reference": Reference(step_ms=10.0), "drift_delta": 0.1}
    found = run(make, "first", {"first": rows("first", shift)}, anchor=anchor, declared_boot_sd=0.005)
    assert found.ok is ok
    assert found.reference_ms == 10.0
    assert found.drift == pytest.approx(math.expm1(shift), abs=0.03)
    assert found.lo < found.drift < found.hi


def test_later_anchors_are_held_against_the_first_whatever_their_order(make, rows):
    positions = {"last": rows("last", 0.2, seed=2), "between1": rows("between1"), "first": rows("first")}
    found = run(make, "last", positions, declared_boot_sd=0.005)
    assert found.ok is False
    assert found.reference_ms == run(make, "first", positions).step_ms
    assert run(make, "between1", positions, declared_boot_sd=0.005).ok is not False


def test_without_a_prior_for_the_boots_it_is_a_screen(make, rows):
    positions = {"first": rows("first"), "last": rows("last", 0.5)}
    found = run(make, "last", positions)
    assert found.reasons == ("screen",)
    assert found.ok is False
    assert run(make, "last", positions, prior_boot_sd=0.002).reasons == ()


def test_what_is_not_excluded_is_unproven(make, rows):
    positions = {"first": rows("first"), "last": rows("last", 0.01)}
    found = run(make, "last", positions, anchor={"drift_delta": 0.01}, declared_boot_sd=0.02)
    assert (found.ok, found.reasons) == (None, ("drift_unproven",))
    assert found.lo < -0.01
    assert found.hi > 0.01


def test_one_boot_an_anchor_and_nothing_known(make, rows):
    positions = {"first": rows("first", boots=1), "last": rows("last", 0.5, boots=1)}
    found = run(make, "last", positions)
    assert (found.ok, found.reasons, found.lo) == (None, ("too_few_boots",), None)
    assert found.drift > 0.4


def test_a_later_anchor_without_the_first_has_no_reference(make, rows):
    assert run(make, "last", {"last": rows("last")}).reasons == ("no_reference",)


def test_an_anchor_without_rows(make, rows):
    found = run(make, "last", {"first": rows("first")})
    assert (found.step_ms, found.ok, found.reasons) == (None, None, ("missing_slots",))


def test_the_store_is_a_reference_of_at_least_two(make, rows):
    store = {"reference": "store", "drift_delta": 0.05}
    positions = {"first": rows("first", 0.3)}
    assert run(make, "first", positions, anchor=store).reasons == ("no_reference",)
    found = run(make, "first", positions, anchor=store, past=Past(10.0, 0.01, 6))
    assert found.ok is False
    near = run(make, "first", {"first": rows("first")}, anchor=store, past=Past(10.0, 0.01, 6))
    assert near.ok is not False
    oracle = stats.t.ppf(0.95, 5) * 0.01 * math.sqrt(1 + 1 / 6)
    assert math.log1p(near.hi) - math.log1p(near.drift) == pytest.approx(oracle)


def test_the_error_rate_is_split_over_the_planned_anchors(make, rows):
    positions = {"first": rows("first"), "last": rows("last", 0.02)}
    few = run(make, "last", positions, declared_boot_sd=0.01, planned=2)
    many = run(make, "last", positions, declared_boot_sd=0.01, planned=6)
    assert many.hi - many.lo > few.hi - few.lo


def test_false_alarms_at_the_edge_of_delta(make, rows):
    """A true drift of exactly delta is called proven at most at the stated rate, and so is none of it."""
    delta, reps = 0.02, 300
    rng = np.random.default_rng(6)
    wrong = shown = 0
    for _ in range(reps):
        seeds = rng.integers(0, 2**31, 2)
        edge = {
            "first": rows("first", seed=int(seeds[0]), boot_sd=0.01, boots=3, slots=6),
            "last": rows("last", math.log1p(delta), seed=int(seeds[1]), boot_sd=0.01, boots=3, slots=6),
        }
        found = run(make, "last", edge, anchor={"drift_delta": delta})
        wrong += found.ok is False
        shown += found.ok is True
    ceiling = stats.binom.ppf(0.999, reps, 0.05) / reps
    assert wrong / reps <= ceiling
    assert shown / reps <= ceiling
