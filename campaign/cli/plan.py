"""`campaign plan`: what a campaign would do and cost, before anything is spent."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from campaign.cloud.catalogue import Offer
    from campaign.spec.models import Spec


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
    from campaign.engines.images import load  # tags of images become digests
    from campaign.fleet.past import for_plan
    from campaign.plan.admit import require_admitted
    from campaign.plan.build import build
    from campaign.plan.cost import declared_prices

    loaded = load(file, sets)
    plan = build(loaded.spec, declared_prices(loaded.spec), for_plan(loaded.spec, Path(loaded.spec.store)))
    quotes = _quotes(loaded.spec)
    if as_json:
        import json
        from dataclasses import asdict

        rented = {"quotes": {name: [asdict(o) for o in offers] for name, offers in quotes.items()}}
        click.echo(json.dumps(plan.to_json() | (rented if quotes else {}), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from campaign.plan.view import render

        render(plan, loaded.defaults(), Console(highlight=False))
        for name, offers in quotes.items():
            _say(name, offers, loaded.spec)
    require_admitted(plan)


def _quotes(spec: "Spec") -> "dict[str, list[Offer]]":
    """What every rented node of the file would cost, by SkyPilot's lists on this machine; launches and asks nothing."""
    rented = {name: node for name, node in spec.nodes.items() if node.provider == "sky"}
    if not rented:
        return {}
    from campaign.cloud.catalogue import offers
    from campaign.spec.models import SkyNode

    return {name: offers(node) for name, node in rented.items() if isinstance(node, SkyNode)}


def _say(name: str, offers: "list[Offer]", spec: "Spec") -> None:
    from campaign.cloud.catalogue import fits
    from campaign.spec.models import SkyNode

    node = spec.nodes[name]
    assert isinstance(node, SkyNode)
    click.echo(f"node {name}: planned at its limit of ${node.max_usd_per_hour}/h; prices of whole nodes:")
    for o in offers:
        price = "no price here" if o.usd_per_hour is None else f"${o.usd_per_hour:.2f}/h"
        click.echo(f"  {o.what}: {price} ({o.source})" + (f"; not taken: {o.why_not}" if o.why_not else ""))
    taken = fits(offers)
    if taken is None:
        click.echo(
            f"  declared: ${node.max_usd_per_hour}/h; what SkyPilot asks is known at `campaign doctor` or at launch"
        )
    elif not taken:
        click.echo("  none of these fits: raise max_usd_per_hour, or name other candidates in any_of")
