"""`campaign spend --all` and `--provider`: every run of a store, and what SkyPilot says beside ours."""

import csv
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from campaign.ledger.state import RunState


def show_all(*, as_json: bool, as_csv: bool, store: Path = Path("results")) -> None:
    """One line a run: settled, still running, cap, measured share. A ledger that cannot be read is named."""
    rows = [_row(folder) for folder in sorted(p.parent for p in store.glob("*/ledger.db"))]
    total = sum(r["spent_usd"] for r in rows if r["spent_usd"] is not None)
    if as_json:
        click.echo(json.dumps({"runs": rows, "spent_usd": round(total, 6)}, indent=2))
        return
    if as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        names = ("run", "spent_usd", "committed_usd", "cap_usd", "measured_share", "final", "reason")
        writer.writerow(names)
        writer.writerows([r[n] for n in names] for r in rows)
        return
    for r in rows:
        if r["spent_usd"] is None:
            click.echo(f"{r['run']}: unreadable: {r['reason']}")
            continue
        share = "unknown" if r["measured_share"] is None else f"{r['measured_share'] * 100:.0f} %"
        running = "" if r["final"] else f", still running, at most ${r['committed_usd'] or 0:.2f}"
        click.echo(
            f"{r['run']}: ${r['spent_usd']:.4f} of ${r['cap_usd'] or 0:.2f}{running}; measuring {share}"
        )
    click.echo(f"{len(rows)} runs: ${total:.4f}")


def _row(folder: Path) -> dict[str, Any]:
    from campaign.budget.spend import spend, spend_json
    from campaign.clock import SystemClock
    from campaign.errors import CampaignError
    from campaign.ledger.journal import read_events
    from campaign.ledger.state import fold

    names = ("spent_usd", "committed_usd", "cap_usd", "measured_share", "final")
    try:
        found = spend_json(spend(fold(read_events(folder / "ledger.db")), SystemClock().utc_ns()))
    except CampaignError as error:
        return {"run": folder.name, **dict.fromkeys(names), "reason": str(error)}
    return {"run": folder.name, **{n: found[n] for n in names}, "reason": None}


WHY = (
    "They differ: the ledger bills from before the launch call to the proof, at the price frozen then; SkyPilot",
    "counts what it believes was up, at the price of today's catalogue, without disks, storage or egress, and shows",
    "0 where pricing failed.",
)


def provider_json(state: "RunState") -> dict[str, Any]:
    """What SkyPilot's cost report says of this run's nodes beside the ledger, and why the two differ."""
    rented = [le for le in state.leases.values() if le.provider == "sky" and le.node_id]
    told: dict[str, float] = {}
    if rented:
        from campaign.cloud.sky_sdk import cost_report

        told = cost_report()
    nodes = [
        {
            "node": le.node_id,
            "lease": le.id,
            "ledger_usd": None if le.settled_usd is None else le.settled_usd / 1_000_000,
            "provider_usd": told.get(str(le.node_id)),
        }
        for le in rented
    ]
    return {"nodes": nodes, "why": " ".join(WHY)}


def show_provider(state: "RunState") -> None:
    """The same in words."""
    found = provider_json(state)
    if not found["nodes"]:
        click.echo("SkyPilot rented nothing of this run")
        return
    for node in found["nodes"]:
        ours = "still running" if node["ledger_usd"] is None else f"${node['ledger_usd']:.4f}"
        theirs = "no record" if node["provider_usd"] is None else f"${node['provider_usd']:.4f}"
        click.echo(f"{node['node']}: {ours} in the ledger, {theirs} in SkyPilot's cost report")
    for line in WHY:
        click.echo(line)
