"""Ends what a Ray cluster of ours leaves behind, when whoever started it is gone.

Run as `python -S -E sweeper.py FOLDER TOKEN PARENT` with a pipe on standard input. When the pipe closes
(the parent closed it, or was killed), every process that carries the token in its environment or holds
a file under FOLDER is killed, and FOLDER is removed. Ray 2.60 takes over a minute to do this by itself.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

PASSES = 25
PAUSE_S = 0.2


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:  # noqa: PTH123  # pathlib costs start-up time here
            return file.read()
    except OSError:
        return b""


def _files(pid: str) -> list[str]:
    try:
        return [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]  # noqa: PTH115, PTH208
    except OSError:
        return []


def ours(folder: str, token: str, spared: frozenset[int]) -> list[int]:
    """Pids that belong to the cluster of this folder and token."""
    pids = []
    for pid in os.listdir("/proc"):  # noqa: PTH208
        if not pid.isdigit() or int(pid) in spared:
            continue
        command = _read(f"/proc/{pid}/cmdline")
        marked = token.encode() in _read(f"/proc/{pid}/environ") or folder.encode() in command
        # A Ray process renames itself, environment and all; somebody reading a log there is not ours.
        named = b"ray" in command and any(path.startswith(folder + "/") for path in _files(pid))
        if marked or named:
            pids.append(int(pid))
    return pids


def sweep(folder: str, token: str, spared: frozenset[int]) -> None:
    """Kill until nothing is left, then remove the folder."""
    for _ in range(PASSES):
        pids = ours(folder, token, spared)
        for pid in pids:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            break
        time.sleep(PAUSE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1], sys.argv[2], frozenset({os.getpid(), int(sys.argv[3])}))
