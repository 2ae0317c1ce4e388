"""The committed runs of a real H200: every number follows from their rows, and what is claimed of them is in them."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from campaign.report.assemble import assemble
from campaign.report.jsonview import report_json
from campaign.store.run import open_run

RUNS = Path(__file__).parents[2] / "examples/runs/h200"
DEPTH, KV, PLACES, AA = sorted(p for p in RUNS.iterdir() if p.is_dir())


@pytest.fixture(scope="module")
def said():
    """Of each run: its report, made anew."""
    return {run: report_json(assemble(open_run(run))) for run in (DEPTH, KV, PLACES, AA)}


def _verdict(report, pair, metric):
    return next(v for v in report["verdicts"] if v["pair"] == pair and v["metric"] == metric)


@pytest.mark.parametrize("run", [DEPTH, KV, PLACES, AA], ids=["depth", "kv", "places", "aa"])
def test_the_published_report_follows_from_the_rows(run, said):
    published = json.loads((run / "report.json").read_text())
    anew = json.loads(json.dumps(said[run]))
    assert anew["verdicts"] == published["verdicts"]
    assert anew["speculation"] == published["speculation"]
    assert anew["energy"] == published["energy"]
    assert anew["gpu_idle"] == published["gpu_idle"]
    assert anew["simulated"] is False


def test_speculation_loses_alone_and_only_simulated_acceptance_breaks_even(said):
    ladders = {s["ladder"]: s for s in said[DEPTH]["speculation"]["ladders"]}
    alone, eight = ladders["depth1"], ladders["depth8"]
    assert alone["t1_ms"] == pytest.approx(4.93, rel=0.03), "the first table's step"
    assert len(alone["widths"]) == len(eight["widths"]) == 5
    for width in alone["widths"]:
        assert width["break_even_accept_len"] == pytest.approx(1.8, abs=0.03)
    # The cost of a verify step at concurrency 1 does not grow with its width; at 8 it does.
    assert alone["slope_lo"] < 0 < alone["slope_hi"]
    for width in eight["widths"]:
        assert "no_drafts" not in width["reasons"]
        assert 2.3 < width["break_even_accept_len"] < 2.7
    pair = "depth{0}:plain|depth{0}=ngram-breadth1-depth3-simulated_acceptan"
    assert _verdict(said[DEPTH], pair.format(1), "decode_tok_s")["verdict"] == "faster"
    assert _verdict(said[DEPTH], pair.format(8), "decode_tok_s")["verdict"] == "equivalent"
    assert _verdict(said[DEPTH], pair.format(8), "step_ms")["n"] == 6


def test_the_place_is_worth_a_percent_and_the_swap_takes_it_off(said):
    assert _verdict(said[PLACES], "aa", "step_ms")["verdict"] == "equivalent"
    assert _verdict(said[AA], "aa", "step_ms")["verdict"] == "equivalent"
    by_place = {"p0": [], "p1": []}
    for row in open_run(PLACES).requests().rows():
        if row.phase == "measure" and row.step_ms:
            by_place[row.half].append(row.step_ms)
    mean = {place: sum(v) / len(v) for place, v in by_place.items()}
    assert 0.005 < 1 - mean["p1"] / mean["p0"] < 0.012


def test_fp8_doubles_the_pool_and_is_faster_with_long_prompts(said):
    tokens = {}
    for file in (KV / "provenance").glob("kv~ladder.kv8-long*.json"):
        effective = json.loads(file.read_text())["effective"]
        tokens[effective["kv_dtype"]] = effective["kv_capacity_tokens"]
    assert tokens == {"bf16": 572948, "fp8_e5m2": 1145897, "fp8_e4m3": 1145897}
    for name in ("fp8_e5m2", "fp8_e4m3"):
        assert _verdict(said[KV], f"kv8-long:base|kv8-long={name}", "step_ms")["verdict"] == "faster"


def test_power_and_clocks_stand_in_the_rows_and_the_report(said):
    for run in (DEPTH, KV, PLACES, AA):
        rows = [r for r in open_run(run).requests().rows() if r.phase == "measure"]
        assert all(r.gpu_w and r.gpu_sm_mhz and r.gpu_throttle == 0 for r in rows)
        assert not any("unequal_clocks" in v["reasons"] for v in said[run]["verdicts"])
        (idle,) = said[run]["gpu_idle"]
        assert 0.6 < idle["share"] < 0.8
    joules = {(e["group"], e["arm"]): e for e in said[DEPTH]["energy"]}
    assert joules["ladder.depth1", "plain"]["source"] == "counter"
    assert joules["ladder.depth8", "plain"]["source"] == "power_by_time"
    names = ["plain", "depth1=ngram-breadth1-depth1", "depth1=ngram-breadth1-depth15"]
    used = [joules["ladder.depth1", n]["joules_per_token"] for n in names]
    assert all(a < b for a, b in pairwise(used))
