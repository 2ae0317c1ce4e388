import io
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from campaign.cli.plan import command
from campaign.errors import BudgetRefused
from campaign.plan.text import dollars, span
from campaign.plan.view import default_lines, render
from campaign.spec.load import load


@pytest.fixture
def file(tmp_path, quickstart_text) -> Path:
    path = tmp_path / "experiments.yaml"
    path.write_text(quickstart_text)
    return path


def test_json_is_the_plan(file, quickstart, planned):
    result = CliRunner().invoke(command, [str(file), "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    assert json.loads(result.stdout) == planned(quickstart()).to_json()


def test_set_changes_a_field(file):
    result = CliRunner().invoke(
        command, [str(file), "--json", "--set", "budget.cap_usd=7"], catch_exceptions=False
    )
    assert json.loads(result.stdout)["cap_usd"] == 7


def test_a_refused_plan_is_still_printed(file):
    result = CliRunner().invoke(command, [str(file), "--json", "--set", "budget.cap_usd=0.001"])
    assert isinstance(result.exception, BudgetRefused)
    shown = json.loads(result.stdout)
    assert shown["admitted"] == []
    assert any("cut ladder depth" in c for c in shown["cut"])


def test_the_command_exits_3_and_says_what_to_cut(file):
    done = subprocess.run(
        [sys.executable, "-m", "campaign", "plan", str(file), "--set", "budget.cap_usd=0.001"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 3
    assert "session main asks" in done.stderr
    assert "cut pair kv" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plan_loads_nothing_heavy(file):
    """What costs seconds to import is not needed to plan: the budget of `campaign plan` is 3 s."""
    code = textwrap.dedent(f"""
        import sys
        from campaign.cli.plan import command
        command.main([{str(file)!r}], standalone_mode=False)
        heavy = {{"ray", "sky", "boto3", "pyarrow", "pandas", "matplotlib", "scipy.stats", "scipy.optimize"}}
        print(sorted(heavy & set(sys.modules)))
    """)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_screen_says_what_a_person_needs(file, planned):
    loaded = load(file)
    plan = planned(loaded.spec)
    out = io.StringIO()
    render(plan, loaded.defaults(), Console(file=out, width=140))
    text = out.getvalue()
    for part in (
        "plan of quickstart",
        "defaults in force",
        "max_consecutive_errors 3",
        "times and dollars assume",
        "SmolLM2-135M",
        "anchor.between1",
        "ladder.depth alternated: all 4 arms fit",
        "depth:plain|depth=3",
        "admitted: main; worst case",
    ):
        assert part in text
    assert plan.sessions[0].usd_worst
    assert dollars(plan.sessions[0].usd_worst) in text


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_screen_fits_its_width(file, planned, width):
    loaded = load(file)
    out = io.StringIO()
    render(planned(loaded.spec), loaded.defaults(), Console(file=out, width=width))
    assert max(len(line.rstrip()) for line in out.getvalue().splitlines()) <= width


def test_brackets_in_names_are_not_markup(file, planned):
    loaded = load(file)
    out = io.StringIO()
    render(planned(loaded.spec), {"a.b": "[red]x[/red]"}, Console(file=out, width=100))
    assert "[red]x[/red]" in out.getvalue()


def test_defaults_are_grouped_by_entry():
    found = default_lines(
        {"pairs.kv.boots": 2, "pairs.kv.margin": 0.02, "store": "results/", "anchor.between": True}
    )
    assert found == ["pairs.kv: boots 2, margin 0.02", "file: store results/", "anchor: between yes"]


@pytest.mark.parametrize(
    ("amount", "shown"),
    [
        (0, "$0"),
        (1, "$0.000001"),
        (1_000, "$0.001"),
        (1_234, "$0.0012"),
        (600_000, "$0.60"),
        (252_123, "$0.252"),
        (12_340_000, "$12.34"),
        (1_234_567_000, "$1,234.57"),
    ],
)
def test_dollars_in_words(amount, shown):
    assert dollars(amount) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(40, "40 s"), (312, "5.2 min"), (11_160, "3.1 h")])
def test_spans_in_words(seconds, shown):
    assert span(seconds) == shown
