import json
import math
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from campaign.analysis.conclude import conclude
from campaign.analysis.validity import hit_rate
from campaign.plan.power import Prior

CASES = Path(__file__).parents[1] / "data" / "cases"


def finite(value):
    if isinstance(value, dict):
        return all(finite(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return all(finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)


@pytest.fixture
def judge(make):
    def run(rows, plan, **fields):
        base = {
            "declared_boot_sd": {},
            "confidence": 0.95,
            "usd_by_group": {},
            "partial": False,
            "anchor": make.anchor(),
        }
        return conclude(rows, plan, **{**base, **fields})

    return run


@pytest.fixture
def pair(make):
    """(group, rows, verdict by metric) of one pair with three boots an arm."""
    group = make.group("pair.p", "pair", ("a", "b"), boots=3, slots=8)

    def build(shift=0.0, kind="pair", **effects):
        rows = make.rows_of(group, {"a": make.effects(**effects), "b": make.effects(shift=shift, **effects)})
        return group, rows, make.plan([group], [make.comparison(group, "a", "b", kind=kind)])

    return build


def first(found, metric="step_ms"):
    return next(v for v in found.verdicts if v.metric == metric)


# --- words


@pytest.mark.parametrize(
    ("shift", "step", "rate"),
    [(0.05, "slower", "slower"), (-0.05, "faster", "faster"), (0.0, "equivalent", "equivalent")],
)
def test_lower_step_time_and_higher_rate_are_faster(judge, pair, shift, step, rate):
    _, rows, plan = pair(shift)
    found = judge(rows, plan)
    assert first(found).verdict == step
    assert first(found, "decode_tok_s").verdict == rate
    assert first(found).boot_sd_source == "estimated"
    assert first(found).boots == 3
    assert first(found).n == 8


def test_one_acceptance_of_a_whole_cell_makes_no_interval(judge, make, pair):
    """Arm b's counters are of its cell: the spread of arm a alone says nothing of b's."""
    _, rows, plan = pair()
    rows = [
        make.replace(r, accept_len=2.0, reasons=("counters_of_cell", "counters_with_ramp"))
        if r.arm == "b"
        else make.replace(r, accept_len=1.2 * (1 + 0.01 * (7 * r.order % 5)))
        for r in rows
    ]
    found = first(judge(rows, plan), "accept_len")
    assert (found.verdict, found.lo, found.lo_boots_only) == ("unresolved", None, None)
    assert {"counters_of_cell", "counters_with_ramp", "no_spread"} <= set(found.reasons)
    assert "counters_of_cell" not in first(judge(rows, plan), "decode_tok_s").reasons


def test_accept_len_is_higher_or_lower(judge, make, pair):
    _, rows, plan = pair()
    rows = [
        make.replace(
            r, accept_len=r.accept_len * (1.5 if r.arm == "b" else 1.0) * (1 + 0.01 * (7 * r.order % 5))
        )
        for r in rows
    ]
    assert first(judge(rows, plan), "accept_len").verdict == "higher"


def test_a_small_proven_difference_is_both_different_and_equivalent(judge, pair):
    _, rows, plan = pair(0.01, boot_sd=0.0005, residual_sd=0.001)
    v = first(judge(rows, plan))
    assert v.differs
    assert v.equivalent
    assert v.verdict == "slower"
    _, rows, null = pair(0.01, kind="null", boot_sd=0.0005, residual_sd=0.001)
    assert first(judge(rows, null)).verdict == "equivalent"
    assert first(judge(rows, null)).differs


def test_noise_is_unresolved(judge, pair):
    _, rows, plan = pair(0.01, residual_sd=0.15, boot_sd=0.05)
    v = first(judge(rows, plan))
    assert (v.verdict, v.differs, v.equivalent) == ("unresolved", False, False)
    assert v.lo < 1 < v.hi


def test_no_spread_claims_nothing(judge, pair):
    _, rows, plan = pair(slot_sd=0.0, boot_sd=0.0, residual_sd=0.0)
    v = first(judge(rows, plan))
    assert (v.ratio, v.p, v.lo, v.verdict) == (1.0, None, None, "unresolved")
    assert v.reasons == ("no_spread",)


def test_one_boot_and_nothing_known_is_unresolved_with_the_boots_only_interval(judge, make):
    group = make.group("pair.p", "pair", ("a", "b"), boots=1, design="bracketed")
    rows = make.rows_of(group, {"a": make.effects(), "b": make.effects(shift=0.1)})
    plan = make.plan([group], [make.comparison(group, "a", "b")])
    v = first(judge(rows, plan))
    assert (v.verdict, v.boot_sd_source, v.lo) == ("unresolved", "unknown", None)
    assert v.lo_boots_only > 1
    assert v.boot_sd_overturn > 0
    declared = first(judge(rows, plan, declared_boot_sd={"step_ms": 0.01}))
    assert (declared.verdict, declared.boot_sd_source) == ("slower", "declared")
    known = Prior({}, {"step_ms": 0.01}, {}, boot_df={"step_ms": 8.0})
    prior = first(judge(rows, plan, prior=known))
    assert (prior.verdict, prior.boot_sd_source) == ("slower", "prior")
    assert prior.hi - prior.lo > declared.hi - declared.lo


# --- families


def test_holm_over_the_ladder_on_its_primary_metric(judge, make):
    arms = ("base", "x", "y", "z")
    group = make.group("ladder.d", "ladder", arms, boots=3)
    shifts = dict(zip(arms, (0.0, 0.004, 0.05, 0.05), strict=True))
    rows = make.rows_of(group, {a: make.effects(shift=s, boot_sd=0.001) for a, s in shifts.items()}, seed=3)
    comparisons = [
        make.comparison(group, "base", b, kind="ladder", family="d", pair=f"d:base|{b}", margin=0.001)
        for b in arms[1:]
    ]
    found = judge(rows, make.plan([group], comparisons))
    primary = {v.b: v for v in found.verdicts if v.primary}
    assert {v.metric for v in found.verdicts if v.verdict_adjusted is not None} == {"step_ms"}
    assert primary["y"].verdict_adjusted == "slower"
    for v in primary.values():
        assert v.p_adjusted >= v.p
    smallest = min(primary.values(), key=lambda v: v.p)
    assert smallest.p_adjusted == pytest.approx(min(1.0, 3 * smallest.p))


# --- validity


def spoil(make, rows, **changes):
    """Change the first row of arm b."""
    out, done = [], False
    for row in rows:
        if row.arm == "b" and not done:
            out.append(make.replace(row, **changes))
            done = True
        else:
            out.append(row)
    return out


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion_tokens": 60}, "unequal_lengths"),
        ({"state": "short", "completion_tokens": 60}, "unequal_lengths"),
        ({"reasons": ("engine_restarted",), "validity": "void"}, "engine_restarted"),
        ({"boot_attempt": 1}, "engine_restarted"),
        ({"rate_definition": "after-first-chunk"}, "mixed_rate_definition"),
        ({"simulated": True}, "mixed_simulated"),
    ],
)
def test_one_row_can_make_a_pair_invalid(judge, make, pair, changes, reason):
    _, rows, plan = pair(0.05)
    v = first(judge(spoil(make, rows, **changes), plan))
    assert v.verdict == "invalid"
    assert reason in v.reasons
    assert v.ratio is not None


