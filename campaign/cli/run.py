"""`campaign run`: a campaign under its budget."""

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experiments.yaml"))
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a field, e.g. budget.cap_usd=5."
)
@click.option("--only", metavar="PAIR", help="Run one pair, ladder or session (and the anchors).")
@click.option("--override", "gates", multiple=True, metavar="GATE", help="Go on past a gate; needs --reason.")
@click.option("--reason", metavar="TEXT", help="Why the gate is overridden; printed beside what it touched.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON at the end.")
@click.option("--hold", metavar="TIME", help="Keep each node so long after its plan, for `campaign add`.")
@click.option(
    "--detach", is_flag=True, help="Go on in the background, without this terminal; prints where it logs."
)
def command(
    file: Path,
    sets: tuple[str, ...],
    only: str | None,
    gates: tuple[str, ...],
    reason: str | None,
    hold: str | None,
    *,
    as_json: bool,
    detach: bool,
) -> None:
    """Plan, measure, judge and report one experiments.yaml.

    Ctrl-C stops at the next token, settles, and leaves a run that `campaign resume` completes.
    """
    from rich.console import Console

    from campaign.cli._drive import drive_and_report, hold_seconds, overrides, results_folder
    from campaign.engines.flags.spec import check_spec
    from campaign.engines.images import load  # tags of images become digests
    from campaign.fleet.past import for_plan
    from campaign.fleet.start import new_drive
    from campaign.fleet.start import only as cut_to
    from campaign.plan.admit import require_admitted
    from campaign.plan.build import build
    from campaign.plan.cost import declared_prices
    from campaign.plan.view import summary

    loaded = load(file, sets)
    events = overrides(gates, reason)
    planned = cut_to(loaded.spec, only) if only else loaded.spec
    known = for_plan(planned, results_folder(loaded.spec, file))
    plan = build(planned, declared_prices(planned), known, hold_s=hold_seconds(hold))
    console = Console(stderr=as_json, highlight=False)
    summary(plan, console)
    require_admitted(plan)
    for warning in check_spec(loaded).require().warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if detach:
        from campaign.cli._detach import detached

        detached(results_folder(loaded.spec, file))
        return
    drive = new_drive(loaded, plan, file.parent, results_folder(loaded.spec, file), events, only)
    drive_and_report(drive, console, as_json=as_json)
