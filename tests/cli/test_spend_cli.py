"""`campaign spend`: dollars per million output tokens, and the provider's own report beside ours."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from campaign.cli import _spend_all, cli
from campaign.cloud import sky_sdk
from campaign.report import facts
from campaign.store.run import open_run
from campaign.testing.sample_run import sample_run


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_run(tmp_path_factory.mktemp("store")).root


def ask(*argv: str) -> str:
    done = CliRunner().invoke(cli, ["spend", *argv])
    assert done.exit_code == 0, done.output
    return done.output


def test_dollars_per_million_output_tokens_re_derive_from_the_rows(sample: Path) -> None:
    said = json.loads(ask(str(sample), "--json"))
    rows = [r for r in open_run(str(sample)).requests().rows() if r.phase == "measure"]
    tokens = sum(r.completion_tokens or 0 for r in rows)
    assert tokens > 0
    assert said["output_tokens"] == tokens
    assert said["usd_per_mtok_out"] == pytest.approx(said["spent_usd"] / tokens * 1e6, abs=1e-5)
    assert f"${said['usd_per_mtok_out']:.2f} per million output tokens" in ask(str(sample))


def test_csv_adds_up(sample: Path) -> None:
    lines = [line.split(",") for line in ask(str(sample), "--csv").splitlines()[1:]]
    spent = json.loads(ask(str(sample), "--json"))["spent_usd"]
    assert sum(float(usd) for _, _, usd in lines) == pytest.approx(spent, abs=1e-5)


def test_provider_report_stands_beside_ours_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with a record, one without, and one that still runs: unknown is none, never zero."""

    def lease(node: str, settled: int | None) -> SimpleNamespace:
        return SimpleNamespace(provider="sky", node_id=node, id=f"{node}.1", settled_usd=settled)

    leases = {"a": lease("n1", 2_291_700), "b": lease("n2", 1_000_000), "c": lease("n3", None)}
    monkeypatch.setattr(sky_sdk, "cost_report", lambda: {"n1": 2.1944, "foreign": 99.0})
    said = _spend_all.provider_json(SimpleNamespace(leases=leases))
    assert [(n["node"], n["ledger_usd"], n["provider_usd"]) for n in said["nodes"]] == [
        ("n1", 2.2917, 2.1944), ("n2", 1.0, None), ("n3", None, None),
    ]  # fmt: skip
    assert "from before the launch call to the proof" in said["why"]


def test_nothing_rented_asks_nobody(sample: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sky_sdk, "cost_report", lambda: pytest.fail("nobody is to be asked"))
    assert json.loads(ask(str(sample), "--json", "--provider"))["provider"]["nodes"] == []


def test_burn_down_shows_what_was_committed_and_ends_at_what_was_spent(sample: Path) -> None:
    run = open_run(str(sample))
    points = facts.risk_points(run.events())
    spent = json.loads(ask(str(sample), "--json"))
    assert points[0].usd >= spent["spent_usd"]
    assert points[-1].usd == pytest.approx(spent["settled_usd"])
    assert max(p.usd for p in points) <= spent["cap_usd"]
