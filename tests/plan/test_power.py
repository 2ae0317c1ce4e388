import math

import numpy as np
import pytest
from statsmodels.stats.power import TTestPower

from campaign.plan.model import BootPlan, GroupPlan, RoundPlan
from campaign.plan.power import (
    METRICS,
    Precision,
    Prior,
    achieved_power,
    boot_df,
    default_prior,
    needed_boots,
    needed_slots,
    precision,
    resolvable,
    satterthwaite,
    session_boot_df,
)


def prior(slot=0.0, boot=0.0, residual=0.0, df=None):
    return Prior(
        dict.fromkeys(METRICS, slot),
        dict.fromkeys(METRICS, boot),
        dict.fromkeys(METRICS, residual),
        boot_df={} if df is None else dict.fromkeys(METRICS, df),
    )


# --- against statsmodels and published counts


@pytest.mark.parametrize("n", [4, 8, 16, 64])
@pytest.mark.parametrize("power", [0.5, 0.8, 0.95])
def test_one_known_boot_is_the_paired_t_of_statsmodels(n, power):
    found = resolvable("step_ms", n, 1, prior(residual=0.01), "blocks", power=power)
    effect = TTestPower().solve_power(nobs=n, alpha=0.05, power=power, alternative="two-sided")
    assert math.log1p(found) == pytest.approx(effect * 0.01 * math.sqrt(2), rel=1e-3)


@pytest.mark.parametrize("difference", [0.5, 1.0, 3.0])
def test_power_of_one_error_is_that_of_statsmodels(difference):
    found = achieved_power(difference * 0.01, Precision(0.01**2 / 12, 11.0, 0.0, 1e6))
    assert found == pytest.approx(TTestPower().power(difference, 12, 0.05), rel=1e-6)


def test_two_percent_in_tok_s_takes_about_175_pairs_and_in_step_time_a_handful():
    """Residuals of a published campaign: 6.6 % in tok/s and 0.86 % in step time, one boot, normal: 175 and 3."""
    z = prior()
    record = Prior(z.slot_sd, z.boot_sd, default_prior("gpu").residual_sd)
    assert needed_slots("decode_tok_s", 1, 0.02, record, "blocks") in range(170, 182)
    assert needed_slots("step_ms", 1, 0.02, record, "blocks") in range(3, 8)
    assert needed_slots("step_ms", 1, 0.01, record, "blocks") in range(12, 16)
    assert resolvable("decode_tok_s", 16, 1, record, "blocks") == pytest.approx(0.07, abs=0.005)


# --- shape


def test_satterthwaite_of_one_term_is_its_own():
    assert satterthwaite([(2.0, 3.0, 5.0)]) == pytest.approx((6.0, 5.0))
    assert satterthwaite([(0.0, 3.0, 5.0)]) == (0.0, 0.0)


def test_satterthwaite_of_two_equal_terms_adds_their_degrees_of_freedom():
    assert satterthwaite([(1.0, 1.0, 4.0), (1.0, 1.0, 4.0)])[1] == pytest.approx(8.0)


def test_variance_is_that_of_the_model():
    found = precision("step_ms", 10, 4, prior(0.03, 0.02, 0.05), "alternated")
    assert found.variance == pytest.approx(0.03**2 / 10 + 2 * 0.05**2 / 40 + 2 * 0.02**2 / 4)


@pytest.mark.parametrize("design", ["alternated", "blocks"])
def test_more_boots_and_more_slots_resolve_more(design):
    p = default_prior("cpu")
    for metric in METRICS:
        by_boots = [resolvable(metric, 12, k, p, design) for k in (2, 3, 4, 8)]
        by_slots = [resolvable(metric, n, 4, p, design) for n in (4, 8, 16, 64)]
        assert by_boots == sorted(by_boots, reverse=True)
        assert by_slots == sorted(by_slots, reverse=True)
        assert all(math.isfinite(x) and x > 0 for x in (*by_boots, *by_slots))


def test_boots_set_a_floor_that_slots_do_not_break():
    p = prior(boot=0.02, residual=0.001)
    assert resolvable("step_ms", 4096, 2, p, "blocks") > 0.05
    assert needed_slots("step_ms", 2, 0.01, p, "blocks") is None
    boots = needed_boots("step_ms", 16, 0.02, p, "blocks")
    assert (
        resolvable("step_ms", 16, boots, p, "blocks")
        <= 0.02
        < resolvable("step_ms", 16, boots - 1, p, "blocks")
    )


