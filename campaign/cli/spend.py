"""`campaign spend`: where the dollars went, by phase; during a run too."""

import csv
import json
import sys
from io import StringIO
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.console import Console

    from campaign.budget.spend import Spend
    from campaign.ledger.state import RunState
    from campaign.store.layout import RunDir

_BAR = 28
_MEANS = {
    "provision": "waiting for the node",
    "setup": "making the node ready",
    "load": "starting servers, loading weights",
    "warmup": "warm-up requests",
    "anchor": "checking the machine for drift",
    "measure": "requests that verdicts rest on",
    "idle": "between rounds",
    "teardown": "ending the node",
    "lost": "work that does not count",
}
_COLOURS = {"measure": "green", "anchor": "cyan", "lost": "red"}


@click.command(short_help="Where the dollars went.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="The contract of docs/CONTRACTS.md.")
@click.option("--csv", "as_csv", is_flag=True, help="One line per session and phase.")
@click.option("--all", "every", is_flag=True, help="One line for every run of the store, and their sum.")
@click.option("--provider", "beside", is_flag=True, help="What SkyPilot's cost report says beside it.")
def command(run: str | None, *, as_json: bool, as_csv: bool, every: bool, beside: bool) -> None:
    """Show what RUN (a name, a folder; the newest if left out) has spent, by phase and by session.

    Works while the run goes on: what open leases have accrued is counted up to now, and marked.
    """
    from campaign.budget.spend import spend, spend_json
    from campaign.clock import SystemClock
    from campaign.ledger.journal import read_events
    from campaign.ledger.state import fold
    from campaign.store.layout import find_run

    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other. Fix: give one of them")
    if every:
        from campaign.cli._spend_all import show_all

        show_all(as_json=as_json, as_csv=as_csv)
        return
    run_dir = find_run(run)
    state = fold(read_events(run_dir.ledger))
    found = spend(state, SystemClock().utc_ns(), answered=_answered(run_dir, state))
    tokens = _output_tokens(run_dir)
    if as_json:
        document = {**spend_json(found), **_per_token(found, tokens)}
        if beside:
            from campaign.cli._spend_all import provider_json

            document["provider"] = provider_json(state)
        click.echo(json.dumps(document, indent=2))
    elif as_csv:
        click.echo(_csv(found), nl=False)
    else:
        from rich.console import Console

        _show(found, run_dir.name, Console(file=sys.stdout))
        each = _per_token(found, tokens)["usd_per_mtok_out"]
        if each is not None:
            click.echo(f"${each:.2f} per million output tokens ({tokens:,} in rows that count)")
        if beside:
            from campaign.cli._spend_all import show_provider

            show_provider(state)


def _answered(run_dir: "RunDir", state: "RunState") -> int | None:
    """Comparisons whose rounds are all committed; None where the plan cannot be read."""
    from campaign.plan.codec import load

    try:
        plan = load(run_dir.plan.read_bytes())
    except (OSError, ValueError):
        return None
    whole = {
        (session.name, group.name)
        for session in plan.sessions
        for group in session.groups
        if {r.id for r in group.rounds} <= set(state.done(session.name))
    }
    return sum((s.name, c.group) in whole for s in plan.sessions for c in s.comparisons)


def _output_tokens(run_dir: "RunDir") -> int | None:
    """Completion tokens of measured requests that count; None where the rows cannot be read."""
    from campaign.errors import CampaignError
    from campaign.store.run import Run

    try:
        rows = Run(run_dir).requests().rows()
    except CampaignError:
        return None
    return sum(r.completion_tokens or 0 for r in rows if r.phase == "measure")


def _per_token(found: "Spend", tokens: int | None) -> dict[str, float | int | None]:
    """All dollars of the run over the output tokens of measured requests; unknown where there are none."""
    each = found.total_usd / tokens if tokens else None
    return {"output_tokens": tokens, "usd_per_mtok_out": None if each is None else round(each, 6)}


def _csv(found: "Spend") -> str:
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["session", "phase", "usd"])
    for session in found.sessions:
        for phase, amount in session.phases.items():
            writer.writerow([session.session, phase, f"{amount / 1_000_000:.6f}"])
    return out.getvalue()


