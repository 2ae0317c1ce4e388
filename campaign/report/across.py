"""Runs in, comparisons across their sessions out; never mixed with the verdicts of pairs."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from pathlib import Path

from campaign.analysis.across import Across, SessionSd, Side, compare_across, match, session_sd
from campaign.errors import CampaignError, UserError
from campaign.plan.model import CampaignPlan, SessionPlan
from campaign.plan.power import METRICS
from campaign.report import words
from campaign.store.layout import RunDir
from campaign.store.row import RequestRow
from campaign.store.run import Run


def _sides(run: str, session: SessionPlan, rows: Sequence[RequestRow]) -> list[Side]:
    mine: dict[str, list[RequestRow]] = {}
    for r in rows:
        if r.session == session.name and r.phase == "measure" and r.validity == "valid":
            mine.setdefault(r.arm, []).append(r)
    # The second side of an A/A is the same arm again; the first stands for both.
    return [
        Side(run, session.name, arm, tuple(mine[name]))
        for name, arm in session.arms.items()
        if name in mine and "#" not in name
    ]


def _between(
    left: Sequence[Side],
    right: Sequence[Side],
    sds: Mapping[str, SessionSd],
    *,
    series: bool,
    given: Mapping[str, str],
    margin: float,
) -> Iterator[Across]:
    a, b = {s.arm.name: s for s in left}, {s.arm.name: s for s in right}
    for x, y, how in match([s.arm for s in left], [s.arm for s in right], series=series, given=given):
        one, two = a[x.name], b[y.name]
        shared = {(r.workload, r.concurrency) for r in one.rows} & {
            (r.workload, r.concurrency) for r in two.rows
        }
        for workload, concurrency in sorted(shared):
            yield from compare_across(
                one, two, how, workload=workload, concurrency=concurrency, margin=margin,
                sds={m: sds[m] for m in METRICS},
            )  # fmt: skip


def _sds(rows: Sequence[RequestRow], declared: float | None) -> dict[str, SessionSd]:
    found: dict[str, SessionSd] = {m: session_sd(rows, m) for m in METRICS}
    if declared is not None:
        found["step_ms"] = SessionSd(declared, 1e6, "declared")
    return found


def across_runs(
    a: Run,
    b: Run,
    *,
    session_a: str | None,
    session_b: str | None,
    given: Mapping[str, str],
    margin: float,
    declared: float | None,
    further: Sequence[RequestRow] = (),
) -> list[Across]:
    """Arms of two runs against each other. Raises UserError where nothing matches or a name is unknown."""
    rows_a = a.requests().rows()
    rows_b = rows_a if a.dir.root == b.dir.root else b.requests().rows()
    left, right = _chosen(a, session_a), _chosen(b, session_b)
    everything = [*rows_a, *(() if rows_b is rows_a else rows_b), *further]
    sds = _sds(everything, declared)
    series_a, series_b = a.spec().series, b.spec().series
    found: list[Across] = []
    for x in left:
        for y in right:
            if a.dir.root == b.dir.root and x.name == y.name:
                continue
            if a.dir.root == b.dir.root and session_a is None and session_b is None and x.name > y.name:
                continue
            found += _between(
                _sides(a.name, x, rows_a), _sides(b.name, y, rows_b), sds,
                series=series_a is not None and series_a == series_b, given=given, margin=margin,
            )  # fmt: skip
    if not found:
        names = [", ".join(n for s in side for n in s.arms) for side in (left, right)]
        raise UserError(
            f"no arm of {a.name} ({names[0]}) matches one of {b.name} ({names[1]}) on a workload both measured. "
            "Fix: --arm NAME_IN_A=NAME_IN_B"
        )
    return found


def _chosen(run: Run, name: str | None) -> list[SessionPlan]:
    sessions = run.plan().sessions
    found = [s for s in sessions if name is None or s.name == name]
    if not found:
        raise UserError(
            f"{run.name} has no session {name}. Fix: one of {', '.join(s.name for s in sessions)}"
        )
    return found


def inside(plan: CampaignPlan, run: str, rows: Sequence[RequestRow], margin: float = 0.02) -> list[Across]:
    """Comparisons between the sessions of one run: what no pair of it may be."""
    if len(plan.sessions) < 2:
        return []
    sds = _sds(rows, None)
    sides = {s.name: _sides(run, s, rows) for s in plan.sessions}
    return [
        x
        for a, b in combinations([s.name for s in plan.sessions], 2)
        for x in _between(sides[a], sides[b], sds, series=False, given={}, margin=margin)
    ]


def store_rows(folder: Path, skip: set[Path]) -> Iterator[RequestRow]:
    """Valid rows of every readable run under a store folder; a run that cannot be read is left out."""
    for ledger in sorted(folder.glob("*/ledger.db")):
        root = ledger.parent.resolve()
        if root in skip:
            continue
        try:
            rows = Run(RunDir(root)).requests().rows()
        except CampaignError:
            continue
        yield from (r for r in rows if not r.simulated)


def sentence(x: Across) -> str:
    """One comparison across sessions in plain words."""
    fields = ", ".join(f"{k} {v[0]} -> {v[1]}" for k, v in x.changed.items()) or "the same configuration"
    lo, hi, of = x.lo90, x.hi90, "at 90 %, session variance inside"
    if lo is None:
        lo, hi, of = x.lo90_these_sessions, x.hi90_these_sessions, "at 90 %, these sessions only"
    span = f" {words.interval(lo, hi)} {of}" if lo is not None else ""
    small = (
        "" if x.margin_smallest is None else f"; equivalent from a margin of {x.margin_smallest * 100:.2g} %"
    )
    return (
        f"{x.b.session}/{x.b.arm.name} against {x.a.session}/{x.a.arm.name} ({fields}; {x.workload}): "
        f"{words.METRIC[x.metric]} {words.signed(x.ratio, lo, hi)} %{span} - {x.verdict}{small} "
        f"({words.reasons(x.reasons)})"
    )
