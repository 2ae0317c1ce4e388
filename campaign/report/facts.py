"""What a run's ledger, plan and rows say, in the shapes a report shows. Reads nothing but its arguments."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from campaign.budget.machine import committed
from campaign.budget.spend import Interval, Spend
from campaign.ledger.events import Event
from campaign.ledger.state import RunState, apply
from campaign.money import usd
from campaign.plan.model import CampaignPlan
from campaign.report.model import (
    AnchorTime,
    BootFact,
    GateFact,
    LadderRung,
    NodeFact,
    PlanActual,
    RunStatus,
    SpendPoint,
)
from campaign.spec.models import Spec
from campaign.store.row import RequestRow

_POINTS = 120


def plain(text: object) -> str:
    """Text from outside without control characters: no escape sequence reaches a terminal."""
    return "".join(
        " " if c in "\n\t" else c for c in str(text) if c in "\n\t" or unicodedata.category(c) != "Cc"
    )


def measured(rows: Iterable[RequestRow]) -> list[RequestRow]:
    """Rows of anchors and comparisons; warm-up and probes left out."""
    return [r for r in rows if r.phase in {"measure", "anchor"}]


def status(events: Sequence[Event], state: RunState, *, alive: bool) -> tuple[RunStatus, str]:
    """(status, why): from the ledger, and from whether a controller holds the run now."""
    if state.finished is not None:
        return "finished", plain(state.finished.get("reason") or "")
    if alive:
        return "running", ""
    for event in reversed(events):
        if event.type == "controller_started":
            break
        if event.type == "controller_stopped":
            code, why = event.payload["exit_code"], plain(event.payload["reason"] or "")
            ended: Mapping[int, RunStatus] = {0: "finished", 1: "finished", 3: "stopped", 130: "interrupted"}
            return ended.get(code, "failed"), why
    return "interrupted", "its controller is gone"


def nodes(state: RunState, rows: Iterable[RequestRow]) -> tuple[NodeFact, ...]:
    """One for each lease, in order of intent."""
    places: dict[str, set[str]] = {}
    for row in rows:
        places.setdefault(row.lease, set()).add(f"{row.half} ({row.gpu_set})")
    return tuple(
        NodeFact(
            session=lease.session or "?",
            lease=lease.id,
            node=lease.node,
            provider=lease.provider,
            node_id=None if lease.node_id is None else plain(lease.node_id),
            usd_per_hour=None if lease.usd_per_hour is None else usd(lease.usd_per_hour),
            price_source=lease.price_source,
            places=tuple(sorted(places.get(lease.id, ()))),
            state="settled" if lease.settled else "open" if lease.opened else "intended",
            opened_utc_ns=lease.opened_at_utc_ns,
            closed_utc_ns=lease.until_utc_ns,
        )
        for lease in state.leases.values()
    )


def boots(state: RunState) -> tuple[BootFact, ...]:
    """Every start of an engine, in order."""
    return tuple(
        BootFact(
            boot_id=b.id,
            session=b.session or "?",
            arm=b.arm or "?",
            place=b.place or "?",
            ready_s=None if b.boot_ns is None else b.boot_ns / 1e9,
            state=b.state,
            error=None if b.error is None else plain(f"{b.kind}: {b.error}"),
        )
        for b in state.boots.values()
    )


def gates(events: Sequence[Event]) -> tuple[GateFact, ...]:
    """Trips and overrides, in order. A trip that the agent and the controller both wrote down is one."""
    found: dict[object, GateFact] = {}
    for e in events:
        p = e.payload
        if e.type == "gate_tripped":
            said = (plain(p["value"]), plain(p["limit"]), plain(p["detail"]))
            fact = GateFact(e.utc_ns, e.session, plain(p["gate"]), "tripped", *said, e.source)
            found.setdefault((e.session, p["gate"], *said), fact)
        elif e.type == "gate_overridden":
            values = ("", "", plain(p["reason"]), plain(p["by"]))
            found[e.seq] = GateFact(e.utc_ns, e.session, plain(p["gate"]), "overridden", *values)
    return tuple(found.values())


def cell_counters(events: Sequence[Event]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """(session, cell) -> what its committed round says of its server's counters and of the node meanwhile."""
    return {
        (e.session or "?", cell["cell"]): cell
        for e in events
        if e.type == "round_committed"
        for cell in e.payload["cells"]
    }


def anchor_times(state: RunState) -> tuple[AnchorTime, ...]:
    """When each anchor was judged; the last time counts."""
    found = {(a.session or "?", a.position): a.utc_ns for a in state.anchors}
    return tuple(AnchorTime(session, position, at) for (session, position), at in found.items())


def ladders(spec: Spec, plan: CampaignPlan) -> dict[str, tuple[LadderRung, ...]]:
    """By ladder: the base, then its rungs."""
    found: dict[str, tuple[LadderRung, ...]] = {}
    for session in plan.sessions:
        for group in session.groups:
            name = group.ladder
            if name is None or name not in spec.ladders or name in found:
                continue
            # A ladder in stages has its rungs in several groups, in order.
            stages = [g for g in session.groups if g.ladder == name]
            base, *rungs = dict.fromkeys(arm for g in stages for arm in g.arms)
            values = spec.ladders[name].values
            found[name] = (
                LadderRung(name, base, None),
                *(LadderRung(name, arm, _numeric(v)) for arm, v in zip(rungs, values, strict=False)),
            )
    return found


