"""The plan as JSON and as text."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from campaign.money import usd
from campaign.plan.model import CampaignPlan, GroupPlan, Power, SessionPlan
from campaign.plan.text import dollars, span

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def plan_json(plan: CampaignPlan) -> dict[str, Any]:
    """The contract of `campaign plan --json`."""
    return {
        "campaign": plan.campaign,
        "cap_usd": usd(plan.cap_usd),
        "usd_expected": usd(sum(s.usd_expected for s in plan.sessions)),
        "usd_worst": usd(sum(s.usd_worst for s in plan.sessions)),
        "minutes": round(sum(s.seconds for s in plan.sessions) / 60, 2),
        "admitted": list(plan.admitted),
        "sessions": [
            {
                "name": s.name,
                "node": s.node,
                "boots": s.boots,
                "requests": s.requests,
                "minutes": round(s.seconds / 60, 2),
                "usd_expected": usd(s.usd_expected),
                "usd_worst": usd(s.usd_worst),
                "usd_per_hour": usd(s.usd_per_hour),
                "price_source": s.price_source,
                "lease_minutes": round(s.worst_seconds / 60, 2),
                "groups": [
                    {
                        "name": g.name,
                        "design": g.design,
                        "why": g.why,
                        "arms": list(g.arms),
                        "concurrency": g.concurrency,
                        "boots": boots(g),
                        "requests": requests(g),
                        "minutes": round(g.seconds / 60, 2),
                        "usd_expected": usd(g.usd_expected),
                    }
                    for g in s.groups
                ],
            }
            for s in plan.sessions
        ],
        "cheapest": [
            {
                "pair": c.pair,
                "metric": c.metric,
                "difference_pct": c.difference_pct,
                "design": c.design,
                "boots": c.boots,
                "n": c.n,
                "minutes": c.minutes,
                "usd": usd(c.usd),
                "usd_planned": usd(c.usd_planned),
            }
            for c in plan.cheapest
        ],
        "power": [
            {
                "pair": p.pair,
                "metric": p.metric,
                "n": p.n,
                "boots": p.boots,
                "resolvable_pct": p.resolvable_pct,
                "rule_pct": p.rule_pct,
                "source": p.source,
            }
            for p in plan.power
        ],
        "warnings": list(plan.warnings),
        "assumptions": list(plan.assumptions),
        "cut": list(plan.cut),
    }


def boots(group: GroupPlan) -> int:
    """Engines started by a group."""
    return sum(len(r.boots) for r in group.rounds)


def requests(group: GroupPlan) -> int:
    """Requests sent by a group, warm-up included."""
    return sum(len(r.warmup) + len(r.sequence) for r in group.rounds)


def default_lines(defaults: Mapping[str, Any]) -> list[str]:
    """Defaults by dotted path (`Loaded.defaults()`), one line for each entry: `pairs.kv: boots 2, margin 0.02`."""
    entries: dict[str, list[str]] = {}
    for path, value in defaults.items():
        entry, _, name = path.rpartition(".")
        entries.setdefault(entry or "file", []).append(f"{name} {_shown(value)}")
    return [f"{entry}: {', '.join(fields)}" for entry, fields in entries.items()]


def _shown(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def summary(plan: CampaignPlan, console: "Console") -> None:
    """The plan in a few lines, for `run`: sessions, groups, money, warnings."""
    from rich.text import Text

    _title(plan, console)
    for s in plan.sessions:
        console.print(
            f"  session {s.name} on {s.node}: {s.boots} boots, {s.requests} requests, about {span(s.seconds)}"
        )
        for group in s.groups:
            if group.kind != "anchor":
                line = f"    {group.name}: {', '.join(group.arms)}; {group.design}, {boots(group)} boots, {span(group.seconds)}"
                console.print(Text(line, style="dim"))
    _section(console, "warnings", plan.warnings, "yellow")
    console.print(_outlook(plan))
    _section(console, "to make a session fit", plan.cut, "red")


def _title(plan: CampaignPlan, console: "Console") -> None:
    from rich.text import Text

    console.print(
        Text.assemble(("plan of ", "dim"), (plan.campaign, "bold"), ("  cap ", "dim"), dollars(plan.cap_usd))
    )


def render(plan: CampaignPlan, defaults: Mapping[str, Any], console: "Console") -> None:
    """Print the plan for a person; `defaults` are what the file left out (`Loaded.defaults()`)."""
    from rich.text import Text

    _title(plan, console)
    _section(console, "defaults in force", default_lines(defaults), "dim")
    _section(console, "times and dollars assume", plan.assumptions, "dim")
    for session in plan.sessions:
        console.print()
        console.print(_session_line(plan, session))
        console.print(_groups(session, many=len(plan.sessions) > 1, narrow=console.width < 76))
        for group in session.groups:
            if group.kind != "anchor":
                why = Text.assemble((f"  {group.name} ", "bold"), (f"{group.design}: ", "cyan"), group.why)
                console.print(why)
    console.print()
    if plan.power:
        console.print(_power(plan))
        console.print()
    if plan.cheapest:
        console.print(_cheapest(plan, narrow=console.width < 76))
        console.print()
    _section(console, "warnings", plan.warnings, "yellow")
    console.print(_outlook(plan))
    _section(console, "to make a session fit", plan.cut, "red")


def _section(console: "Console", title: str, lines: Iterable[str], style: str) -> None:
    from rich.padding import Padding
    from rich.text import Text

    lines = list(lines)
    if lines:
        console.print(Text(title, style=f"bold {style}"))
        for line in lines:
            console.print(Padding(Text(line, style=style), (0, 0, 0, 2), expand=False))


def _table(title: str, *columns: str) -> "Table":
    """Columns whose title starts with `>` are right-aligned numbers: they never wrap or lose digits."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title, style="bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            # Names fold last: `anchor.between1` stays whole where there is any room.
            min_width=15 if column in {"group", "comparison"} else None,
        )
    return table


