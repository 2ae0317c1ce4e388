"""What verifying one more token costs.

Per request, `verify_ms = (window - undrafted * t1) / drafts`: the time of a step that had a draft, the
drafter's own time included, with the steps where it offered nothing taken out at the bare step t1. An arm's
value is the mean over requests weighted by drafts, which is the ratio of the sums and stays stable where a
request drafted once or twice. The width is the mean of what was verified, 1 + drafted / drafts, never the
nominal one; the slope is least squares of verify_ms on it over the arms.

Intervals: delete-one-block jackknife (Tukey 1958), all arms losing the same block together, plus the boot
variance by the delta method; t with Satterthwaite degrees of freedom. What breaks an invariant is not a
number: None, with the reason.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from campaign.analysis.estimate import critical
from campaign.analysis.model import Speculation, WidthCost
from campaign.analysis.pairs import KNOWN_DF, BootSd
from campaign.analysis.variance import usable
from campaign.store.row import RequestRow

Sums = tuple[float, float, float, float, float]
"""Of one block: window ms, steps, drafts, undrafted steps, drafted tokens."""


@dataclass(frozen=True, slots=True)
class LadderArm:
    """An arm of the ladder: depth None is no speculation."""

    name: str
    depth: int | None


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Sums by block of one arm, and how many boots they come from."""

    sums: Mapping[str, Sums]
    boots: int
    accepted: int | None
    drafted: int
    drafts: int
    tokens: int
    steps: int
    positions: tuple[float, ...] | None
    broken: tuple[str, ...]


def speculation(
    rows: Iterable[RequestRow],
    *,
    session: str,
    ladder: str,
    arms: Sequence[LadderArm],
    boot: BootSd,
    level: float = 0.95,
) -> Speculation:
    """Verify cost by width for one ladder of one session.

    boot: standard deviation of a boot's log step time. Reasons: `no_base`, `no_rows`, `no_drafts`,
    `one_width`, `boot_sd_unknown` (intervals of these boots only), and `not_identified:WHAT`
    for each invariant that the counters or the
    result break; `depth_not_honoured` where the engine drafted more than it was asked.
    """
    by_arm: dict[str, list[RequestRow]] = defaultdict(list)
    for row in rows:
        if usable(row):
            by_arm[row.arm].append(row)
    gathered = {arm.name: _gather(by_arm.get(arm.name, []), arm.depth) for arm in arms}
    base = next((gathered[a.name] for a in arms if a.depth is None and gathered[a.name].sums), None)
    t1 = _t1(base.sums) if base is not None else None
    model = _Model(base, boot, level)
    widths = [
        _width(arm, gathered[arm.name], t1, model)
        for arm in sorted(arms, key=lambda a: (a.depth or 0, a.name))
        if arm.depth is not None
    ]
    usable_arms = [gathered[w.arm] for w in widths if w.verify_ms is not None]
    reasons: list[str] = [] if base is not None else ["no_base"]
    distinct = {round(w.verified_tokens, 6) for w in widths if w.verify_ms is not None and w.verified_tokens}
    slope = lo = hi = None
    if len(distinct) < 2:
        reasons.append("one_width" if distinct else "no_drafts")
    else:
        slope, lo, hi = model.interval(_slope, usable_arms)
        if boot.sd is None:
            reasons.append("boot_sd_unknown")
    return Speculation(session, ladder, t1, tuple(widths), slope, lo, hi, tuple(reasons))


