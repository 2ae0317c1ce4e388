import importlib.util
import json
import math
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from campaign.analysis.pairs import KNOWN_DF, BootSd, Pool, boot_sd, compare, pool_for
from campaign.analysis.variance import Boot, Split, boots_of, split
from campaign.plan.power import METRICS, Prior

ROOT = Path(__file__).parents[2]
SMALL = {
    c["name"]: c
    for c in json.loads((ROOT / "tests/data/cases/38_small_sets.json").read_text())["cases"]
    if "A" in c
}
NO_BOOT = BootSd(0.0, KNOWN_DF, "declared", None)
UNKNOWN = BootSd(None, 0.0, "unknown", None, ("boot_sd_unknown",))


def finite(value):
    """No NaN or infinity anywhere inside."""
    if isinstance(value, dict):
        return all(finite(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


def small(make, name):
    case = SMALL[name]
    rows = [
        make.row(arm=arm.lower(), slot=i, block=f"s{i}", step_ms=value)
        for arm in "AB"
        for i, value in enumerate(case[arm])
        if value is not None
    ]
    a = boots_of([r for r in rows if r.arm == "a"], "step_ms")
    b = boots_of([r for r in rows if r.arm == "b"], "step_ms")
    return compare(a, b, boot=NO_BOOT, resident=False)


# --- tiny sets


@pytest.mark.parametrize("name", sorted(SMALL))
def test_no_small_set_gives_nan_or_infinity(make, name):
    assert finite(asdict(small(make, name)))


@pytest.mark.parametrize(("name", "mean"), [("identical pairs", 0.0), ("constant shift", math.log(10 / 12))])
def test_zero_spread_claims_nothing(make, name, mean):
    found = small(make, name)
    assert found.mean == pytest.approx(mean)
    assert found.n == 3
    assert found.full is None
    assert found.boots_only is None
    assert found.reasons == ("no_spread",)


def test_one_pair_has_no_interval(make):
    found = small(make, "one pair")
    assert (found.n, found.full, found.reasons) == (1, None, ("too_few_blocks",))


def test_no_pairs_say_nothing(make):
    found = small(make, "no pairs")
    assert (found.n, found.mean, found.reasons) == (0, None, ("too_few_blocks",))


def test_only_whole_pairs_count(make):
    assert small(make, "unequal arms").n == 1


def test_a_zero_is_not_a_value(make):
    assert small(make, "ratio of zero").n == 1


def test_an_outlier_is_kept_and_the_median_stands_beside_the_mean(make):
    found = small(make, "outlier")
    assert found.n == 5
    assert abs(found.median) < 0.011
    assert found.mean < -0.3
    assert found.full.interval(0.95)[0] < found.mean < 0 < found.full.interval(0.95)[1]


# --- the interval


def table(y, arm, first_round=0):
    """Boots from an array [boots, slots]."""
    return [
        Boot(arm, k, first_round + k, {f"s{i}": float(v) for i, v in enumerate(row)})
        for k, row in enumerate(y)
    ]


def test_without_boot_variance_it_is_the_paired_t():
    rng = np.random.default_rng(3)
    a = rng.normal(0, 1, (2, 9))
    b = a + rng.normal(0.3, 0.2, (2, 9))
    found = compare(table(a, "a"), table(b, "b"), boot=NO_BOOT, resident=True)
    oracle = stats.ttest_rel(b.mean(axis=0), a.mean(axis=0))
    assert found.boots_only.p_zero() == pytest.approx(oracle.pvalue)
    assert found.full.interval(0.95) == pytest.approx(oracle.confidence_interval(0.95))


def test_declared_boot_variance_is_added_for_both_arms():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 0.01, (2, 9)), rng.normal(0, 0.01, (4, 9))
    declared = BootSd(0.05, KNOWN_DF, "declared", None)
    found = compare(table(a, "a"), table(b, "b", 5), boot=declared, resident=False)
    se = found.full.errors[0][0]
    assert se**2 == pytest.approx(found.boots_only.errors[0][0] ** 2 + 0.05**2 * (1 / 2 + 1 / 4))
    assert found.boots == 2


def test_unknown_boot_variance_leaves_the_interval_of_these_boots_only():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0, 0.01, (1, 9)), rng.normal(1, 0.01, (1, 9))
    found = compare(table(a, "a"), table(b, "b", 1), boot=UNKNOWN, resident=False)
    assert found.full is None
    assert found.boots_only is not None
    assert found.reasons == ("boot_sd_unknown",)


