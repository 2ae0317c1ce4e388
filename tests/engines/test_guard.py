"""The guard: nothing of a server outlives its parent, whatever ends that parent."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from campaign.engines import procfs
from campaign.engines.child import Child
from campaign.errors import EngineError

# A server with a child in its own group, one in a session of its own, and an orphan of an orphan.
FAMILY = r"""
import os, sys, time
def fork(new_session):
    pid = os.fork()
    if pid == 0:
        if new_session:
            os.setsid()
            if os.fork():
                os._exit(0)
        print(os.getpid(), flush=True)
        time.sleep(600)
        os._exit(0)
    return pid
fork(False)
fork(True)
fork(True)
print(os.getpid(), flush=True)
time.sleep(600)
"""

PARENT = """
import os, sys, time
from pathlib import Path
from campaign.engines.child import Child
child = Child([sys.executable, "-c", sys.argv[2]], env={}, cwd=None, cpus=(), log_path=Path(sys.argv[1]))
if sys.argv[3] == "fork" and os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(5)
    os._exit(0)
time.sleep(600)
"""


def gone(pids: list[int]) -> bool:
    return all(procfs.state(p) in {None, "Z"} for p in pids)


def eventually(check, seconds: float = 10.0) -> bool:
    """Other processes end in their own time; a deadline on the real clock is the only way to see it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if check():
            return True
        time.sleep(0.02)
    return False


def pids_in(log: Path, n: int) -> list[int]:
    assert eventually(lambda: log.exists() and len(log.read_text().split()) >= n), log.read_text()
    return [int(x) for x in log.read_text().split()]


def start(tmp_path: Path, *argv: str, **kw) -> Child:
    options = {"env": {"PATH": os.environ["PATH"]}, "cwd": None, "cpus": (), **kw}
    return Child(argv, log_path=tmp_path / "log", **options)


def test_the_whole_family_ends(tmp_path: Path) -> None:
    child = start(tmp_path, sys.executable, "-c", FAMILY)
    pids = pids_in(tmp_path / "log", 4)
    assert child.poll()
    assert set(pids) <= set(child.pids())
    child.end()
    assert gone(pids)
    child.end()
    assert child.status == -signal.SIGTERM


@pytest.mark.parametrize("how", ["plain", "fork"])
def test_kill_9_of_the_parent(tmp_path: Path, how: str) -> None:
    """Also where a fork of the parent lives on and holds the control pipe open."""
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PARENT,
            str(tmp_path / "log"),
            FAMILY,
            how,
        ],
        stdout=subprocess.PIPE,
    )
    if how == "fork":
        fork = int(parent.stdout.readline())
    pids = pids_in(tmp_path / "log", 4)
    assert not gone(pids)
    parent.kill()
    parent.wait()
    assert eventually(lambda: gone(pids), 4)
    if how == "fork":
        assert not gone([fork]), "the fork ended first: this shows nothing"
        os.kill(fork, signal.SIGKILL)
    parent.stdout.close()


def test_kill_9_of_the_guard_takes_the_server(tmp_path: Path) -> None:
    child = start(tmp_path, sys.executable, "-c", "import time; time.sleep(600)")
    os.kill(child._guard.pid, signal.SIGKILL)
    assert eventually(lambda: gone([child.pid]))
    assert not child.poll()
    child.end()


def test_a_server_that_ignores_term_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("campaign.engines.child.GRACE_S", 0.2)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
    child = start(tmp_path, sys.executable, "-c", code)
    pids_in(tmp_path / "log", 1)
    child.end()
    assert gone([child.pid])
    assert child.status == -signal.SIGKILL


def test_a_stopped_server_is_ended(tmp_path: Path) -> None:
    child = start(tmp_path, sys.executable, "-c", "import time; time.sleep(600)")
    os.kill(child.pid, signal.SIGSTOP)
    child.end()
    assert gone([child.pid])


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 11)", -11)]
)
def test_the_status_is_the_servers_own(tmp_path: Path, code: str, status: int) -> None:
    child = start(tmp_path, sys.executable, "-c", code)
    assert eventually(lambda: not child.poll())
    assert child.status == status
    child.end()


def test_children_of_a_server_that_died_do_not_stay(tmp_path: Path) -> None:
    code = FAMILY.replace('time.sleep(600)\n"', "").rpartition("time.sleep")[0] + "time.sleep(0.3)"
    child = start(tmp_path, sys.executable, "-c", code)
    pids = pids_in(tmp_path / "log", 4)
    assert eventually(lambda: gone(pids))
    child.end()
    assert child.status == 0


def test_what_cannot_be_executed_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no-such-server") as caught:
        start(tmp_path, "/no-such-server")
    assert caught.value.kind == "config"


def test_environment_folder_affinity_and_pipes(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    code = (
        "import json, os; print(json.dumps([dict(os.environ), os.getcwd(), sorted(os.sched_getaffinity(0)),"
        " [f for f in map(int, os.listdir('/proc/self/fd')) if f > 2], os.getsid(0) == os.getpid()]))"
    )
    child = start(tmp_path, sys.executable, "-c", code, env={"A": "1"}, cwd=str(tmp_path), cpus=(cpu,))
    assert eventually(lambda: not child.poll())
    child.end()
    env, cwd, cpus, fds, leads = json.loads((tmp_path / "log").read_text())
    assert env["A"] == "1"
    assert set(env) <= {"A", "LC_CTYPE"}  # CPython itself may set the second
    assert cwd == str(tmp_path)
    assert cpus == [cpu]
    assert len(fds) == 1, "only the folder being listed: no pipe of the guard reaches the server"
    assert leads


def test_the_guard_starts_fast(tmp_path: Path) -> None:
    times = []
    for _ in range(5):
        before = time.monotonic()
        child = start(tmp_path, sys.executable, "-S", "-c", "import time; time.sleep(600)")
        times.append(time.monotonic() - before)
        child.end()
    assert min(times) < 0.25, times