def _gather(rows: Sequence[RequestRow], depth: int | None) -> _Blocks:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0] * 5)
    boots: set[int] = set()
    accepted: int | None = 0
    totals = [0, 0, 0, 0]
    positions: list[float] | None = []
    broken: set[str] = set()
    for row in sorted(rows, key=lambda r: r.key):
        if row.window_ms is None or not row.steps:
            continue
        if depth is not None and (row.drafts is None or row.undrafted is None or row.drafted is None):
            continue
        drafts, undrafted, drafted = row.drafts or 0, row.undrafted or 0, row.drafted or 0
        values = (row.window_ms, row.steps, drafts, undrafted, drafted)
        block = sums[row.block]
        for i, value in enumerate(values):
            block[i] += value
        boots.add(row.boot_index)
        totals = [
            totals[0] + drafted,
            totals[1] + drafts,
            totals[2] + (row.tokens_in_window or 0),
            totals[3] + row.steps,
        ]
        accepted = None if accepted is None or row.accepted is None else accepted + row.accepted
        positions = _add(positions, row.accept_pos)
        if row.accepted is not None and row.accepted > drafted:
            broken.add("not_identified:accepted_above_drafted")
        if min(values) < 0:
            broken.add("not_identified:negative_counter")
    drafted, drafts, tokens, steps = totals
    shares = tuple(p / drafts for p in positions) if positions and drafts else None
    if shares and any(later > earlier + 1e-12 for earlier, later in itertools.pairwise(shares)):
        broken.add("not_identified:accept_pos_increases")
    return _Blocks(
        sums={k: (v[0], v[1], v[2], v[3], v[4]) for k, v in sorted(sums.items())},
        boots=len(boots),
        accepted=accepted,
        drafted=drafted,
        drafts=drafts,
        tokens=tokens,
        steps=steps,
        positions=shares,
        broken=tuple(sorted(broken)),
    )


def _add(total: list[float] | None, more: Sequence[int] | None) -> list[float] | None:
    if total is None or more is None:
        return None
    size = max(len(total), len(more))
    left = [*total, *[0.0] * (size - len(total))]
    return [x + (more[i] if i < len(more) else 0) for i, x in enumerate(left)]


def _t1(base: Mapping[str, Sums]) -> float | None:
    steps = math.fsum(s[1] for s in base.values())
    return math.fsum(s[0] for s in base.values()) / steps if steps > 0 else None


def _verify(sums: Iterable[Sums], t1: float | None) -> float | None:
    window, drafts, undrafted = 0.0, 0.0, 0.0
    for s in sums:
        window, drafts, undrafted = window + s[0], drafts + s[2], undrafted + s[3]
    if drafts <= 0 or (undrafted > 0 and t1 is None):
        return None
    return (window - undrafted * (t1 or 0.0)) / drafts


def _tokens(sums: Iterable[Sums]) -> float:
    drafts, drafted = 0.0, 0.0
    for s in sums:
        drafts, drafted = drafts + s[2], drafted + s[4]
    return 1 + drafted / drafts


Statistic = Callable[[Sequence[Mapping[str, Sums]], float | None], float | None]
"""Of the arms' blocks and t1."""


def _one(arms: Sequence[Mapping[str, Sums]], t1: float | None) -> float | None:
    return _verify(arms[0].values(), t1)


def _slope(arms: Sequence[Mapping[str, Sums]], t1: float | None) -> float | None:
    points: list[tuple[float, float]] = []
    for arm in arms:
        cost = _verify(arm.values(), t1)
        if cost is None:
            return None
        points.append((_tokens(arm.values()), cost))
    x = math.fsum(p[0] for p in points) / len(points)
    y = math.fsum(p[1] for p in points) / len(points)
    square = math.fsum((p[0] - x) ** 2 for p in points)
    return math.fsum((p[0] - x) * (p[1] - y) for p in points) / square if square > 0 else None


