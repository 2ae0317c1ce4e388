"""Every number the published files print, from their rows."""

import pytest


@pytest.fixture(scope="module")
def cells(folder, call):
    return {(c["file"], c["arm"], c["cell"]): c for c in call("cells", folder, "--json")}


@pytest.fixture(scope="module")
def differences(folder, call):
    found = call("verify", folder, "--json", code=1)
    assert found["checked"] - found["matched"] == len(found["differences"])
    return found["differences"]


@pytest.fixture(scope="module")
def verdicts(folder, call):
    return call("report", folder, "--json")["verdicts"]


def test_every_median_rate_tau_and_step_follows_to_the_printed_digit(differences):
    known = {
        "tok_s_median",
        "tok_s_first8_median",
        "tok_s_agg",
        "tau",
        "step_ms",
        "tok_s_all_sorted",
        "per_pos",
    }
    wrong = [
        d
        for d in differences
        if d["cell"] and d["field"].split(".")[0] in known and d["published"] is not None
    ]
    assert wrong == []


def test_the_smoke_run_gets_its_tau_and_step_back(cells, differences):
    for arm, tau, step in (("SG0_s3", 3.565, 8.90), ("SG1_s5", 4.825, 10.10), ("SG2_s6", 5.269, 10.73)):
        cell = cells["brl11_stage600sg.json", arm, "tool_nothink_10k"]
        assert round(cell["tau_as_published"], 3) == tau
        assert round(cell["step_ms_as_published"], 2) == step
    null = {
        (d["arm"], d["field"])
        for d in differences
        if d["published"] is None and d["derived"] is not None and d["arm"]
    }
    assert null == {(a, f) for a in ("SG0_s3", "SG1_s5", "SG2_s6") for f in ("tau", "step_ms")}


def test_definitions_are_not_mixed(cells):
    """Tokens in the window over drafts is not 1 + accepted/drafts: the first token is not in the window."""
    cell = cells["brl11_stage600r.json", "R0_d6", "tool_nothink_10k"]
    assert cell["accept_len"] == pytest.approx(5.1183, abs=5e-5)
    assert cell["tau_as_published"] == pytest.approx(5.1208, abs=5e-5)
    assert cell["decode_tok_s_agg"] == pytest.approx(1000 * cell["accept_len"] / cell["step_ms"])
    assert cell["rate_definition"] == "all-but-one"
    api = cells["fireworks_live_replication.json", "standard-default", "api"]
    assert (api["accept_len"], api["step_ms"], round(api["decode_tok_s_median"], 1)) == (None, None, 118.4)


def test_a_null_is_where_the_file_cannot_tell(cells):
    assert all(c["tau_as_published"] is None for k, c in cells.items() if k[0].startswith("fireworks"))


def test_upper_medians_are_named(differences):
    found = [d for d in differences if d["field"] == "ttft_ms_median"]
    assert len(found) == 18
    assert all("upper of the two middle" in d["cause"] for d in found)


def test_the_tp8_arms_carry_a_tp4_command(differences):
    found = [d for d in differences if d["field"] == "argv.tp"]
    assert [(d["arm"], d["published"], d["derived"]) for d in found] == [
        ("B0_nospec_tp8", 4, 8), ("B1_k5_tp8", 4, 8), ("B2_k6_tp8", 4, 8),
    ]  # fmt: skip
    assert all("argv" in d["cause"] for d in found)


def test_a_negative_draft_pass_is_no_number(differences):
    d = next(d for d in differences if d["field"] == "e1.draft_pass_ms")
    assert (d["published"], d["derived"]) == (-0.98, None)
    assert "not identified" in d["cause"]
    assert "17.14" in d["cause"]
    assert "12.24" in d["cause"]
    others = [d["field"] for d in differences if d["field"].startswith("e1.")]
    assert others == ["e1.draft_pass_ms"]


def test_sessions_are_files_and_every_two_arms_of_a_cell_are_compared(verdicts):
    sessions = {v["session"] for v in verdicts}
    assert sessions == {
        "brl11_stage600a", "brl11_stage600b", "brl11_stage600e1", "brl11_stage600r", "brl11_stage600sg",
        "fireworks_live_replication",
    }  # fmt: skip
    tool = {
        (v["a"], v["b"])
        for v in verdicts
        if v["session"] == "brl11_stage600r" and v["workload"] == "tool_nothink_10k"
    }
    assert tool == {("R0_d6", "R1_d7"), ("R0_d6", "R2_fovea"), ("R1_d7", "R2_fovea")}
    assert {v["metric"] for v in verdicts} == {"step_ms", "accept_len", "decode_tok_s", "ttft_ms"}


def test_no_pair_crosses_sessions(verdicts):
    tp8 = {"B0_nospec_tp8", "B1_k5_tp8", "B2_k6_tp8"}
    assert all(({v["a"], v["b"]} <= tp8) or not ({v["a"], v["b"]} & tp8) for v in verdicts)


@pytest.mark.parametrize(
    ("metric", "ratio", "lo", "hi"),
    [
        ("decode_tok_s", 1.022, 0.963, 1.084),
        ("step_ms", 1.058, 1.054, 1.062),
        ("accept_len", 1.081, 1.017, 1.149),
    ],
)
def test_depth_7_against_6_before_any_boot_variance(verdicts, metric, ratio, lo, hi):
    v = next(
        v for v in verdicts
        if (v["session"], v["a"], v["b"], v["metric"], v["workload"])
        == ("brl11_stage600r", "R0_d6", "R1_d7", metric, "tool_nothink_10k")
    )  # fmt: skip
    assert [round(v[k], 3) for k in ("ratio", "lo_boots_only", "hi_boots_only")] == [ratio, lo, hi]
    assert v["verdict"] == "unresolved"
    assert "boot_sd_unknown" in v["reasons"]
    # What a boot sd would do: it widens every interval, and a large one overturns what looked resolved.
    widths = [s["hi"] / s["lo"] for s in v["supposed_boot_sd"]]
    assert widths == sorted(widths)
    assert widths[0] > v["hi_boots_only"] / v["lo_boots_only"]
    if metric == "decode_tok_s":
        assert not any(s["differs"] for s in v["supposed_boot_sd"])
    else:
        assert v["supposed_boot_sd"][0]["differs"]
        assert v["boot_sd_overturn"] > 0


def test_nothing_is_printed_as_nan(folder, call):
    from campaign.report.assemble import assemble
    from campaign.report.jsonview import dumps
    from campaign.store.run import open_run

    text = dumps(assemble(open_run(str(folder))))
    assert "NaN" not in text
    assert "Infinity" not in text
