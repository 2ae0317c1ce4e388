"""A run folder in, a report out: conclusions from the rows, everything else from ledger and plan.

Works at any moment of a run. Nothing is taken from an earlier report: every number re-derives.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from campaign.analysis.conclude import Conclusions, conclude
from campaign.analysis.drift import Past
from campaign.analysis.looks import Stop
from campaign.analysis.model import Verdict
from campaign.budget.spend import spend, spend_json
from campaign.fleet import past
from campaign.ledger.lock import holder
from campaign.ledger.state import RunState
from campaign.money import usd
from campaign.plan.model import CampaignPlan
from campaign.report import facts, queries
from campaign.report.further import further
from campaign.report.instrument import instrument
from campaign.report.model import Report, Source, verdict_key
from campaign.store.row import RequestRow
from campaign.store.run import Run

_MONEY = ("lease_intent", "lease_opened", "lease_extended", "lease_settled", "phase_started")


def assemble(run: Run, *, now_utc_ns: int | None = None) -> Report:
    """Everything a report shows of `run`, as of its last event (of a run that goes on: as of now).

    Raises LedgerError where the ledger does not verify, and StoreError where rows cannot be read.
    """
    events, state, plan, spec = run.events(), run.state(), run.plan(), run.spec()
    alive = holder(run.dir.lock) is not None
    status, why = facts.status(events, state, alive=alive)
    now = _now(state, running=status == "running", given=now_utc_ns)
    rows = run.requests(valid_only=False).rows()
    valid = run.requests().rows()
    money = spend(state, now, answered=facts.answered(plan, state))
    created = state.created or {}
    cpu = all(r.gpu_set == "cpu" for r in rows)
    simulated = bool(created.get("simulated")) or any(r.simulated for r in rows)
    before = [] if simulated or created.get("imported") else _past_rows(run, state, cpu=cpu)
    known = past.prior_of(before, cpu=cpu, arm_hashes=past.hashes(plan))
    usd_by_group = {key: usd(amount) for key, amount in money.groups.items()}
    found = conclude(
        # Void rows too: why they are void decides what becomes of a comparison.
        run.committed().rows(),
        plan,
        declared_boot_sd=spec.statistics.boot_sd,
        confidence=spec.statistics.confidence,
        usd_by_group=usd_by_group,
        partial=status != "finished",
        anchor=spec.anchor,
        overridden={s.name: _overridden(state, s.name) for s in plan.sessions},
        prior=known,
        past=_past_anchors(before, valid),
        stopped={key: Stop.of(e) for key, e in state.stopped_early.items()},
        cells=facts.cell_counters(events),
    )
    found = replace(found, verdicts=_labelled(found.verdicts, plan))
    head = events[-1]
    return Report(
        run=run.dir.name,
        campaign=plan.campaign,
        simulated=simulated,
        partial=status != "finished",
        status=status,
        why_ended=why,
        started_utc_ns=state.created_at_utc_ns or events[0].utc_ns,
        ended_utc_ns=None if status == "running" else head.utc_ns,
        as_of_utc_ns=now,
        path=run.dir.name,
        head_hash=head.hash,
        ledger_length=head.seq,
        canonical_sha256=str(created.get("canonical_sha256", "")),
        versions={"campaign": facts.plain(created.get("version", "?")), **_versions(run, state)},
        nodes=facts.nodes(state, rows),
        boots=facts.boots(state),
        anchors=found.anchors,
        anchor_times=facts.anchor_times(state),
        drift_delta=spec.anchor.drift_delta,
        verdicts=found.verdicts,
        speculation=found.speculation,
        ladders=facts.ladders(spec, plan),
        spend=spend_json(money),
        spend_points=facts.spend_points(money),
        risk_points=facts.risk_points(events),
        plan_actual=facts.plan_actual(plan, state, money, rows, valid),
        gates=facts.gates(events),
        warnings=facts.warnings(state, events),
        plan_warnings=tuple(facts.plain(w) for w in plan.warnings),
        labels=facts.labels(plan),
        further=further(
            valid,
            plan,
            found.verdicts,
            run=run.dir.name,
            usd_by_group=usd_by_group,
            declared=spec.statistics.boot_sd,
            prior=known,
            stopped=state.stopped_early,
            forecasts=state.forecasts,
            billed_s={s.session: s.hours * 3600 for s in money.sessions if s.hours},
            sent=rows,
        ),
        instrument=instrument(run.dir, ((x.session or "?", x.id) for x in state.leases.values()), events),
        prior_runs=tuple(sorted({r.run for r in before})) if known is not None else (),
        sources=_sources(
            found, plan, valid, {t: sum(e.type == t for e in events) for t in (*_MONEY, "boot_ready")}
        ),
    )


def _labelled(verdicts: Sequence[Verdict], plan: CampaignPlan) -> tuple[Verdict, ...]:
    """What was added while the run went on was not registered before it, and says so."""
    added = {s.name for s in plan.sessions if s.exploratory}
    return tuple(
        replace(v, reasons=tuple(sorted({*v.reasons, "exploratory"}))) if v.session in added else v
        for v in verdicts
    )


def _past_rows(run: Run, state: RunState, *, cpu: bool) -> list[RequestRow]:
    """Rows of earlier runs beside this one."""
    return past.earlier(run.dir.root.parent, before_utc_ns=state.created_at_utc_ns, cpu=cpu)


def _past_anchors(before: list[RequestRow], valid: list[RequestRow]) -> Past | None:
    """The reference set of this run's anchor arm on its kind of node."""
    first = next((r for r in valid if r.group == "anchor.first"), None)
    return None if first is None else past.past_anchors(before, first.arm_hash, first.gpu_set)


