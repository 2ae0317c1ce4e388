"""`campaign resume`: go on with a run that was interrupted."""

import click


@click.command()
@click.argument("run", required=False)
@click.option("--override", "gates", multiple=True, metavar="GATE", help="Go on past a gate; needs --reason.")
@click.option("--reason", metavar="TEXT", help="Why the gate is overridden; printed beside what it touched.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON at the end.")
def command(run: str | None, gates: tuple[str, ...], reason: str | None, *, as_json: bool) -> None:
    """Go on with a run that was interrupted (default: the newest).

    Committed rounds stay; a half-done round is kept as superseded and done again.
    """
    from rich.console import Console

    from campaign.cli._drive import drive_and_report, overrides
    from campaign.fleet.start import resumed_drive
    from campaign.store.layout import find_run

    drive = resumed_drive(find_run(run), overrides(gates, reason))
    drive_and_report(drive, Console(stderr=as_json, highlight=False), as_json=as_json)
