"""Starter files: the quickstart, and three of at most 15 lines; `init` and `validate`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaign.cli.init import TEMPLATES
from campaign.cli.init import command as init
from campaign.cli.validate import command as validate
from campaign.spec.load import load
from campaign.workloads.packs import load_all

ROOT = Path(__file__).parents[2]
ENV = {"REV": "0123abc"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_template_validates_with_its_prompts(template, tmp_path):
    file = tmp_path / "e.yaml"
    written = CliRunner().invoke(init, [str(file), "--template", template])
    assert written.exit_code == 0, written.output
    load_all(load(file, (), ENV), tmp_path)
    result = CliRunner().invoke(validate, [str(file)], env=ENV)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{file}: ok (")
    assert load(file, (), ENV).canonical_sha256 in result.output


@pytest.mark.parametrize("template", [t for t in TEMPLATES if t != "quickstart"])
def test_a_first_file_is_short_and_says_what_it_is(template):
    lines = (ROOT / "campaign/spec/templates" / f"{template}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 15


def test_the_quickstart_is_the_file_at_the_root():
    shipped = ROOT / "campaign/spec/templates/quickstart.yaml"
    assert shipped.read_bytes() == (ROOT / "experiments.yaml").read_bytes()


def test_the_quickstart_keeps_to_what_the_machine_can_do():
    spec = load(ROOT / "experiments.yaml", (), {}).spec
    assert spec.arms["plain"].threads == 1
    assert spec.arms["plain"].prefix_cache is False
    assert spec.anchor.reference == "establish"
    assert spec.anchor.drift_delta == 0.25
    assert spec.ladders["depth"].values == (3, 5, 8)
    assert {p.boots for p in (*spec.pairs.values(), *spec.ladders.values())} == {4}
    assert spec.pairs["aa"].kind == "aa"


def test_init_does_not_overwrite(tmp_path):
    from campaign.errors import UserError

    file = tmp_path / "e.yaml"
    file.write_text("mine")
    result = CliRunner().invoke(init, [str(file)])
    assert isinstance(result.exception, UserError)
    assert "--force" in str(result.exception)
    assert file.read_text() == "mine"
    assert CliRunner().invoke(init, [str(file), "--force"]).exit_code == 0
    assert file.read_bytes() == (ROOT / "experiments.yaml").read_bytes()
    missing = CliRunner().invoke(init, [str(tmp_path / "no" / "e.yaml")])
    assert isinstance(missing.exception, UserError)


def test_validate_prints_every_problem_and_exits_2(tmp_path):
    file = tmp_path / "e.yaml"
    file.write_bytes((ROOT / "experiments.yaml").read_bytes())
    sets = ["--set", "workloads.copy.n=99", "--set", "workloads.chat.n=98"]
    result = CliRunner().invoke(validate, [str(file), *sets])
    assert result.exit_code == 2
    assert "99" in result.output
    assert "98" in result.output
    assert "2 problems" in result.output
    as_json = CliRunner().invoke(validate, [str(file), "--json", *sets])
    assert as_json.exit_code == 2
    answer = json.loads(as_json.output)
    assert answer["ok"] is False
    assert {p["field"] for p in answer["problems"]} == {"workloads.copy.n", "workloads.chat.n"}
    good = json.loads(CliRunner().invoke(validate, [str(file), "--json"]).output)
    assert good["ok"] is True
    assert good["workloads"]["copy"]["n"] == 6


def test_a_pack_that_is_too_short_is_refused_at_its_line(tmp_path):
    file = tmp_path / "e.yaml"
    text = (ROOT / "experiments.yaml").read_text().replace("pack: health, n: 4", "pack: health, n: 9")
    file.write_text(text)
    result = CliRunner().invoke(validate, [str(file)])
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "pack: health" in row)
    assert (
        f"{file}:{line}: workloads.health.n = 9: health has 8 prompts. Fix: write at most 8" in result.output
    )
