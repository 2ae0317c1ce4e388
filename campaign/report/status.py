"""What a run is doing now: its leases, what they may still cost, and how each is stopped."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from campaign.budget import machine
from campaign.clock import iso
from campaign.ledger.events import Event
from campaign.ledger.state import Lease, RunState
from campaign.money import usd
from campaign.report import facts, words
from campaign.report.model import RunStatus


@dataclass(frozen=True, slots=True)
class LeaseStatus:
    """One lease that may still bill."""

    lease: str
    session: str
    node: str
    provider: str
    node_id: str | None
    state: Literal["launching", "open", "going down", "unreachable"]
    deadline_utc_ns: int | None
    accrued_usd: float | None
    worst_usd: float | None
    """What it may come to: to its deadline, dead-man granularity and teardown included."""
    stop: str
    """The command that ends it."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What a session's agent last said."""

    session: str
    state: str
    phase: str | None
    cell: str
    done: int
    total: int
    last_seen_utc_ns: int | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Status:
    """One run, now."""

    run: str
    campaign: str
    status: RunStatus
    why: str
    now_utc_ns: int
    controller: Mapping[str, Any] | None
    """Who holds the lock: pid, host, started, command."""
    cap_usd: float | None
    spent_usd: float | None
    committed_usd: float | None
    leases: tuple[LeaseStatus, ...]
    sessions: tuple[SessionStatus, ...]
    next: str
    """What to type next; empty where nothing is to be done."""


def build(
    run: str,
    events: Sequence[Event],
    state: RunState,
    controller: Mapping[str, Any] | None,
    *,
    now_utc_ns: int | None = None,
) -> Status:
    """Status from a ledger and the holder of its lock; without a time, as of now (simulated: its last event)."""
    if now_utc_ns is None and not (state.created or {}).get("simulated"):
        now_utc_ns = time.time_ns()
    now = max(now_utc_ns or 0, state.latest_utc_ns)
    status, why = facts.status(events, state, alive=controller is not None)
    leases = tuple(_lease(run, x, now, alive=controller is not None) for x in state.open_leases)
    following = ""
    if status == "running":
        following = f"campaign stop {run}"
    elif status != "finished" or leases:
        following = f"campaign resume {run}"
    return Status(
        run=run,
        campaign=str((state.created or {}).get("campaign", "?")),
        status=status,
        why=why,
        now_utc_ns=now,
        controller=controller,
        cap_usd=_usd(state.cap_usd),
        spent_usd=_usd(machine.spent(state, now)),
        committed_usd=_usd(machine.committed(state, now)),
        leases=leases,
        sessions=tuple(
            SessionStatus(
                session=s.name,
                state=s.state,
                phase=_phase(state, s.lease),
                cell=facts.plain(s.cell),
                done=s.done,
                total=s.total,
                last_seen_utc_ns=s.last_seen_utc_ns,
                reason=facts.plain(s.reason) if s.reason else None,
            )
            for s in state.sessions.values()
        ),
        next=following,
    )


def _lease(run: str, x: Lease, now: int, *, alive: bool) -> LeaseStatus:
    stop = f"campaign stop {run}" if alive else f"campaign resume {run}"
    if x.unreachable_since_utc_ns is not None:
        stop = facts.plain(x.check_by_hand or stop)
        what: Literal["launching", "open", "going down", "unreachable"] = "unreachable"
    elif x.down_asked_at_utc_ns is not None:
        what = "going down"
    else:
        what = "open" if x.opened else "launching"
    return LeaseStatus(
        lease=x.id,
        session=x.session or "?",
        node=x.node,
        provider=x.provider,
        node_id=None if x.node_id is None else facts.plain(x.node_id),
        state=what,
        deadline_utc_ns=x.deadline_utc_ns,
        accrued_usd=_usd(machine.accrued(x, now)),
        worst_usd=_usd(machine.at_risk(x, now)),
        stop=stop,
    )


def _phase(state: RunState, lease: str | None) -> str | None:
    known = state.leases.get(lease or "")
    return known.marks[-1].phase if known is not None and known.marks and not known.settled else None