def _now(state: RunState, *, running: bool, given: int | None) -> int:
    if given is not None:
        return max(given, state.latest_utc_ns)
    # The clock of a simulated run is not this machine's.
    simulated = bool((state.created or {}).get("simulated"))
    if simulated or not (running or state.open_leases):
        return state.latest_utc_ns
    # An open lease bills on, whether or not a controller is alive.
    import time

    return max(time.time_ns(), state.latest_utc_ns)


def _overridden(state: RunState, session: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o.gate for o in state.overridden if o.session in {None, session}))


def _versions(run: Run, state: RunState) -> dict[str, str]:
    """Package versions read from the live servers; several of one package are all named."""
    found: dict[str, set[str]] = {}
    seen: set[str | None] = set()
    root = run.dir.root.resolve()
    for boot in state.boots.values():
        if boot.arm_hash in seen or not isinstance(boot.provenance, Mapping):
            continue
        path = (root / str(boot.provenance.get("path", ""))).resolve()
        if not path.is_relative_to(root):
            continue
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        seen.add(boot.arm_hash)
        versions = data.get("versions") if isinstance(data, dict) else None
        for name, version in (versions or {}).items():
            found.setdefault(facts.plain(name), set()).add(facts.plain(version))
    return {name: ", ".join(sorted(versions)) for name, versions in sorted(found.items())}


def _sources(
    found: Conclusions, plan: CampaignPlan, valid: list[RequestRow], counts: Mapping[str, int]
) -> dict[str, Source]:
    groups = {(s.name, c.pair): c.group for s in plan.sessions for c in s.comparisons}
    sources = {verdict_key(v): queries.verdict(v, groups[v.session, v.pair]) for v in found.verdicts}
    sources |= {f"anchor/{a.session}/{a.position}": queries.anchor(a) for a in found.anchors}
    for s in found.speculation:
        inputs = sum(
            r.session == s.session
            and r.group.partition("@")[0] == f"ladder.{s.ladder}"
            and r.phase == "measure"
            and r.state == "ok"
            for r in valid
        )
        sources[f"speculation/{s.session}/{s.ladder}"] = queries.speculation(s, inputs)
    sources["requests"] = queries.requests(len(facts.measured(valid)))
    sources["boots"] = queries.events(("boot_ready",), counts["boot_ready"])
    sources["spend"] = queries.events(_MONEY, sum(counts[t] for t in _MONEY))
    return sources
