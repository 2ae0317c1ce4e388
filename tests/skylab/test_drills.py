"""Every other failure drill on a real SkyPilot; long, so only with DRILL_REAL=1 (`make drill-real`), which prints what it found.

After each: no allocation of ours is left, or, while it cannot be reached, exit 4 and a bill that runs on; spend is
within the cap; the ledger verifies.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

SPEC = Path(__file__).with_name("rented.yaml")
Lab = Any
"""conftest.Lab, given by the fixture."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not os.environ.get("DRILL_REAL"), reason="a long drill: `make drill-real` runs it"),
]


def killed(process: "subprocess.Popen[str]") -> None:
    """kill -9 of the controller; its actors follow."""
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)


def settled(lab: Lab) -> None:
    """What must be so after every drill."""
    assert lab.squeue() == []
    assert not lab.spend()["open_leases"]
    lab.check_money()


def test_controller_dies_right_after_the_intent(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_intent"), pause_s=0.02)
    killed(process)
    lab.reconcile()
    settled(lab)
    # The request may have been on its way: nothing comes of it later either.
    for _ in range(30):
        assert lab.squeue() == []
        time.sleep(1)


def test_controller_dies_while_the_launch_request_is_under_way(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: "sky.launch" in lab.run("sky", "api", "status").stdout, pause_s=0.1)
    killed(process)
    lab.reconcile()
    settled(lab)
    for _ in range(30):
        assert lab.squeue() == []
        time.sleep(1)


def test_controller_dies_mid_launch(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lab.squeue)
    killed(process)
    lab.reconcile()
    settled(lab)


def test_controller_dies_mid_down(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_down_asked"), pause_s=0.05)
    killed(process)
    lab.reconcile()
    settled(lab)


def test_preempted_node_is_drawn_again_and_completed_blocks_stay(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: [e for e in lab.events("round_committed") if "pair" in e.payload["round_id"]])
    number = lab.squeue()[0].split()[0]
    lab.slurm("scancel", number)
    code = process.wait(1800)
    assert code == 0, lab.log()[-4000:]
    sessions = {e.session for e in lab.events("round_committed")}
    assert sessions == {"main", "main.draw2"}
    rounds = [e.payload["round_id"] for e in lab.events("round_committed") if "pair" in e.payload["round_id"]]
    assert len(rounds) == len(set(rounds)) == 2
    settled(lab)


def test_api_server_killed_mid_launch(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lab.squeue)
    for pid in lab.server():
        os.kill(pid, signal.SIGKILL)
    code = process.wait(1500)
    print(f"the controller: exit {code}: {lab.log().strip().splitlines()[-2:]}")
    assert code == 4
    lab.run("sky", "api", "start")
    lab.reconcile()
    settled(lab)


def ssh_servers(root: int) -> list[int]:
    """A listener and every session of it; not what was started through them."""
    found = [root]
    names: dict[int, list[tuple[int, str]]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = stat.read_text().rpartition(")")
        except OSError:
            continue
        names.setdefault(int(tail.split()[1]), []).append((int(stat.parent.name), head.partition("(")[2]))
    for pid in found:
        found += [child for child, name in names.get(pid, []) if name.startswith("sshd")]
    return found


def test_login_node_unreachable_during_down(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_down_asked"), pause_s=0.05)
    for pid in ssh_servers(int((lab.folder / "run" / "sshd.pid").read_text())):
        os.kill(pid, signal.SIGKILL)
    try:
        code = process.wait(1500)
        assert lab.squeue(), "the node had ended before the line was cut: nothing was shown"
        print(f"the controller: exit {code}; the node is still there: {lab.squeue()}")
        assert code == 4, lab.log()[-3000:]
        assert "check by hand" in " ".join(lab.log().split())
        (lease,) = lab.spend()["open_leases"]
        assert lease["unreachable"]
        before = lab.spend()["spent_usd"]
        lab.reconcile(expect=4)
        assert lab.spend()["spent_usd"] > before  # it bills on
    finally:
        subprocess.run(
            ["/usr/sbin/sshd", "-f", lab.folder / "ssh/sshd_config", "-E", lab.folder / "log/sshd.log"],
            env=lab.env,
            check=True,
        )
    lab.reconcile()
    settled(lab)


def test_hung_engine_and_dead_controller_end_at_the_lease(lab: Lab) -> None:
    process = lab.start("run", str(SPEC), "--set", "nodes.rent.max_hours=0.15")
    lab.until(lambda: lab.on_node(b"llamacpp_server"))
    killed(process)
    for pid in lab.on_node(b"llamacpp_server"):
        os.kill(pid, signal.SIGSTOP)
    (opened,) = lab.events("lease_opened")
    lab.until(lambda: not lab.squeue(), 1200, pause_s=1)
    late = time.time() - opened.payload["deadline_utc_ns"] / 1e9
    print(f"the node ended itself {late:.0f} s after its deadline (allowed: 180)")
    assert late <= 180
    assert not lab.on_node(b"llamacpp_server")
    lab.reconcile()
    settled(lab)


def test_second_controller_on_the_same_run_is_refused(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_intent"))
    second = lab.run("campaign", "resume", str(lab.runs()[-1]))
    print(f"the second controller: exit {second.returncode}: {(second.stderr or second.stdout).strip()}")
    assert second.returncode == 4
    assert "is held by" in " ".join((second.stderr + second.stdout).split())
    assert "left to its controller" in lab.reconcile()
    process.send_signal(signal.SIGINT)
    assert process.wait(1200) == 130
    settled(lab)
