"""What rows say of the GPUs under them: clocks that make arms incomparable, joules a token, and idle time.

Power and clocks are the whole GPU's, other engines that are resident on it and idle included.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum

from campaign.analysis.describe import median
from campaign.analysis.variance import MEASURED, usable
from campaign.store.row import RequestRow

APART = 0.02
"""Relative difference of median SM clocks above which arms did not run on the same machine."""
CAPPED = 0.25
"""Share of samples at the power cap from which a lower clock is the arm's own doing. An H200 at 310 to 430 of its 700 W
and at full clock set the bit in up to 21 % of samples; 2 to 4 % below it, in 43 % and more (docs/H200.md)."""


def clocks(rows: Iterable[RequestRow], pair: tuple[str, str]) -> tuple[set[str], set[str]]:
    """(fatal, notes) of two arms' clocks; nothing where either was not sampled.

    `unequal_clocks` is fatal: median SM clocks over 2 % apart. Where the slower arm stood at its power cap it drew more
    power by itself, on the same machine: then `power_cap` is noted. `throttled` is noted: heat, power
    brake or hardware slowed some samples.
    """
    by_arm: dict[str, list[RequestRow]] = defaultdict(list)
    for row in rows:
        if usable(row) and row.arm in pair and row.gpu_sm_mhz is not None:
            by_arm[row.arm].append(row)
    if len(by_arm) < 2:
        return set(), set()
    notes = {"throttled"} if any(r.gpu_throttle for mine in by_arm.values() for r in mine) else set()
    middle = {arm: median([r.gpu_sm_mhz or 0.0 for r in mine]) or 0.0 for arm, mine in by_arm.items()}
    slow, fast = sorted(middle, key=lambda arm: (middle[arm], arm))
    if middle[fast] <= 0 or 1 - middle[slow] / middle[fast] <= APART:
        return set(), notes
    shares = [r.gpu_power_cap or 0.0 for r in by_arm[slow]]
    if fsum(shares) / len(shares) >= CAPPED:
        return set(), {*notes, "power_cap"}
    return {"unequal_clocks"}, notes


@dataclass(frozen=True, slots=True)
class ArmPower:
    """Energy of one arm in one group at one place set, over its measured requests."""

    session: str
    group: str
    arm: str
    concurrency: int
    requests: int
    joules_per_token: float
    """Joules of the GPUs by completion tokens, prefill included."""
    source: str
    """`counter`: the energy counter over each request; `power_by_time`: mean power by the time of each wave."""
    gpu_w: float | None
    gpu_sm_mhz: float | None
    power_cap: float | None
    throttle: float | None


def energy(rows: Sequence[RequestRow]) -> list[ArmPower]:
    """Joules a token of each arm whose GPU power was sampled, in order of session, group and arm."""
    cells: dict[tuple[str, str, str, int], list[RequestRow]] = defaultdict(list)
    for row in rows:
        if row.phase == "measure" and usable(row) and row.completion_tokens and row.gpu_w is not None:
            cells[row.session, row.group, row.arm, row.concurrency].append(row)
    found = []
    for (session, group, arm, concurrency), mine in sorted(cells.items()):
        tokens = sum(r.completion_tokens or 0 for r in mine)
        counted = all(r.joules is not None for r in mine)
        joules = fsum(r.joules or 0.0 for r in mine) if counted else _by_time(mine)
        if joules is None:
            continue
        found.append(
            ArmPower(
                session,
                group,
                arm,
                concurrency,
                len(mine),
                joules / tokens,
                "counter" if counted else "power_by_time",
                _mean([r.gpu_w for r in mine]),
                _mean([r.gpu_sm_mhz for r in mine]),
                _mean([r.gpu_power_cap for r in mine]),
                _mean([r.gpu_throttle for r in mine]),
            )
        )
    return found


def _by_time(rows: Sequence[RequestRow]) -> float | None:
    """Mean power by duration, wave by wave; None where a request of one has no end.

    None too where waves overlap, as the batches of a steady or open loop do: whose energy it was is not known.
    """
    waves: dict[tuple[int, str], list[RequestRow]] = defaultdict(list)
    for row in rows:
        waves[row.boot_index, row.block].append(row)
    total = 0.0
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for (boot, _), mine in waves.items():
        ends = [r.done_ns for r in mine if r.done_ns is not None]
        watts = _mean([r.gpu_w for r in mine])
        if len(ends) != len(mine) or watts is None:
            return None
        start, stop = min(r.sent_ns for r in mine), max(ends)
        spans[boot].append((start, stop))
        total += watts * (stop - start) / 1e9
    alone = all(a[1] <= b[0] for seen in spans.values() for a, b in pairwise(sorted(seen)))
    return total if alone else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return fsum(known) / len(known) if known else None


@dataclass(frozen=True, slots=True)
class Idle:
    """Of one session: how much of its billed time a GPU served no request."""

    session: str
    billed_s: float
    busy_s: float
    """Time with a request in flight, of any phase."""

    @property
    def share(self) -> float:
        return 1 - self.busy_s / self.billed_s


def idle(rows: Iterable[RequestRow], billed: Mapping[str, float]) -> list[Idle]:
    """Idle share by session. rows: of every phase; billed: session -> billed seconds. CPU sessions are left out."""
    spans: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row.done_ns is not None and row.gpu_set != "cpu" and row.phase in {*MEASURED, "warmup"}:
            spans[row.session].append((row.sent_utc_ns, row.sent_utc_ns + row.done_ns - row.sent_ns))
    return [
        Idle(session, billed[session], min(_union(mine) / 1e9, billed[session]))
        for session, mine in sorted(spans.items())
        if billed.get(session, 0.0) > 0
    ]


def _union(spans: Sequence[tuple[int, int]]) -> int:
    total, end = 0, 0
    for start, stop in sorted(spans):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
