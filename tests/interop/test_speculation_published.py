"""The published decomposition, forecasts and cross-session comparisons, from real rows."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaign.analysis.decompose import decompose
from campaign.analysis.forecast import forecast, none_can_win, score
from campaign.cli import cli
from campaign.errors import CampaignError
from campaign.interop import brl11, imported
from campaign.report.further import drafters

FILES = sorted((Path(__file__).parents[1] / "data" / "brl11").glob("*.json"))


@pytest.fixture(scope="module")
def report(folder, call):
    return call("report", folder, "--json")


def part(report, session):
    return next(
        d for d in report["speculation"]["decomposition"]
        if d["session"] == session and d["workload"] == "tool_nothink_10k"
    )  # fmt: skip


def test_t1_v6_v9_and_the_slope(report):
    d = part(report, "brl11_stage600e1")
    arms = {a["arm"]: a for a in d["arms"]}
    assert round(d["t1_ms_as_published"], 2) == 6.60
    assert round(arms["E1A_ngramgpu_k5"]["verify_ms_as_published"], 2) == 17.14
    assert round(arms["E1C_ngramgpu_k8"]["verify_ms_as_published"], 2) == 18.33
    slope = d["verify_slope_ms_as_published"]
    assert round(slope["value"], 3) == 0.397
    assert (slope["lo"], slope["hi"]) == pytest.approx((0.29, 0.54), abs=0.01)
    assert d["verify_slope_ms"]["value"] == pytest.approx(0.4547, abs=1e-4)
    assert arms["E1C_ngramgpu_k8"]["verified_tokens"] == 9.0


def test_the_draft_pass_is_not_identified(report):
    eagle = next(a for a in part(report, "brl11_stage600e1")["arms"] if a["arm"] == "E1D_eagle_k5")
    assert eagle["draft_ms"] is None
    assert "not_identified:verify_above_step" in eagle["reasons"]


def test_conditional_acceptance_has_intervals(report):
    k7 = next(a for a in part(report, "brl11_stage600a")["arms"] if a["arm"] == "A5_k7")
    assert len(k7["accept_conditional"]) == 7
    assert k7["accept_conditional"][0]["value"] == pytest.approx(0.8988, abs=5e-5)
    assert all(0 <= c["lo"] <= c["value"] <= c["hi"] <= 1 for c in k7["accept_conditional"])


def test_a_draft_pass_that_fits_is_a_number(run):
    """Slower EAGLE steps than the verify line leave room for the drafter: depth times draft."""
    session = next(s for s in run.plan().sessions if s.name == "brl11_stage600e1")
    rows = [r for r in run.requests().rows() if r.session == session.name]
    slow = [replace(r, window_ms=2 * r.window_ms) if r.arm == "E1D_eagle_k5" else r for r in rows]
    d = decompose(slow, session=session.name, workload="tool_nothink_10k", arms=drafters(session))
    eagle = next(a for a in d.arms if a.arm == "E1D_eagle_k5")
    verify = next(a for a in d.arms if a.arm == "E1A_ngramgpu_k5").step_ms.value
    assert eagle.draft_ms == pytest.approx((2 * 12.2225 - verify) / 5, abs=1e-3)


def test_rising_acceptance_is_said(run):
    session = next(s for s in run.plan().sessions if s.name == "brl11_stage600a")
    rows = [r for r in run.requests().rows() if r.session == session.name]
    broken = [replace(r, accept_pos=(1, *r.accept_pos[1:])) if r.arm == "A5_k7" else r for r in rows]
    d = decompose(broken, session=session.name, workload="tool_nothink_10k", arms=drafters(session))
    assert "not_identified:accept_pos_increases" in next(a for a in d.arms if a.arm == "A5_k7").reasons


def test_depth_7_forecast_from_5_and_6(run):
    session = next(s for s in run.plan().sessions if s.name == "brl11_stage600a")
    rows = [
        r for r in run.requests().rows() if r.session == session.name and r.workload == "tool_nothink_10k"
    ]
    arms = [a for a in drafters(session) if a.depth in {5, 6}]
    said = forecast(rows, arms, [7])[0]
    scores = score({"depth": 7, "tau": said.tau, "tau_lo": said.tau_lo, "tau_hi": said.tau_hi,
                    "tok_s": said.tok_s, "tok_s_lo": said.tok_s_lo, "tok_s_hi": said.tok_s_hi}, 5.7645, 376.69)  # fmt: skip
    assert [s.inside for s in scores] == [True, True]
    assert none_can_win([said], 407.0) is False
    assert none_can_win([said], 1000.0) is True
    one = forecast(rows, arms[:1], [7])[0]
    assert (one.tok_s, one.reasons) == (None, ("not_identified:one_depth",))


def test_a_stored_forecast_is_scored_and_cannot_be_changed(tmp_path, call):
    data = json.loads(next(p for p in FILES if p.stem == "brl11_stage600a").read_text())
    deep = data["arms"].pop("A5_k7")
    for name, arms in (("first", data["arms"]), ("later", {"A5_k7": deep})):
        (tmp_path / f"{name}.json").write_text(json.dumps(data | {"arms": arms}))
    imported.write([brl11.read(tmp_path / "first.json")], tmp_path / "first")
    made = call("forecast", tmp_path / "first", "--depth", 7, "--store", tmp_path, "--json")["forecasts"]
    assert call("forecast", "--score", "--store", tmp_path, "--json")["scores"] == []
    imported.write([brl11.read(tmp_path / "later.json")], tmp_path / "later")
    found = call("forecast", "--score", "--store", tmp_path, "--json")
    assert [(s["quantity"], s["inside"]) for s in found["scores"]] == [("tau", True), ("tok_s", True)]
    assert found["scores"][0]["said"] == made[0]["tau"]
    # What is imported was recorded before the forecast was made, and counts apart.
    assert {s["retrospective"] for s in found["scores"]} == {True}
    assert [(c["retrospective"], c["n"]) for c in found["calibration"]] == [
        (False, 0), (False, 0), (True, 1), (True, 1),
    ]  # fmt: skip
    stored = tmp_path / "forecasts.jsonl"
    stored.write_text(stored.read_text().replace('"depth": 7', '"depth": 8'))
    result = CliRunner().invoke(cli, ["forecast", "--score", "--store", str(tmp_path)])
    assert isinstance(result.exception, CampaignError)


def test_tp8_against_tp4_is_a_result_of_another_kind(folder, call):
    found = call(
        "compare",
        folder,
        folder,
        "--session-a",
        "brl11_stage600a",
        "--session-b",
        "brl11_stage600b",
        "--json",
    )
    step = {x["b"]["arm"]: x for x in found["across"] if x["metric"] == "step_ms"}
    k5 = step["B1_k5_tp8"]
    assert k5["changed"] == {"tp": {"a": 4, "b": 8}}
    assert (k5["verdict"], k5["equivalent"], k5["session_sd_source"]) == ("equivalent", True, "estimated")
    assert "not a pair" in k5["caveat"]
    # The session variance is in it: wider than these two sessions alone say.
    assert k5["hi90"] / k5["lo90"] > k5["hi90_these_sessions"] / k5["lo90_these_sessions"]
    assert all(x["equivalent_these_sessions"] for x in step.values())
    bare = step["B0_nospec_tp8"]
    assert (bare["ratio"] - 1) * 100 == pytest.approx(-1.421, abs=1e-3)
    assert (bare["verdict"], bare["equivalent"]) == ("unresolved", False)


def test_two_sessions_alone_carry_the_caveat(tmp_path, call):
    for stage in ("brl11_stage600a", "brl11_stage600b"):
        imported.write([brl11.read(next(p for p in FILES if p.stem == stage))], tmp_path / stage)
    found = call("compare", tmp_path / "brl11_stage600a", tmp_path / "brl11_stage600b", "--json")["across"]
    step = [x for x in found if x["metric"] == "step_ms"]
    assert len(step) == 3
    for x in step:
        assert (x["lo"], x["differs"], x["session_sd"]) == (None, None, None)
        assert x["equivalent"] is True
        assert "session_sd_unknown" in x["reasons"]
        assert "these sessions only" in x["caveat"]


def test_arms_may_be_named_and_nothing_else_is_guessed(folder, call):
    args = ("compare", folder, folder, "--session-a", "brl11_stage600sg", "--session-b", "brl11_stage600r")
    found = call(*args, "--arm", "SG1_s5=R1_d7", "--json")["across"]
    assert {(x["a"]["arm"], x["b"]["arm"], x["matched_by"]) for x in found} == {("SG1_s5", "R1_d7", "arms")}
    assert found[0]["changed"] == {"speculation.depth": {"a": 5, "b": 7}}
    result = CliRunner().invoke(cli, [*map(str, args), "--arm", "SG1_s5=none"])
    assert isinstance(result.exception, CampaignError)
