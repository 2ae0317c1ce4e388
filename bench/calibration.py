"""Do the intervals hold what they promise? Seeded simulation of the verdicts of `campaign.analysis`.

    python bench/calibration.py --json FILE [--reps 4000] [--widths 1500]

The promises first: false differences, coverage, equivalence, early stops, champions, drift and dollars, under the
variance components of a real campaign with boot variance in the truth, and with serial correlation and heavy tails.
Everything printed is simulated. With `--widths`, also how wide intervals are against those of somebody who knows
every variance: a session of some pairs of arms is drawn from slot, boot and residual variance, and judged by the very
functions that judge a run. Written and printed: how often an A/A is called different, how often a true
difference at the margin is called equivalent, and how wide the interval is against the one a person who
knows every variance would give.
"""

import argparse
import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from scipy import special

from campaign.analysis.champion import champion
from campaign.analysis.drift import judge
from campaign.analysis.estimate import Estimate, critical
from campaign.analysis.pairs import SIGNED_SHARE, boot_sd, compare, pool_for
from campaign.analysis.sequential import look, quads
from campaign.analysis.variance import Boot
from campaign.plan.cheapest import Costs, cheapest, price
from campaign.plan.power import METRICS, Prior, default_prior, needed_boots
from campaign.spec.models import Anchor
from campaign.store.row import RequestRow


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


# --- what the rules promise, under the components of a real campaign


STEP = {"residual": 0.0086, "slot": 0.003, "boot": 0.003}
RATE = {"residual": 0.066, "slot": 0.020, "boot": 0.004}
"""Log scale: BRL-2026-11, SGLang on four B200s; boots 0.1 to 0.5 %, here 0.3 and 0.4 %."""
COSTS = Costs(boot_s=480.0, request_s=4.6, usd_per_hour=24.0)
"""Warm reload of a 554 GiB model, 2048 tokens at 480 tok/s, four B200s."""
LAWS = ("normal", "serial", "heavy")
"""Independent normal; AR(1) of 0.3 within a boot; Student's t with 4 degrees of freedom, same variance."""
HISTORY = 6
"""Past groups of four boots in the store, from which the prior of the boot sd is estimated."""


def noise(rng, law, shape, sd):
    """Residuals of this law along the last axis."""
    if law == "heavy":
        return rng.standard_t(4, shape) * sd / math.sqrt(2)
    e = rng.normal(0, sd, shape)
    if law == "serial":
        rho = 0.3
        e[..., 1:] *= math.sqrt(1 - rho**2)
        for i in range(1, shape[-1]):
            e[..., i] += rho * e[..., i - 1]
    return e


def draw(rng, comp, law, shape):
    """Log values of (sessions, 2 arms, boots, prompts)."""
    sessions, _, k, n = shape
    own = rng.normal(0, comp["slot"] / math.sqrt(2), (sessions, 2, 1, n))
    return own + rng.normal(0, comp["boot"], (sessions, 2, k, 1)) + noise(rng, law, shape, comp["residual"])


def boots_of_one(y, design):
    """One session of `draw` as the boots that `campaign.analysis` reads."""
    return [
        Boot(
            arm,
            i,
            i if design == "alternated" else 2 * i + a,
            {f"s{j}": float(v) for j, v in enumerate(y[a, i])},
        )
        for a, arm in enumerate("ab")
        for i in range(y.shape[1])
    ]


def mean_squares(y, design):
    """(boot, residual, df of boots) of every session: `analysis.variance.split`, for all sessions at once."""
    _, _, k, n = y.shape
    left = (y[:, 1:] - y[:, :1]) / math.sqrt(2) if design == "alternated" else y
    left = left - left.mean(axis=2, keepdims=True)
    means = left.mean(axis=3)
    inner = left - means[..., None]
    df = left.shape[1] * (k - 1)
    return (means**2).sum(axis=(1, 2)) / df, (inner**2).sum(axis=(1, 2, 3)) / (df * (n - 1)), df


