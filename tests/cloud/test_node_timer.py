"""The lease timer as a real process: it ends the agent and runs the command that ends the node."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from campaign.cloud import node_timer
from campaign.cloud.control import Record, sign

KEY = "ab" * 32


def start(folder: Path, left_s: float, lease_s: float | None = None) -> subprocess.Popen[bytes]:
    (folder / "control").mkdir(exist_ok=True)
    env = {
        "CAMPAIGN_KEY": KEY,
        "CAMPAIGN_LEASE": "s.1",
        "CAMPAIGN_END": f"echo ended >> {folder}/ended; kill -9 $PPID",
        "CAMPAIGN_DEADLINE_UTC": str(time.time() + left_s),
        "CAMPAIGN_LEASE_S": str(left_s if lease_s is None else lease_s),
        "PATH": os.environ["PATH"],
    }
    return subprocess.Popen(
        [sys.executable, "-S", "-E", node_timer.__file__, str(folder)], env=env, start_new_session=True
    )


def until(what: Path, process: subprocess.Popen[bytes], limit_s: float = 20) -> None:
    process.wait(limit_s)
    assert what.exists()


def test_hung_agent_is_ended_and_then_the_node(tmp_path: Path) -> None:
    # An engine that hears TERM and goes on: only KILL ends it.
    hung = subprocess.Popen(["bash", "-c", "trap '' TERM; while :; do sleep 1; done"], start_new_session=True)
    (tmp_path / "agent.pid").write_text(str(hung.pid))
    node_timer_flush = 2.0
    code = (
        f"import sys; sys.path.insert(0, {str(Path(node_timer.__file__).parent)!r}); import node_timer as t; "
        f"t.FLUSH_S = {node_timer_flush}; from pathlib import Path; t.main(Path({str(tmp_path)!r}))"
    )
    (tmp_path / "control").mkdir()
    env = {
        "CAMPAIGN_KEY": KEY, "CAMPAIGN_LEASE": "s.1", "CAMPAIGN_END": f"touch {tmp_path}/ended; kill -9 $PPID",
        "CAMPAIGN_DEADLINE_UTC": str(time.time() + 1), "CAMPAIGN_LEASE_S": "1", "PATH": os.environ["PATH"],
    }  # fmt: skip
    timer = subprocess.Popen([sys.executable, "-c", code], env=env, start_new_session=True)
    until(tmp_path / "ended", timer)
    assert hung.wait(10) == -9


def test_wall_clock_that_is_wrong_does_not_lengthen_a_lease(tmp_path: Path) -> None:
    timer = start(tmp_path, left_s=9999, lease_s=1)
    until(tmp_path / "ended", timer)


def test_signals_do_not_end_the_timer(tmp_path: Path) -> None:
    timer = start(tmp_path, left_s=3)
    while not (tmp_path / "timer.json").exists():
        assert timer.poll() is None
        time.sleep(0.05)
    timer.terminate()
    until(tmp_path / "ended", timer)


@pytest.mark.parametrize("key", [KEY, "cd" * 32])
def test_only_a_signed_record_extends(tmp_path: Path, key: str) -> None:
    folder = tmp_path / "control"
    folder.mkdir()
    (folder / "0001.json").write_bytes(sign(Record("s.1", 1, "extend", deadline_utc_ns=5 * 10**18), key))
    (folder / "0002.json").write_bytes(b"not json")
    found = node_timer.extension(folder, KEY, "s.1")
    assert found == (5e9 if key == KEY else None)


def test_granted_is_never_more_than_the_lease() -> None:
    assert node_timer.granted(100.0, 50.0, 90.0) == 10.0
    assert node_timer.granted(1000.0, 50.0, 90.0) == 50.0
    assert node_timer.granted(80.0, 50.0, 90.0) == 0.0
