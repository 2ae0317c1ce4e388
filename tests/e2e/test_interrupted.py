"""What interrupts a campaign, and that nothing measured or spent is lost."""

import signal
import time

import psutil
import pytest
from e2e_support import (
    INLINE,
    SMALL,
    Campaign,
    assert_whole,
    in_round,
    servers,
    spec_argv,
    state_of,
    valid_cells,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.engine]


def gone(processes: list[psutil.Process], seconds: float = 20) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return not alive


@pytest.mark.parametrize("mode", ["inline", pytest.param("ray", marks=pytest.mark.ray)])
def test_kill_9_in_the_ladder_then_resume_gives_the_rows_of_an_unbroken_run(
    campaign: Campaign, mode: str
) -> None:
    process = campaign.start(*spec_argv("run", INLINE if mode == "inline" else SMALL))
    wait_for(in_round(campaign.folder, "ladder.depth"), process)
    engines = servers(campaign.folder)
    assert engines
    finished = {r.key for r in campaign.opened.requests(valid_only=False).rows()}
    process.kill()
    process.wait(30)
    assert gone(engines), "a server outlived its campaign"
    committed = valid_cells(campaign.opened)
    done = campaign.run("resume")
    assert done.returncode == 0, done.stdout + done.stderr
    run = campaign.opened
    assert_whole(run)
    assert set(committed) <= set(valid_cells(run))
    # No finished request was lost: those of the broken round are kept, and marked.
    kept = {r.key: r.validity for r in run.requests(valid_only=False).rows()}
    assert finished <= set(kept)
    assert "superseded" in kept.values()
    spend = campaign.json("spend")
    assert spend["phases"]["lost"] > 0
    assert sum(spend["phases"].values()) == pytest.approx(spend["settled_usd"], abs=1e-6)


def test_ctrl_c_settles_exits_130_and_resume_completes(campaign: Campaign) -> None:
    process = campaign.start(*spec_argv("run", INLINE))
    wait_for(in_round(campaign.folder, "pair.aa"), process)
    engines = servers(campaign.folder)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert "campaign resume" in output
    assert "Traceback" not in output
    assert gone(engines)
    state = state_of(campaign.folder)
    assert state is not None
    assert not state.open_leases
    done = campaign.run("resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_whole(campaign.opened)


def test_stop_verb_ends_a_run(campaign: Campaign) -> None:
    process = campaign.start(*spec_argv("run", INLINE))
    wait_for(in_round(campaign.folder, "pair.aa"), process)
    asked = campaign.run("stop", "--why", "lunch")
    assert asked.returncode == 0, asked.stderr
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "lunch" in output
    idle = campaign.run("stop")
    assert idle.returncode == 2
    assert "campaign resume" in idle.stderr


def test_killed_engine_voids_its_round_which_is_done_again(campaign: Campaign) -> None:
    process = campaign.start(*spec_argv("run", INLINE))
    wait_for(in_round(campaign.folder, "pair.aa"), process)
    for server in servers(campaign.folder):
        server.kill()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    run = campaign.opened
    assert_whole(run)
    assert "voided" in run.state().attempt_states.values()
    assert any(r.validity == "void" for r in run.requests(valid_only=False).rows())


def test_engine_that_hangs_is_found_and_its_round_done_again(campaign: Campaign) -> None:
    process = campaign.start(*spec_argv("run", (*INLINE, "gates.request_timeout=6s")))
    wait_for(in_round(campaign.folder, "pair.aa"), process)
    for server in servers(campaign.folder):
        server.suspend()
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert_whole(campaign.opened)
    assert servers(campaign.folder) == []


def test_engine_that_keeps_dying_exits_4_with_a_settled_ledger(campaign: Campaign) -> None:
    process = campaign.start(*spec_argv("run", INLINE))
    wait_for(in_round(campaign.folder, "pair.aa"), process)
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        for server in servers(campaign.folder):
            server.kill()
        time.sleep(0.2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 4, output
    assert "Traceback" not in output
    assert "stopped:" in output
    state = state_of(campaign.folder)
    assert state is not None
    assert not state.open_leases
    assert campaign.opened.dir.report_html.exists()
