"""`campaign doctor`: what could be rented for a file, at what price, and what would end it. Launches nothing."""

import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experiments.yaml"))
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a field.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(file: Path, sets: tuple[str, ...], *, as_json: bool) -> None:
    """For every node of FILE and every enabled cloud: what fits, its price, its dead-men and what they need.

    Exits 4 where a rented node cannot be had at all, or would have fewer than two effective dead-men everywhere.
    """
    import json

    from campaign.fleet.doctor import examine
    from campaign.spec.load import load

    loaded = load(file, sets)
    found = examine(loaded.spec)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        for node in found["nodes"]:
            click.echo(f"{node['node']}: {node['provider']}" + (f", {node['note']}" if node["note"] else ""))
            for c in node["candidates"]:
                price = "no price" if c["usd_per_hour"] is None else f"${c['usd_per_hour']:.2f}/h"
                fits = "fits" if c["fits"] else f"does not fit: {c['why']}"
                click.echo(f"  {c['what']}: {price}, {fits}; quota: {c['quota']}")
                click.echo(
                    f"    dead-men: {', '.join(c['dead_men']) or 'none'}; credential on the node: {c['credential']}"
                )
                for name, said in c["sources"].items():
                    click.echo(f"      {name}: {said}")
    sys.exit(0 if found["ok"] else 4)
