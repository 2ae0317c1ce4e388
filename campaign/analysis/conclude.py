"""Rows and a plan in, everything a report says out. Deterministic: the same rows give the same values."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from campaign.analysis.drift import Past, judge, moved
from campaign.analysis.estimate import ratio
from campaign.analysis.looks import take
from campaign.analysis.model import AnchorResult, Speculation, Verdict
from campaign.analysis.pairs import boot_sd, compare, pool_for
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
    stopped: Mapping[str, int]
    _boots: dict[Metric, dict[str, list[Boot]]] = field(default_factory=dict)

    @property
    def designs(self) -> dict[str, str]:
        return {g.name: g.design for g in self.plan.groups}

    def boots(self, metric: Metric) -> dict[str, list[Boot]]:
        """Boots of every group, anchors among them."""
        if metric not in self._boots:
            self._boots[metric] = {g: boots_of(rows, metric) for g, rows in sorted(self.rows.items())}
        return self._boots[metric]

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
    stopped: Mapping[tuple[str, str], int] | None = None,
) -> Conclusions:
    """Judge every comparison, anchor and ladder of a run.

    rows: of committed rounds, void ones among them where they can be had: they count as lost either way, and
    say why. Superseded ones are ignored.
    usd_by_group: (session, group) -> dollars. partial: the run is not over, so a group that is not whole is
    `unresolved` with the reason `partial`, and anchors still to come are left out. overridden: session ->
    gates that were overridden, printed beside every verdict of the session; an override of the drift gate
    keeps proven drift from making a pair invalid. prior: components from earlier rows of the store. past:
    earlier anchors, for `reference: store`. tolerance: share of planned blocks that may be lost. stopped: (session,
    group) -> rounds run, of pairs that a look ended early: judged on those rounds, with the interval that holds
    at every look.
    """
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
        ladders += [
            _ladder(about, g) for g in session.groups if g.kind == "ladder" and about.rows.get(g.name)
        ]
        moves = _moves(about)
        verdicts += [_verdict(about, c, m, moves) for c in session.comparisons for m in METRICS]
    return Conclusions(tuple(adjust(verdicts)), tuple(anchors), tuple(ladders))


def _shortened(session: SessionPlan, stopped: Mapping[tuple[str, str], int]) -> SessionPlan:
    """The session without the rounds that an early stop left out."""
    groups = tuple(
        replace(g, rounds=g.rounds[: stopped.get((session.name, g.name), len(g.rounds))])
        for g in session.groups
    )
    return replace(session, groups=groups)


def _always_valid(about: _Session, comparison: Comparison, group: GroupPlan, found: Verdict) -> Verdict:
    """The verdict of a pair that a look ended: the primary metric carries the interval that allowed the look."""
    reasons = tuple(sorted({*found.reasons, f"stopped_early:{about.stopped[group.name]}"}))
    if not found.primary or found.verdict == "invalid":
        return replace(found, reasons=reasons)
    rows = about.rows.get(group.name, ())
    seen = take(
        rows,
        group,
        comparison,
        about.stopped[group.name],
        level=about.level,
        declared=about.declared,
        prior=None,
    )
    if seen.lo is None or seen.hi is None or seen.mean is None:
        return replace(found, reasons=reasons)
    limit = math.log1p(found.margin)
    differs = seen.lo > 0 or seen.hi < 0
    equivalent = -limit < seen.lo and seen.hi < limit
    said = word(found.kind, direction(found.metric, seen.mean), differs=differs, equivalent=equivalent)
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
    unfinished = about.partial and not sound.complete
    if unfinished:
        notes.add("partial")
        fatal.discard("missing_slots")
        notes.discard("missing_slots")
    elif stats.n < (MIN_WAVES if comparison.concurrency > 1 else MIN_BLOCKS):
        fatal.add("too_few_blocks")
    if not unfinished:
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
    return _always_valid(about, comparison, group, said) if group.name in about.stopped else said


def _drift(about: _Session, group: str, moves: Mapping[str, bool | None]) -> tuple[set[str], set[str]]:
    """(fatal, notes) of the anchors that bracket a group."""
    moved_ = moves.get(group)
    if moved_:
        overridden = DRIFT_GATE in about.overridden
        return (set(), {"drift"}) if overridden else ({"drift"}, set())
    unproven = moved_ is None and any(g.kind == "anchor" for g in about.plan.groups)
    return set(), {"drift_unproven"} if unproven else set()


def _ladder(about: _Session, group: GroupPlan) -> Speculation:
    arms = []
    for name in group.arms:
        config = about.plan.arms[name].config.speculation
        arms.append(LadderArm(name, config.depth if config is not None and config.depth > 0 else None))
    pair = (group.arms[0], group.arms[-1])
    # The ladder asks for one value for all its arms, so no arm is held against the rest.
    pool = replace(pool_for(about.boots("step_ms"), about.designs, group.name, pair), own=None, rest=())
    boot = boot_sd("step_ms", pool, declared=about.declared.get("step_ms"), prior=about.prior)
    return speculation(
        about.rows[group.name],
        session=about.plan.name,
        ladder=group.name.removeprefix("ladder."),
        arms=arms,
        boot=boot,
        level=about.level,
    )