def test_needed_slots_is_the_least():
    p = default_prior("gpu")
    n = needed_slots("step_ms", 4, 0.01, p, "alternated")
    assert (
        resolvable("step_ms", n, 4, p, "alternated")
        <= 0.01
        < resolvable("step_ms", n - 1, 4, p, "alternated")
    )
    assert needed_boots("step_ms", 4, 0.0001, p, "alternated", at_most=8) is None


def test_what_the_boots_of_a_session_know_helps_every_pair():
    p = default_prior("cpu")
    assert resolvable("step_ms", 12, 2, p, "alternated", df_boot=8) < resolvable(
        "step_ms", 12, 2, p, "alternated"
    )
    assert resolvable("step_ms", 12, 2, prior(0.01, 0.02, 0.04, df=8.0), "alternated") < resolvable(
        "step_ms", 12, 2, prior(0.01, 0.02, 0.04), "alternated"
    )


def test_nothing_varies_nothing_to_resolve():
    assert resolvable("step_ms", 4, 2, prior(), "alternated") == 0.0


def test_impossible_designs_are_refused():
    with pytest.raises(ValueError, match="2 slots"):
        resolvable("step_ms", 1, 2, prior(), "alternated")


# --- degrees of freedom


@pytest.mark.parametrize(
    ("boots", "design", "arms", "df"),
    [
        (2, "alternated", 2, 1),
        (2, "blocks", 2, 2),
        (4, "alternated", 4, 9),
        (1, "blocks", 2, 0),
        (3, "anchor", 1, 2),
    ],
)
def test_boot_df_of_a_group(boots, design, arms, df):
    assert boot_df(boots, design, arms) == df


def group(name, arms, boots, *, resident):
    held = (
        [[(a, k) for a in arms] for k in range(boots)]
        if resident
        else [[(a, k)] for k in range(boots) for a in arms]
    )
    rounds = tuple(
        RoundPlan(f"{name}/r{i}", i, tuple(BootPlan(a, k, "p0", ()) for a, k in these), (), ())
        for i, these in enumerate(held)
    )
    design = "alternated" if resident else "blocks"
    return GroupPlan(name, "pair", design, "", tuple(arms), "w", 1, rounds, 1.0, 0)


def test_boot_df_of_a_session_is_pooled_by_manner():
    groups = [
        group("ladder.d", "abcd", 2, resident=True),
        group("pair.p", "ab", 2, resident=True),
        group("anchor.first", "a", 2, resident=False),
        group("anchor.last", "a", 2, resident=False),
    ]
    assert session_boot_df(groups, resident=True) == 3 + 1
    assert session_boot_df(groups, resident=False) == 2
    assert session_boot_df([], resident=True) == 0


def test_power_is_reached_in_simulation():
    """Means and mean squares drawn from their own distributions find the resolvable difference 4 times in 5."""
    from scipy import stats

    rng = np.random.default_rng(3)
    n, k, df, reps = 10, 3, 6.0, 20_000
    p = prior(0.02, 0.02, 0.03)
    shift = math.log1p(resolvable("step_ms", n, k, p, "blocks", df_boot=df))
    within = (0.02**2 + 2 / k * 0.03**2) / n
    seen = 2 / k * (0.02**2 + 0.03**2 / n)
    noise = 2 / k / n * 0.03**2
    a = within * rng.chisquare(n - 1, reps) / (n - 1)
    b = seen * rng.chisquare(df, reps) / df
    c = noise * rng.chisquare(df * (n - 1), reps) / (df * (n - 1))
    mean = rng.normal(shift, math.sqrt(within + 2 / k * 0.02**2), reps)
    total = a + np.maximum(b - c, 0)
    free = np.maximum(total**2 / (a**2 / (n - 1) + b**2 / df + c**2 / df / (n - 1)), min(df, n - 1))
    half = np.maximum(stats.t.ppf(0.975, free) * np.sqrt(total), stats.t.ppf(0.975, df) * np.sqrt(b))
    assert np.mean(np.abs(mean) > half) == pytest.approx(0.8, abs=0.05)
