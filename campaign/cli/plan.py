"""`campaign plan`: what a campaign would do and cost, before anything is spent."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from campaign.plan.power import Prior
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
    from campaign.plan.admit import require_admitted
    from campaign.plan.build import build
    from campaign.plan.cost import declared_prices

    loaded = load(file, sets)
    plan = build(loaded.spec, declared_prices(loaded.spec), _prior(loaded.spec))
    if as_json:
        import json

        click.echo(json.dumps(plan.to_json(), indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from campaign.plan.view import render

        render(plan, loaded.defaults(), Console(highlight=False))
    require_admitted(plan)


def _prior(spec: "Spec") -> "Prior | None":
    """Variance components of the store's earlier runs on the same kind of device; None where it has none."""
    results = Path(spec.store)
    if "://" in spec.store or not any(results.glob("*/ledger.db")):
        return None
    from campaign.report.past import earlier, prior_of

    cpu = not any(getattr(n, "gpus", ()) or n.provider == "sky" for n in spec.nodes.values())
    return prior_of(earlier(results, cpu=cpu), cpu=cpu)
