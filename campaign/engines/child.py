"""One guarded server process: started, looked at, and ended with everything that descends from it."""

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from campaign.engines import guard, procfs
from campaign.errors import EngineError

GRACE_S = 5.0
"""From TERM to KILL."""
_START_S = 10.0


class Child:
    """A server under its guard. Blocking methods end within seconds; `asyncio.to_thread` them."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | None,
        cpus: Sequence[int],
        log_path: Path,
    ) -> None:
        """Start it. Raises EngineError('config') when it cannot be executed."""
        log_path.parent.mkdir(parents=True, exist_ok=True)
        control_read, self._control = os.pipe()
        self._report, report_write = os.pipe()
        try:
            with log_path.open("ab") as log:
                self._guard = subprocess.Popen(
                    [
                        *(sys.executable, "-I", "-S", guard.__file__),
                        *(str(control_read), str(report_write), str(GRACE_S)),
                        *(",".join(str(c) for c in cpus), cwd or "", "--", *argv),
                    ],
                    env=dict(env),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(control_read, report_write),
                    start_new_session=True,
                )
        except OSError as error:
            os.close(self._control)
            os.close(self._report)
            raise EngineError("config", f"cannot start the server: {error}") from error
        finally:
            os.close(control_read)
            os.close(report_write)
        self._buffer = b""
        self._closed = False
        self.status: int | None = None
        first = self._read_line(_START_S)
        if "pid" not in first:
            self.kill()
            raise EngineError(
                "config", f"cannot start the server: {first.get('error', 'no word from its guard')}"
            )
        self.pid = int(first["pid"])

    def poll(self) -> bool:
        """Whether the server is alive. Afterwards `status` is known where it ended."""
        if procfs.state(self.pid) not in {None, "Z", "X"} and self._guard.poll() is None:
            return True
        if self.status is None:
            # The guard reports as soon as it has reaped; a guard that was killed never does.
            self.status = self._read_line(1.0).get("status", self._guard.poll())
        return False

    def pids(self) -> list[int]:
        """The server and everything under its guard that is alive."""
        return guard.descendants(self._guard.pid) if self._guard.poll() is None else []

    def end(self) -> None:
        """TERM, after the grace KILL, for the whole tree; returns when nothing is left. Idempotent."""
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        try:
            self._guard.wait(GRACE_S + 5)
        except subprocess.TimeoutExpired:
            self.kill()
        self.poll()
        self._close()

    def kill(self) -> None:
        """KILL without grace, should the guard itself not answer."""
        for pid in [*guard.descendants(self._guard.pid), self._guard.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._guard.wait()
        self._close()

    def _close(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1
        if not self._closed:
            self._closed = True
            os.close(self._report)

    def _read_line(self, timeout_s: float) -> dict[str, int]:
        """The next line of the guard's report; empty when none comes."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer and not self._closed:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._report], [], [], left)[0]:
                return {}
            data = os.read(self._report, 4096)
            if not data:
                return {}
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        parsed = json.loads(line) if line else {}
        return parsed if isinstance(parsed, dict) else {}


async def start(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: str | None, cpus: Sequence[int], log_path: Path
) -> Child:
    """`Child(...)` without blocking the loop. A cancelled start leaves no process behind."""
    task = asyncio.ensure_future(
        asyncio.to_thread(lambda: Child(argv, env=env, cwd=cwd, cpus=cpus, log_path=log_path))
    )
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(EngineError):
            child = await task
            await asyncio.to_thread(child.end)
        raise
