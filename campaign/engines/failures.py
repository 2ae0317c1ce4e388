"""Failures that can be told from a log, and from the way a process ended. Kinds as in `EngineError`."""

import re
import signal
from collections.abc import Sequence

Pattern = tuple[str, re.Pattern[str]]


def pattern(kind: str, expression: str) -> Pattern:
    """A kind, and the expression that a line of the log must match."""
    return kind, re.compile(expression, re.IGNORECASE)


COMMON: tuple[Pattern, ...] = (
    pattern(
        "config",
        r"unrecogni[sz]ed arguments?|argument \S+ is not recogni[sz]ed|no such option|unknown argument"
        r"|invalid choice|expected one argument|error: argument |error: the following arguments are required"
        r"|error: ambiguous option|invalid value for",
    ),
    pattern("port_taken", r"address (?:already )?in use|errno 98|EADDRINUSE|couldn't bind|failed to bind"),
    pattern(
        "oom",
        r"out of memory|OutOfMemoryError|std::bad_alloc|cannot allocate memory|MemoryError"
        r"|failed to allocate (?:buffer|memory|compute)|oom-kill",
    ),
    pattern("missing_model", r"model file not found|no such file or directory.*\.(?:gguf|safetensors|json)"),
)
"""In order of precedence: what a user can fix first."""


def find(log: str, patterns: Sequence[Pattern]) -> tuple[str, str] | None:
    """(kind, line) of the first pattern, in order of precedence, that a line matches."""
    lines = log.splitlines()
    for kind, expression in patterns:
        for line in lines:
            if expression.search(line):
                return kind, line.strip()
    return None


def of_status(status: int | None) -> tuple[str, str]:
    """(kind, words) of how a process ended, where its log says nothing. Status as in `subprocess`."""
    if status is None:
        return "died", "ended, and nobody saw its status"
    if status == 2:
        return "config", "exit status 2 (its command line)"
    if status < 0 or status > 128:
        number = -status if status < 0 else status - 128
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        # SIGKILL that we did not send is, on Linux, almost always the kernel's OOM killer; not proven here.
        hint = " (the kernel's OOM killer sends it)" if number == signal.SIGKILL else ""
        return "died", f"ended by {name}{hint}"
    return "died", f"exit status {status}"
