import numpy as np
import pytest

from campaign.analysis.variance import Boot, boots_of, common_blocks, components, pool, prior, split
from campaign.plan.power import METRICS, default_prior


def table(y, arm, first_round=0):
    return [
        Boot(arm, k, first_round + k, {f"s{i}": float(v) for i, v in enumerate(row)})
        for k, row in enumerate(y)
    ]


def test_mean_squares_of_one_arm_are_the_two_way_split():
    rng = np.random.default_rng(1)
    y = rng.normal(0, 1, (3, 7)) + rng.normal(0, 1, (3, 1)) + rng.normal(0, 1, 7)
    found = split(table(y, "a"), resident=False)
    means = y.mean(axis=1)
    inner = y - means[:, None] - y.mean(axis=0) + y.mean()
    assert found.ms_boot == pytest.approx(means.var(ddof=1))
    assert found.ms_residual == pytest.approx((inner**2).sum() / 12)
    assert (found.df_boot, found.df_residual, found.n) == (2, 12, 7)


def test_residents_are_the_interaction_of_arm_and_round():
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, (3, 7)), rng.normal(0, 1, (3, 7))
    found = split([*table(a, "a"), *table(b, "b")], resident=True)
    d = (b - a).mean(axis=1)
    assert found.ms_boot == pytest.approx(d.var(ddof=1) / 2)
    inner = (b - a) - d[:, None] - (b - a).mean(axis=0) + (b - a).mean()
    assert found.ms_residual == pytest.approx((inner**2).sum() / 12 / 2)


def test_boot_variance_is_unbiased():
    rng = np.random.default_rng(2)
    truth, found = 0.02**2, []
    for _ in range(800):
        y = rng.normal(0, 0.02, (2, 1)) + rng.normal(0, 0.05, (2, 10))
        found.append(split(table(y, "a"), resident=False).boot_variance)
    assert np.mean(found) == pytest.approx(truth, rel=0.2)


def test_pooling_weighs_by_degrees_of_freedom_and_never_goes_below_zero():
    rng = np.random.default_rng(3)
    splits = [split(table(rng.normal(0, 1, (k, 5)), "a"), resident=False) for k in (2, 4)]
    expect = (1 * splits[0].boot_variance + 3 * splits[1].boot_variance) / 4
    found = pool(splits)
    assert found.variance == pytest.approx(max(0.0, expect))
    assert found.df == 4
    assert pool([]) is None


def test_an_arm_that_cannot_vary_lends_no_degrees_of_freedom():
    rng = np.random.default_rng(3)
    boots = [*table(np.zeros((3, 5)), "none"), *table(rng.normal(0, 1, (3, 5)), "d3", 3)]
    assert split(boots, resident=False).df_boot == 2


def test_nothing_booted_twice_gives_nothing():
    assert split(table(np.ones((1, 5)), "a"), resident=False) is None
    assert split([], resident=False) is None


def test_blocks_come_in_natural_order():
    boots = [Boot("a", 0, 0, {f"s{i}": 0.0 for i in range(12)})]
    assert common_blocks(boots)[9:] == ["s9", "s10", "s11"]


def test_a_wave_that_lost_a_request_is_dropped(make):
    rows = [
        make.row(boot_index=k, slot=s, block=f"w{w}", concurrency=2, step_ms=10.0 + s, order=w)
        for k in range(2)
        for w in range(2)
        for s in range(2)
    ]
    lost = [r for r in rows if not (r.boot_index == 0 and r.block == "w1" and r.slot == 1)]
    boots = boots_of(lost, "step_ms")
    assert sorted(boots[0].values) == ["w0"]
    assert sorted(boots[1].values) == ["w0", "w1"]


def test_unusable_rows_never_enter(make):
    rows = [
        make.row(step_ms=10.0, state="failed"),
        make.row(step_ms=10.0, validity="void"),
        make.row(step_ms=10.0, phase="warmup"),
        make.row(step_ms=None),
        make.row(step_ms=0.0),
    ]
    assert boots_of(rows, "step_ms") == []


def test_every_level_comes_back(make):
    """Components of a large simulated store are those it was made of."""
    rng = np.random.default_rng(11)
    rows = []
    for session in range(12):
        node = rng.normal(0, 0.03)
        group = make.group("pair.p", "pair", ("a", "b"), boots=4, slots=16)
        effects = make.effects(shift=node, boot_sd=0.01, residual_sd=0.02, slot_sd=0.05)
        mine = make.rows_of(group, {"a": effects, "b": effects}, seed=session)
        own = {(arm, s): rng.normal(0, 0.04 / np.sqrt(2)) for arm in "ab" for s in range(16)}
        rows += [
            make.replace(
                r,
                session=f"s{session}",
                arm_hash=r.arm * 16,
                step_ms=r.step_ms * np.exp(own[r.arm, r.slot]),
            )
            for r in mine
        ]
    found = components(rows)["step_ms"]
    assert found.residual_sd == pytest.approx(0.02, rel=0.1)
    assert found.boot_sd == pytest.approx(0.01, rel=0.25)
    assert found.slot_sd == pytest.approx(0.04, rel=0.2)
    assert found.session_sd == pytest.approx(0.03, rel=0.6)
    assert found.boot_df == 12 * 3
    assert found.session_df == 22


def test_a_prior_takes_from_rows_what_they_know_and_the_rest_from_the_fallback(make):
    group = make.group("anchor.first", "anchor", ("a",), boots=3, design="anchor")
    rows = make.rows_of(group, {"a": make.effects(boot_sd=0.05)})
    cpu = default_prior("cpu")
    found = prior(rows, cpu)
    assert found.source == "prior"
    assert found.boot_df["step_ms"] == 2
    assert found.slot_sd == cpu.slot_sd
    assert found.boot_sd["step_ms"] != cpu.boot_sd["step_ms"]
    assert prior([], cpu) is cpu
    assert all(v >= 0 for m in METRICS for v in (found.boot_sd[m], found.residual_sd[m]))
