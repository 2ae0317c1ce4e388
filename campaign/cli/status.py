"""`campaign status`: what is running, what it may still cost, and how to stop it."""

import click


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: str | None, *, as_json: bool) -> None:
    """Say what a run (default: the newest) is doing: leases, deadlines, money, and the command that stops it.

    Reads the ledger only: it takes no lock and works beside a running controller, or without one.
    """
    from campaign.ledger.journal import read_events
    from campaign.ledger.lock import holder
    from campaign.ledger.state import fold
    from campaign.report.status import build, render, status_json
    from campaign.store.layout import find_run

    run_dir = find_run(run)
    events = read_events(run_dir.ledger)
    status = build(run_dir.name, events, fold(events), holder(run_dir.lock))
    if as_json:
        import json

        click.echo(json.dumps(status_json(status), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        render(status, Console(highlight=False))
