"""Do the intervals hold what they promise? Seeded simulation of the verdicts of `campaign.analysis`.

    python bench/calibration.py --json FILE [--reps 4000]

A session of some pairs of arms is drawn from slot, boot and residual variance, and judged by the very
functions that judge a run. Written and printed: how often an A/A is called different, how often a true
difference at the margin is called equivalent, and how wide the interval is against the one a person who
knows every variance would give.
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from campaign.analysis.pairs import boot_sd, compare, pool_for
from campaign.analysis.variance import Boot


@dataclass(frozen=True)
class Setting:
    """One simulated session. Standard deviations on the log scale, in units of the residual's."""

    design: str
    slots: int
    boots: int
    pairs: int
    """Pairs (groups) in the session; they share what they know of boots."""
    slot_sd: float
    boot_sd: float
    round_sd: float = 0.0
    """Common to all boots of a round: time."""
    residual_sd: float = 0.01


def session(rng, setting, shift):
    """group -> boots of a session; arm b of the first pair is `shift` away from a."""
    groups = {}
    names = [f"s{i}" for i in range(setting.slots)]
    for g in range(setting.pairs):
        prompt = rng.normal(0, 0.05, setting.slots)
        boots = []
        rounds = rng.normal(0, setting.round_sd * setting.residual_sd, 2 * setting.boots)
        for arm in "ab":
            own = prompt + rng.normal(0, setting.slot_sd * setting.residual_sd / math.sqrt(2), setting.slots)
            for k in range(setting.boots):
                together = setting.design == "alternated"
                r = k if together else 2 * k + (arm == "b")
                mean = rounds[r] + rng.normal(0, setting.boot_sd * setting.residual_sd)
                y = own + mean + rng.normal(0, setting.residual_sd, setting.slots)
                if arm == "b" and g == 0:
                    y = y + shift
                boots.append(Boot(arm, k, r, dict(zip(names, (float(v) for v in y), strict=True))))
        groups[f"pair.{g}"] = boots
    return groups


def estimate(groups, design):
    """The estimate of the first pair, as a run would make it."""
    found = pool_for(groups, dict.fromkeys(groups, design), "pair.0", ("a", "b"))
    mine = groups["pair.0"]
    return compare(
        [b for b in mine if b.arm == "a"],
        [b for b in mine if b.arm == "b"],
        boot=boot_sd("step_ms", found),
        resident=found.resident,
    )


def calibrate(setting, reps, seed=20260701, margin=0.02):
    """Rates over `reps` sessions."""
    rng = np.random.default_rng(seed)
    limit = math.log1p(margin)
    false, same, boots_only, widths = 0, 0, 0, []
    for _ in range(reps):
        found = estimate(session(rng, setting, 0.0), setting.design)
        false += found.full.p_zero() < 0.05
        boots_only += found.boots_only.p_zero() < 0.05
        widths.append(found.full.half_width(0.95))
        found = estimate(session(rng, setting, limit), setting.design)
        same += found.full.p_equivalent(limit) < 0.05
    s, k = setting, setting.boots
    apart = 0.0 if s.design == "alternated" else s.round_sd**2
    known = s.residual_sd * math.sqrt(
        s.slot_sd**2 / s.slots + 2 / s.slots / k + 2 * (s.boot_sd**2 + apart) / k
    )
    return {
        **asdict(setting),
        "reps": reps,
        "false_different": false / reps,
        "false_different_boots_only": boots_only / reps,
        "false_equivalent": same / reps,
        "width_over_oracle": float(np.median(widths)) / (1.96 * known),
    }


SETTINGS = [
    Setting(design, slots, boots, pairs, slot_sd, sd, round_sd=0.5)
    for design in ("alternated", "blocks")
    for slots, boots in ((6, 2), (16, 2), (8, 3), (16, 4))
    for pairs in (1, 3)
    for slot_sd, sd in ((0.0, 0.0), (0.5, 0.3), (0.5, 1.0), (0.0, 3.0))
]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument("--reps", type=int, default=4000)
    args = parser.parse_args()
    rows = []
    for i, setting in enumerate(SETTINGS):
        row = calibrate(setting, args.reps, seed=1000 + i)
        rows.append(row)
        print(
            f"| {row['design']} | {row['slots']} | {row['boots']} | {row['pairs']} | {row['slot_sd']:g} "
            f"| {row['boot_sd']:g} | {row['false_different']:.1%} | {row['false_different_boots_only']:.1%} "
            f"| {row['false_equivalent']:.1%} | {row['width_over_oracle']:.2f} |",
            flush=True,
        )
    Path(args.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
