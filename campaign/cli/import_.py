"""`campaign import`: published result files as a run folder."""

from pathlib import Path

import click


@click.command(name="import")
@click.argument("schema", type=click.Choice(["brl11"]))
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option("--into", required=True, type=click.Path(path_type=Path), metavar="DIR", help="A new folder.")
def command(schema: str, files: tuple[Path, ...], into: Path) -> None:  # noqa: ARG001  # one schema so far
    """Read published FILEs into the run folder DIR.

    `campaign report DIR`, `verify DIR` and `cells DIR` then read it like any run: one session per file, every
    two arms that share a cell compared.
    """
    from campaign.interop import brl11, imported

    read = [brl11.read(path) for path in files]
    run_dir = imported.write(read, into)
    arms = sum(bool(a.cells) for f in read for a in f.arms)
    rows = sum(len(c.rows) for f in read for a in f.arms for c in a.cells)
    click.echo(f"imported {rows} rows of {arms} arms in {len(read)} session(s) into {run_dir.root.name}")
    for mark in (m for f in read for m in f.marks):
        click.echo(f"  kept and marked: {mark}")
    click.echo(f"next: campaign report {into}; campaign verify {into}; campaign cells {into}")
