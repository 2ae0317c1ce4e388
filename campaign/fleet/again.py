"""What is left of a session whose node is gone, as a session of its own.

A comparison is made within one node. So the blocks that were completed stay where they are, and what is left
starts anew on the next node: between anchors of its own.
"""

from dataclasses import dataclass, replace

from campaign.ledger.events import NewEvent
from campaign.ledger.model import RunState
from campaign.money import MicroUsd
from campaign.plan.model import CampaignPlan, SessionPlan


def continued(plan: SessionPlan, state: RunState, name: str) -> SessionPlan | None:
    """The rest of `plan` under a new name, or None where only anchors are left.

    Groups keep their names and rounds their ids; every anchor is measured again. The lease asked for is as long as
    before: what is left may be the slow part.
    """
    done = set(state.done(plan.name))
    groups = []
    for group in plan.groups:
        rounds = (
            group.rounds if group.kind == "anchor" else tuple(r for r in group.rounds if r.id not in done)
        )
        if rounds:
            share = len(rounds) / len(group.rounds)
            groups.append(
                replace(
                    group,
                    rounds=rounds,
                    seconds=group.seconds * share,
                    usd_expected=MicroUsd(int(group.usd_expected * share)),
                )
            )
    if all(group.kind == "anchor" for group in groups):
        return None
    left = {group.name for group in groups}
    rounds_left = [r for g in groups for r in g.rounds]
    return replace(
        plan,
        name=name,
        groups=tuple(groups),
        comparisons=tuple(c for c in plan.comparisons if c.group in left),
        boots=sum(len(r.boots) for r in rounds_left),
        requests=sum(len(r.warmup) + len(r.sequence) for r in rounds_left),
    )


@dataclass(frozen=True, slots=True)
class Rest:
    """What is left of a plan whose nodes are gone."""

    plan: CampaignPlan
    """With the sessions that were added."""
    sessions: tuple[SessionPlan, ...]
    """Those to run."""
    added: tuple[NewEvent, ...]
    """`sessions_added`, one for each continuation."""


def rest_of(plan: CampaignPlan, state: RunState, stays: frozenset[str]) -> Rest:
    """Sessions to run after a controller died.

    A session on a node of `stays` (names of nodes that are still the same machine) goes on under its own name; one
    that was begun on a rented node goes on as a continuation. Sessions that were continued already are left out.
    """
    latest: dict[str, SessionPlan] = {}
    for session in plan.sessions:
        if not session.exploratory:  # added on a node that was held: it went with its node
            latest[root_of(session.name)] = session
    sessions, added, events = [], [], []
    for root, session in latest.items():
        done = set(state.done(session.name))
        if {r.id for g in session.groups for r in g.rounds} <= done:
            continue
        begun = any(lease.session == session.name for lease in state.leases.values())
        if not begun or session.node in stays:
            sessions.append(session)
            continue
        rest = continued(session, state, next_name(root, state))
        if rest is not None:
            sessions.append(rest)
            added.append(rest)
            reason = f"the node of {session.name} is gone"
            events.append(
                NewEvent(
                    "sessions_added", {"sessions": [rest.name], "reason": reason, "continues": session.name}
                )
            )
    return Rest(replace(plan, sessions=(*plan.sessions, *added)), tuple(sessions), tuple(events))


def root_of(name: str) -> str:
    """The planned session that a continuation belongs to."""
    return name.split(".draw", 1)[0]


def next_name(root: str, state: RunState) -> str:
    """A name for the next continuation of a planned session that the ledger has never named.

    A name that came twice would number rounds anew, and one commit would take the place of another.
    """
    named = {*state.sessions, *(le.session or "" for le in state.leases.values()), root}
    return f"{root}.draw{1 + max(draw_of(name) for name in named if root_of(name) == root)}"


def draw_of(name: str) -> int:
    """Which node of its planned session this is: 1, 2, ..."""
    _, mark, number = name.partition(".draw")
    return int(number) if mark and number.isdigit() else 1
