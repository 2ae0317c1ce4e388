"""`run.lock`: one controller a run. flock, so that a dead holder's lock is simply free."""

import fcntl
import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from campaign.clock import Clock, iso
from campaign.errors import LedgerError, LedgerLocked
from campaign.store.jsonl import describe


@dataclass(frozen=True, slots=True)
class Signature:
    """The process a person would look for: the command, not a worker that holds the file for it."""

    pid: int
    command: str
    """The verb only: the rest of a command line may hold what should not be written down."""

    @classmethod
    def mine(cls) -> Self:
        """This process."""
        return cls(os.getpid(), " ".join([Path(sys.argv[0]).name, *sys.argv[1:2]]))


class RunLock:
    """Held from construction to `release`, or until this process ends, whichever comes first.

    flock holds between processes of one host and, on Linux, over NFSv4; where several hosts share a
    results folder over another network file system, it does not protect.
    """

    def __init__(self, path: Path, clock: Clock, signature: Signature | None = None) -> None:
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise LedgerError(describe(error, path)) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._sign(clock, signature or Signature.mine())
        except BlockingIOError:
            os.close(self._fd)
            raise LedgerLocked(_refusal(path)) from None
        except OSError as error:
            os.close(self._fd)
            raise LedgerError(describe(error, path)) from error

    def _sign(self, clock: Clock, who: Signature) -> None:
        holder = {
            "pid": who.pid,
            "host": platform.node(),
            "started": iso(clock.utc_ns()),
            "command": who.command,
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(holder).encode() + b"\n", 0)
        os.fsync(self._fd)

    def release(self) -> None:
        """Let go. Idempotent. The file stays: removing it would let two holders in."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def holder(path: Path) -> dict[str, Any] | None:
    """Who holds the lock now: pid, host, started, command. None where nobody does, or it is unsigned."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return _signature(path)
    finally:
        os.close(fd)
    return None


def _signature(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _refusal(path: Path) -> str:
    who = _signature(path)
    run = path.parent.name
    if who is None:
        return f"another controller holds run {run}. Wait for it, or stop it with `campaign stop {run}`"
    return (
        f"run {run} is held by pid {who.get('pid')} on {who.get('host')} ({who.get('command')}) since "
        f"{who.get('started')}. Wait for it, or stop it with `campaign stop {run}`"
    )
