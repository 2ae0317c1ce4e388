"""Where the variance comes from: requests, prompts, boots, sessions.

Values are logs. A *table* is what one group's boots measured: one row per boot, one column per block, only
blocks that every boot has. With M the projector that removes arm means (and round means, where the boots of
a round are resident together) from the boots, and C the one that removes means over the n blocks,

    boot      MS = |M mean(Y)|^2 / df        expects boot_sd^2 + residual_sd^2 / n
    residual  MS = |M Y C|^2 / (df (n - 1))  expects residual_sd^2

so a boot effect is what is left of a boot's mean once its arm, and the round all residents shared, are taken
out. Several groups are pooled by their degrees of freedom.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from campaign.plan.power import METRICS, RESIDENT, Prior
from campaign.spec.models import Metric
from campaign.store.row import RequestRow

MEASURED = frozenset({"measure", "anchor"})


@dataclass(frozen=True, slots=True)
class Boot:
    """What one boot of one arm measured: the mean log of a metric by block."""

    arm: str
    index: int
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Split:
    """Mean squares of one group's boots."""

    ms_boot: float
    df_boot: int
    ms_residual: float
    df_residual: int
    n: int

    @property
    def boot_variance(self) -> float:
        """Unbiased, so it may be negative."""
        return self.ms_boot - self.ms_residual / self.n


KNOWN_N = 1e6
"""Blocks a boot of a variance that is taken as known: so many that the residual adds nothing. Finite, for JSON."""


@dataclass(frozen=True, slots=True)
class BootVariance:
    """Pooled over groups."""

    signed: float
    """A difference of mean squares, so it may be negative; cut off at zero it would be too large on average."""
    df: float
    n: float = KNOWN_N
    """Blocks a boot behind it: the residual of a boot's mean falls with them, and with it the noise of the estimate."""

    @property
    def variance(self) -> float:
        """Never negative."""
        return max(0.0, self.signed)

    @property
    def sd(self) -> float:
        """On the log scale."""
        return math.sqrt(self.variance)


def usable(row: RequestRow) -> bool:
    """Whether a row may enter a comparison: valid, measured, ended well."""
    return row.validity == "valid" and row.phase in MEASURED and row.state == "ok"


def log_value(row: RequestRow, metric: Metric) -> float | None:
    """Log of a metric; None where it is unknown, zero or not finite."""
    value: float | None = getattr(row, metric)
    return math.log(value) if value is not None and 0 < value < math.inf else None


