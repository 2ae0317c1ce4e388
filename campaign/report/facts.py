"""What a run's ledger, plan and rows say, in the shapes a report shows. Reads nothing but its arguments."""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from campaign.budget.machine import cost
from campaign.ledger.events import Event
from campaign.ledger.state import Lease, RunState
from campaign.money import bill, usd
from campaign.plan.model import CampaignPlan, SessionPlan
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

_POINTS = 80


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
    """Trips and overrides, in order."""
    found = []
    for e in events:
        p = e.payload
        if e.type == "gate_tripped":
            values = (plain(p["value"]), plain(p["limit"]), plain(p["detail"]), e.source)
            found.append(GateFact(e.utc_ns, e.session, plain(p["gate"]), "tripped", *values))
        elif e.type == "gate_overridden":
            values = ("", "", plain(p["reason"]), plain(p["by"]))
            found.append(GateFact(e.utc_ns, e.session, plain(p["gate"]), "overridden", *values))
    return tuple(found)


def anchor_times(state: RunState) -> tuple[AnchorTime, ...]:
    """When each anchor was judged; the last time counts."""
    found = {(a.session or "?", a.position): a.utc_ns for a in state.anchors}
    return tuple(AnchorTime(session, position, at) for (session, position), at in found.items())


def ladders(spec: Spec, plan: CampaignPlan) -> dict[str, tuple[LadderRung, ...]]:
    """By ladder: the base, then its rungs."""
    found: dict[str, tuple[LadderRung, ...]] = {}
    for session in plan.sessions:
        for group in session.groups:
            name = group.name.removeprefix("ladder.")
            if group.kind != "ladder" or name not in spec.ladders:
                continue
            base, *rungs = group.arms
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


def spent_usd(leases: Iterable[Lease], at_utc_ns: int) -> float | None:
    """Dollars settled or accrued at a moment; None where a price is unreadable."""
    total = 0
    for lease in leases:
        if lease.billing_from_utc_ns > at_utc_ns:
            continue
        over = lease.settled and (lease.until_utc_ns or 0) <= at_utc_ns
        amount = lease.settled_usd if over else cost(_unsettled(lease), at_utc_ns)
        if amount is None:
            return None
        total += amount
    return usd(total)


def _unsettled(lease: Lease) -> Lease:
    from dataclasses import replace

    return replace(lease, settled=False, settled_usd=None, until_utc_ns=None)


def usd_by_group(state: RunState, now_utc_ns: int) -> dict[tuple[str, str], float]:
    """(session, group) -> dollars of the time marked with the group, its boots and warm-up included.

    A mark lasts until the lease's next mark or its end. What nothing is marked with (setup, teardown) is
    nobody's.
    """
    found: dict[tuple[str, str], int] = {}
    for lease in state.leases.values():
        if lease.usd_per_hour is None or lease.session is None:
            continue
        end = lease.until_utc_ns if lease.until_utc_ns is not None else now_utc_ns
        for mark, following in zip(lease.marks, [*(m.at_utc_ns for m in lease.marks[1:]), end], strict=True):
            if mark.group is not None:
                key = (lease.session, mark.group)
                found[key] = found.get(key, 0) + bill(lease.usd_per_hour, following - mark.at_utc_ns)
    return {key: usd(amount) for key, amount in found.items()}


def spend_points(state: RunState, until_utc_ns: int) -> tuple[SpendPoint, ...]:
    """Money over time: evenly spaced moments, and every mark where a lease begins or ends."""
    leases = list(state.leases.values())
    if not leases:
        return ()
    start = min(x.billing_from_utc_ns for x in leases)
    step = max(1, (until_utc_ns - start) // _POINTS)
    moments = {start, until_utc_ns, *range(start, until_utc_ns, step)}
    moments |= {x.until_utc_ns for x in leases if x.until_utc_ns is not None}
    points = ((t, spent_usd(leases, t)) for t in sorted(moments))
    return tuple(SpendPoint(t, amount) for t, amount in points if amount is not None)


def plan_actual(
    plan: CampaignPlan,
    state: RunState,
    rows: Sequence[RequestRow],
    valid: Sequence[RequestRow],
    now_utc_ns: int,
) -> tuple[PlanActual, ...]:
    """One for each planned session. rows: all of them; valid: those analysis uses."""
    sent = Counter(r.session for r in measured(rows))
    kept = Counter(r.session for r in measured(valid))
    return tuple(_session(s, state, sent[s.name], kept[s.name], now_utc_ns) for s in plan.sessions)


def _session(s: SessionPlan, state: RunState, sent: int, kept: int, now_utc_ns: int) -> PlanActual:
    leases = [x for x in state.leases.values() if x.session == s.name]
    lasted = sum((x.until_utc_ns or now_utc_ns) - x.billing_from_utc_ns for x in leases)
    return PlanActual(
        session=s.name,
        minutes_planned=s.seconds / 60,
        minutes=lasted / 60e9 if leases else None,
        boots_planned=s.boots,
        boots=sum(1 for b in state.boots.values() if b.session == s.name and b.boot_ns is not None),
        requests_planned=sum(len(r.sequence) for g in s.groups for r in g.rounds),
        requests=kept,
        requests_void=sent - kept,
        possibly_spent=sum(r.possibly_spent for r in state.rounds.values() if r.session == s.name),
        usd_expected=usd(s.usd_expected),
        usd=spent_usd(leases, now_utc_ns) if leases else None,
    )


def warnings(plan: CampaignPlan, state: RunState) -> tuple[str, ...]:
    """What a careful reader should know: the plan's own warnings, refusals, nodes not proven gone, voids."""
    said = [
        *(plain(w) for w in plan.warnings),
        *(
            f"Session {r.get('session')} was refused a lease on {r.get('node')}: {plain(r.get('why'))}."
            for r in state.refused
        ),
    ]
    for lease in state.open_leases:
        if lease.unreachable_since_utc_ns is not None:
            by_hand = plain(lease.check_by_hand)
            said.append(
                f"Lease {lease.id} may still bill: {plain(lease.unreachable_why)}. Check by hand: {by_hand}"
            )
    ended = Counter(state.attempt_states.values())
    if ended["voided"]:
        last = next((plain(r.reason) for r in state.rounds.values() if r.state == "voided" and r.reason), "")
        said.append(f"{ended['voided']} round(s) were voided{': ' + last if last else ''}.")
    if ended["superseded"]:
        said.append(
            f"{ended['superseded']} interrupted round(s) were done again; their rows are kept as superseded."
        )
    return tuple(said)