def _numeric(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def labels(plan: CampaignPlan) -> dict[str, str]:
    """What a varied arm (`PAIR.b`) differs in, where its name does not say it."""
    found: dict[str, str] = {}
    for session in plan.sessions:
        for c in session.comparisons:
            if c.b == f"{c.pair.partition('@')[0]}.b" and c.a in session.arms and c.b in session.arms:
                a, b = (_flat(session.arms[name].config.model_dump(mode="json")) for name in (c.a, c.b))
                changed = [
                    f"{key.removesuffix('.')} {'none' if b.get(key) is None else b[key]}"
                    for key in dict.fromkeys((*a, *b))
                    if a.get(key) != b.get(key) and key.split(".")[0] != "estimate"
                ]
                found[c.b] = plain(", ".join(changed)) or c.b
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            out |= _flat(item, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = item
    return out


def spend_points(money: Spend) -> tuple[SpendPoint, ...]:
    """The running total over the billed intervals of all leases, thinned to what a plot can show."""
    if not money.intervals:
        return ()
    moments = sorted({t for i in money.intervals for t in (i.start_utc_ns, i.end_utc_ns)})
    if len(moments) > _POINTS:
        kept = range(0, len(moments), -(-len(moments) // _POINTS))
        moments = [*(moments[i] for i in kept), moments[-1]]
    return tuple(
        SpendPoint(t, usd(sum(_until(i, t) for i in money.intervals))) for t in dict.fromkeys(moments)
    )


def risk_points(events: Sequence[Event]) -> tuple[SpendPoint, ...]:
    """What was committed after each event that changed it; where it is unknown there is no point."""
    state, points = RunState(), []
    for event in events:
        state = apply(state, event)
        if event.type in _RISKS:
            risk = committed(state, event.utc_ns)
            if risk is not None:
                points.append(SpendPoint(event.utc_ns, usd(risk)))
    return tuple(points)


_RISKS = frozenset({"lease_intent", "lease_opened", "lease_extended", "lease_settled", "tokens_billed"})


def _until(interval: Interval, at_utc_ns: int) -> int:
    """Micro-dollars of an interval up to a moment inside or outside it."""
    length = interval.end_utc_ns - interval.start_utc_ns
    passed = min(max(at_utc_ns - interval.start_utc_ns, 0), length)
    return interval.usd * passed // length if length else interval.usd


def answered(plan: CampaignPlan, state: RunState) -> int:
    """Comparisons whose rounds are all committed."""
    done = {s.name: frozenset(state.done(s.name)) for s in plan.sessions}
    return sum(
        all(r.id in done[s.name] for g in s.groups if g.name == c.group for r in g.rounds)
        for s in plan.sessions
        for c in s.comparisons
    )


def plan_actual(
    plan: CampaignPlan, state: RunState, money: Spend, rows: Sequence[RequestRow], valid: Sequence[RequestRow]
) -> tuple[PlanActual, ...]:
    """One for each planned session. rows: all of them; valid: those analysis uses."""
    sent = Counter(r.session for r in measured(rows))
    kept = Counter(r.session for r in measured(valid))
    spent = {s.session: s for s in money.sessions}
    found = []
    for s in plan.sessions:
        own = spent.get(s.name)
        found.append(
            PlanActual(
                session=s.name,
                minutes_planned=s.seconds / 60,
                minutes=None if own is None else own.hours * 60,
                boots_planned=s.boots,
                boots=sum(1 for b in state.boots.values() if b.session == s.name and b.boot_ns is not None),
                requests_planned=sum(len(r.sequence) for g in s.groups for r in g.rounds),
                requests=kept[s.name],
                requests_void=sent[s.name] - kept[s.name],
                possibly_spent=sum(r.possibly_spent for r in state.rounds.values() if r.session == s.name),
                usd_expected=usd(s.usd_expected),
                usd=None if own is None else usd(own.settled_usd + own.accrued_usd),
            )
        )
    return tuple(found)


_SHOWN = 5


def warnings(state: RunState, events: Sequence[Event] = ()) -> tuple[str, ...]:
    """What a careful reader should know: refusals, nodes not proven gone, rounds voided or done again."""
    said = [
        f"Session {r.get('session')} was refused a lease on {r.get('node')}: {plain(r.get('why'))}."
        for r in state.refused
    ]
    for lease in state.open_leases:
        if lease.unreachable_since_utc_ns is not None:
            by_hand = plain(lease.check_by_hand)
            said.append(
                f"Lease {lease.id} may still bill: {plain(lease.unreachable_why)}. Check by hand: {by_hand}"
            )
    ended = Counter(state.attempt_states.values())
    why = {
        (e.session, e.payload["round_id"], e.payload["attempt"]): plain(e.payload["reason"])
        for e in events
        if e.type == "round_voided"
    }
    voided = [key for key, ended_ in state.attempt_states.items() if ended_ == "voided"]
    for session, id_, attempt in voided[:_SHOWN]:
        reason = why.get((session, id_, attempt)) or plain(state.rounds[session, id_].reason)
        said.append(
            f"Round {id_} of {session}, attempt {attempt}, was voided: {reason or 'no reason given'}."
        )
    if len(voided) > _SHOWN:
        said.append(f"{len(voided) - _SHOWN} further round(s) were voided.")
    if ended["superseded"]:
        said.append(
            f"{ended['superseded']} interrupted round(s) were done again; their rows are kept as superseded."
        )
    return tuple(said)
