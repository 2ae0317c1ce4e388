"""The small process that owns a server, so that nothing of it survives, whatever kills `campaign`.

Run as a file with `python -I -S`: it imports a handful of standard modules and starts in 20 ms. It becomes
a child subreaper, so descendants that leave their process group, session or parent stay its own, and ends
all of them when its control pipe reaches end of file (the parent died or asked), when it gets SIGTERM,
SIGINT or SIGHUP, or when the server itself ends. Should the guard be killed, the kernel kills the server.

Arguments: `CONTROL_FD REPORT_FD GRACE_S CPUS CWD -- ARGV...`; the server inherits stdout, stderr and the
environment. On the report pipe it writes JSON lines: `{"pid": N}` or `{"error": TEXT}`, and at the end
`{"status": N}` as `os.waitstatus_to_exitcode` gives it. Linux only (prctl, /proc).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LOOK_S = 1.0
"""Between looks at the parent: a fork of it may hold the control pipe open after it is gone."""
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def descendants(root: int) -> list[int]:
    """Every live descendant of `root`, by the parent links in /proc; zombies left out."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208  # pathlib would double the start-up time
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as f:  # noqa: PTH123  # likewise
                fields = f.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in {b"Z", b"X"}:
            children.setdefault(int(fields[1]), []).append(int(name))
    out: list[int] = []
    todo = [root]
    while todo:
        found = children.get(todo.pop(), [])
        out += found
        todo += found
    return out


def _spawn(argv: list[str], cwd: str, cpus: set[int]) -> int:
    """Fork and exec the server in a session of its own. Raises OSError for what exec says."""
    mine = os.getpid()
    read_end, write_end = os.pipe()  # closed by a successful exec
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != mine:
                os._exit(127)
            if cpus:
                os.sched_setaffinity(0, cpus)
            for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
            if cwd:
                os.chdir(cwd)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.execvpe(argv[0], argv, os.environ)  # noqa: S606  # no shell is the point
        except BaseException as error:
            os.write(write_end, f"{argv[0]}: {error}".encode()[:2000])
        os._exit(127)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as f:
        failed = f.read()
    if failed:
        os.waitpid(pid, 0)
        raise OSError(failed.decode("utf-8", "replace"))
    return pid


def _reap(server: int) -> int | None:
    """Collect every child that ended. The server's status once it is among them."""
    status = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == server:
            status = os.waitstatus_to_exitcode(raw)


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _end_tree(server: int, grace_s: float) -> int | None:
    """TERM, then KILL until no descendant is left. New forks are found on the next round."""
    status = _reap(server)
    pids = descendants(os.getpid())
    _signal_all(pids, signal.SIGTERM)
    _signal_all(pids, signal.SIGCONT)  # a stopped process acts on TERM only once it runs
    deadline = time.monotonic() + grace_s
    while True:
        reaped = _reap(server)
        status = status if reaped is None else reaped
        pids = descendants(os.getpid())
        if not pids:
            # It may have ended between the two looks.
            reaped = _reap(server)
            return status if reaped is None else reaped
        if time.monotonic() >= deadline:
            _signal_all(pids, signal.SIGKILL)
        time.sleep(0.01)


def main(args: list[str]) -> int:
    """Own one server to its end; returns what the guard exits with."""
    control, report = int(args[0]), int(args[1])
    grace_s, cpus, cwd = float(args[2]), args[3], args[4]
    argv = args[args.index("--") + 1 :]
    # Neither pipe may reach the server: it would hold the control pipe open or write on the report.
    os.set_inheritable(control, False)  # noqa: FBT003  # its only signature
    os.set_inheritable(report, False)  # noqa: FBT003
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # what the parent blocks is not the server's business
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def say(line: dict[str, object]) -> None:
        with contextlib.suppress(OSError):  # the parent may be gone
            os.write(report, json.dumps(line).encode() + b"\n")

    try:
        server = _spawn(argv, cwd, {int(c) for c in cpus.split(",") if c})
    except OSError as error:
        say({"error": str(error)})
        return 127
    say({"pid": server})
    status: int | None = None
    while status is None:
        ready, _, _ = select.select([control, wake_read], [], [], _LOOK_S)
        if os.getppid() != parent:
            break
        if control in ready and not os.read(control, 4096):
            break
        if wake_read in ready and any(b != signal.SIGCHLD for b in os.read(wake_read, 4096)):
            break
        status = _reap(server)
    if status is not None:
        say({"status": status})  # before its children are ended, which may take the grace
        _end_tree(server, grace_s)
        return status if status >= 0 else 128 - status
    status = _end_tree(server, grace_s)
    say({"status": status})
    if status is None:
        return 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
