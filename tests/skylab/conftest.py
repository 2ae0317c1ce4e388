"""The lab: a real SkyPilot over a private Slurm on this machine (scripts/skylab)."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
SPEC = Path(__file__).with_name("rented.yaml")


@dataclass
class Lab:
    """A running lab, and a folder to run campaigns in."""

    env: dict[str, str]
    folder: Path
    work: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, *argv: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """A command of this environment, to its end."""
        return subprocess.run(
            [str(BIN / argv[0]), *argv[1:]],
            cwd=self.work, env=self.env, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(self, *argv: str) -> subprocess.Popen[str]:
        """`campaign ARGV` in the background, in a session of its own."""
        with (self.work / "controller.log").open("w") as log:
            process = subprocess.Popen(
                [str(BIN / "campaign"), *argv],
                cwd=self.work,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def slurm(self, *argv: str) -> str:
        """A command of the scheduler itself. Fails where it cannot be asked: nothing is proven then."""
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.strip()

    def squeue(self) -> list[str]:
        """Our allocations, as the scheduler lists them: `ID NAME STATE`."""
        return [line for line in self.slurm("squeue", "-h", "-o", "%i %j %T").splitlines() if " cmp-" in line]

    def squeue_numbers(self) -> list[str]:
        """Every allocation there is, whoever's."""
        return sorted(self.slurm("squeue", "-h", "-o", "%i").split())

    def runs(self) -> list[Path]:
        """Run folders, oldest first."""
        return sorted(p.parent for p in self.work.glob("results/*/ledger.db"))

    def events(self, kind: str | None = None) -> list[Any]:
        """Events of the newest run, read while it writes them; none while the ledger is being made."""
        from campaign.errors import LedgerError
        from campaign.ledger.journal import read_events

        runs = self.runs()
        if not runs:
            return []
        try:
            return [e for e in read_events(runs[-1] / "ledger.db") if kind in {None, e.type}]
        except LedgerError:
            if self.started and self.started[-1].poll() is None:
                return []
            raise

    def spend(self) -> dict[str, Any]:
        """`campaign spend --json` of the newest run."""
        done = self.run("campaign", "spend", str(self.runs()[-1]), "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def log(self) -> str:
        """What the controller in the background has printed."""
        path = self.work / "controller.log"
        return path.read_text() if path.exists() else ""

    def until(self, what: Callable[[], Any], limit_s: float = 900, pause_s: float = 0.5) -> Any:
        """Wait for something to be so; ends at once where the controller has ended and it is not."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            over = bool(self.started) and self.started[-1].poll() not in {None, -9}
            found = what()
            if found:
                return found
            assert not over, f"the controller has ended: {self.log()[-3000:]}"
            time.sleep(pause_s)
        raise AssertionError(f"not within {limit_s} s; {self.log()[-3000:]}")

    def reconcile(self, expect: int = 0) -> str:
        """`campaign reconcile` of every run of this folder; what it printed."""
        done = self.run("campaign", "reconcile", "--store", "results")
        print(f"reconcile: exit {done.returncode}: {done.stdout.strip()}")
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    def check_money(self, cap: float = 25.0) -> dict[str, Any]:
        """Whatever happened: spend within the cap, ledger whole."""
        spent = self.spend()
        print(f"spent ${spent['spent_usd']:.4f} of ${cap:.2f}")
        assert 0 <= spent["spent_usd"] <= cap
        assert spent["over_cap_usd"] == 0
        done = self.run("campaign", "verify", str(self.runs()[-1]))
        assert done.returncode == 0, done.stdout + done.stderr
        return spent

    def server(self) -> list[int]:
        """Processes of the API server of this lab: its main one, by the port it was told."""
        found = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                ours = f"HOME={self.env['HOME']}".encode() in environ.read_bytes().split(b"\0")
                if ours and b"sky.server.server" in (environ.parent / "cmdline").read_bytes():
                    found.append(int(environ.parent.name))
        return sorted(found)

    def on_node(self, word: bytes) -> list[int]:
        """Processes of the node's user whose command line holds `word`."""
        listed = subprocess.run(["pgrep", "-u", "skynode"], capture_output=True, text=True, check=False)
        found = []
        for pid in listed.stdout.split():
            with contextlib.suppress(OSError):
                if word in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found


@pytest.fixture(scope="session")
def lab_up() -> Iterator[dict[str, str]]:
    """The environment of a lab: the one in SKYLAB, which stays up, or a new one for this session of tests."""
    given = os.environ.get("SKYLAB")
    if given is not None:
        yield sourced(Path(given))
        return
    if os.geteuid() != 0:
        pytest.skip("the lab needs root: it makes a user and starts munge, Slurm and sshd")
    folder = Path(tempfile.mkdtemp(prefix="skylab.", dir="/tmp"))
    script = ROOT / "scripts" / "skylab" / "lab"
    env = {**os.environ, "BIN": str(BIN)}
    # Installs packages where they are missing, which may take minutes.
    up = subprocess.run(
        [script, "up", folder], env=env, capture_output=True, text=True, timeout=1200, check=False
    )
    if up.returncode in {2, 3}:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr[-3000:]
    yield sourced(folder)
    down = subprocess.run(
        [script, "down", folder], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert down.returncode == 0, down.stderr[-2000:]


def sourced(folder: Path) -> dict[str, str]:
    """The environment that the lab's file makes."""
    shown = subprocess.run(
        ["bash", "-c", f". {folder}/env && env -0"], capture_output=True, text=True, check=True
    )
    return dict(pair.split("=", 1) for pair in shown.stdout.split("\0") if "=" in pair)


@pytest.fixture
def lab(lab_up: dict[str, str], tmp_path: Path) -> Iterator[Lab]:
    it = Lab({**lab_up, "SKYLAB_TOKEN": "NAMED-secret"}, Path(lab_up["LAB"]), tmp_path)
    yield it
    for process in it.started:
        if process.poll() is None:
            process.kill()
            process.wait(30)
