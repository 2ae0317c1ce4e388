"""Batches of a steady loop: tested for autocorrelation, and what happens where there is some."""

import numpy as np
import pytest

from campaign.analysis.pairs import BootSd, compare
from campaign.analysis.serial import independent, lag1
from campaign.analysis.variance import Boot


def series(rng, boots, w, rho):
    """AR(1) noise of unit variance."""
    y = np.empty((boots, w))
    y[:, 0] = rng.standard_normal(boots)
    for t in range(1, w):
        y[:, t] = rho * y[:, t - 1] + np.sqrt(1 - rho * rho) * rng.standard_normal(boots)
    return y


def test_the_test_has_its_level_and_finds_what_matters():
    rng = np.random.default_rng(5)
    runs = 2000
    false = sum(not independent(series(rng, 4, 12, 0.0)) for _ in range(runs)) / runs
    found = sum(not independent(series(rng, 4, 12, 0.6)) for _ in range(runs)) / runs
    # The normal approximation at 44 pairs; the level is 5 %.
    assert 0.02 < false < 0.08
    assert found > 0.9
    estimates = [lag1(series(rng, 4, 40, 0.0))[0] for _ in range(500)]
    assert abs(np.mean(estimates)) < 0.01


def test_too_little_says_nothing():
    assert lag1(np.zeros((3, 9))) is None
    assert lag1(np.arange(8.0).reshape(4, 2)) is None
    assert lag1(np.arange(6.0).reshape(1, 6)) is None
    assert not independent(np.arange(6.0).reshape(1, 6))


def boots(arm, y):
    return [Boot(arm, i, i, {f"w{t}": float(v) for t, v in enumerate(row)}) for i, row in enumerate(y)]


def test_the_boot_is_the_block_where_batches_are_not_independent():
    rng = np.random.default_rng(7)
    sd = BootSd(0.0, 100.0, "declared", 1.0)
    a, b = boots("a", series(rng, 6, 30, 0.9)), boots("b", series(rng, 6, 30, 0.9))
    plain = compare(a, b, boot=sd, resident=False, waves=True)
    checked = compare(a, b, boot=sd, resident=False, waves=True, serial=True)
    assert checked.reasons == ("autocorrelated",)
    assert checked.mean == plain.mean
    assert checked.boots_only.errors[0][0] > plain.boots_only.errors[0][0]
    assert checked.boots_only.errors[0][1] <= 10
    one = compare(a[:1], b[:1], boot=sd, resident=False, waves=True, serial=True)
    assert one.reasons == ("autocorrelated", "too_few_blocks")
    assert one.boots_only is None


@pytest.mark.parametrize("resident", [False, True])
def test_independent_batches_stay_the_blocks(resident):
    rng = np.random.default_rng(11)
    sd = BootSd(0.01, 100.0, "declared", 1.0)
    a, b = boots("a", series(rng, 4, 12, 0.0)), boots("b", series(rng, 4, 12, 0.0))
    plain = compare(a, b, boot=sd, resident=resident, waves=True)
    assert compare(a, b, boot=sd, resident=resident, waves=True, serial=True) == plain