def test_the_overturning_boot_sd_is_where_significance_ends():
    rng = np.random.default_rng(8)
    a, b = rng.normal(0, 0.02, (2, 12)), rng.normal(0.05, 0.02, (2, 12))
    sd = compare(table(a, "a"), table(b, "b", 2), boot=UNKNOWN, resident=False).overturn_sd
    df = 11.0

    def t_at(value):
        within = compare(table(a, "a"), table(b, "b", 2), boot=UNKNOWN, resident=False).boots_only.errors[0][
            0
        ]
        return math.sqrt(within**2 + value**2)

    mean = compare(table(a, "a"), table(b, "b", 2), boot=UNKNOWN, resident=False).mean
    assert abs(mean) / t_at(sd) == pytest.approx(stats.t.ppf(0.975, df))


def test_what_a_round_does_to_both_residents_cancels():
    rng = np.random.default_rng(4)
    prompts, rounds = rng.normal(0, 0.1, 8), np.array([[0.0], [0.5], [-0.4]])
    a = prompts + rounds + rng.normal(0, 0.01, (3, 8))
    b = prompts + rounds + rng.normal(0, 0.01, (3, 8))
    together = split([*table(a, "a"), *table(b, "b")], resident=True)
    apart = split([*table(a, "a"), *table(b, "b", 3)], resident=False)
    assert math.sqrt(together.ms_boot) < 0.02
    assert math.sqrt(apart.ms_boot) > 0.2
    assert (together.df_boot, apart.df_boot) == (2, 4)


def test_resident_comparison_drops_a_round_that_holds_one_arm_only():
    rng = np.random.default_rng(4)
    a, b = rng.normal(0, 0.01, (3, 8)), rng.normal(0, 0.01, (2, 8))
    a[2] += 5
    found = compare(table(a, "a"), table(b, "b"), boot=NO_BOOT, resident=True)
    assert found.boots == 2
    assert abs(found.mean) < 0.1


def test_waves_spread_inside_boots_only():
    rng = np.random.default_rng(4)
    a = rng.normal(0, 0.01, (3, 2)) + np.array([[0.0], [1.0], [2.0]])
    b = rng.normal(0, 0.01, (3, 2)) + np.array([[0.0], [1.0], [2.0]])
    for arm, y in (("a", a), ("b", b)):
        assert arm in "ab"
        assert y.shape == (3, 2)

    def waves(y, arm):
        return [Boot(arm, k, k, {"w0": float(r[0]), "w1": float(r[1])}) for k, r in enumerate(y)]

    found = compare(waves(a, "a"), waves(b, "b"), boot=NO_BOOT, resident=True, waves=True)
    assert found.n == 6
    assert found.boots_only.errors[0][1] == 3.0  # 3 boots, 2 waves each
    assert found.boots_only.errors[0][0] < 0.02
    apart = compare(waves(a, "a"), waves(b, "b"), boot=NO_BOOT, resident=False, waves=True)
    assert apart.n == 6
    assert apart.boots_only.errors[0][0] < 0.02


def test_an_arm_that_cannot_vary_brings_no_boot_variance():
    rng = np.random.default_rng(4)
    b = rng.normal(0.5, 0.05, (2, 8))
    declared = BootSd(0.1, KNOWN_DF, "declared", None)
    found = compare(table(np.zeros((2, 8)), "a"), table(b, "b"), boot=declared, resident=False)
    added = found.full.errors[0][0] ** 2 - found.boots_only.errors[0][0] ** 2
    assert added == pytest.approx(0.1**2 / 2)


# --- where the boot sd comes from


def squares(ms_boot, df=4, ms_residual=1e-4, n=10):
    return Split(ms_boot, df, ms_residual, df * (n - 1), n)


def test_estimated_boot_sd_takes_the_residual_out():
    found = boot_sd("step_ms", Pool(True, squares(5e-4), (squares(5e-4),), ()))
    assert found.source == "estimated"
    assert found.sd == pytest.approx(math.sqrt(5e-4 - 1e-5))
    assert found.df == 4


def test_declared_holds_unless_the_boots_prove_it_too_small():
    own = squares(5e-4)
    assert boot_sd("step_ms", Pool(True, own, (own,), ()), declared=0.02).source == "declared"
    found = boot_sd("step_ms", Pool(True, own, (own,), ()), declared=0.001)
    assert (found.source, found.reasons) == ("estimated", ("declared_boot_sd_too_small",))


