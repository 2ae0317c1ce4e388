"""Results beside the verdicts: champions, replicates, composites, sessions, decompositions, economics, across.

None of them is a verdict of a pair, and each is labelled with what it is. JSON-ready, with one sentence each for
the pages.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any

from campaign.analysis.across import Across, across_json
from campaign.analysis.champion import champion, replicates
from campaign.analysis.composite import composite
from campaign.analysis.decompose import Decomposition, Drafter, decompose, decomposition_json
from campaign.analysis.economics import CellEconomics, Point, economics, iso
from campaign.analysis.estimate import Estimate, ratio
from campaign.analysis.forecast import aggregate, mean_tau, score
from campaign.analysis.looks import Stop
from campaign.analysis.model import Verdict
from campaign.analysis.pairs import boot_sd, compare, pool_for
from campaign.analysis.power import ArmPower, energy, idle
from campaign.analysis.sequential import saved
from campaign.analysis.sessions import over_sessions
from campaign.analysis.variance import boots_of
from campaign.plan.model import CampaignPlan, SessionPlan
from campaign.plan.power import Prior
from campaign.report import across, words
from campaign.report.beside import Further
from campaign.spec.models import Metric
from campaign.store.row import RequestRow


def further(
    rows: Sequence[RequestRow],
    plan: CampaignPlan,
    verdicts: Sequence[Verdict],
    *,
    run: str,
    usd_by_group: Mapping[tuple[str, str], float],
    declared: Mapping[Metric, float],
    prior: Prior | None,
    stopped: Mapping[tuple[str, str], Mapping[str, Any]] | None = None,
    forecasts: Sequence[Mapping[str, Any]] = (),
    billed_s: Mapping[str, float] | None = None,
    sent: Sequence[RequestRow] | None = None,
) -> Further:
    """Everything beside the verdicts. rows: valid ones; sent: all there are, for the time in which a GPU was busy."""
    measured = [r for r in rows if r.phase == "measure" and r.validity == "valid"]
    said: list[tuple[str, str]] = []
    crossed = across.inside(plan, run, measured)
    said += [("across sessions", across.sentence(x)) for x in crossed if x.metric == "step_ms" and _tells(x)]
    champions, repeats, parts = [], [], []
    for session in plan.sessions:
        mine = [r for r in measured if r.session == session.name]
        champions += _champions(session, mine, said)
        repeats += _replicates(session, mine)
        parts += _decompositions(session, mine, said)
    money = economics(
        measured,
        usd_per_hour={s.name: s.usd_per_hour / 1e6 for s in plan.sessions},
        usd_by_group=usd_by_group,
        accelerators=_accelerators(plan),
    )
    power = energy(measured)
    said += _energy(power)
    gpu_idle = idle(rows if sent is None else sent, billed_s or {})
    said += [
        (
            "GPU idle",
            f"{i.session}: no request in flight for {words.number(100 * i.share)} % of the billed {words.number(i.billed_s / 60)} min",
        )
        for i in gpu_idle
    ]
    return Further(
        energy=[asdict(e) for e in power],
        gpu_idle=[asdict(i) | {"share": i.share} for i in gpu_idle],
        across=[across_json(x) for x in crossed],
        champions=champions,
        replicates=repeats,
        composites=_composites(plan, measured, declared, prior, said),
        sessions=_over_sessions(verdicts, said),
        aa_offsets=_offsets(verdicts, said),
        decomposition=[decomposition_json(d) for d in parts],
        economics=[asdict(e) | {"reasons": list(e.reasons)} for e in money],
        frontiers=_frontiers(money, said),
        looks=_looks(plan, stopped or {}, said),
        forecasts=_forecasts(forecasts, measured, said),
        sentences=tuple(said),
    )


def _energy(power: Sequence[ArmPower]) -> list[tuple[str, str]]:
    """One sentence a group: the arms' joules a token."""
    groups: dict[tuple[str, str], list[ArmPower]] = defaultdict(list)
    for p in power:
        groups[p.session, p.group].append(p)
    return [
        (
            "energy",
            f"{session} / {group}, joules a token: "
            + ", ".join(f"{p.arm} {words.number(p.joules_per_token)}" for p in mine),
        )
        for (session, group), mine in groups.items()
    ]