@dataclass(frozen=True, slots=True)
class _Model:
    base: _Blocks | None
    boot: BootSd
    level: float

    def interval(
        self, statistic: Statistic, arms: Sequence[_Blocks]
    ) -> tuple[float | None, float | None, float | None]:
        """(value, low, high); the interval is None below 3 blocks."""
        base: Mapping[str, Sums] = self.base.sums if self.base is not None else {}
        tables = [a.sums for a in arms]
        value = statistic(tables, _t1(base))
        blocks = sorted(set().union(*tables))
        if value is None or len(blocks) < 3:
            return value, None, None
        left_out = []
        for block in blocks:
            less = [{k: v for k, v in t.items() if k != block} for t in tables]
            again = statistic(less, _t1({k: v for k, v in base.items() if k != block}))
            if again is None:
                return value, None, None
            left_out.append(again)
        n = len(blocks)
        mean = math.fsum(left_out) / n
        jackknife = (n - 1) / n * math.fsum((x - mean) ** 2 for x in left_out)
        boots = self._boots(statistic, tables, arms)
        total = jackknife + boots
        if total <= 0:
            return value, None, None
        df_boot = self.boot.df or KNOWN_DF
        df = total**2 / (jackknife**2 / (n - 1) + boots**2 / df_boot)
        half = critical(self.level, max(df, min(n - 1.0, df_boot))) * math.sqrt(total)
        return value, value - half, value + half

    def _boots(
        self, statistic: Statistic, tables: Sequence[Mapping[str, Sums]], arms: Sequence[_Blocks]
    ) -> float:
        """Boot variance by the delta method: each arm's times, and t1, move by their own boot effect."""
        if self.boot.sd is None:
            return 0.0
        base: Mapping[str, Sums] = self.base.sums if self.base is not None else {}
        t1 = _t1(base)
        step = 1e-4
        value = statistic(tables, t1)
        total = 0.0
        for i, arm in enumerate(arms):
            moved = list(tables)
            moved[i] = {k: (v[0] * (1 + step), *v[1:]) for k, v in tables[i].items()}
            total += _square(value, statistic(moved, t1), step) * self.boot.sd**2 / max(1, arm.boots)
        if t1 is not None and self.base is not None:
            change = _square(value, statistic(tables, t1 * (1 + step)), step)
            total += change * self.boot.sd**2 / max(1, self.base.boots)
        return total


def _square(value: float | None, moved: float | None, step: float) -> float:
    return 0.0 if value is None or moved is None else ((moved - value) / step) ** 2


def _width(arm: LadderArm, blocks: _Blocks, t1: float | None, model: _Model) -> WidthCost:
    reasons = list(blocks.broken)
    if arm.depth is not None and blocks.drafted > arm.depth * blocks.drafts:
        # The engine drafted more than it was asked: the mean width is real, the nominal one is not.
        reasons.append("depth_not_honoured")
    verify = lo = hi = None
    if not blocks.sums:
        reasons.append("no_rows")
    elif not blocks.drafts:
        reasons.append("no_drafts")
    elif not blocks.broken:
        verify, lo, hi = model.interval(_one, [blocks])
        if verify is None:
            reasons.append("no_base")
        elif verify <= 0:
            verify = lo = hi = None
            reasons.append("not_identified:verify_not_positive")
        elif model.boot.sd is None:
            reasons.append("boot_sd_unknown")
    counted = bool(blocks.drafts) and not blocks.broken
    accept_len = blocks.tokens / blocks.steps if blocks.steps else None
    honest = "depth_not_honoured" not in reasons
    if accept_len is not None and honest and arm.depth is not None and accept_len > arm.depth + 1:
        accept_len = None
        reasons.append("not_identified:accept_len_above_width")
    step = math.fsum(s[0] for s in blocks.sums.values()) / blocks.steps if blocks.steps else None
    rate = None
    if counted and blocks.accepted is not None and blocks.drafted:
        rate = blocks.accepted / blocks.drafted
    return WidthCost(
        arm=arm.name,
        depth=arm.depth,
        verified_tokens=1 + blocks.drafted / blocks.drafts if counted else None,
        verify_ms=verify,
        lo=lo,
        hi=hi,
        accept_len=accept_len,
        accept_rate=rate,
        accept_pos=blocks.positions if counted else None,
        break_even_accept_len=step / t1 if step and t1 else None,
        reasons=tuple(reasons),
    )