def judged(y, design, past, past_df, past_n):
    """Mean and the two errors with their df of every session: `pairs.boot_sd` and `pairs.compare`, all at once.

    past: the signed boot variance that the store knows. Held to the functions themselves by `agrees`.
    """
    _, _, k, n = y.shape
    ms, r, df = mean_squares(y, design)
    first = np.maximum(0.0, (df * (ms - r / n) + past_df * past) / (df + past_df))
    squares = [(first + r / n) ** 2, (first + r / past_n) ** 2]
    weights = [df / squares[0], past_df / squares[1]]
    total_weight = weights[0] + weights[1]
    signed = (weights[0] * (ms - r / n) + weights[1] * past) / total_weight
    spread_of = (weights[0] ** 2 * squares[0] / df + weights[1] ** 2 * squares[1] / past_df) / total_weight**2
    of = df + past_df
    n_eff = r / (np.sqrt(spread_of * of) - first)
    own = np.maximum(signed, -SIGNED_SHARE * r / n)
    noisier = of * ((own + r / n) / (own + r / n_eff)) ** 2
    boot_df = np.where(n_eff < n, np.maximum(noisier, max(df, 1.0)), of)
    d = (y[:, 1] - y[:, 0]).mean(axis=1)
    within, h = d.var(axis=1, ddof=1) / n, 2.0 / k
    seen = h * (own + r / n)
    spread = within**2 / (n - 1) + seen**2 / boot_df + (h * r / n) ** 2 / (boot_df * (n - 1))
    total = within + h * own
    free = np.maximum(total**2 / spread, np.minimum(boot_df, n - 1.0))
    # Where nothing is left of the sum, the boots alone are believed.
    se = np.where(total > 0, np.sqrt(np.maximum(total, 0.0)), np.sqrt(seen))
    return d.mean(axis=1), (se, np.where(total > 0, free, boot_df)), (np.sqrt(seen), boot_df)


def p_zero(mean, *errors):
    return np.minimum(1.0, np.max([2 * special.stdtr(df, -abs(mean) / se) for se, df in errors], axis=0))


def p_equivalent(mean, limit, *errors):
    return np.max([special.stdtr(df, -(limit - abs(mean)) / se) for se, df in errors], axis=0)


def agrees(y, design, past, past_df, past_n, p, p_same, limit):
    """The same sessions judged by the functions that judge a run: equal, or this raises."""
    blank = dict.fromkeys(METRICS, 0.0)
    for i in range(len(y)):
        known = Prior(
            blank, {"step_ms": math.sqrt(max(0.0, past[i]))}, blank, {"step_ms": float(past_df)},
            boot_signed={"step_ms": float(past[i])}, boot_n={"step_ms": float(past_n)},
        )  # fmt: skip
        boots = boots_of_one(y[i], design)
        found = pool_for({"g": boots}, {"g": design}, "g", ("a", "b"))
        sides = [[x for x in boots if x.arm == arm] for arm in "ab"]
        full = compare(*sides, boot=boot_sd("step_ms", found, prior=known), resident=found.resident).full
        at_margin = Estimate(full.mean + limit, full.errors)
        if not math.isclose(full.p_zero(), p[i], rel_tol=1e-6) or not math.isclose(
            at_margin.p_equivalent(limit), p_same[i], rel_tol=1e-6
        ):
            raise AssertionError(f"the vectorised test is not that of a run: {full.p_zero()} and {p[i]}")


CHECKED = 40
"""Sessions of each row that are judged a second time, by the functions themselves."""