def boots_of(rows: Iterable[RequestRow], metric: Metric) -> list[Boot]:
    """Boots of one group, sorted by arm and index.

    At concurrency 1 a block's value is the mean log over its rows. Above, a wave counts only where it holds
    the same slots in every boot that ran it, so that a lost request does not change what is averaged.
    """
    cells: dict[tuple[str, int, int], dict[str, list[tuple[int, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    slots: dict[str, set[int]] = defaultdict(set)
    for row in rows:
        value = log_value(row, metric) if usable(row) else None
        if value is None:
            continue
        cells[row.arm, row.boot_index, row.round][row.block].append((row.slot, value))
        slots[row.block].add(row.slot)
    boots = []
    for arm, index, round_ in sorted(cells):
        values = {
            block: math.fsum(v for _, v in seen) / len(seen)
            for block, seen in sorted(cells[arm, index, round_].items())
            if {s for s, _ in seen} == slots[block]
        }
        if values:
            boots.append(Boot(arm, index, round_, values))
    return boots


def varies(boots: Sequence[Boot], arm: str) -> bool:
    """Whether an arm's values differ at all: tokens per step are 1 everywhere without speculation."""
    seen = [v for b in boots if b.arm == arm for v in b.values.values()]
    return bool(seen) and max(seen) - min(seen) > 1e-12


def common_blocks(boots: Sequence[Boot]) -> list[str]:
    """Blocks that every boot has, in natural order."""
    if not boots:
        return []
    shared = set(boots[0].values).intersection(*(b.values for b in boots[1:]))
    return sorted(shared, key=lambda b: (b[:1], int(b[1:]) if b[1:].isdigit() else 0, b))


def split(boots: Sequence[Boot], *, resident: bool) -> Split | None:
    """Mean squares of boots and residuals; None where no arm was booted often enough.

    An arm whose values never vary has no variance to pool and is left out.
    """
    arms = sorted({b.arm for b in boots})
    varying = {a for a in arms if varies(boots, a)}
    kept = [b for b in boots if b.arm in varying]
    blocks = common_blocks(kept)
    n = len(blocks)
    if n < 2 or len(kept) < 2:
        return None
    labels = tuple((b.arm, b.round if resident else None) for b in kept)
    rank, remove = _remover(labels)
    df = len(kept) - rank
    if df <= 0:
        return None
    y = np.array([[b.values[k] for k in blocks] for b in kept])
    left = y - remove @ y
    means = left.mean(axis=1)
    inner = left - means[:, None]
    return Split(
        ms_boot=float(means @ means) / df,
        df_boot=df,
        ms_residual=float((inner * inner).sum()) / (df * (n - 1)),
        df_residual=df * (n - 1),
        n=n,
    )


@lru_cache(maxsize=256)
def _remover(labels: tuple[tuple[str, int | None], ...]) -> tuple[int, np.ndarray]:
    """Rank and projector of what is taken out of boots: means of their arms, and of their rounds where given."""
    arms, rounds = sorted({a for a, _ in labels}), sorted({r for _, r in labels if r is not None})
    columns = [[float(a == arm) for a, _ in labels] for arm in arms]
    columns += [[float(r == round_) for _, r in labels] for round_ in rounds]
    design = np.array(columns).T
    return int(np.linalg.matrix_rank(design)), design @ np.linalg.pinv(design)


def pool(splits: Iterable[Split]) -> BootVariance | None:
    """Between-boot variance of several groups; None of nothing."""
    found = list(splits)
    df = sum(s.df_residual for s in found)
    residual = math.fsum(s.ms_residual * s.df_residual for s in found) / df if df else 0.0
    return join([BootVariance(s.boot_variance, float(s.df_boot), s.n) for s in found], residual)


def join(parts: Sequence[BootVariance], residual: float) -> BootVariance | None:
    """Several estimates as one, each weighted by how well it is known: df / (boot variance + residual / n)^2.

    residual: mean square within boots. Estimates from few blocks are noisy: their boot means hold `residual / n` too.
    """
    kept = [p for p in parts if p.df > 0]
    df = math.fsum(p.df for p in kept)
    if not kept:
        return None
    first = max(0.0, math.fsum(p.df * p.signed for p in kept) / df)
    square = [(first + residual / p.n) ** 2 for p in kept]
    weights = [p.df / s if s > 0 else p.df for p, s in zip(kept, square, strict=True)]
    total = math.fsum(weights)
    signed = math.fsum(w * p.signed for w, p in zip(weights, kept, strict=True)) / total
    # One n that stands for all: the noise of the whole is what boots of so many blocks would have.
    noise = math.fsum(w * w * s / p.df for w, s, p in zip(weights, square, kept, strict=True)) / total**2
    excess = math.sqrt(noise * df) - first
    return BootVariance(signed, df, min(KNOWN_N, residual / excess) if excess > 0 else KNOWN_N)


def residents(boots: Sequence[Boot], design: str) -> bool:
    """Whether what a round does is common to at least two varying arms and cancels between them."""
    return design in RESIDENT and sum(varies(boots, a) for a in {b.arm for b in boots}) >= 2


@dataclass(frozen=True, slots=True)
class Components:
    """All levels of one metric, estimated from rows; None where the rows cannot tell."""

    slot_sd: float | None = None
    """Of the log ratio of two arms, between slots."""
    residual_sd: float | None = None
    boot_sd: float | None = None
    boot_df: float = 0.0
    boot_signed: float | None = None
    """The boot variance before it is cut off at zero."""
    boot_n: float = 0.0
    """Blocks a boot behind it."""
    session_sd: float | None = None
    session_df: float = 0.0


@dataclass(slots=True)
class _Sums:
    splits: list[Split] = field(default_factory=list)
    slot: list[tuple[float, int]] = field(default_factory=list)
    sessions: dict[tuple[str, str], dict[str, list[float]]] = field(default_factory=dict)


def components(
    rows: Iterable[RequestRow], designs: Mapping[str, str] | None = None
) -> dict[Metric, Components]:
    """Variance components by metric, from the rows of any number of runs and sessions at concurrency 1.

    `designs` maps a group's name to its design; a group that is not in it counts as resident where every
    one of its rounds holds all its arms.
    """
    groups: dict[tuple[str, str, str], list[RequestRow]] = defaultdict(list)
    for row in rows:
        if row.concurrency == 1 and usable(row):
            groups[row.run, row.session, row.group].append(row)
    return {metric: _components(groups, metric, designs or {}) for metric in METRICS}


def _components(
    groups: Mapping[tuple[str, str, str], Sequence[RequestRow]], metric: Metric, designs: Mapping[str, str]
) -> Components:
    sums = _Sums()
    for (run, session, group), rows in sorted(groups.items()):
        boots = boots_of(rows, metric)
        arms = {b.arm for b in boots}
        rounds = {b.round for b in boots}
        together = len(arms) > 1 and len(boots) == len(arms) * len(rounds)
        design = designs.get(group, "alternated" if together else "blocks")
        part = split(boots, resident=residents(boots, design))
        if part is not None:
            sums.splits.append(part)
        _slot_square(boots, part, sums)
        identity = {r.arm: r.arm_hash for r in rows}
        for boot in boots:
            cell = sums.sessions.setdefault((identity[boot.arm], rows[0].workload), {})
            cell.setdefault(f"{run}/{session}", []).append(math.fsum(boot.values.values()) / len(boot.values))
    pooled = pool(sums.splits)
    df = sum(s.df_residual for s in sums.splits)
    slot_df = sum(d for _, d in sums.slot)
    between, between_df = _session_variance(sums.sessions, pooled)
    return Components(
        slot_sd=math.sqrt(max(0.0, sum(v * d for v, d in sums.slot) / slot_df)) if slot_df else None,
        residual_sd=math.sqrt(sum(s.ms_residual * s.df_residual for s in sums.splits) / df) if df else None,
        boot_sd=pooled.sd if pooled else None,
        boot_df=pooled.df if pooled else 0.0,
        boot_signed=pooled.signed if pooled else None,
        boot_n=pooled.n if pooled else 0.0,
        session_sd=math.sqrt(between) if between is not None else None,
        session_df=between_df,
    )


def _slot_square(boots: Sequence[Boot], part: Split | None, sums: _Sums) -> None:
    """Arm-by-slot interaction of varying arms: twice it is the slot variance of a log ratio."""
    arms = [a for a in sorted({b.arm for b in boots}) if varies(boots, a)]
    kept = [b for b in boots if b.arm in arms]
    blocks = common_blocks(kept)
    if part is None or len(arms) < 2 or len(blocks) < 2:
        return
    table = np.array(
        [np.mean([[b.values[k] for k in blocks] for b in kept if b.arm == a], axis=0) for a in arms]
    )
    inner = table - table.mean(axis=0) - table.mean(axis=1)[:, None] + table.mean()
    df = (len(arms) - 1) * (len(blocks) - 1)
    per_arm = len(kept) / len(arms)
    sums.slot.append((2 * (float((inner * inner).sum()) / df - part.ms_residual / per_arm), df))


def _session_variance(
    cells: Mapping[tuple[str, str], Mapping[str, Sequence[float]]], boot: BootVariance | None
) -> tuple[float | None, float]:
    total, df = 0.0, 0
    for sessions in cells.values():
        if len(sessions) < 2:
            continue
        means = [math.fsum(v) / len(v) for v in sessions.values()]
        harmonic = math.fsum(1 / len(v) for v in sessions.values()) / len(sessions)
        own = (boot.variance if boot else 0.0) * harmonic
        total += (len(means) - 1) * (float(np.var(means, ddof=1)) - own)
        df += len(means) - 1
    return (max(0.0, total / df), float(df)) if df else (None, 0.0)


def prior(rows: Iterable[RequestRow], fallback: Prior) -> Prior:
    """A prior for `plan` from earlier rows; what they cannot tell is taken from `fallback`."""
    found = components(rows)
    if all(c.residual_sd is None for c in found.values()):
        return fallback

    def pick(name: str, default: Mapping[Metric, float]) -> dict[Metric, float]:
        values = {m: getattr(found[m], name) for m in METRICS}
        return {m: default[m] if v is None else v for m, v in values.items() if v is not None or m in default}

    return Prior(
        slot_sd=pick("slot_sd", fallback.slot_sd),
        boot_sd=pick("boot_sd", fallback.boot_sd),
        residual_sd=pick("residual_sd", fallback.residual_sd),
        boot_df={m: c.boot_df for m, c in found.items() if c.boot_sd is not None},
        boot_signed={m: c.boot_signed for m, c in found.items() if c.boot_signed is not None},
        boot_n={m: c.boot_n for m, c in found.items() if c.boot_sd is not None},
        session_sd=pick("session_sd", fallback.session_sd),
        source="prior",
    )
