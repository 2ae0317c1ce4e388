"""The report as JSON: the contract of `campaign report --json` and of `report.json` (docs/CONTRACTS.md).

Dollars carry `_usd` or `usd_`, percent `_pct`, shares are 0 to 1, times ISO 8601 UTC; unknown is null with
its codes in `reasons`. A non-finite number is our bug and raises ValueError; it is never written.
"""

import json
from typing import Any

from campaign.analysis.model import AnchorResult, Speculation, Verdict
from campaign.clock import iso
from campaign.report.model import GateFact, Report, verdict_key
from campaign.report.words import headlines


def dumps(report: Report) -> str:
    """`report_json` as text."""
    return json.dumps(report_json(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def report_json(report: Report) -> dict[str, Any]:
    """The contract's keys first, then what it may gain."""
    return {
        "run": report.run,
        "campaign": report.campaign,
        "simulated": report.simulated,
        "anchors": [_anchor(a) for a in report.anchors],
        "verdicts": [verdict_json(v, verdict_key(v)) for v in report.verdicts],
        "speculation": {
            "ladders": [_speculation(s) for s in report.speculation],
            "decomposition": report.further.decomposition,
        },
        "spend": dict(report.spend),
        "partial": report.partial,
        "status": report.status,
        "why_ended": report.why_ended,
        "started": iso(report.started_utc_ns),
        "ended": None if report.ended_utc_ns is None else iso(report.ended_utc_ns),
        "as_of": iso(report.as_of_utc_ns),
        "ledger": {"head_sha256": report.head_hash, "events": report.ledger_length},
        "canonical_sha256": report.canonical_sha256,
        "versions": dict(report.versions),
        "headlines": [
            {"title": h.title, "kind": h.kind, "text": h.text, "verdicts": list(h.words)}
            for h in headlines(report)
        ],
        "nodes": [
            {
                "session": n.session,
                "lease": n.lease,
                "node": n.node,
                "provider": n.provider,
                "node_id": n.node_id,
                "usd_per_hour": n.usd_per_hour,
                "price_source": n.price_source,
                "places": list(n.places),
                "state": n.state,
                "opened": _time(n.opened_utc_ns),
                "closed": _time(n.closed_utc_ns),
            }
            for n in report.nodes
        ],
        "boots": [
            {
                "boot_id": b.boot_id,
                "session": b.session,
                "arm": b.arm,
                "place": b.place,
                "ready_s": b.ready_s,
                "state": b.state,
                "error": b.error,
            }
            for b in report.boots
        ],
        "plan_actual": [
            {
                "session": p.session,
                "minutes_planned": p.minutes_planned,
                "minutes": p.minutes,
                "boots_planned": p.boots_planned,
                "boots": p.boots,
                "requests_planned": p.requests_planned,
                "requests": p.requests,
                "requests_void": p.requests_void,
                "possibly_spent": p.possibly_spent,
                "usd_expected": p.usd_expected,
                "usd": p.usd,
            }
            for p in report.plan_actual
        ],
        "gates": [_gate(g) for g in report.gates if g.what == "tripped"],
        "overrides": [_gate(g) for g in report.overrides],
        "warnings": [*report.warnings, *report.plan_warnings],
        "across": report.further.across,
        "champions": report.further.champions,
        "replicates": report.further.replicates,
        "composites": report.further.composites,
        "over_sessions": report.further.sessions,
        "aa_offsets": report.further.aa_offsets,
        "stopped_early": report.further.looks,
        "forecasts": report.further.forecasts,
        "economics": report.further.economics,
        "frontiers": report.further.frontiers,
        "instrument": dict(report.instrument),
        "energy": report.further.energy,
        "gpu_idle": report.further.gpu_idle,
        "prior_runs": list(report.prior_runs),
        "sources": {
            k: {"query": s.query, "language": s.language, "n": s.n, "unit": s.unit}
            for k, s in report.sources.items()
        },
    }


def verdict_json(v: Verdict, source: str | None = None) -> dict[str, Any]:
    """One verdict, the shape of docs/CONTRACTS.md; `source` is its key in `sources`."""
    return {
        "pair": v.pair,
        "kind": v.kind,
        "family": v.family,
        "session": v.session,
        "workload": v.workload,
        "concurrency": v.concurrency,
        "a": v.a,
        "b": v.b,
        "metric": v.metric,
        "primary": v.primary,
        "ratio": v.ratio,
        "lo": v.lo,
        "hi": v.hi,
        "ci_level": v.ci_level,
        "lo_boots_only": v.lo_boots_only,
        "hi_boots_only": v.hi_boots_only,
        "lo90": v.lo90,
        "hi90": v.hi90,
        "n": v.n,
        "boots": v.boots,
        "df": v.df,
        "boot_sd": v.boot_sd,
        "boot_sd_source": v.boot_sd_source,
        "differs": v.differs,
        "equivalent": v.equivalent,
        "margin": v.margin,
        "verdict": v.verdict,
        "verdict_adjusted": v.verdict_adjusted,
        "reasons": list(v.reasons),
        "usd": v.usd,
        "design": v.design,
        "p": v.p,
        "p_tost": v.p_tost,
        "p_adjusted": v.p_adjusted,
        "ratio_median": v.ratio_median,
        "boot_sd_overturn": v.boot_sd_overturn,
        "supposed_boot_sd": [
            {"boot_sd": sd, "lo": lo, "hi": hi, "differs": differs} for sd, lo, hi, differs in v.supposed
        ],
        "margin_smallest": v.margin_smallest,
        "lo_bootstrap": v.lo_bootstrap,
        "hi_bootstrap": v.hi_bootstrap,
        "bootstrap": None
        if v.lo_bootstrap is None
        else "BCa"
        if v.bootstrap_claims
        else "BCa, n below 16: no claim",
        "blocks": [{"block": block, "log_ratio": value} for block, value in v.blocks],
        "source": source,
    }


def _anchor(a: AnchorResult) -> dict[str, Any]:
    return {
        "session": a.session,
        "position": a.position,
        "step_ms": a.step_ms,
        "drift_pct": _pct(a.drift),
        "ok": a.ok,
        "reference_ms": a.reference_ms,
        "lo_pct": _pct(a.lo),
        "hi_pct": _pct(a.hi),
        "n": a.n,
        "boots": a.boots,
        "reasons": list(a.reasons),
        "source": f"anchor/{a.session}/{a.position}",
    }


def _speculation(s: Speculation) -> dict[str, Any]:
    return {
        "session": s.session,
        "ladder": s.ladder,
        "t1_ms": s.t1_ms,
        "verify_slope_ms": s.verify_slope_ms,
        "slope_lo": s.slope_lo,
        "slope_hi": s.slope_hi,
        "reasons": list(s.reasons),
        "source": f"speculation/{s.session}/{s.ladder}",
        "widths": [
            {
                "arm": w.arm,
                "depth": w.depth,
                "verified_tokens": w.verified_tokens,
                "verify_ms": w.verify_ms,
                "lo": w.lo,
                "hi": w.hi,
                "accept_len": w.accept_len,
                "accept_rate": w.accept_rate,
                "accept_pos": None if w.accept_pos is None else list(w.accept_pos),
                "break_even_accept_len": w.break_even_accept_len,
                "reasons": list(w.reasons),
            }
            for w in s.widths
        ],
    }


def _gate(g: GateFact) -> dict[str, Any]:
    shape: dict[str, Any] = {"at": iso(g.utc_ns), "session": g.session, "gate": g.gate}
    if g.what == "overridden":
        return shape | {"reason": g.text, "by": g.by}
    return shape | {"value": g.value, "limit": g.limit, "detail": g.text}


def _pct(relative: float | None) -> float | None:
    return None if relative is None else relative * 100


def _time(utc_ns: int | None) -> str | None:
    return None if utc_ns is None else iso(utc_ns)
