"""The best of k arms, with what picking it added taken off again.

The largest of k noisy means is too large: with four equal arms by 1.03 standard errors. So the arm is picked
without a part of the data and valued on that part alone, each part in turn (leave one out), which has no
selection bias whatever the arms are. The part is a boot where every arm has two or more, since a lucky boot
helps all its prompts at once; else a prompt, with the reason `boot_luck_not_removed`.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from campaign.analysis.estimate import ratio
from campaign.analysis.variance import Boot, common_blocks


@dataclass(frozen=True, slots=True)
class Champion:
    """The best of a family on one metric. Values in the metric's unit, ratios against the family's mean."""

    arm: str
    k: int
    raw: float
    """Its mean over everything (geometric)."""
    adjusted: float | None
    """Of arms picked without the part they are valued on."""
    picked: Mapping[str, float]
    """Arm -> share of parts on which it was picked."""
    part: str
    """`boot` or `prompt`."""
    reasons: tuple[str, ...]

    @property
    def optimism(self) -> float | None:
        """Raw / adjusted: what picking the best added."""
        return None if self.adjusted is None else self.raw / self.adjusted


def champion(boots: Sequence[Boot], *, higher: bool) -> Champion | None:
    """The arm with the best mean log value over the prompts all have; None below two arms or two parts."""
    arms = sorted({b.arm for b in boots})
    blocks = common_blocks(boots)
    if len(arms) < 2 or len(blocks) < 2:
        return None
    by_arm = {arm: [b for b in boots if b.arm == arm] for arm in arms}
    least = min(len(v) for v in by_arm.values())
    part = "boot" if least >= 2 else "prompt"
    tables = {
        arm: [[b.values[k] for k in blocks] for b in sorted(found, key=lambda b: b.index)]
        for arm, found in by_arm.items()
    }
    parts = least if part == "boot" else len(blocks)
    values = {arm: _parts(table, part, parts) for arm, table in tables.items()}
    sign = 1.0 if higher else -1.0
    best = max(arms, key=lambda a: (sign * _mean(values[a]), a))
    picked: Counter[str] = Counter()
    held: list[float] = []
    for i in range(parts):
        without = {a: _mean([v for j, v in enumerate(values[a]) if j != i]) for a in arms}
        chosen = max(arms, key=lambda a: (sign * without[a], a))
        picked[chosen] += 1
        held.append(values[chosen][i])
    raw, adjusted = ratio(_mean(values[best])), ratio(_mean(held))
    if raw is None:
        return None
    reasons = () if part == "boot" else ("boot_luck_not_removed",)
    return Champion(best, len(arms), raw, adjusted, {a: c / parts for a, c in picked.items()}, part, reasons)


def _parts(table: Sequence[Sequence[float]], part: str, parts: int) -> list[float]:
    if part == "boot":
        return [_mean(row) for row in table[:parts]]
    return [_mean([row[i] for row in table]) for i in range(parts)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


@dataclass(frozen=True, slots=True)
class Replicates:
    """Repeats of one arm, pooled, with their spread."""

    arm_hash: str
    arms: tuple[str, ...]
    n: int
    """Repeats: boots, or sessions."""
    value: float
    """Geometric mean."""
    sd: float | None
    """Between repeats, log scale; None of one."""
    lowest: float
    highest: float


def replicates(arm_hash: str, repeats: Mapping[str, float]) -> Replicates:
    """Pool repeats: label -> mean log value. The largest of them is not a result; their mean is."""
    logs = list(repeats.values())
    mean = _mean(logs)
    sd = math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1)) if len(logs) > 1 else None
    return Replicates(
        arm_hash,
        tuple(sorted(repeats)),
        len(logs),
        math.exp(mean),
        sd,
        math.exp(min(logs)),
        math.exp(max(logs)),
    )
