"""Rows and a plan in, everything a report says out. Deterministic: the same rows give the same values."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from campaign.analysis.drift import Past, judge, moved
from campaign.analysis.estimate import ratio
from campaign.analysis.looks import Stop, share, take
from campaign.analysis.model import AnchorResult, Speculation, Verdict, VerdictWord
from campaign.analysis.overlap import CellCounters, shared
from campaign.analysis.pairs import boot_sd, compare, pool_for
from campaign.analysis.sequential import Look
from campaign.analysis.speculation import LadderArm, speculation
from campaign.analysis.validity import LOST_SHARE, MIN_BLOCKS, MIN_WAVES, check
from campaign.analysis.variance import MEASURED, Boot, boots_of
from campaign.analysis.verdicts import Context, adjust, direction, verdict, word
from campaign.plan.model import CampaignPlan, Comparison, GroupPlan, SessionPlan
from campaign.plan.power import METRICS, Prior
from campaign.spec.models import Anchor, Metric
from campaign.store.row import RequestRow

DRIFT_GATE = "anchor_drift"


@dataclass(frozen=True, slots=True)
class Conclusions:
    """Verdicts in the plan's order (metric within comparison), anchors in running order, ladders."""

    verdicts: tuple[Verdict, ...]
    anchors: tuple[AnchorResult, ...]
    speculation: tuple[Speculation, ...]


@dataclass(frozen=True, slots=True)
class _Session:
    plan: SessionPlan
    rows: Mapping[str, Sequence[RequestRow]]
    """By group."""
    declared: Mapping[Metric, float]
    prior: Prior | None
    level: float
    usd: Mapping[tuple[str, str], float]
    partial: bool
    anchor: Anchor
    overridden: Sequence[str]
    past: Past | None
    tolerance: float
    stopped: Mapping[str, Stop]
    _boots: dict[Metric, dict[str, list[Boot]]] = field(default_factory=dict)

    @property
    def designs(self) -> dict[str, str]:
        return {g.name: g.design for g in self.plan.groups}

    def boots(self, metric: Metric) -> dict[str, list[Boot]]:
        """Boots of every group, anchors among them."""
        if metric not in self._boots:
            self._boots[metric] = {
                g: self._whole(g, boots_of(rows, metric)) for g, rows in sorted(self.rows.items())
            }
        return self._boots[metric]

    def _whole(self, group: str, boots: list[Boot]) -> list[Boot]:
        """Without the boots of a round that a look cut short, where others are whole: they hold fewer prompts."""
        stop = self.stopped.get(group)
        return boots if stop is None or not stop.rounds else [b for b in boots if b.round < stop.rounds]

    def prior_step(self) -> float | None:
        """Boot sd of the step that earlier rows know, or None."""
        if self.prior is None or self.prior.source != "prior":
            return None
        return self.prior.boot_sd.get("step_ms")


def conclude(
    rows: Sequence[RequestRow],
    plan: CampaignPlan,
    *,
    declared_boot_sd: Mapping[Metric, float],
    confidence: float,
    usd_by_group: Mapping[tuple[str, str], float],
    partial: bool,
    anchor: Anchor,
    overridden: Mapping[str, Sequence[str]] | None = None,
    prior: Prior | None = None,
    past: Past | None = None,
    tolerance: float = LOST_SHARE,
    stopped: Mapping[tuple[str, str], Stop] | None = None,
    cells: CellCounters | None = None,
) -> Conclusions:
    """Judge every comparison, anchor and ladder of a run.

    rows: of committed rounds, void ones among them where they can be had: they count as lost either way, and
    say why. Superseded ones are ignored.
    usd_by_group: (session, group) -> dollars. partial: the run is not over, so a group that is not whole is
    `unresolved` with the reason `partial`, and anchors still to come are left out. overridden: session ->
    gates that were overridden, printed beside every verdict of the session; an override of the drift gate
    keeps proven drift from making a pair invalid. prior: components from earlier rows of the store. past:
    earlier anchors, for `reference: store`. tolerance: share of planned blocks that may be lost. stopped: (session,
    group) -> how far it ran, of groups that ended early: judged on what ran, with the interval that holds at every
    look. A stage of a ladder that a forecast left out is `unresolved` (`stopped_by_forecast`). cells: counters of
    overlapping requests, as their rounds committed them.
    """
    if cells:
        rows = shared(rows, cells, _depths(plan))
    by_session: dict[str, dict[str, list[RequestRow]]] = defaultdict(lambda: defaultdict(list))
    for row in sorted(rows, key=lambda r: r.key):
        if row.validity != "superseded" and row.phase in MEASURED:
            by_session[row.session][row.group].append(row)
    verdicts: list[Verdict] = []
    anchors: list[AnchorResult] = []
    ladders: list[Speculation] = []
    for session in (_shortened(s, stopped or {}) for s in plan.sessions):
        if partial and session.name not in by_session:
            continue
        about = _Session(
            plan=session,
            rows=by_session.get(session.name, {}),
            declared=declared_boot_sd,
            prior=prior,
            level=confidence,
            usd=usd_by_group,
            partial=partial,
            anchor=anchor,
            overridden=tuple((overridden or {}).get(session.name, ())),
            past=past,
            tolerance=tolerance,
            stopped={group: k for (name, group), k in (stopped or {}).items() if name == session.name},
        )
        anchors += _anchors(about)
        ladders += _ladders(about)
        moves = _moves(about)
        verdicts += [_verdict(about, c, m, moves) for c in session.comparisons for m in METRICS]
    return Conclusions(tuple(adjust(verdicts)), tuple(anchors), tuple(ladders))


