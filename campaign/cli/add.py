"""`campaign add`: further arms on a node that is held."""

from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--to", "run", metavar="RUN", help="The run whose node is held (default: the newest).")
@click.option("--session", metavar="NAME", help="The held session, where there are several.")
@click.option(
    "--pair", "pairs", multiple=True, metavar="PAIR", help="Pairs or ladders of FILE (default: all new ones)."
)
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a field of FILE, e.g. arms.a.threads=2."
)
def command(
    file: Path, run: str | None, session: str | None, pairs: tuple[str, ...], sets: tuple[str, ...]
) -> None:
    """Run the pairs and ladders of FILE that RUN does not have, on the node that RUN holds.

    They run after an anchor, inside the lease that was admitted, and are exploratory: the ledger and the report say
    so. Anchor, gates and statistics are those of RUN. Start RUN with `campaign run --hold 30m`.
    """
    from campaign.fleet.add import ask
    from campaign.spec.load import load
    from campaign.store.layout import find_run

    run_dir = find_run(run)
    name = ask(run_dir, load(file, sets), file, session, pairs)
    click.echo(
        f"{name} runs in {run_dir.name}, exploratory; `campaign status {run_dir.name}` shows how far it is"
    )
