"""What makes a comparison invalid, and what is only said beside it.

A slot or wave that one boot lost is dropped from every boot, so only whole pairs count. A loss is noted, and
above the tolerance it is fatal: what fails is rarely a random sample.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from campaign.analysis.describe import median
from campaign.analysis.power import clocks
from campaign.analysis.variance import MEASURED, log_value, usable
from campaign.plan.model import Comparison, GroupPlan
from campaign.spec.models import Metric
from campaign.store.row import RequestRow

CACHED_SHARE = 0.02
"""Share of prompt tokens served from a prefix cache above which an arm measures the cache."""
LOST_SHARE = 0.2
"""Share of planned blocks (or of requests) lost above which the comparison is invalid."""
COLD = 5.0
"""Times the other requests' TTFT above which the first ones found a cold server."""
MIN_BLOCKS = 3
"""Prompts per arm below which no interval is worth printing."""
MIN_WAVES = 6
"""Waves per arm above concurrency 1."""


@dataclass(frozen=True, slots=True)
class Soundness:
    """Reason codes, sorted: `fatal` make the comparison invalid, `notes` do not."""

    fatal: tuple[str, ...]
    notes: tuple[str, ...]
    complete: bool
    """Whether every planned boot of both arms has rows: a round is committed as a whole or not at all."""


def check(
    rows: Iterable[RequestRow],
    group: GroupPlan,
    comparison: Comparison,
    metric: Metric,
    tolerance: float = LOST_SHARE,
) -> Soundness:
    """Judge the rows of one comparison's group against what was planned.

    Superseded rows are ignored: their round was done again. Void rows count as lost.
    """
    pair = (comparison.a, comparison.b)
    mine = [
        r
        for r in rows
        if r.arm in pair
        and r.group == group.name
        and r.phase in MEASURED
        and r.workload == comparison.workload
        and r.concurrency == comparison.concurrency
        and r.validity != "superseded"
    ]
    planned = _planned(group, pair)
    got = Counter(
        (r.arm, r.boot_index, r.block) for r in mine if usable(r) and log_value(r, metric) is not None
    )
    wanted = Counter(
        (arm, boot, f"s{slot}" if comparison.concurrency == 1 else f"w{wave}")
        for arm, boot, slot, _, wave in planned
    )
    lost = sum(1 for key, count in wanted.items() if got[key] < count)
    failed = sum(1 for r in mine if r.state not in {"ok", "short"})
    fatal: set[str] = set()
    notes: set[str] = set()

    def share(code: str, count: int, of: int) -> None:
        if count:
            (fatal if of == 0 or count / of > tolerance else notes).add(code)

    share("missing_slots", lost, len(wanted))
    share("failed_requests", failed, len(planned))
    if _restarted(mine):
        fatal.add("engine_restarted")
    if _cached(mine, tolerance):
        fatal.add("cache_hits")
    if metric != "ttft_ms" and _unequal(mine, pair):
        fatal.add("unequal_lengths")
    good = [r for r in mine if usable(r)]
    if metric != "ttft_ms" and len({r.rate_definition for r in good if r.rate_definition}) > 1:
        fatal.add("mixed_rate_definition")
    if len({r.simulated for r in good}) > 1:
        fatal.add("mixed_simulated")
    apart, said = clocks(mine, pair)
    fatal |= apart if metric != "accept_len" else set()
    notes |= said
    notes |= _carried(mine, metric)
    if _cold(mine):
        notes.add("cold_first_wave")
    booted = {(r.arm, r.boot_index) for r in mine}
    complete = bool(planned) and all((arm, boot) in booted for arm, boot, *_ in planned)
    return Soundness(tuple(sorted(fatal)), tuple(sorted(notes - fatal)), complete)


def _carried(rows: Iterable[RequestRow], metric: Metric) -> set[str]:
    """Reasons of rows that their comparison says too."""
    codes = {"client_lag"}
    if metric in {"step_ms", "accept_len"}:
        # One acceptance stands for all of a cell: it has no spread of its own.
        codes |= {"counters_of_cell", "counters_with_ramp"}
    return {code for row in rows for code in row.reasons if code in codes}


def hit_rate(rows: Iterable[RequestRow]) -> float | None:
    """Share of prompt tokens served from a prefix cache; None where no server said."""
    known = [
        (r.cached_tokens, r.prompt_tokens) for r in rows if r.cached_tokens is not None and r.prompt_tokens
    ]
    total = sum(p for _, p in known if p)
    return sum(c for c, _ in known if c) / total if total else None


def _planned(group: GroupPlan, pair: tuple[str, str]) -> list[tuple[str, int, int, int, int]]:
    """(arm, boot index, slot, seed, wave) of every request of two arms."""
    out = []
    for round_ in group.rounds:
        index = {b.arm: b.index for b in round_.boots}
        out += [
            (q.arm, index[q.arm], q.slot, q.seed, q.wave)
            for q in round_.sequence
            if q.arm in pair and not q.cut
        ]
    return out


def _restarted(rows: Sequence[RequestRow]) -> bool:
    """The engine restarted under a cell, or one planned boot holds rows of two attempts."""
    attempts: dict[tuple[str, int], set[int]] = defaultdict(set)
    for row in rows:
        if "engine_restarted" in row.reasons:
            return True
        if row.validity == "valid":
            attempts[row.arm, row.boot_index].add(row.boot_attempt)
    return any(len(a) > 1 for a in attempts.values())


def _cached(rows: Sequence[RequestRow], tolerance: float) -> bool:
    arms: dict[str, list[RequestRow]] = defaultdict(list)
    for row in rows:
        arms[row.arm].append(row)
    for mine in arms.values():
        rate = hit_rate(mine)
        flagged = sum("cache_hit" in r.reasons for r in mine)
        if (rate is not None and rate > CACHED_SHARE) or flagged > tolerance * len(mine):
            return True
    return False


def cold_start(ttft_ms: Sequence[float], in_flight: int) -> bool:
    """Whether the first requests in flight took over five times the rest, by medians: the server was not warm.

    ttft_ms: in issue order. The cell is flagged; nothing is dropped.
    """
    first, rest = median(ttft_ms[:in_flight]), median(ttft_ms[in_flight:])
    return first is not None and rest is not None and len(ttft_ms) >= in_flight + 3 and first > COLD * rest


def _cold(rows: Sequence[RequestRow]) -> bool:
    boots: dict[tuple[str, int], list[RequestRow]] = defaultdict(list)
    for row in rows:
        if row.ttft_ms is not None and row.validity == "valid":
            boots[row.arm, row.boot_index].append(row)
    return any(
        cold_start(
            [r.ttft_ms or 0.0 for r in sorted(mine, key=lambda r: (r.order, r.sent_ns))], mine[0].concurrency
        )
        for mine in boots.values()
    )


def _unequal(rows: Sequence[RequestRow], pair: tuple[str, str]) -> bool:
    """Whether any slot got different output lengths in the two arms (by boot, in order of seed)."""
    lengths: dict[str, dict[int, set[int]]] = {arm: defaultdict(set) for arm in pair}
    for row in rows:
        if row.validity == "valid" and row.state in {"ok", "short"} and row.completion_tokens is not None:
            lengths[row.arm][row.slot].add(row.completion_tokens)
    a, b = lengths[pair[0]], lengths[pair[1]]
    return any(len(a[slot] | b[slot]) > 1 for slot in a.keys() & b.keys())
