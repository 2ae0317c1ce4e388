"""`campaign report` and `campaign status` on run folders."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from campaign.cli.report import command as report_command
from campaign.cli.status import command as status_command
from campaign.testing.sample_run import sample_run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work") / "results"
    sample_run(folder, name="whole")
    sample_run(folder, name="broken", rounds=4)
    return folder


def call(command, *args):
    result = CliRunner().invoke(command, args, catch_exceptions=False)
    return result.exit_code, result.output


def test_report_prints_and_writes_both_files(results, monkeypatch):
    monkeypatch.chdir(results.parent)
    code, text = call(report_command, "whole")
    assert code == 0
    assert "kv_dtype q8_0 is" in text
    assert text.rstrip().endswith("results/whole/report.html")
    page = (results / "whole" / "report.html").read_text(encoding="utf-8")
    assert "SIMULATED" in page
    value = json.loads((results / "whole" / "report.json").read_text(encoding="utf-8"))
    assert value["run"] == "whole"


def test_json_is_json_alone_and_writes_nothing(results, monkeypatch):
    monkeypatch.chdir(results.parent)
    code, text = call(report_command, "broken", "--json")
    value = json.loads(text)
    assert code == 0
    assert value["partial"] is True
    assert not (results / "broken" / "report.html").exists()


def test_markdown_and_html_elsewhere(results, monkeypatch, tmp_path):
    monkeypatch.chdir(results.parent)
    page = tmp_path / "page.html"
    code, text = call(report_command, "broken", "--md", "--html", str(page))
    assert code == 0
    assert text.startswith("### sample")
    assert "PARTIAL" in page.read_text(encoding="utf-8")
    assert not (results / "broken" / "report.html").exists()


def test_two_formats_are_refused(results, monkeypatch):
    monkeypatch.chdir(results.parent)
    code, text = call(report_command, "whole", "--json", "--md")
    assert code == 2
    assert "one of them" in text


def test_an_unknown_run_is_a_user_error(results):
    result = subprocess.run(
        [sys.executable, "-m", "campaign", "report", "nope"],
        cwd=results.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "no run 'nope'" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_changed_row_file_is_refused(results, tmp_path):
    import shutil

    from campaign.errors import StoreError

    copy = tmp_path / "copy"
    shutil.copytree(results / "whole", copy)
    file = next(copy.glob("rows/*/*/*.parquet"))
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(StoreError):
        CliRunner().invoke(report_command, [str(copy)], catch_exceptions=False)


def test_status_of_a_finished_run(results, monkeypatch):
    monkeypatch.chdir(results.parent)
    code, text = call(status_command, "whole")
    assert code == 0
    assert "nothing bills" in text
    assert "resume" not in text
    value = json.loads(call(status_command, "whole", "--json")[1])
    assert (value["status"], value["leases"], value["next"]) == ("finished", [], "")


def test_status_of_a_run_without_controller_says_how_to_go_on(results, monkeypatch):
    monkeypatch.chdir(results.parent)
    text = call(status_command, "broken")[1]
    assert "no controller is alive" in text
    assert "go on with: campaign resume broken" in text
    value = json.loads(call(status_command, "broken", "--json")[1])
    (lease,) = value["leases"]
    assert lease["state"] == "open"
    assert lease["stop"] == "campaign resume broken"
    assert lease["worst_usd"] >= lease["accrued_usd"] > 0
    assert value["committed_usd"] == lease["worst_usd"]
    assert value["sessions"][0]["phase"] in {"measure", "anchor"}


def test_status_names_who_holds_the_run_and_how_to_stop_it(results, monkeypatch):
    from campaign.ledger.journal import Ledger
    from campaign.store.layout import RunDir
    from campaign.testing.clock import VirtualClock

    monkeypatch.chdir(results.parent)
    with Ledger.open(RunDir(results / "broken"), VirtualClock()):
        text = call(status_command, "broken")[1]
        value = json.loads(call(status_command, "broken", "--json")[1])
    assert "held by pid" in text
    assert "stop it with: campaign stop broken" in text
    assert value["status"] == "running"
    assert value["controller"]["pid"] > 0
