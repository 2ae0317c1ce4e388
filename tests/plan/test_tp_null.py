"""examples/tp-null.yaml, planned for two, four and eight GPUs."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaign.cli import cli

FILE = Path(__file__).parents[2] / "examples/tp-null.yaml"


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_blocks_in_abba_order_on_explicit_gpus_and_an_aa_across_the_halves(gpus, tmp_path, monkeypatch):
    from campaign.plan.build import build
    from campaign.plan.cost import declared_prices
    from campaign.spec.load import load

    monkeypatch.setenv("CAMPAIGN_GPU", str(tmp_path))
    listed = ",".join(map(str, range(gpus)))
    sets = [f"nodes.gpu.gpus=[{listed}]", f"arms.narrow.tp={gpus // 2}", f"arms.wide.tp={gpus}"]
    args = [word for s in sets for word in ("--set", s)]
    assert CliRunner().invoke(cli, ["validate", str(FILE), *args]).exit_code == 0
    shown = CliRunner().invoke(cli, ["plan", str(FILE), "--json", *args])
    assert shown.exit_code == 0, shown.output
    assert all(s["usd_expected"] > 0 for s in json.loads(shown.output)["sessions"])

    spec = load(FILE, sets).spec
    plan = build(spec, declared_prices(spec))
    assert [s.name for s in plan.sessions] == ["plain", "ngram"]
    everything = tuple(range(gpus))
    lower, upper = everything[: gpus // 2], everything[gpus // 2 :]
    for session in plan.sessions:
        groups = {g.name: g for g in session.groups}
        assert {"anchor.first", "anchor.last"} <= set(groups)
        tp = groups[f"pair.{session.name}-tp"]
        a, b = tp.arms
        boots = [boot for round_ in tp.rounds for boot in round_.boots]
        assert tp.design == "blocks"
        assert [boot.arm for boot in boots] == [a, b, b, a, a, b, b, a]
        assert {boot.gpus for boot in boots if boot.arm == b} == {everything}
        assert {boot.gpus for boot in boots if boot.arm == a} == {lower}
        halves = groups[f"pair.{session.name}-halves"]
        assert halves.design == "alternated"
        for round_ in halves.rounds:
            assert sorted(boot.gpus for boot in round_.boots) == [lower, upper]
        used = {(boot.arm, boot.gpus) for round_ in halves.rounds for boot in round_.boots}
        assert len(used) == 4, "each side was on each half"
    comparison = next(c for c in plan.sessions[0].comparisons if c.pair.startswith("plain-tp"))
    assert (comparison.kind, comparison.primary, comparison.margin, comparison.concurrency) == (
        "null",
        "step_ms",
        0.02,
        1,
    )