def test_prior_is_used_where_nothing_was_booted_twice_and_joined_where_it_was():
    known = Prior({}, {"step_ms": 0.01}, {}, boot_df={"step_ms": 12.0})
    alone = boot_sd("step_ms", Pool(False, None, (), ()), prior=known)
    assert (alone.sd, alone.df, alone.source) == (0.01, 12.0, "prior")
    own = squares(5e-4)
    joined = boot_sd("step_ms", Pool(True, own, (own,), ()), prior=known)
    assert joined.df == 16
    assert joined.sd == pytest.approx(math.sqrt((4 * 4.9e-4 + 12 * 1e-4) / 16))


def test_stated_defaults_are_never_evidence():
    stated = Prior({}, {"step_ms": 0.01}, {}, source="default")
    assert boot_sd("step_ms", Pool(False, None, (), ()), prior=stated).source == "unknown"


def test_a_pair_whose_boots_vary_more_than_the_rest_stands_alone():
    own, rest = squares(1e-1, df=3), squares(1e-4, df=8)
    found = boot_sd("step_ms", Pool(True, own, (own, rest), (rest,)))
    assert found.reasons == ("boot_sd_not_pooled",)
    assert found.df == 3
    calm = boot_sd("step_ms", Pool(True, rest, (rest, rest), (rest,)))
    assert calm.df == 16


def test_residents_never_lend_their_boot_variance_to_boots_apart():
    rng = np.random.default_rng(2)

    def boots(arms, k, base=0):
        return [
            Boot(arm, i, base + i, {f"s{j}": float(v) for j, v in enumerate(rng.normal(0, 1, 5))})
            for arm in arms
            for i in range(k)
        ]

    groups = {"pair.x": boots("ab", 1), "pair.y": boots("cd", 3)}
    designs = {"pair.x": "blocks", "pair.y": "alternated"}
    assert pool_for(groups, designs, "pair.x", ("a", "b")).whole == ()
    lent = pool_for(
        {"pair.x": boots("ab", 1), "pair.y": boots("cd", 3)},
        {"pair.x": "alternated", "pair.y": "blocks"},
        "pair.x",
        ("a", "b"),
    )
    assert lent.resident
    assert sum(s.df_boot for s in lent.whole) == 4


# --- coverage, by the simulation of bench/calibration.py


def _calibration():
    spec = importlib.util.spec_from_file_location("calibration", ROOT / "bench" / "calibration.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("design", "slots", "boots", "pairs", "slot_sd", "sd"),
    [
        ("alternated", 6, 2, 1, 0.0, 0.0),
        ("alternated", 16, 2, 1, 0.0, 3.0),
        ("alternated", 12, 2, 3, 0.5, 1.0),
        ("alternated", 16, 4, 1, 0.5, 0.3),
        ("blocks", 8, 3, 1, 0.5, 1.0),
        ("blocks", 16, 2, 3, 0.0, 0.3),
    ],
)
def test_aa_is_called_different_at_most_one_time_in_twenty(design, slots, boots, pairs, slot_sd, sd):
    calibration = _calibration()
    reps = 500
    found = calibration.calibrate(
        calibration.Setting(design, slots, boots, pairs, slot_sd, sd, round_sd=0.5), reps, seed=77
    )
    ceiling = float(stats.binom.ppf(0.999, reps, 0.05)) / reps
    assert found["false_different"] <= ceiling
    assert found["false_equivalent"] <= ceiling
    if sd >= 1.0:  # what intervals over prompts alone would have said
        assert found["false_different_boots_only"] > 2 * ceiling


def test_power_promises_what_the_analysis_finds():
    """80 % of simulated sessions find the difference that `resolvable` names."""
    from campaign.plan.power import resolvable

    calibration = _calibration()
    setting = calibration.Setting("alternated", 12, 4, 2, 0.5, 0.6)
    unit = setting.residual_sd
    prior = Prior(
        dict.fromkeys(METRICS, setting.slot_sd * unit),
        dict.fromkeys(METRICS, setting.boot_sd * unit),
        dict.fromkeys(METRICS, unit),
    )
    shift = math.log1p(resolvable("step_ms", 12, 4, prior, "alternated", df_boot=6.0))
    rng = np.random.default_rng(9)
    reps = 500
    hits = sum(
        calibration.estimate(calibration.session(rng, setting, shift), "alternated").full.p_zero() < 0.05
        for _ in range(reps)
    )
    assert 0.74 < hits / reps < 0.87