def _looks(
    plan: CampaignPlan, stopped: Mapping[tuple[str, str], Mapping[str, Any]], said: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """What each early stop saved against the fixed plan."""
    found = []
    for session in plan.sessions:
        for group in session.groups:
            event = stopped.get((session.name, group.name))
            if event is None:
                continue
            stop = Stop.of(event)
            ran = stop.cut(group).rounds
            got = saved(
                sum(len(r.sequence) for r in group.rounds),
                sum(len(r.sequence) for r in ran),
                sum(len(r.boots) for r in group.rounds),
                sum(len(r.boots) for r in ran),
                group.usd_expected / 1e6,
            )
            found.append(
                {"session": session.name, "group": group.name, "look": stop.rounds, "quads": stop.quads,
                 "why": event["why"], "requests_saved": got.requests, "boots_saved": got.boots, "usd_saved": got.usd}
            )  # fmt: skip
            within = f" and {stop.quads} quads" if stop.quads else ""
            where = f"after round {stop.rounds}{within} of {len(group.rounds)}" if ran else "before it began"
            said.append(
                (
                    "stopped early",
                    (
                        f"{group.name} {where} ({_WHY.get(event['why'], event['why'])}): {got.requests} requests, "
                        f"{got.boots} boots and about {words.dollars(got.usd)} less than the fixed plan"
                    ),
                )
            )
    return found


_WHY = {
    "decided": "every comparison is decided",
    "forecast": "no deeper arm can reach the best rate so far, by the forecast",
}


def _forecasts(
    made: Sequence[Mapping[str, Any]], rows: Sequence[RequestRow], said: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """Forecasts written down before a stage ran, each against what came."""
    found = []
    for entry in made:
        # As it was made: the same arm may stand at a higher concurrency elsewhere in the session.
        mine = [
            r for r in rows
            if r.session == entry["session"] and r.workload == entry["workload"] and r.concurrency == 1
        ]  # fmt: skip
        for f in entry["forecasts"]:
            about = {
                "session": entry["session"], "group": entry["group"], "arm": f["arm"], "best_tok_s": entry["best_tok_s"],
                "stop": entry["stop"],
            }  # fmt: skip
            scores = score(f, mean_tau(mine, f["arm"]), aggregate(mine, f["arm"]))
            came = [
                {
                    "quantity": s.quantity,
                    "said": s.said,
                    "lo": s.lo,
                    "hi": s.hi,
                    "came": s.came,
                    "inside": s.inside,
                }
                for s in scores
            ]
            found.append(about | {k: v for k, v in f.items() if k != "arm"} | {"scores": came})
        first = next(
            (f for f in found if f["group"] == entry["group"] and f["session"] == entry["session"]), None
        )
        if first is None or first["tok_s"] is None:
            continue
        came_rate = next((s for s in first["scores"] if s["quantity"] == "tok_s"), None)
        outcome = "it did not run"
        if came_rate is not None:
            outcome = f"came {words.number(came_rate['came'])}" + (
                "" if came_rate["inside"] else ", outside its interval"
            )
        said.append(
            (
                "forecast",
                (
                    f"{first['arm']}, said before it ran: {words.number(first['tok_s'])} tok/s "
                    f"[{words.number(first['tok_s_lo'])}, {words.number(first['tok_s_hi'])}]; {outcome}"
                ),
            )
        )
    return found


def _tells(x: Across) -> bool:
    return x.verdict != "invalid" and "no_spread" not in x.reasons


def _champions(
    session: SessionPlan, rows: Sequence[RequestRow], said: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    found = []
    for group in session.groups:
        if group.kind not in {"ladder", "pair"} or len(group.arms) < 3:
            continue
        made_up = simulated_arms(session)
        mine = [r for r in rows if r.group == group.name and r.arm not in made_up]
        # Only prompts and boots that all arms have: an arm with fewer would be judged on easier ones.
        best = champion(boots_of(mine, "decode_tok_s"), higher=True)
        if best is None:
            continue
        found.append(
            {
                "session": session.name, "group": group.name, "metric": "decode_tok_s", "arm": best.arm, "k": best.k,
                "raw": best.raw, "adjusted": best.adjusted, "optimism": best.optimism,
                "picked": dict(best.picked), "held_out": best.part, "reasons": list(best.reasons),
            }
        )  # fmt: skip
        said.append(
            (
                "champion",
                (
                    f"{best.arm} is the best of {best.k} in {session.name} / {group.name}: {words.number(best.raw)} tok/s as "
                    f"picked, {words.number(best.adjusted)} with the picking taken off (it leads on "
                    f"{best.picked.get(best.arm, 0) * 100:.0f} % of held-out {best.part}s"
                    + ("; one boot an arm, whose luck is not taken off)" if best.reasons else ")")
                ),
            )
        )
    return found


def _replicates(session: SessionPlan, rows: Sequence[RequestRow]) -> list[dict[str, Any]]:
    """Boots of one arm on one workload, pooled: the best of them is not a result."""
    cells: dict[tuple[str, str, int], dict[str, list[RequestRow]]] = defaultdict(lambda: defaultdict(list))
    for r in rows:
        cells[r.arm_hash, r.workload, r.concurrency][f"{r.group}/{r.arm}/b{r.boot_index}"].append(r)
    found = []
    for (arm_hash, workload, concurrency), boots in sorted(cells.items()):
        for metric in ("step_ms", "decode_tok_s"):
            means: dict[str, float] = {}
            for label, mine in boots.items():
                made = boots_of(mine, metric)
                if len(made) == 1 and made[0].values:
                    means[label] = math.fsum(made[0].values.values()) / len(made[0].values)
            if len(means) < 2:
                continue
            pooled = replicates(arm_hash, means)
            found.append(
                {"session": session.name, "workload": workload, "concurrency": concurrency, "metric": metric}
                | asdict(pooled)
                | {"arms": list(pooled.arms)}
            )
    return found


def simulated_arms(session: SessionPlan) -> frozenset[str]:
    """Arms whose acceptance is made up: none of them is a best arm, nor a forecast's evidence."""
    return frozenset(
        arm.name
        for arm in session.arms.values()
        if arm.config.speculation is not None and arm.config.speculation.simulated_acceptance is not None
    )


def drafters(session: SessionPlan) -> list[Drafter]:
    """The session's arms as a decomposition sees them."""
    found = []
    for arm in session.arms.values():
        how = arm.config.speculation
        active = how is not None and how.depth > 0
        found.append(
            Drafter(arm.name, how.method if active and how else None, how.depth if active and how else None)
        )
    return found


def _decompositions(
    session: SessionPlan, rows: Sequence[RequestRow], said: list[tuple[str, str]]
) -> list[Decomposition]:
    found = []
    for workload in dict.fromkeys(r.workload for r in rows):
        d = decompose(rows, session=session.name, workload=workload, arms=drafters(session))
        if d is None:
            continue
        found.append(d)
        parts = []
        if d.t1.value is not None:
            parts.append(f"bare step {words.number(d.t1.value)} ms")
        if d.slope.value is not None:
            lo, hi = words.number(d.slope.lo), words.number(d.slope.hi)
            parts.append(
                f"a further verified token {words.number(d.slope.value)} ms [{lo}, {hi}], these boots only ({d.method})"
            )
        for arm in d.arms:
            broken = [r for r in arm.reasons if r == "not_identified:verify_above_step"]
            if arm.draft_ms is not None:
                parts.append(f"{arm.arm}: a drafted token {words.number(arm.draft_ms)} ms")
            elif broken:
                parts.append(
                    f"{arm.arm}: draft pass not identified (the verify time at its width exceeds its whole step)"
                )
        if parts:
            said.append(("speculation", f"{session.name} / {workload}: {'; '.join(parts)}"))
    return found


def _composites(
    plan: CampaignPlan,
    rows: Sequence[RequestRow],
    declared: Mapping[Metric, float],
    prior: Prior | None,
    said: list[tuple[str, str]],
) -> list[dict[str, Any]]:
    """Pairs measured at concurrency 1 and above: step time of the one with acceptance of the other."""
    found = []
    for session in plan.sessions:
        one = {(c.a, c.b, c.workload): c for c in session.comparisons if c.concurrency == 1}
        for c in session.comparisons:
            low = one.get((c.a, c.b, c.workload))
            if c.concurrency == 1 or low is None:
                continue
            mine = [r for r in rows if r.session == session.name and r.group in {c.group, low.group}]
            designs = {g.name: g.design for g in session.groups}
            step = _estimate(mine, session, low.group, (c.a, c.b), "step_ms", designs, declared, prior)
            accept = _estimate(mine, session, c.group, (c.a, c.b), "accept_len", designs, declared, prior)
            if step is None or accept is None:
                continue
            moves = tuple(
                m for m in (_moves(mine, low.group, c.group, arm) for arm in (c.a, c.b)) if m is not None
            )
            both = composite(step, accept, moves, margin=c.margin)
            lo, hi = (e.interval(0.95) for e in (step, accept))
            found.append(
                {
                    "session": session.name, "pair": c.pair, "a": c.a, "b": c.b, "metric": "decode_tok_s",
                    "label": "composite", "ratio": both.ratio, "lo": both.lo, "hi": both.hi,
                    "step_ms": {"ratio": ratio(step.mean), "lo": ratio(lo[0]), "hi": ratio(lo[1]), "concurrency": 1},
                    "accept_len": {
                        "ratio": ratio(accept.mean), "lo": ratio(hi[0]), "hi": ratio(hi[1]), "concurrency": c.concurrency,
                    },
                    "acceptance_moves": [{"ratio": ratio(m.mean), "p": m.p_zero()} for m in moves],
                    "reasons": list(both.reasons),
                }
            )  # fmt: skip
            said.append(
                (
                    "composite",
                    (
                        f"{c.b} against {c.a}: decode rate {words.signed(both.ratio, both.lo, both.hi)} % "
                        f"{words.interval(both.lo, both.hi)} from step time at concurrency 1 and acceptance at "
                        f"{c.concurrency} ({words.reasons(both.reasons)})"
                    ),
                )
            )
    return found


def _estimate(
    rows: Sequence[RequestRow],
    session: SessionPlan,
    group: str,
    pair: tuple[str, str],
    metric: Metric,
    designs: Mapping[str, str],
    declared: Mapping[Metric, float],
    prior: Prior | None,
) -> Estimate | None:
    boots = {group: boots_of([r for r in rows if r.group == group], metric)}
    pool = pool_for(boots, designs, group, pair)
    a, b = ([x for x in boots[group] if x.arm == arm] for arm in pair)
    waves = any(g.name == group and g.concurrency > 1 for g in session.groups)
    known = boot_sd(metric, pool, declared=declared.get(metric), prior=prior)
    return compare(a, b, boot=known, resident=pool.resident, waves=waves).full


def _moves(rows: Sequence[RequestRow], low: str, high: str, arm: str) -> Estimate | None:
    """accept_len of one arm, higher concurrency over 1, by prompt."""
    values: list[dict[int, list[float]]] = []
    for group in (low, high):
        by: dict[int, list[float]] = defaultdict(list)
        for r in rows:
            if r.group == group and r.arm == arm and r.accept_len and r.state == "ok":
                by[r.slot].append(math.log(r.accept_len))
        values.append(by)
    shared = sorted(values[0].keys() & values[1].keys())
    d = [sum(values[1][s]) / len(values[1][s]) - sum(values[0][s]) / len(values[0][s]) for s in shared]
    if len(d) < 3:
        return None
    mean = math.fsum(d) / len(d)
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in d) / (len(d) - 1))
    return Estimate(mean, ((sd / math.sqrt(len(d)), len(d) - 1.0),)) if sd > 1e-12 else None


def _over_sessions(verdicts: Sequence[Verdict], said: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """The same comparison in several sessions of the run: t on session means."""
    groups: dict[tuple[str, str, str], list[Verdict]] = defaultdict(list)
    for v in verdicts:
        if v.ratio and v.verdict != "invalid":
            groups[v.pair, v.metric, v.workload].append(v)
    found = []
    for (pair, metric, workload), mine in groups.items():
        if len({v.session for v in mine}) < 2 or len({(v.a, v.b) for v in mine}) > 1:
            continue
        over = over_sessions([math.log(v.ratio) for v in mine if v.ratio])
        if over is None:
            continue
        ends = over.estimate.interval(0.95) if over.estimate is not None else (None, None)
        lo, hi = ratio(ends[0]), ratio(ends[1])
        found.append(
            {
                "pair": pair, "metric": metric, "workload": workload, "a": mine[0].a, "b": mine[0].b,
                "sessions": over.sessions, "ratio": ratio(over.mean), "lo": lo, "hi": hi, "session_sd": over.sd,
                "df": over.sessions - 1, "p": over.estimate.p_zero() if over.estimate is not None else None,
            }
        )  # fmt: skip
        if mine[0].primary:
            said.append(
                (
                    "several sessions",
                    (
                        f"{pair}: {words.METRIC[mine[0].metric]} {words.signed(ratio(over.mean), lo, hi)} % "
                        f"{words.interval(lo, hi)} over {over.sessions} sessions (t on session means)"
                    ),
                )
            )
    return found


def _offsets(verdicts: Sequence[Verdict], said: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """What an arm differs from itself by in the places of a session: the floor of what a pair there can claim."""
    found = []
    for v in verdicts:
        if v.kind != "aa" or v.ratio is None:
            continue
        lo, hi = (v.lo, v.hi) if v.lo is not None else (v.lo_boots_only, v.hi_boots_only)
        beside = sorted(
            {o.pair for o in verdicts if o.session == v.session and o.metric == v.metric and o.kind != "aa"}
        )
        found.append(
            {
                "session": v.session, "aa": v.pair, "metric": v.metric, "ratio": v.ratio, "lo": lo, "hi": hi,
                "verdict": v.verdict, "beside": beside,
            }
        )  # fmt: skip
        if v.primary:
            said.append(
                (
                    "A/A offset",
                    (
                        f"{v.session}: an arm differs from itself by {words.signed(v.ratio, lo, hi)} % {words.interval(lo, hi)} "
                        f"in {words.METRIC[v.metric]}; read the pairs of this session beside it"
                    ),
                )
            )
    return found


def _accelerators(plan: CampaignPlan) -> dict[tuple[str, str], int]:
    """(session, arm) -> GPUs, from the plan's places, else from the tensor parallel size."""
    found: dict[tuple[str, str], int] = {}
    for s in plan.sessions:
        for g in s.groups:
            for r in g.rounds:
                for b in r.boots:
                    if b.gpus:
                        found[s.name, b.arm] = len(b.gpus)
        for name, arm in s.arms.items():
            if arm.config.tp and (s.name, name) not in found:
                found[s.name, name] = arm.config.tp
    return found


def _frontiers(cells: Sequence[CellEconomics], said: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Every two arms of a session measured at two or more concurrencies: cost held, and interactivity held."""
    fronts: dict[tuple[str, str, str], list[CellEconomics]] = defaultdict(list)
    for c in cells:
        if c.interactivity and c.usd_per_mtok_node and c.rate_se is not None:
            fronts[c.session, c.workload, c.arm].append(c)
    found = []
    kept = {k: v for k, v in fronts.items() if len(v) >= 2}
    for (s, w, a), (s2, w2, b) in combinations(sorted(kept), 2):
        if (s, w) != (s2, w2):
            continue
        points = [
            [
                Point(c.interactivity or 0.0, c.usd_per_mtok_node or 0.0, c.rate_se or 0.0)
                for c in kept[s, w, arm]
            ]
            for arm in (a, b)
        ]
        for hold, values in (
            ("interactivity", [p.interactivity for p in (*points[0], *points[1])]),
            ("cost", [p.usd_per_mtok for p in (*points[0], *points[1])]),
        ):
            at = sorted(values)[len(values) // 2]
            result = iso(points[0], points[1], at=at, hold=hold)
            found.append(
                {
                    "session": s, "workload": w, "a": a, "b": b, "hold": hold, "at": at, "ratio": result.ratio,
                    "lo": result.lo, "hi": result.hi, "reasons": list(result.reasons),
                }
            )  # fmt: skip
            if result.ratio is not None:
                what = "cost" if hold == "interactivity" else "interactivity"
                said.append(
                    (
                        "economics",
                        (
                            f"{b} against {a} at one {hold}: {what} {words.signed(result.ratio, result.lo, result.hi)} % "
                            f"{words.interval(result.lo, result.hi)}"
                        ),
                    )
                )
    return found
