"""`campaign verify`: recompute every printed number from the raw rows."""

import json
import sys

import click


@click.command(short_help="Recompute every printed number from the raw rows.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="The contract of docs/CONTRACTS.md.")
def command(run: str | None, *, as_json: bool) -> None:
    """Check RUN (a folder or name; the newest if left out): hashes, rows, report.json, published statistics.

    Exits 0 where everything follows from the rows, 1 where something differs; each difference has its cause.
    """
    from campaign.errors import StoreError
    from campaign.interop.verify import verify
    from campaign.report.assemble import assemble
    from campaign.report.jsonview import report_json
    from campaign.store.layout import find_run
    from campaign.store.run import open_run

    run_dir = find_run(run)
    opened = open_run(str(run_dir.root))
    printed = None
    if run_dir.report_json.is_file():
        try:
            printed = json.loads(run_dir.report_json.read_text(encoding="utf-8"))
        except ValueError as error:
            raise StoreError(
                f"{run_dir.report_json} is not JSON: {error}. Fix: campaign report {run_dir.name}"
            ) from error
        if not isinstance(printed, dict):
            raise StoreError(f"{run_dir.report_json} is not a report. Fix: campaign report {run_dir.name}")
    again = json.loads(json.dumps(report_json(assemble(opened))))
    tally, differences = verify(opened, printed, again)
    if as_json:
        shown = {
            "checked": tally.checked,
            "matched": tally.matched,
            "differences": [d.json() for d in differences],
        }
        click.echo(json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        click.echo(f"{tally.checked} values checked, {tally.matched} follow from the rows")
        for d in differences:
            place = " / ".join(x for x in (d.file, d.arm, d.cell) if x)
            click.echo(f"  {place}: {d.field}: published {d.published}, derived {d.derived}: {d.cause}")
    sys.exit(1 if differences else 0)
