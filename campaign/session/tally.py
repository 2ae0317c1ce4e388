"""What a round has counted so far, by arm: valid rows, the client's lag, drafts, and its overlapping waves."""

from collections.abc import Mapping
from typing import Any

from campaign.client.base import Outcome
from campaign.engines.base import Counters
from campaign.errors import EngineError
from campaign.plan.model import ArmPlan
from campaign.session.cell import CellWindow, whole
from campaign.session.instrument import CellLag
from campaign.store.row import RequestRow

INERT_DRAFTS = 200
"""Drafts of a round after which acceptance of exactly 1 is not believed."""


def inert(drafts: int, refused_tokens: int) -> bool:
    """Whether so many drafts without one refused token cannot be chance."""
    return drafts >= INERT_DRAFTS and refused_tokens == 0


class Tally:
    """Counts of one round. Warm-up counts for the drafts and its waves alone."""

    def __init__(self, requested_rate: float | None, *, keep_rows: bool) -> None:
        self._requested_rate, self._keep_rows = requested_rate, keep_rows
        self.measured: list[RequestRow] = []
        """Measured rows in order, where somebody looks at them before the end."""
        self.valid: dict[str, list[bool]] = {}
        """Arm -> of each measured request, whether its row is valid."""
        self.lags: dict[str, CellLag] = {}
        self._drafting: dict[str, tuple[int, int]] = {}
        """Arm -> drafts so far, and drafted tokens that were refused."""
        self._windows: dict[str, list[CellWindow]] = {}
        """Arm -> its waves above concurrency 1, where no request can claim the server's counters."""
        self._open: dict[str, CellWindow] = {}

    def open_waves(self, before: Mapping[str, Counters | None]) -> None:
        """A wave begins; by arm, what its server counted before it."""
        self._open = {arm: CellWindow(counters) for arm, counters in before.items()}

    def close_wave(self, arm: str, after: Counters | None, *, measured: bool) -> None:
        """An arm's wave is over; a wave of the warm-up is forgotten."""
        window = self._open.pop(arm)
        window.after = after
        if measured:
            self._windows.setdefault(arm, []).append(window)

    def add(self, arm: str, row: RequestRow, outcome: Outcome, *, measured: bool) -> None:
        """One request that is over; `measured` unless it was of the warm-up."""
        if arm in self._open:
            self._open[arm].add(row.completion_tokens, finished=row.state in {"ok", "short"})
        if row.drafts and row.drafted and row.accepted is not None:
            drafts, refused_tokens = self._drafting.get(arm, (0, 0))
            self._drafting[arm] = (drafts + row.drafts, refused_tokens + row.drafted - row.accepted)
        if measured:
            self.valid.setdefault(arm, []).append(row.validity == "valid")
            if self._keep_rows:
                self.measured.append(row)
            self.lags.setdefault(arm, CellLag(self._requested_rate)).add(outcome, row.step_ms)

    def overlapping(self, arm: ArmPlan) -> dict[str, Any]:
        """Steps and acceptance of the cell and of its waves, where requests overlap; nothing else."""
        windows = self._windows.get(arm.name)
        if not windows:
            return {}
        spec = arm.config.speculation
        depth = spec.depth if spec else None
        return {
            "overlapping": whole(windows).to_json(depth),
            "waves": [window.to_json(depth) for window in windows],
        }

    def drafters_are_real(self, arms: Mapping[str, ArmPlan]) -> None:
        """Every draft accepted, hundreds of times, is a drafter that nothing checks: the arm is invalid."""
        for arm, (drafts, refused) in self._drafting.items():
            spec = arms[arm].config.speculation
            if spec is not None and spec.simulated_acceptance is None and inert(drafts, refused):
                why = f"{arm}: all of {drafts} drafts were accepted whole: the drafter is inert"
                raise EngineError("not_effective", why)
