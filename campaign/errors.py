"""The exceptions of `campaign`, and the exit code each one ends the command with.

::

    CampaignError
    ├── UserError                 exit 2   the user can fix it; says where, what and how
    │   ├── SpecError             a value in experiments.yaml (file:line, field, value, fix)
    │   ├── PreflightError        a flag, variable, model file or port an engine will not take
    │   └── RunNotFound           no such run under results/
    ├── GateStop                  exit 3   a gate or the budget stopped or refused
    │   └── BudgetRefused         nothing fits under the cap
    ├── InfrastructureError       exit 4   cloud, engine, disk, another controller
    │   ├── EngineError           the server died, hung, or is not the one we started
    │   ├── ProviderError         a node could not be launched, reached or proven gone
    │   ├── LedgerError           the ledger cannot be written or does not verify
    │   │   └── LedgerLocked      another controller holds this run; names it
    │   ├── StoreError            rows cannot be written or read
    │   │   └── StoreUnreachable  the object store does not answer; asking again later may help
    │   └── RayError              our cluster did not answer in time, or is not ours
    └── Interrupted               exit 130 Ctrl-C; the run can be resumed

Anything else that escapes is our bug: exit 70, and a report file is written.
"""

from dataclasses import dataclass
from typing import ClassVar


class CampaignError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code: ClassVar[int] = 70


@dataclass(frozen=True)
class Problem:
    """One thing a user can fix: where it is, what stands there, and what to write instead."""

    file: str
    line: int | None
    field: str
    value: str
    why: str
    fix: str

    def __str__(self) -> str:
        """`file:line: field = value: why; fix`."""
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        shown = f" = {self.value}" if self.value else ""
        text = f"{place}: {self.field}{shown}: {self.why}. Fix: {self.fix}"
        # One line, whatever the file holds: control and private characters are spelled out.
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class UserError(CampaignError):
    """The user can fix it. Never shown with a traceback."""

    exit_code = 2


class SpecError(UserError):
    """One or more problems in experiments.yaml, all reported at once."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems))

    def __reduce__(self) -> tuple[type["SpecError"], tuple[tuple[Problem, ...]]]:
        """Keep the problems when the error crosses a process boundary."""
        return type(self), (self.problems,)


class PreflightError(UserError):
    """An engine will not take what the arm asks for."""


class RunNotFound(UserError):
    """No run of that name under the results folder."""


class GateStop(CampaignError):
    """A gate left its limit; names the gate, the value and the limit."""

    exit_code = 3

    def __init__(self, gate: str, value: str, limit: str, detail: str = "") -> None:
        self.gate, self.value, self.limit, self.detail = gate, value, limit, detail
        super().__init__(f"gate {gate}: {value} against limit {limit}" + (f" ({detail})" if detail else ""))

    def __reduce__(self) -> tuple[type["GateStop"], tuple[str, str, str, str]]:
        """Keep the four fields when the error crosses a process boundary."""
        return type(self), (self.gate, self.value, self.limit, self.detail)


class BudgetRefused(GateStop):
    """Nothing of the plan fits under the cap; the detail says what to cut."""


class InfrastructureError(CampaignError):
    """Something outside the file and the budget failed."""

    exit_code = 4


class EngineError(InfrastructureError):
    """The server died, hung, never became ready, or is not the one we started.

    `kind` is one of: `config` (no retry: a flag it does not know), `missing_model`, `port_taken`,
    `port_owned_by_other`, `died`, `hung`, `oom`, `not_effective` (it ignored what was asked).
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)

    def __reduce__(self) -> tuple[type["EngineError"], tuple[str, str]]:
        """Keep the kind when the error crosses a process boundary."""
        return type(self), (self.kind, str(self))


class ProviderError(InfrastructureError):
    """A node could not be launched, reached or proven gone.

    `kind` is one of: `capacity`, `quota`, `credentials`, `setup`, `preempted`, `unreachable`, `price`,
    `refused` (the launch call itself was wrong and will stay so).
    """

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)

    def __reduce__(self) -> tuple[type["ProviderError"], tuple[str, str]]:
        """Keep the kind when the error crosses a process boundary."""
        return type(self), (self.kind, str(self))


class LedgerError(InfrastructureError):
    """The ledger cannot be written, or its hash chain does not verify."""


class LedgerLocked(LedgerError):
    """Another controller holds this run."""


class StoreError(InfrastructureError):
    """Rows cannot be written or read (full disk, read-only folder, corrupt journal)."""


class StoreUnreachable(StoreError):
    """The object store does not answer. Nothing is lost: asking again later may help."""


class RayError(InfrastructureError):
    """Our Ray cluster did not answer in time, died, or is not ours."""


class Interrupted(CampaignError):
    """Ctrl-C. Nothing is lost; `campaign resume` goes on."""

    exit_code = 130
