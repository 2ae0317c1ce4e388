"""`campaign preflight` on the shipped examples, as they are and with mistakes in them."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaign.cli import cli

ROOT = Path(__file__).parents[2]
KIMI = ROOT / "examples" / "kimi-k26-b200.yaml"
ENV = {"KIMI_REVISION": "0" * 40, "HEAD_REVISION": "1" * 40, "QWEN_REVISION": "2" * 40}


@pytest.fixture(autouse=True)
def _revisions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", ["kimi-k26-b200.yaml", "qwen3-8b-h100.yaml"])
def test_examples_validate_preflight_and_plan(name: str) -> None:
    for verb in ("validate", "preflight", "plan"):
        result = CliRunner().invoke(cli, [verb, str(ROOT / "examples" / name)])
        assert result.exit_code == 0, result.output
    planned = json.loads(CliRunner().invoke(cli, ["plan", str(ROOT / "examples" / name), "--json"]).output)
    assert planned["usd_expected"] <= (300 if "kimi" in name else 10)
    assert planned["admitted"]


def broken(tmp_path: Path, *edits: tuple[str, str]) -> Path:
    text = KIMI.read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "prompts").symlink_to(ROOT / "examples" / "prompts")
    file = tmp_path / "kimi.yaml"
    file.write_text(text)
    return file


def test_three_mistakes_each_with_its_line(tmp_path: Path) -> None:
    file = broken(
        tmp_path,
        (
            "    trust_remote_code: true\n    prefix_cache: false\n    estimate: {boot_s: 480, ttft_ms: 700, step_ms: 9}\n  sg-eagle:",
            (
                "    trust_remote_code: true\n    prefix_cache: false\n    estimate: {boot_s: 480, ttft_ms: 700, step_ms: 9}\n"
                "    extra_args: [--schedule-polici, fcfs, --torchao-config, int4wo-128]\n"
                "    env: {SGLANG_ENABLE_SPEC_V9: 1}\n  sg-eagle:"
            ),
        ),
    )
    result = CliRunner().invoke(cli, ["preflight", str(file)])
    assert result.exit_code == 2
    lines = file.read_text().splitlines()
    at = {
        word: 1 + next(i for i, line in enumerate(lines) if word in line)
        for word in ("--schedule-polici", "SGLANG_ENABLE_SPEC_V9")
    }
    flags, env = at["--schedule-polici"], at["SGLANG_ENABLE_SPEC_V9"]
    assert (
        f"kimi.yaml:{flags}: arms.sg.extra_args.0 = --schedule-polici fcfs: is no flag of sglang 0.5.23. Fix: did you mean --schedule-policy?"
        in result.output
    )
    assert re.search(
        rf"kimi\.yaml:{flags}: arms\.sg\.extra_args\.2 = --torchao-config int4wo-128: was removed: 0\.5\.14 has it, sglang 0\.5\.23 has not",
        result.output,
    )
    assert re.search(
        rf"kimi\.yaml:{env}: arms\.sg\.env\.SGLANG_ENABLE_SPEC_V9 = 1: .*nothing in sglang 0\.5\.23 reads it",
        result.output,
    )
    assert "3 problems" in result.output, "arms that inherit the mistakes are not reported again"
    assert not list(tmp_path.glob("results*"))


def test_typed_fields_are_named_not_flags(tmp_path: Path) -> None:
    file = broken(tmp_path, ("    attention_backend: trtllm_mla\n", "    attention_backend: cutlass_mla\n"))
    result = CliRunner().invoke(cli, ["preflight", str(file), "--json"])
    problem = json.loads(result.output)["problems"][0]
    assert problem["field"] == "arms.sg.attention_backend"
    assert "becomes --attention-backend" in problem["why"]


def test_one_flag_can_be_accepted_and_an_unknown_source_warns(tmp_path: Path) -> None:
    file = broken(
        tmp_path,
        (
            "    attention_backend: trtllm_mla\n",
            "    attention_backend: trtllm_mla\n    extra_args: [--forked]\n    allow_unknown: [--forked]\n",
        ),
        ('{pip: "vllm==0.33.0"}', f'{{image: "vllm/vllm-openai@sha256:{"a" * 64}"}}'),
    )
    result = CliRunner().invoke(cli, ["preflight", str(file)])
    assert result.exit_code == 0, result.output
    assert "warning: arm vl: no source of vllm is known" in result.output
    assert "checked on the node, before weights load" in result.output


def test_run_refuses_before_anything_is_leased(tmp_path: Path) -> None:
    file = tmp_path / "e.yaml"
    file.write_text(
        "version: 1\ncampaign: x\nbudget: {cap_usd: 5}\n"
        "nodes: {gpu: {provider: local, usd_per_hour: 1, max_hours: 1, gpus: [0]}}\n"
        "models: {m: {hub: o/m, revision: abc}}\nruntimes: {new: {pip: sglang==0.5.23}}\n"
        "arms:\n  a: {engine: sglang, model: m, runtime: new, tp: 1, max_running_requests: 1, extra_args: [--tp, 1]}\n"
        "workloads: {w: {pack: health, n: 2, max_tokens: 8}}\nanchor: {arm: a, workload: w, drift_delta: 0.1}\n"
        f"pairs: {{aa: {{kind: aa, a: a, workload: w}}}}\nsessions: {{s: {{node: gpu, pairs: [aa]}}}}\nstore: {tmp_path / 'results'}\n"
    )
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert result.exit_code != 0
    assert "--tp" in str(result.exception) + result.output
    assert not (tmp_path / "results").exists()
