"""`campaign rerun`: repeat one pair in a new session of the same campaign."""

import click


@click.command()
@click.argument("run", required=False)
@click.option("--pair", required=True, metavar="PAIR", help="The pair or ladder to repeat.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON at the end.")
def command(run: str | None, pair: str, *, as_json: bool) -> None:
    """Repeat both arms of PAIR and the anchors in a new session; supersedes nothing."""
    from rich.console import Console

    from campaign.cli._drive import drive_and_report
    from campaign.fleet.start import rerun_drive
    from campaign.store.layout import find_run

    drive_and_report(
        rerun_drive(find_run(run), pair), Console(stderr=as_json, highlight=False), as_json=as_json
    )