def test_a_lost_request_is_noted_and_its_slot_dropped(judge, make, pair):
    _, rows, plan = pair(0.05)
    v = first(judge(spoil(make, rows, state="failed", step_ms=None), plan))
    assert (v.verdict, v.n) == ("slower", 7)
    assert {"failed_requests", "missing_slots"} <= set(v.reasons)


def test_many_lost_requests_make_it_invalid(judge, make, pair):
    _, rows, plan = pair(0.05)
    rows = [make.replace(r, state="failed", step_ms=None) if r.slot < 3 else r for r in rows]
    v = first(judge(rows, plan))
    assert v.verdict == "invalid"
    assert {"failed_requests", "missing_slots"} <= set(v.reasons)


def test_void_rows_count_as_lost_and_superseded_ones_not_at_all(judge, make, pair):
    _, rows, plan = pair(0.05)
    old = [make.replace(r, validity="superseded", step_ms=99.0) for r in rows]
    redone = [make.replace(r, boot_attempt=1) if r.boot_index == 1 else r for r in rows]
    assert first(judge([*old, *redone], plan)).verdict == "slower"
    void = [make.replace(r, validity="void") if r.boot_index == 1 else r for r in rows]
    assert "missing_slots" in first(judge(void, plan)).reasons
    assert first(judge(void, plan)).verdict == "invalid"


