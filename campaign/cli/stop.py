"""`campaign stop`: ask a running campaign to stop, tear down and settle."""

import json
import os

import click


@click.command()
@click.argument("run", required=False)
@click.option("--why", default="", metavar="TEXT", help="Written to the ledger.")
def command(run: str | None, why: str) -> None:
    """Ask a running campaign (default: the newest) to stop at the next token, tear down and settle."""
    from campaign.errors import UserError
    from campaign.ledger.lock import holder
    from campaign.store.layout import find_run

    run_dir = find_run(run)
    who = holder(run_dir.lock)
    if who is None:
        raise UserError(
            f"run {run_dir.name} has no controller, so nothing is running. Fix: `campaign resume {run_dir.name}`"
        )
    temporary = run_dir.stop_file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"by": os.environ.get("USER", ""), "why": why}), encoding="utf-8")
    temporary.replace(run_dir.stop_file)
    click.echo(f"asked {run_dir.name} to stop; `campaign status {run_dir.name}` shows when it has settled")