def _depths(plan: CampaignPlan) -> dict[str, int]:
    """Draft depth of the arms that draft."""
    return {
        name: arm.config.speculation.depth
        for session in plan.sessions
        for name, arm in session.arms.items()
        if arm.config.speculation is not None and arm.config.speculation.depth > 0
    }


def _shortened(session: SessionPlan, stopped: Mapping[tuple[str, str], Stop]) -> SessionPlan:
    """The session without what early stops left out."""
    groups = tuple(
        stopped[session.name, g.name].cut(g) if (session.name, g.name) in stopped else g
        for g in session.groups
    )
    return replace(session, groups=groups)


def _always_valid(about: _Session, comparison: Comparison, group: GroupPlan, found: Verdict) -> Verdict:
    """The verdict of a group that a look ended: the primary metric carries the interval that allowed the look."""
    stop = about.stopped[group.name]
    at = f"{stop.rounds}+{stop.quads}q" if stop.quads else str(stop.rounds)
    reasons = tuple(sorted({*found.reasons, f"stopped_early:{at}"}))
    if not found.primary or found.verdict == "invalid":
        return replace(found, reasons=reasons)
    members = sum(c.group == group.name for c in about.plan.comparisons)

    def seen_at(level: float) -> Look:
        return take(
            about.rows.get(group.name, ()), group, comparison, stop.rounds, quads_more=stop.quads, level=level,
            declared=about.declared, prior=about.prior,
        )  # fmt: skip

    def said_of(seen: Look) -> tuple[bool, bool, VerdictWord]:
        lo, hi = seen.lo or 0.0, seen.hi or 0.0
        differs, equivalent = lo > 0 or hi < 0, -limit < lo and hi < limit
        way = direction(found.metric, seen.mean or 0.0)
        return differs, equivalent, word(found.kind, way, differs=differs, equivalent=equivalent)

    limit = math.log1p(found.margin)
    seen, strict = seen_at(about.level), seen_at(share(about.level, members))
    if seen.lo is None or seen.hi is None or seen.mean is None:
        # The interval of a fixed n does not hold where the data chose n, and nothing else is known here.
        return replace(
            found, lo=None, hi=None, lo90=None, hi90=None, df=None, margin_smallest=None, differs=None, equivalent=None,
            verdict="unresolved", p=None, p_tost=None, said_adjusted="unresolved",
            reasons=tuple(sorted({*reasons, "look_not_repeatable"})),
        )  # fmt: skip
    differs, equivalent, said = said_of(seen)
    return replace(
        found,
        ratio=ratio(seen.mean),
        lo=ratio(seen.lo),
        hi=ratio(seen.hi),
        lo90=ratio(seen.lo),
        hi90=ratio(seen.hi),
        differs=differs,
        equivalent=equivalent,
        verdict=said,
        p=None,
        p_tost=None,
        reasons=reasons,
        # No p-value holds at every look: the family's share of the error rate takes the place of Holm.
        said_adjusted="unresolved" if strict.lo is None else said_of(strict)[2],
    )


def _position(group: GroupPlan) -> str:
    return group.name.removeprefix("anchor.")


def _anchor_rows(about: _Session) -> dict[str, Sequence[RequestRow]]:
    planned = [g for g in about.plan.groups if g.kind == "anchor"]
    return {_position(g): about.rows[g.name] for g in planned if about.rows.get(g.name)}


def _tests(about: _Session) -> int:
    planned = sum(g.kind == "anchor" for g in about.plan.groups)
    return max(1, planned - (about.anchor.reference == "establish"))


def _anchors(about: _Session) -> list[AnchorResult]:
    """Each anchor with all anchors of the session behind its boot variance."""
    rows = _anchor_rows(about)
    planned = [g for g in about.plan.groups if g.kind == "anchor"]
    return [
        judge(
            _position(group),
            rows,
            session=about.plan.name,
            anchor=about.anchor,
            declared_boot_sd=about.declared.get("step_ms"),
            prior_boot_sd=about.prior_step(),
            planned=len(planned),
            past=about.past,
        )
        for group in planned
        if _position(group) in rows or not about.partial
    ]


