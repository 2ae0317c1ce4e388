"""`campaign report`: verdicts, anchors and spend, at the end or in the middle of a run."""

from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/CONTRACTS.md).")
@click.option("--md", "as_markdown", is_flag=True, help="Print Markdown for a pull request.")
@click.option(
    "--html",
    "html_path",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PATH",
    help="Write the page to PATH instead of the run folder.",
)
def command(run: str | None, html_path: Path | None, *, as_json: bool, as_markdown: bool) -> None:
    """Report a run (default: the newest): verdicts, anchors, and where the dollars went.

    Works in the middle of a run, marked partial. Without options it prints the report and (re)writes
    report.html and report.json in the run folder.
    """
    from campaign.report.assemble import assemble
    from campaign.store.layout import find_run
    from campaign.store.run import open_run

    if as_json and as_markdown:
        raise click.UsageError("--json and --md are two formats of one output; give one of them")
    run_dir = find_run(run)
    report = assemble(open_run(str(run_dir.root)))
    if html_path is not None:
        from campaign.report.files import write_page

        write_page(report, html_path)
    if as_json:
        from campaign.report import jsonview

        click.echo(jsonview.dumps(report), nl=False)
    elif as_markdown:
        from campaign.report import markdown

        click.echo(markdown.render(report), nl=False)
    elif html_path is not None:
        click.echo(f"wrote {html_path}")
    else:
        from rich.console import Console

        from campaign.report.files import publish

        publish(report, run_dir, Console(highlight=False))