def test_an_arm_that_replays_the_other_from_the_cache_is_invalid(judge, make, pair):
    expect = json.loads((CASES / "34_prefix.expect.json").read_text())

    def counters(name):
        text = (CASES / f"34_prefix_{name}.prom").read_text()
        return {
            m[1]: float(m[2])
            for m in re.finditer(r"^vllm:prefix_cache_(\w+)_total\{.*\} (\S+)$", text, re.MULTILINE)
        }

    _, rows, plan = pair()
    out = []
    for arm, key, (t0, t1) in (("a", "A", ("t0", "t1")), ("b", "B", ("t1", "t2"))):
        mine = [r for r in rows if r.arm == arm]
        asked = counters(t1)["queries"] - counters(t0)["queries"]
        hit = counters(t1)["hits"] - counters(t0)["hits"]
        per_row = (asked / len(mine), hit / len(mine))
        mine = [
            make.replace(r, prompt_tokens=round(per_row[0]), cached_tokens=round(per_row[1])) for r in mine
        ]
        assert hit_rate(mine) == pytest.approx(expect["expect"]["hit_rate"][key], abs=0.005)
        out += mine
    assert expect["expect"]["pair_usable"] is False
    v = first(judge(out, plan))
    assert v.verdict == "invalid"
    assert "cache_hits" in v.reasons


def test_a_template_that_every_prompt_shares_is_no_cache_hit(judge, make, pair):
    _, rows, plan = pair(0.05)
    rows = [make.replace(r, cached_tokens=1) for r in rows]
    assert first(judge(rows, plan)).verdict == "slower"


def test_warmup_is_never_part_of_a_cell(judge, make, pair):
    _, rows, plan = pair(0.05)
    cold = [make.replace(r, phase="warmup", step_ms=500.0, slot=99, block="s99") for r in rows[:4]]
    assert judge([*rows, *cold], plan) == judge(rows, plan)


def test_too_few_prompts(judge, make):
    group = make.group("pair.p", "pair", ("a", "b"), boots=3, slots=2)
    rows = make.rows_of(group, {"a": make.effects(), "b": make.effects()})
    v = first(judge(rows, make.plan([group], [make.comparison(group, "a", "b")])))
    assert v.verdict == "invalid"
    assert "too_few_blocks" in v.reasons


@pytest.mark.parametrize(("waves", "word"), [(4, "slower"), (2, "invalid")])
def test_above_concurrency_one_the_block_is_the_wave(judge, make, waves, word):
    group = make.group("pair.p@c4", "pair", ("a", "b"), boots=2, slots=4, concurrency=4, waves=waves)
    rows = make.rows_of(group, {"a": make.effects(), "b": make.effects(shift=0.2)})
    v = first(judge(rows, make.plan([group], [make.comparison(group, "a", "b")])))
    assert (v.n, v.verdict) == (2 * waves, word)


# --- drift


def anchored(make, drift, *, delta=0.05):
    before, after = make.anchor_group("first"), make.anchor_group("last")
    group = make.group("pair.p", "pair", ("a", "b"), boots=3)
    steady = make.effects(boot_sd=0.001)
    rows = [
        *make.rows_of(before, {"a": steady}),
        *make.rows_of(group, {"a": steady, "b": make.effects(shift=0.1, boot_sd=0.001)}),
        *make.rows_of(after, {"a": make.effects(shift=drift, boot_sd=0.001)}),
    ]
    # Anchors run the same prompts: the two cells share their slot effects.
    return (
        rows,
        make.plan([before, group, after], [make.comparison(group, "a", "b")]),
        make.anchor(drift_delta=delta),
    )


