"""A rented node end to end, and failure drills, on a real SkyPilot. No cloud account, no mock.

Two drills are part of every run; the others run with DRILL_REAL=1 (`make drill-real`), and print what they found.
"""

import json
import os
import re
import signal
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from campaign.store.run import open_run

SPEC = Path(__file__).with_name("rented.yaml")
Lab = Any
"""conftest.Lab, given by the fixture."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

full = pytest.mark.skipif(not os.environ.get("DRILL_REAL"), reason="a long drill: `make drill-real` runs it")


class Allocation(threading.Thread):
    """Polls scontrol: what the scheduler says of our allocation, from its start to its end."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(daemon=True)
        self.lab, self.stop, self.text = lab, threading.Event(), ""
        self.secrets: set[str] = set()

    def run(self) -> None:
        number = None
        while not self.stop.wait(1.0):
            try:
                if number is None:
                    listed = self.lab.squeue()
                    number = listed[0].split()[0] if listed else None
                if number is not None:
                    self.text = self.lab.slurm("scontrol", "show", "job", number) or self.text
            except (subprocess.SubprocessError, OSError):
                continue

    def elapsed_s(self) -> float:
        """From StartTime to EndTime, as scontrol last showed them."""
        start, end = (
            datetime.fromisoformat(found.group(1))
            for key in ("StartTime", "EndTime")
            if (found := re.search(rf" {key}=(\S+)", self.text))
        )
        return (end - start).total_seconds()


def check_money(lab: Lab, cap: float = 25.0) -> dict[str, object]:
    """Whatever happened: spend within the cap, ledger whole."""
    spent = lab.spend()
    assert spent["spent_usd"] <= cap
    assert spent["over_cap_usd"] == 0
    verified = lab.events()  # reading verifies the whole chain
    assert verified
    return spent