def verdict_rates(job):
    """False differences, coverage and false equivalence of one design under one law."""
    name, comp, law, design, n, k, past_n, reps, seed = job
    rng = np.random.default_rng(seed)
    limit = math.log1p(0.02)
    false = same = bare = done = 0
    while done < reps:
        size = min(2000, reps - done)
        # Ten sessions share a store, as they would.
        stores = -(-size // 10)
        ms, r, df = mean_squares(draw(rng, comp, law, (stores * HISTORY, 2, 4, past_n)), design)
        past = np.repeat((ms - r / past_n).reshape(stores, HISTORY).mean(axis=1), 10)[:size]
        y = draw(rng, comp, law, (size, 2, k, n))
        mean, *errors = judged(y, design, past, HISTORY * df, past_n)
        p, p_same = p_zero(mean, *errors), p_equivalent(mean + limit, limit, *errors)
        if done == 0:
            few = slice(0, CHECKED)
            agrees(y[few], design, past[few], HISTORY * df, past_n, p[few], p_same[few], limit)
        d = (y[:, 1] - y[:, 0]).mean(axis=1)
        t = abs(mean) / np.sqrt(d.var(axis=1, ddof=1) / n)
        bare += int((2 * special.stdtr(n - 1, -t) < 0.05).sum())
        false += int((p < 0.05).sum())
        # Interval and estimate move with a true effect alike: coverage of one is coverage of none, and the interval
        # covers where the test does not reject.
        same += int((p_same < 0.05).sum())
        done += size
    return {
        "metric": name, "law": law, "design": design, "n": n, "boots": k, "past_n": past_n, "reps": reps,
        "false_different": false / reps, "false_different_upper": upper(false, reps),
        "false_different_boots_only": bare / reps, "coverage": 1 - false / reps,
        "false_equivalent": same / reps, "false_equivalent_upper": upper(same, reps),
    }  # fmt: skip


def upper(count, of):
    """One-sided 95 % upper bound of a share (Clopper and Pearson 1934)."""
    return 1.0 if count >= of else float(special.betaincinv(count + 1, of - count, 0.95))


def stop_rates(job):
    """How often an A/A is stopped early as different, at any look."""
    law, every, prior_sd, reps, seed = job
    rng = np.random.default_rng(seed)
    n, boots = 64, 4
    stops = bare = 0
    for _ in range(reps):
        own = rng.normal(0, STEP["boot"], (2, boots))
        y = noise(rng, law, (2, boots, n // boots), STEP["residual"]) + own[:, :, None]
        d = (y[1] - y[0]).reshape(-1) + rng.normal(0, STEP["slot"], n)
        units = list(d) if every == "request" else quads([0.0] * n, list(d))
        per = 1 if every == "request" else 2
        looks = list(range(2, len(units) + 1))
        hit = naive = False
        for i in looks:
            counts = [min(n // boots, max(0, i * per - k * (n // boots))) for k in range(boots)]
            booted = sum(counts) ** 2 / sum(c * c for c in counts)
            seen = look(units[:i], looks=len(looks), boots=booted, boot_sd=prior_sd, limit=0.0)
            hit = hit or seen.why == "differs"
            if i >= 4:
                x = np.array(units[:i])
                naive = naive or abs(x.mean()) > critical(0.95, i - 1) * x.std(ddof=1) / math.sqrt(i)
        stops, bare = stops + hit, bare + naive
    return {
        "law": law, "looks": f"after every {every}", "reps": reps, "false_stops": stops / reps,
        "false_stops_upper": upper(stops, reps), "false_stops_plain_t": bare / reps,
    }  # fmt: skip


def champion_bias(reps, seed, k=4, n=16, boots=2):
    """Bias of the best of k equal arms, in standard errors of an arm."""
    rng = np.random.default_rng(seed)
    sd = math.sqrt(RATE["residual"] ** 2 / n / boots + RATE["boot"] ** 2 / boots)
    raw, adjusted = [], []
    for _ in range(reps):
        made = [
            Boot(f"a{i}", j, j, {f"s{s}": float(v) for s, v in enumerate(row)})
            for i in range(k)
            for j, row in enumerate(
                rng.normal(0, RATE["boot"], boots)[:, None] + rng.normal(0, RATE["residual"], (boots, n))
            )
        ]
        best = champion(made, higher=True)
        raw.append(math.log(best.raw) / sd)
        adjusted.append(math.log(best.adjusted) / sd)
    return {
        "k": k, "n": n, "boots": boots, "reps": reps, "bias_raw_sd": float(np.mean(raw)),
        "bias_adjusted_sd": float(np.mean(adjusted)), "se": float(np.std(adjusted) / math.sqrt(reps)),
    }  # fmt: skip


def drift_alarms(reps, seed, delta=0.01, anchors=4, boots=2, n=3):
    """Sessions with one or more false alarms, every anchor standing exactly at delta: the worst case of H0."""
    rng = np.random.default_rng(seed)
    blank = RequestRow(
        run="r", campaign="c", session="s", lease="l", node="n", gpu_set="0", boot_id="b", boot_index=0, boot_attempt=0,
        arm="a", arm_hash="h", group="anchor", cell="c", phase="anchor", workload="w", concurrency=1, block="s0",
        round=0, order=0, half="p0", slot=0, seed=0, attempt=0, sent_ns=0, sent_utc_ns=0, state="ok",
    )  # fmt: skip
    plan = Anchor(arm="a", workload="w", drift_delta=delta)
    alarms = 0
    for _ in range(reps):
        rows = {}
        for p in range(anchors):
            name = "first" if p == 0 else f"between{p}" if p < anchors - 1 else "last"
            own = rng.normal(0, STEP["boot"], boots) + (math.log1p(delta) if p else 0.0)
            rows[name] = [
                replace(
                    blank, boot_index=i, round=i, block=f"s{s}", slot=s, group=f"anchor.{name}",
                    step_ms=10 * math.exp(own[i] + rng.normal(0, STEP["residual"])),
                )
                for i in range(boots)
                for s in range(n)
            ]  # fmt: skip
        said = [
            judge(
                name,
                rows,
                session="s",
                anchor=plan,
                declared_boot_sd=STEP["boot"],
                prior_boot_sd=None,
                planned=anchors,
            )
            for name in rows
        ]
        alarms += any(a.ok is False for a in said)
    return {
        "delta": delta, "anchors": anchors, "reps": reps, "stated": 0.05, "false_alarms": alarms / reps,
        "false_alarms_upper": upper(alarms, reps),
    }  # fmt: skip


def dollars(reps, seed):
    """What it costs to resolve a difference at 80 % power, three ways."""
    known = default_prior("gpu")
    rng = np.random.default_rng(seed)
    out = []
    for metric, comp in (("step_ms", STEP), ("decode_tok_s", RATE)):
        for difference in (0.01, 0.02, 0.05):
            # The habit: 16 requests a boot, the question asked in tok/s, boots repeated until it is answered.
            habit = needed_boots("decode_tok_s", 16, difference, known, "blocks", at_most=512)
            habit_usd = None if habit is None else price(COSTS, habit, 16)
            best = next(
                iter(
                    cheapest(metric, difference, known, COSTS, designs=("alternated", "blocks"), df_boot=24)
                ),
                None,
            )
            early = None
            if best is not None:
                early = best.usd * early_share(rng, comp, difference, best, max(60, reps // 10))
            out.append(
                {
                    "metric": metric, "difference": difference, "habit_boots": habit, "habit_usd": habit_usd,
                    "planned_design": best and best.design, "planned_boots": best and best.boots,
                    "planned_slots": best and best.slots, "planned_usd": best and best.usd, "early_usd": early,
                    "habit_over_planned": habit_usd / best.usd if best and habit_usd else None,
                }
            )  # fmt: skip
    return out


def early_share(rng, comp, difference, best, reps):
    """Mean share of the planned boots run when looks are taken after every round from the second on."""
    total = 0.0
    for _ in range(reps):
        own = rng.normal(0, comp["boot"], (2, best.boots))
        # Twice the difference asked for: early stopping pays where the truth is larger than the plan's.
        effect = math.log1p(2 * difference) + rng.normal(0, comp["slot"], best.slots)
        y = rng.normal(0, comp["residual"], (2, best.boots, best.slots)) + own[:, :, None]
        d = y[1] - y[0] + effect
        used = best.boots
        for k in range(2, best.boots):
            units = [u for row in d[:k] for u in quads([0.0] * best.slots, list(row))]
            if look(units, looks=best.boots - 2, boots=k, boot_sd=comp["boot"], boot_df=24, limit=0.0).stop:
                used = k
                break
        total += used / best.boots
    return total / reps


def promises(reps, seed, workers, parts):
    """All of the above; every number is simulated."""
    jobs = [
        (name, comp, law, design, n, 4, past_n or n, 10 * reps, seed + i)
        for i, (name, comp, law, design, n, past_n) in enumerate(
            (name, comp, law, design, n, past_n)
            for past_n in (None, 8, 64)
            for name, comp in (("step_ms", STEP), ("decode_tok_s", RATE))
            for law in (LAWS if past_n is None else LAWS[:2])
            for design in (("alternated", "blocks") if past_n is None else ("alternated",))
            for n in ((8, 16, 32) if past_n is None else (32 if past_n == 8 else 16,))
        )
    ]
    stops = [
        (law, every, STEP["boot"], max(200, reps // 3), seed + 500 + i)
        for i, (law, every) in enumerate((law, every) for law in LAWS for every in ("quad", "request"))
    ]
    found = {}
    with ProcessPoolExecutor(workers) as pool_:
        if "verdicts" in parts:
            found["verdicts"] = list(pool_.map(verdict_rates, jobs))
        if "stopping" in parts:
            found["stopping"] = list(pool_.map(stop_rates, stops))
    if "rest" in parts:
        found["champion"] = champion_bias(reps, seed + 900)
        found["drift"] = drift_alarms(max(300, reps // 2), seed + 901)
        found["dollars"] = dollars(reps, seed + 902)
    return found


PARTS = ("verdicts", "stopping", "rest")


def show(found):
    """The tables of docs/STATISTICS.md."""
    if "verdicts" in found:
        print(
            "| metric | noise | design | n | past n | A/A different (upper) | these boots only | coverage "
            "| false equivalent (upper) |\n|---|---|---|---|---|---|---|---|---|"
        )
    for r in found.get("verdicts", ()):
        print(
            f"| {r['metric']} | {r['law']} | {r['design']} | {r['n']} | {r['past_n']} | {r['false_different']:.1%} "
            f"({r['false_different_upper']:.1%}) | {r['false_different_boots_only']:.1%} | {r['coverage']:.1%} "
            f"| {r['false_equivalent']:.1%} ({r['false_equivalent_upper']:.1%}) |"
        )
    for r in found.get("stopping", ()):
        print(
            f"| {r['law']} | {r['looks']} | {r['false_stops']:.1%} ({r['false_stops_upper']:.1%}) "
            f"| {r['false_stops_plain_t']:.1%} |"
        )
    if "champion" in found:
        c, d = found["champion"], found["drift"]
        print(
            f"champion of {c['k']}: raw {c['bias_raw_sd']:+.2f} sd, adjusted {c['bias_adjusted_sd']:+.2f} "
            f"+- {c['se']:.2f} sd"
        )
        print(
            f"drift at delta: {d['false_alarms']:.1%} of sessions ({d['false_alarms_upper']:.1%}), "
            f"stated {d['stated']:.0%}"
        )
    for r in found.get("dollars", ()):
        print(r)


def _calibrate(job):
    return calibrate(*job)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", required=True)
    parser.add_argument(
        "--reps", type=int, default=4000, help="ten times as many for verdicts; 0: widths only"
    )
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="only this; repeatable (a slow or busy machine)"
    )
    parser.add_argument("--seed", type=int, default=20260701)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--widths", type=int, default=0, help="sessions a setting of the width table; 0 leaves it out"
    )
    args = parser.parse_args()
    found = {"simulated": True, "seed": args.seed}
    if args.reps:
        found |= promises(args.reps, args.seed, args.workers, args.part or PARTS)
        show(found)
    found["widths"] = []
    if args.widths:
        with ProcessPoolExecutor(args.workers) as pool_:
            jobs = [(setting, args.widths, 1000 + i) for i, setting in enumerate(SETTINGS)]
            found["widths"] = list(pool_.map(_calibrate, jobs))
    for row in found["widths"]:
        print(
            f"| {row['design']} | {row['slots']} | {row['boots']} | {row['pairs']} | {row['slot_sd']:g} "
            f"| {row['boot_sd']:g} | {row['false_different']:.1%} | {row['false_different_boots_only']:.1%} "
            f"| {row['false_equivalent']:.1%} | {row['width_over_oracle']:.2f} |"
        )
    Path(args.json).write_text(json.dumps(found, indent=1, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