def test_proven_drift_makes_the_group_invalid(judge, make):
    rows, plan, anchor = anchored(make, 0.5)
    found = judge(rows, plan, anchor=anchor)
    assert [a.ok for a in found.anchors] == [None, False]
    v = first(found)
    assert v.verdict == "invalid"
    assert "drift" in v.reasons


def test_an_overridden_drift_gate_is_printed_and_the_pair_stands(judge, make):
    rows, plan, anchor = anchored(make, 0.5)
    v = first(judge(rows, plan, anchor=anchor, overridden={"main": ["anchor_drift"]}))
    assert v.verdict == "slower"
    assert {"drift", "gate_overridden:anchor_drift"} <= set(v.reasons)


def test_no_drift_is_no_reason(judge, make):
    rows, plan, anchor = anchored(make, 0.0, delta=0.2)
    found = judge(rows, plan, anchor=anchor)
    assert found.anchors[1].ok is True
    assert not {"drift", "drift_unproven"} & set(first(found).reasons)


def test_drift_that_is_not_excluded_is_a_reason_and_no_more(judge, make):
    rows, plan, anchor = anchored(make, 0.0, delta=0.002)
    found = judge(rows, plan, anchor=anchor)
    v = first(found)
    assert v.verdict == "slower"
    assert "drift_unproven" in v.reasons


# --- partial runs, determinism


def test_an_unfinished_group_is_partial_and_a_finished_one_is_judged(judge, make):
    done = make.group("pair.p", "pair", ("a", "b"), boots=3)
    open_ = make.group("pair.q", "pair", ("a", "b"), boots=3)
    absent = make.group("pair.r", "pair", ("a", "b"), boots=3)
    effects = {"a": make.effects(), "b": make.effects(shift=0.1)}
    half = [r for r in make.rows_of(open_, effects) if r.boot_index < 2]
    plan = make.plan([done, open_, absent], [make.comparison(g, "a", "b") for g in (done, open_, absent)])
    found = judge([*make.rows_of(done, effects), *half], plan, partial=True)
    by_pair = {v.pair: v for v in found.verdicts if v.metric == "step_ms"}
    assert by_pair["p"].verdict == "slower"
    assert (by_pair["q"].verdict, by_pair["q"].boots) == ("unresolved", 2)
    assert "partial" in by_pair["q"].reasons
    assert by_pair["q"].ratio > 1.05
    assert by_pair["q"].verdict_adjusted == "unresolved"
    assert (by_pair["r"].verdict, by_pair["r"].n, by_pair["r"].ratio) == ("unresolved", 0, None)
    over = judge([*make.rows_of(done, effects), *half], plan)
    words = {v.pair: v.verdict for v in over.verdicts if v.metric == "step_ms"}
    assert words == {"p": "slower", "q": "invalid", "r": "invalid"}


def test_no_rows_at_all(judge, pair):
    _, _, plan = pair()
    assert judge([], plan, partial=True).verdicts == ()
    assert {v.verdict for v in judge([], plan).verdicts} == {"invalid"}


def test_order_of_rows_does_not_matter(judge, make):
    rows, plan, anchor = anchored(make, 0.01)
    forwards, backwards = judge(rows, plan, anchor=anchor), judge(rows[::-1], plan, anchor=anchor)
    as_bytes = [json.dumps(asdict(c), sort_keys=True, allow_nan=False) for c in (forwards, backwards)]
    assert as_bytes[0] == as_bytes[1]
    assert finite(asdict(forwards))


def test_dollars_are_those_of_the_group(judge, pair):
    _, rows, plan = pair()
    assert first(judge(rows, plan, usd_by_group={("main", "pair.p"): 1.25})).usd == 1.25
    assert first(judge(rows, plan)).usd is None