def controller_dies(process: subprocess.Popen[str]) -> None:
    """kill -9 of the controller's process; its actors follow."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait(30)


def reconcile(lab: Lab, expect: int = 0) -> str:
    done = lab.run("campaign", "reconcile", "--store", "results")
    print(done.stdout)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_campaign_on_a_rented_node(lab: Lab) -> None:
    watch = Allocation(lab)
    watch.start()
    began = time.time()
    done = lab.run("campaign", "run", str(SPEC), timeout=800)
    ended = time.time()
    watch.stop.set()
    watch.join(10)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert lab.squeue() == []  # proof from the scheduler itself
    # Rows came back, were sealed and hashed, and give verdicts.
    run = open_run(lab.runs()[-1])
    rows = run.requests()
    assert len(rows) > 0
    report = json.loads((lab.runs()[-1] / "report.json").read_text())
    assert {v["pair"] for v in report["verdicts"]} == {"kv"}
    assert [a["position"] for a in report["anchors"]] == ["first", "last"]
    (opened,) = lab.events("lease_opened")
    assert set(opened.payload["dead_men"]) == {"autodown", "node_timer", "time_limit"}
    assert opened.payload["usd_per_hour_micro"] == 25_000_000
    # Settled: at least the allocation's time, at most that and what lies between the call, the proof and it.
    (settled,) = lab.events("lease_settled")
    (intent,) = lab.events("lease_intent")
    usd = settled.payload["settled_usd_micro"] / 1e6
    elapsed = watch.elapsed_s()
    least = elapsed * 25 / 3600
    held = (settled.payload["until_utc_ns"] - intent.payload["billing_from_utc_ns"]) / 1e9
    latency = held - elapsed
    print(
        f"allocation {elapsed:.0f} s = ${least:.4f}; settled ${usd:.4f}; launch call and proof {latency:.1f} s"
    )
    assert least - 25 / 3600 <= usd <= (elapsed + latency + 1) * 25 / 3600
    assert 0 <= latency <= ended - began
    told = lab.run("sky", "cost-report")
    print(told.stdout)
    check_money(lab)


def test_controller_dies_mid_cell_and_reconcile_brings_the_rows_and_ends_the_node(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("round_committed"), 500)
    controller_dies(process)
    assert lab.squeue()  # the node does not know; it goes on inside its lease
    said = reconcile(lab)
    assert "settled" in said
    assert lab.squeue() == []
    assert not lab.spend()["open_leases"]
    check_money(lab)
    # What the node had measured is here.
    assert len(open_run(lab.runs()[-1]).requests()) > 0
    assert reconcile(lab).strip() in {"nothing is left behind", ""}


def test_price_above_the_limit_is_never_launched(lab: Lab) -> None:
    done = lab.run("campaign", "run", str(SPEC), "--set", "nodes.rent.max_usd_per_hour=20")
    assert done.returncode == 3, done.stdout[-2000:]
    assert "price" in done.stdout
    assert not lab.events("lease_intent")
    assert lab.squeue() == []


@full
def test_controller_dies_right_after_the_intent(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_intent"), pause_s=0.05)
    controller_dies(process)
    lab.until(lambda: True)
    time.sleep(20)  # the request may be on its way to the API server
    reconcile(lab)
    assert lab.squeue() == []
    check_money(lab)


@full
def test_controller_dies_mid_launch(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lab.squeue)
    controller_dies(process)
    lab.until(lambda: not lab.events("lease_opened") or True)
    reconcile(lab)
    assert lab.squeue() == []
    check_money(lab)


@full
def test_controller_dies_mid_down(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_down_asked"), 600, pause_s=0.05)
    controller_dies(process)
    reconcile(lab)
    assert lab.squeue() == []
    check_money(lab)


@full
def test_preempted_node_is_drawn_again_and_completed_blocks_stay(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: [e for e in lab.events("round_committed") if "pair" in e.payload["round_id"]], 500)
    number = lab.squeue()[0].split()[0]
    lab.slurm("scancel", number)
    assert process.wait(800) == 0, (lab.work / "controller.log").read_text()[-3000:]
    assert lab.squeue() == []
    sessions = {e.session for e in lab.events("round_committed")}
    assert sessions == {"main", "main.draw2"}
    rounds = [e.payload["round_id"] for e in lab.events("round_committed") if "pair" in e.payload["round_id"]]
    assert len(rounds) == len(set(rounds)) == 2
    check_money(lab)


@full
def test_api_server_killed_mid_launch(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lab.squeue)
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            ours = f"HOME={lab.env['HOME']}".encode() in environ.read_bytes().split(b"\0")
            command = (environ.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if ours and b"sky.server" in command:
            os.kill(int(environ.parent.name), signal.SIGKILL)
    process.wait(700)
    lab.run("sky", "api", "start")
    reconcile(lab)
    assert lab.squeue() == []
    assert not lab.spend()["open_leases"]
    check_money(lab)


@full
def test_login_node_unreachable_during_down(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_down_asked"), 600, pause_s=0.05)
    pid = int((lab.folder / "run" / "sshd.pid").read_text())
    sessions = subprocess.run(
        ["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False
    ).stdout.split()
    for number in [*map(int, sessions), pid]:
        os.kill(number, signal.SIGKILL)
    code = process.wait(600)
    log = (lab.work / "controller.log").read_text()
    if lab.squeue():
        assert code == 4, log[-2000:]
        assert "check by hand" in log
        assert lab.spend()["open_leases"][0]["unreachable"]
        reconcile(lab, expect=4)
    subprocess.run(
        ["/usr/sbin/sshd", "-f", lab.folder / "ssh/sshd_config", "-E", lab.folder / "log/sshd.log"],
        env=lab.env,
        check=True,
    )
    reconcile(lab)
    assert lab.squeue() == []
    check_money(lab)


@full
def test_hung_engine_and_dead_controller_end_at_the_lease(lab: Lab) -> None:
    process = lab.start("run", str(SPEC), "--set", "nodes.rent.max_hours=0.07")
    lab.until(lambda: lab.events("boot_ready"), 500)
    controller_dies(process)
    for pid in lab_pids(lab, b"llamacpp_server"):
        os.kill(pid, signal.SIGSTOP)
    (intent,) = lab.events("lease_intent")
    lab.until(lambda: not lab.squeue(), 600, pause_s=2)
    late = time.time() - intent.payload["deadline_utc_ns"] / 1e9
    print(f"the node ended itself {late:.0f} s after its deadline (allowed: 180)")
    assert late <= 180
    reconcile(lab)
    check_money(lab)


@full
def test_second_controller_on_the_same_run_is_refused(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_intent"))
    second = lab.run("campaign", "resume", str(lab.runs()[-1]))
    assert second.returncode == 4
    assert "is held by" in second.stderr + second.stdout
    swept = lab.run("campaign", "reconcile", "--store", "results")
    assert swept.returncode == 0
    assert "left to its controller" in swept.stdout
    process.send_signal(signal.SIGINT)
    assert process.wait(400) == 130
    assert lab.squeue() == []
    check_money(lab)


def lab_pids(lab: Lab, word: bytes) -> list[int]:
    """Processes of the lab's node user whose command line holds `word`."""
    listed = subprocess.run(
        ["pgrep", "-u", "skynode"], capture_output=True, text=True, check=False
    ).stdout.split()
    found = []
    for pid in listed:
        try:
            if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found
