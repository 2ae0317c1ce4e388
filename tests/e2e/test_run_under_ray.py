"""One campaign under Ray, watched while it runs, and everything that is read from it afterwards."""

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import psutil
import pytest
from e2e_support import SMALL, Campaign, assert_whole, in_round, servers, spec_argv, tree, wait_for

from campaign.report.assemble import assemble
from campaign.report.jsonview import report_json

pytestmark = [pytest.mark.e2e, pytest.mark.ray, pytest.mark.engine]


@dataclass
class Watched:
    """What was seen while the run went on."""

    campaign: Campaign
    output: str
    returncode: int
    listening: set[str]
    pids: set[int]
    second: str
    second_code: int
    partial: dict[str, object]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    campaign = Campaign(tmp_path_factory.mktemp("ray"))
    process = campaign.start(*spec_argv("run", SMALL))
    listening: set[str] = set()
    pids: set[int] = set()

    def look() -> bool:
        for member in tree(process.pid):
            pids.add(member.pid)
            try:
                listening.update(
                    c.laddr.ip for c in member.net_connections("inet") if c.status == psutil.CONN_LISTEN
                )
            except psutil.Error:
                continue
        return in_round(campaign.folder, "ladder.depth")()

    try:
        wait_for(look, process)
        second = campaign.run("resume")
        partial = campaign.json("report")
        output, _ = process.communicate(timeout=240)
        yield Watched(
            campaign, output, process.returncode, listening, pids, second.stderr, second.returncode, partial
        )
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


def test_it_ends_well_and_says_where_the_page_is(watched: Watched) -> None:
    assert watched.returncode == 0, watched.output
    assert "Where the dollars went" in watched.output
    (page,) = re.findall(r"page\s+(\S+report\.html)", watched.output)
    html = (watched.campaign.folder / page).read_text()
    assert "<script" not in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert_whole(watched.campaign.opened)


def test_every_socket_is_on_loopback(watched: Watched) -> None:
    assert watched.listening
    assert {ip.removeprefix("::ffff:") for ip in watched.listening} <= {"127.0.0.1", "::1"}


def test_nothing_is_left(watched: Watched) -> None:
    # A pid may have been given to somebody else since: only what is still ours counts.
    left = []
    for pid in watched.pids:
        try:
            text = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            continue
        if "ray" in text or "campaign" in text:
            left.append(text)
    assert left == []
    assert servers(watched.campaign.folder) == []


def test_second_controller_is_refused_by_name(watched: Watched) -> None:
    assert watched.second_code == 4
    assert re.search(r"held by pid \d+ .*campaign", watched.second), watched.second
    assert "Traceback" not in watched.second


def test_report_in_the_middle_is_marked_partial(watched: Watched) -> None:
    assert watched.partial["partial"] is True
    assert watched.partial["anchors"]


def test_gates_and_rules_are_on_record_before_the_first_request(watched: Watched) -> None:
    events = watched.campaign.opened.events()
    assert events[0].type == "run_created"
    assert events[0].payload["gates"]["max_consecutive_errors"] == 3
    assert events[0].payload["rules_sha256"]
    canonical = watched.campaign.opened.dir.canonical.read_bytes()
    assert events[0].payload["canonical_sha256"] == sha256(canonical).hexdigest()


def test_printed_numbers_re_derive_from_the_rows(watched: Watched) -> None:
    run = watched.campaign.opened
    printed = json.loads(run.dir.report_json.read_text())
    again = json.loads(json.dumps(report_json(assemble(run))))
    for key in ("anchors", "verdicts", "speculation", "spend"):
        assert again[key] == printed[key]


def test_rows_hold_the_identity_and_come_from_the_real_engine(watched: Watched) -> None:
    rows = watched.campaign.opened.requests().rows()
    assert not any(r.simulated for r in rows)
    for row in rows:
        assert row.state == "ok"
        assert row.completion_tokens == (32 if row.workload == "copy" else 12)
        assert row.decode_tok_s is not None
        assert row.accept_len is not None
        assert row.step_ms is not None
        assert row.decode_tok_s == pytest.approx(1000 * row.accept_len / row.step_ms, rel=1e-12)
    drafted = [r for r in rows if r.arm == "depth=3" and r.phase == "measure"]
    assert any(r.drafted for r in drafted)
    # A/A sides never share a seed; both sides of a rung do.
    aa = {
        arm: {r.seed for r in rows if r.arm == arm and r.group == "pair.aa" and r.phase == "measure"}
        for arm in ("plain", "plain#2")
    }
    assert not aa["plain"] & aa["plain#2"]


def test_provenance_is_of_the_live_process(watched: Watched) -> None:
    run = watched.campaign.opened
    files = [json.loads(p.read_text()) for p in run.dir.provenance.glob("*plain*.json")]
    assert files
    assert any("--kv-dtype" in " ".join(f["argv"]) or "llamacpp_server" in " ".join(f["argv"]) for f in files)
    # The key of a boot goes to its server and nowhere else.
    for path in run.dir.root.rglob("*"):
        if path.is_file() and path.suffix in {".json", ".log", ".html", ".yaml"}:
            assert "Bearer " not in path.read_text(errors="replace"), path


def test_spend_adds_up(watched: Watched) -> None:
    spend = watched.campaign.json("spend")
    assert spend["committed_usd"] == spend["settled_usd"]
    assert sum(spend["phases"].values()) == pytest.approx(spend["settled_usd"], abs=1e-6)
    assert 0 < spend["measured_share"] < 1


def test_rerun_adds_a_session_and_supersedes_nothing(watched: Watched) -> None:
    campaign = watched.campaign
    before = {r.key for r in campaign.opened.requests().rows()}
    done = campaign.run("rerun", "--pair", "aa")
    assert done.returncode == 0, done.stdout + done.stderr
    after = campaign.opened.requests().rows()
    assert before < {r.key for r in after}
    fresh = {r.session for r in after} - {"main"}
    assert fresh == {"main-rerun1"}
    assert {r.group for r in after if r.session == "main-rerun1"} == {
        "anchor.first",
        "pair.aa",
        "anchor.last",
    }
    sessions = {v["session"] for v in campaign.json("report")["verdicts"]}
    assert sessions == {"main", "main-rerun1"}


def test_results_folder_is_the_default(watched: Watched) -> None:
    assert isinstance(watched.campaign.opened.dir.root, Path)
    assert watched.campaign.opened.dir.root.parent == watched.campaign.folder / "results"