def _session_line(plan: CampaignPlan, s: SessionPlan) -> str:
    state = "admitted" if s.name in plan.admitted else "waits" if s.usd_worst <= plan.cap_usd else "too dear"
    return (
        f"session {s.name} on {s.node} at {dollars(s.usd_per_hour)}/h ({s.price_source}): {s.boots} boots, "
        f"{s.requests} requests, {span(s.seconds)} in a lease of {span(s.worst_seconds)}; "
        f"{dollars(s.usd_expected)} expected, {dollars(s.usd_worst)} at worst: {state}"
    )


def _groups(session: SessionPlan, *, many: bool, narrow: bool) -> "Table":
    title = f"groups of session {session.name}" if many else "groups, in running order"
    counts = () if narrow else (">boots", ">requests")
    table = _table(title, "group", "arms", *counts, ">time", ">$")
    for g in session.groups:
        counted = () if narrow else (str(boots(g)), str(requests(g)))
        table.add_row(g.name, ", ".join(g.arms), *counted, span(g.seconds), dollars(g.usd_expected))
    rest = session.usd_expected - sum(g.usd_expected for g in session.groups)
    table.add_row("setup, teardown", *("" for _ in table.columns[2:]), dollars(rest), style="dim")
    return table


def _power(plan: CampaignPlan) -> "Table":
    """One row a comparison: what each metric resolves, against the margin."""
    metrics = list(dict.fromkeys(p.metric for p in plan.power))
    sources = {p.source for p in plan.power}
    origin = {
        "prior": "from earlier rows",
        "default": "from stated defaults (boot variance unknown)",
        "declared": "with the boot sd that the file declares",
    }
    title = "smallest difference found with 80 % power, " + " and ".join(origin[s] for s in sorted(sources))
    table = _table(title, "comparison", ">n", ">boots", ">margin", *(f">{m}" for m in metrics))
    rows: dict[str, dict[str, Power]] = {}
    for p in plan.power:
        rows.setdefault(p.pair, {})[p.metric] = p
    for pair, found in rows.items():
        first = next(iter(found.values()))
        cells = [f"{found[m].resolvable_pct:.1f} %" if m in found else "" for m in metrics]
        style = "yellow" if first.resolvable_pct > first.rule_pct else ""
        table.add_row(pair, str(first.n), str(first.boots), f"{first.rule_pct:g} %", *cells, style=style)
    return table


def _cheapest(plan: CampaignPlan, *, narrow: bool) -> "Table":
    """One row a comparison: the least money that resolves its margin, beside what the file plans."""
    title = "cheapest design that resolves the margin"
    table = _table(
        title, "comparison", "wanted", "design", ">$", *(() if narrow else (">planned $", ">time"))
    )
    for c in plan.cheapest:
        wanted, design = f"{c.metric} {c.difference_pct:g} %", f"{c.design}, {c.boots} boots of {c.n}"
        more = () if narrow else (dollars(c.usd_planned), span(60 * c.minutes))
        table.add_row(c.pair, wanted, design, dollars(c.usd), *more)
    without = sorted({p.pair for p in plan.power} - {c.pair for c in plan.cheapest})
    if without:
        table.caption = f"no design resolves the margin of {', '.join(without)}"
        table.caption_justify = "left"
    return table


def _outlook(plan: CampaignPlan) -> str:
    admitted = [s for s in plan.sessions if s.name in plan.admitted]
    worst, expected = sum(s.usd_worst for s in admitted), sum(s.usd_expected for s in admitted)
    if not admitted:
        return f"no session fits under the cap of {dollars(plan.cap_usd)}"
    return (
        f"admitted: {', '.join(plan.admitted)}; worst case {dollars(worst)} of {dollars(plan.cap_usd)}, "
        f"leaving {dollars(plan.cap_usd - worst)}; expected {dollars(expected)}, "
        f"leaving {dollars(plan.cap_usd - expected)}"
    )