def _show(found: "Spend", run: str, console: "Console") -> None:
    from rich.table import Table
    from rich.text import Text

    total = found.total_usd
    console.print(f"[bold]Where the dollars went[/]  {run}")
    if not found.sessions:
        console.print("Nothing has been spent: no lease was taken.")
        return
    table = Table(box=None, pad_edge=False, show_footer=len(found.sessions) > 0, footer_style="bold")
    table.add_column("phase", footer="total")
    table.add_column("", no_wrap=True)
    table.add_column("share", justify="right", footer="100 %" if total else "")
    table.add_column("dollars", justify="right", footer=_dollars(total))
    table.add_column("time", justify="right", footer=_clock(sum(found.seconds.values())))
    table.add_column("", style="dim")
    basis = float(total) or sum(found.seconds.values())
    for phase, amount in found.phases.items():
        seconds = found.seconds[phase]
        if not amount and not seconds:
            continue
        share = (amount if total else seconds) / basis if basis else 0.0
        colour = _COLOURS.get(phase, "blue")
        table.add_row(
            phase,
            Text(_bar(share), style=colour),
            f"{share * 100:.1f} %",
            _dollars(amount),
            _clock(seconds),
            _MEANS[phase],
        )
    console.print(table)
    if len(found.sessions) > 1:
        console.print(_session_table(found))
    for line in _lines(found):
        console.print(line, highlight=False)


def _session_table(found: "Spend") -> object:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, side in (("session", "left"), ("dollars", "right"), ("measured", "right"), ("hours", "right")):
        table.add_column(name, justify="right" if side == "right" else "left")
    for s in found.sessions:
        share = "unknown" if s.measured_share is None else f"{s.measured_share * 100:.0f} %"
        table.add_row(s.session, _dollars(s.settled_usd + s.accrued_usd), share, f"{s.hours:.2f}")
    return table


def _lines(found: "Spend") -> list[str]:
    from rich.markup import escape

    from campaign.clock import iso

    cap = "unknown" if found.cap_usd is None else _dollars(found.cap_usd)
    lines = [f"{_dollars(found.settled_usd)} settled of a cap of {cap}"]
    if not found.final:
        risk = "unknown" if found.committed_usd is None else _dollars(found.committed_usd)
        lines[0] += (
            f", {_dollars(found.accrued_usd)} accrued as of {iso(found.as_of_utc_ns)[:19]}Z and still running"
        )
        lines.append(f"{risk} committed: what it may come to at most")
    if found.measured_share is not None:
        lines.append(f"{found.measured_share * 100:.0f} % of it measuring")
    if found.usd_per_verdict is not None:
        lines.append(f"{_dollars(found.usd_per_verdict)} per comparison ({found.answered} measured)")
    if found.over_cap_usd:
        lines.append(f"[red]{_dollars(found.over_cap_usd)} above the cap[/]")
    for lease, gap in found.price_gaps.items():
        lines.append(
            f"[yellow]lease {escape(lease)}: the provider bills {_dollars(gap)}/h more than it quoted[/]"
        )
    for held in found.open_leases:
        if held.unreachable:
            by_hand = f"; check by hand: {escape(held.check_by_hand)}" if held.check_by_hand else ""
            lines.append(f"[red]lease {escape(held.lease)} cannot be reached and may still bill{by_hand}[/]")
    return lines


def _bar(share: float) -> str:
    eighths = round(share * _BAR * 8)
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _clock(seconds: float) -> str:
    """`1:05`, or `2:00:05` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _dollars(amount: int) -> str:
    """Cents where they tell something, up to six decimals where an amount is small."""
    digits = 2 if amount == 0 or amount >= 1_000_000 else 4 if amount >= 1000 else 6
    return f"${amount / 1_000_000:.{digits}f}"