def _usd(amount: int | None) -> float | None:
    return None if amount is None else usd(amount)


def status_json(s: Status) -> dict[str, Any]:
    """The shape of `campaign status --json`."""
    return {
        "run": s.run,
        "campaign": s.campaign,
        "status": s.status,
        "why": s.why,
        "now": iso(s.now_utc_ns),
        "controller": None if s.controller is None else dict(s.controller),
        "cap_usd": s.cap_usd,
        "spent_usd": s.spent_usd,
        "committed_usd": s.committed_usd,
        "leases": [
            {
                "lease": x.lease,
                "session": x.session,
                "node": x.node,
                "provider": x.provider,
                "node_id": x.node_id,
                "state": x.state,
                "deadline": None if x.deadline_utc_ns is None else iso(x.deadline_utc_ns),
                "accrued_usd": x.accrued_usd,
                "worst_usd": x.worst_usd,
                "stop": x.stop,
            }
            for x in s.leases
        ],
        "sessions": [
            {
                "session": x.session,
                "state": x.state,
                "phase": x.phase,
                "cell": x.cell,
                "done": x.done,
                "total": x.total,
                "last_seen": None if x.last_seen_utc_ns is None else iso(x.last_seen_utc_ns),
                "reason": x.reason,
            }
            for x in s.sessions
        ],
        "next": s.next,
    }


def render(s: Status, console: Console) -> None:
    """Print the status."""
    head = Text(s.campaign, style="bold").append(f"  {s.run}  ", style="dim")
    head.append(s.status, style={"running": "green", "finished": "green"}.get(s.status, "bold yellow"))
    if s.why:
        head.append(f": {s.why}")
    console.print(head)
    if s.controller is not None:
        who = s.controller
        console.print(
            f"held by pid {who.get('pid')} on {who.get('host')} since {who.get('started')}", markup=False
        )
    else:
        console.print("no controller is alive")
    worst = "unknown" if s.committed_usd is None else words.dollars(s.committed_usd)
    console.print(f"spent {words.dollars(s.spent_usd)}, worst case {worst}, cap {words.dollars(s.cap_usd)}")
    _sessions(s, console)
    for x in s.leases:
        until = "no deadline yet"
        if x.deadline_utc_ns is not None:
            left = (x.deadline_utc_ns - s.now_utc_ns) / 1e9
            when = f"in {words.duration(left)}" if left >= 0 else f"{words.duration(-left)} ago"
            until = f"deadline {iso(x.deadline_utc_ns)[:19]}Z ({when})"
        style = "bold red" if x.state == "unreachable" else ""
        where = f" {x.node_id}" if x.node_id else ""
        line = Text("lease ").append(x.lease, style="bold").append(f" on {x.node} ({x.provider}{where}): ")
        line.append(x.state, style=style).append(f", {until}")
        console.print(line, soft_wrap=True)
        console.print(
            Text(
                f"  accrued {words.dollars(x.accrued_usd)}, may come to {words.dollars(x.worst_usd)}; ends with: "
            ).append(x.stop, style="bold"),
            soft_wrap=True,
        )
    if not s.leases:
        console.print("nothing bills")
    if s.next:
        verb = "stop it with" if s.status == "running" else "go on with"
        console.print(Text(f"{verb}: ").append(s.next, style="bold"), soft_wrap=True)


def _sessions(s: Status, console: Console) -> None:
    if not s.sessions:
        return
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("session", overflow="fold")
    table.add_column("state", no_wrap=True)
    table.add_column("phase", no_wrap=True)
    table.add_column("requests", justify="right", no_wrap=True)
    table.add_column("heard", justify="right", no_wrap=True)
    table.add_column("cell", overflow="fold")
    for x in s.sessions:
        heard = (
            "–"
            if x.last_seen_utc_ns is None
            else f"{words.duration((s.now_utc_ns - x.last_seen_utc_ns) / 1e9)} ago"
        )
        done = f"{x.done}/{x.total}" if x.total else "–"
        table.add_row(x.session, x.state, x.phase or "–", done, heard, x.cell)
    console.print(table)
