"""`campaign reconcile`: take down and bill what dead controllers left behind; for cron."""

import sys
from pathlib import Path

import click


@click.command()
@click.argument("run", required=False)
@click.option(
    "--store",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("results"),
    show_default=True,
    help="Folder of runs; without RUN, all of them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: str | None, store: Path, *, as_json: bool) -> None:
    """Bring rows, take nodes down and settle leases that no controller holds.

    Takes down what a readable ledger says has ended, and what carries our own install id and a passed deadline.
    Everything else is reported and left alone. Exits 4 where a node cannot be reached or nobody knows it.
    """
    from campaign.clock import SystemClock
    from campaign.fleet.create import install_id
    from campaign.fleet.sweep import runs_of, sweep
    from campaign.money import usd
    from campaign.store.layout import find_run

    runs = [find_run(run, store)] if run is not None else runs_of(store)
    swept = sweep(runs, install_id(), SystemClock())
    alarm = any(s.alarming for s in swept)
    if as_json:
        import json

        rows = [
            {
                "run": s.run,
                "note": s.note,
                "findings": [
                    {
                        "what": f.what,
                        "node": f.node,
                        "detail": f.detail,
                        "check_by_hand": f.check_by_hand,
                        "usd": None if f.usd_micro is None else usd(f.usd_micro),
                    }
                    for f in s.findings
                ],
            }
            for s in swept
        ]
        click.echo(json.dumps({"runs": rows, "ok": not alarm}, indent=2))
    else:
        for s in swept:
            if s.note:
                click.echo(f"{s.run}: {s.note}")
            for f in s.findings:
                paid = "" if f.usd_micro is None else f" (${f.usd_micro / 1e6:.4f})"
                hand = f"; check by hand: {f.check_by_hand}" if f.check_by_hand and f.alarming else ""
                click.echo(f"{s.run}: {f.what} {f.node}: {f.detail}{paid}{hand}")
        if not any(s.findings or s.note for s in swept):
            click.echo("nothing is left behind")
    sys.exit(4 if alarm else 0)