def _moves(about: _Session) -> dict[str, bool | None]:
    """Group -> whether the node moved between the anchors that bracket it (None: not excluded)."""
    rows = _anchor_rows(about)
    groups = about.plan.groups
    found: dict[str, bool | None] = {}
    cache: dict[tuple[str, str], bool | None] = {}
    for i, group in enumerate(groups):
        if group.kind == "anchor":
            continue
        before = next((_position(g) for g in reversed(groups[:i]) if g.kind == "anchor"), None)
        after = next((_position(g) for g in groups[i:] if g.kind == "anchor"), None)
        if before is None or after is None or before not in rows or after not in rows:
            found[group.name] = None
            continue
        if (before, after) not in cache:
            cache[before, after] = moved(
                rows[before],
                rows[after],
                rows,
                delta=about.anchor.drift_delta,
                tests=_tests(about),
                declared_boot_sd=about.declared.get("step_ms"),
                prior_boot_sd=about.prior_step(),
            )
        found[group.name] = cache[before, after]
    return found


def _verdict(
    about: _Session, comparison: Comparison, metric: Metric, moves: Mapping[str, bool | None]
) -> Verdict:
    group = next(g for g in about.plan.groups if g.name == comparison.group)
    sound = check(about.rows.get(group.name, ()), group, comparison, metric, about.tolerance)
    boots = about.boots(metric)
    mine = boots.get(group.name, [])
    session_pool = pool_for(boots, about.designs, group.name, (comparison.a, comparison.b))
    stats = compare(
        [b for b in mine if b.arm == comparison.a],
        [b for b in mine if b.arm == comparison.b],
        boot=boot_sd(metric, session_pool, declared=about.declared.get(metric), prior=about.prior),
        resident=session_pool.resident,
        waves=comparison.concurrency > 1,
        serial=group.load is not None,
        level=about.level,
    )
    fatal, notes = set(sound.fatal), set(sound.notes)
    if metric == "accept_len" and "counters_of_cell" in notes:
        # One value of a whole cell: the other arm's spread alone would make the interval too narrow.
        said_why = tuple(dict.fromkeys((*stats.reasons, "no_spread")))
        stats = replace(stats, boots_only=None, full=None, overturn_sd=None, supposed=(), reasons=said_why)
    unfinished = about.partial and not sound.complete
    skipped = not group.rounds
    if skipped:
        fatal, notes = set(), {"stopped_by_forecast"}
    elif unfinished:
        notes.add("partial")
        fatal.discard("missing_slots")
        notes.discard("missing_slots")
    elif stats.n < (MIN_WAVES if comparison.concurrency > 1 else MIN_BLOCKS):
        fatal.add("too_few_blocks")
    if not unfinished and not skipped:
        proven, open_ = _drift(about, group.name, moves)
        fatal, notes = fatal | proven, notes | open_
    notes.update(f"gate_overridden:{gate}" for gate in about.overridden)
    said = verdict(
        stats,
        Context(
            comparison=comparison,
            session=about.plan.name,
            design=group.design,
            metric=metric,
            level=about.level,
            fatal=tuple(sorted(fatal)),
            notes=tuple(sorted(notes)),
            usd=about.usd.get((about.plan.name, group.name)),
        ),
    )
    looked = group.name in about.stopped and not skipped
    return _always_valid(about, comparison, group, said) if looked else said


def _drift(about: _Session, group: str, moves: Mapping[str, bool | None]) -> tuple[set[str], set[str]]:
    """(fatal, notes) of the anchors that bracket a group."""
    moved_ = moves.get(group)
    if moved_:
        overridden = DRIFT_GATE in about.overridden
        return (set(), {"drift"}) if overridden else ({"drift"}, set())
    unproven = moved_ is None and any(g.kind == "anchor" for g in about.plan.groups)
    return set(), {"drift_unproven"} if unproven else set()


def _ladders(about: _Session) -> list[Speculation]:
    """One for each ladder that has rows, its stages together."""
    stages: dict[str, list[GroupPlan]] = defaultdict(list)
    for group in about.plan.groups:
        if group.ladder is not None and about.rows.get(group.name):
            stages[group.ladder].append(group)
    return [_ladder(about, name, groups) for name, groups in stages.items()]


def _ladder(about: _Session, ladder: str, groups: Sequence[GroupPlan]) -> Speculation:
    arms = []
    group = groups[0]
    for name in dict.fromkeys(a for g in groups for a in g.arms):
        config = about.plan.arms[name].config.speculation
        arms.append(LadderArm(name, config.depth if config is not None and config.depth > 0 else None))
    pair = (group.arms[0], group.arms[-1])
    # The ladder asks for one value for all its arms, so no arm is held against the rest.
    pool = replace(pool_for(about.boots("step_ms"), about.designs, group.name, pair), own=None, rest=())
    boot = boot_sd("step_ms", pool, declared=about.declared.get("step_ms"), prior=about.prior)
    return speculation(
        [r for g in groups for r in about.rows[g.name]],
        session=about.plan.name,
        ladder=ladder,
        arms=arms,
        boot=boot,
        level=about.level,
    )
