"""Depth 7 against depth 6 in a published record session, from its rows."""

import json
import math
from pathlib import Path

import pytest

from campaign.analysis.conclude import conclude
from campaign.analysis.pairs import KNOWN_DF, BootSd, compare
from campaign.analysis.variance import boots_of

FILE = Path(__file__).parents[1] / "data" / "brl11" / "brl11_stage600r.json"
ARMS = {"R0_d6": 0, "R1_d7": 1}


@pytest.fixture
def rows(make):
    data = json.loads(FILE.read_text())
    out = []
    for arm, round_ in ARMS.items():
        for r in data["arms"][arm]["cells"]["tool_nothink_10k"]["rows"]:
            tokens = r["ctok"] - 1
            window_ms = 1000 * tokens / r["tok_s"]
            steps = int(r["sg_deltas"]["spec_verify_calls_total"])
            out.append(
                make.row(
                    arm=arm,
                    group="ladder.depth",
                    round=round_,
                    slot=r["slot"],
                    block=f"s{r['slot']}",
                    completion_tokens=r["ctok"],
                    tokens_in_window=tokens,
                    window_ms=window_ms,
                    steps=steps,
                    decode_tok_s=r["tok_s"],
                    accept_len=tokens / steps,
                    step_ms=window_ms / steps,
                    ttft_ms=r["ttft_ms"],
                )
            )
    return out


@pytest.fixture
def verdicts(make, rows):
    group = make.group("ladder.depth", "ladder", ARMS, boots=1, slots=16, design="bracketed")
    rows = [make.replace(r, seed=r.slot) for r in rows]
    comparison = make.comparison(group, *ARMS, kind="ladder", primary="decode_tok_s")
    plan = make.plan([group], [comparison])

    def run(**declared):
        found = conclude(
            rows,
            plan,
            declared_boot_sd=declared,
            confidence=0.95,
            usd_by_group={("main", "ladder.depth"): 12.86},
            partial=False,
            anchor=make.anchor(),
        )
        return {v.metric: v for v in found.verdicts}

    return run


@pytest.mark.parametrize(
    ("metric", "ratio", "lo", "hi"),
    [
        ("decode_tok_s", 1.022, 0.963, 1.084),
        ("step_ms", 1.058, 1.054, 1.062),
        ("accept_len", 1.081, 1.017, 1.149),
    ],
)
def test_before_any_boot_variance(verdicts, metric, ratio, lo, hi):
    v = verdicts()[metric]
    assert [round(x, 3) for x in (v.ratio, v.lo_boots_only, v.hi_boots_only)] == [ratio, lo, hi]
    assert v.n == 16
    assert v.usd == 12.86


def test_one_boot_an_arm_leaves_everything_unresolved(verdicts):
    for v in verdicts().values():
        assert (v.verdict, v.lo, v.p, v.boot_sd_source) == ("unresolved", None, None, "unknown")
        assert "boot_sd_unknown" in v.reasons


def test_a_declared_boot_sd_of_half_a_percent_keeps_the_step_and_not_the_rate(verdicts):
    found = verdicts(step_ms=0.005, decode_tok_s=0.005, accept_len=0.002)
    assert found["step_ms"].verdict == "slower"
    assert found["decode_tok_s"].verdict == "unresolved"
    assert found["accept_len"].verdict == "higher"


def test_a_boot_sd_of_two_percent_would_overturn_the_step_too(verdicts):
    v = verdicts()["step_ms"]
    assert 0.018 < v.boot_sd_overturn < 0.02
    assert verdicts(step_ms=0.03)["step_ms"].verdict == "unresolved"


def test_the_factors_multiply_to_the_rate(rows):
    unknown = BootSd(0.0, KNOWN_DF, "declared", None)

    def mean(metric):
        a, b = (boots_of([r for r in rows if r.arm == arm], metric) for arm in ARMS)
        return compare(a, b, boot=unknown, resident=False).mean

    assert mean("decode_tok_s") == pytest.approx(mean("accept_len") - mean("step_ms"))
    assert math.exp(mean("decode_tok_s")) == pytest.approx(1.0219, abs=5e-5)
