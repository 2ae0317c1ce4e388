"""Whole campaigns through the command line: a real engine, real weights, real kills."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from campaign.ledger.state import RunState
from campaign.store.run import Run, open_run

ROOT = Path(__file__).parents[2]

# One ladder with one rung and one A/A, few and short requests: some 20 s on two quiet cores.
SMALL = (
    "ladders.depth.values=[3]",
    "ladders.depth.boots=2",
    "pairs.aa.boots=2",
    "sessions.main.pairs=[aa]",
    "workloads.copy.n=2",
    "workloads.chat.n=2",
    "workloads.health.n=2",
    "anchor.boots=1",
    "anchor.between=false",
    # A lease long enough for a busy machine.
    "gates.boot_timeout=240s",
    "workloads.copy.max_tokens=32",
    "workloads.chat.max_tokens=12",
    "workloads.health.max_tokens=12",
)
INLINE = (*SMALL, "ray.mode=inline")


class Campaign:
    """The command, run in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []

    def argv(self, *argv: str) -> list[str]:
        return [sys.executable, "-m", "campaign", *argv]

    @property
    def env(self) -> dict[str, str]:
        env = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "COLUMNS": "100"}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return env

    def run(self, *argv: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*argv),
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def start(self, *argv: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.argv(*argv),
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def json(self, *argv: str) -> Any:
        done = self.run(*argv, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    @property
    def opened(self) -> Run:
        return open_run(None, self.folder / "results")


def sets(values: Sequence[str]) -> list[str]:
    return [part for value in values for part in ("--set", value)]


def spec_argv(verb: str, values: Sequence[str]) -> list[str]:
    return [verb, str(ROOT / "experiments.yaml"), *sets(values)]


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 300) -> None:
    """Until it is so; fails where the process ends first."""
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.stdout.read() if process.stdout else "ended"
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


def state_of(folder: Path) -> RunState | None:
    try:
        return open_run(None, folder / "results").state()
    except Exception:
        return None


def in_round(folder: Path, group: str) -> Callable[[], bool]:
    """A round of this group has been begun and has finished requests in its journals."""

    def now() -> bool:
        state = state_of(folder)
        if state is None or not any(
            r.id.startswith(group) and r.state == "begun" for r in state.rounds.values()
        ):
            return False
        rows = open_run(None, folder / "results").requests(valid_only=False).rows()
        return any(r.group == group and r.phase == "measure" for r in rows)

    return now


def tree(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def servers(run_folder: Path) -> list[psutil.Process]:
    """Live engine servers of runs under this folder: they write their logs there."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        try:
            if "campaign.engines.llamacpp_server" in (process.info["cmdline"] or []) and any(
                str(run_folder) in str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def planned_cells(run: Run) -> set[tuple[str, str, int, int]]:
    """(group, arm, boot index, slot) of every measured request of the plan."""
    return {
        (g.name, b.arm, b.index, q.slot)
        for s in run.plan().sessions
        for g in s.groups
        for r in g.rounds
        for b in r.boots
        for q in r.sequence
        if q.arm == b.arm
    }


def valid_cells(run: Run) -> list[tuple[str, str, int, int]]:
    return [(r.group, r.arm, r.boot_index, r.slot) for r in run.requests().rows() if r.phase != "warmup"]


def assert_whole(run: Run) -> None:
    """The valid rows are those of the plan, none twice, and the ledger is settled."""
    cells = valid_cells(run)
    assert len(cells) == len(set(cells))
    assert set(cells) == planned_cells(run)
    assert not run.state().open_leases
