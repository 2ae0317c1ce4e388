"""`campaign plan`: what a campaign would do and cost, before anything is spent."""

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experiments.yaml"))
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a field, e.g. budget.cap_usd=5."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/CONTRACTS.md).")
def command(file: Path, sets: tuple[str, ...], *, as_json: bool) -> None:
    """Boots, requests, minutes, dollars and power, before anything is spent.

    Exits 3 where no session fits under the cap, and says what to cut.
    """
    from campaign.fleet.past import for_plan
    from campaign.plan.admit import require_admitted
    from campaign.plan.build import build
    from campaign.plan.cost import declared_prices
    from campaign.spec.load import load

    loaded = load(file, sets)
    plan = build(loaded.spec, declared_prices(loaded.spec), for_plan(loaded.spec, Path(loaded.spec.store)))
    if as_json:
        import json

        click.echo(json.dumps(plan.to_json(), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from campaign.plan.view import render

        render(plan, loaded.defaults(), Console(highlight=False))
    require_admitted(plan)
