"""`campaign init`: a commented starter file."""

from pathlib import Path

import click

TEMPLATES = ("quickstart", "try", "ladder", "regression")


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experiments.yaml"))
@click.option(
    "--template",
    type=click.Choice(TEMPLATES),
    default="quickstart",
    show_default=True,
    help="quickstart: this machine's CPU. try: one KV dtype on one rented GPU, $20. "
    "ladder: speculative depths on a node you have. regression: two engine versions, weekly.",
)
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def command(file: Path, template: str, *, force: bool) -> None:
    """Write a commented starter FILE (experiments.yaml)."""
    from importlib.resources import files

    from campaign.errors import UserError

    data = files("campaign.spec").joinpath("templates", f"{template}.yaml").read_bytes()
    try:
        # Exclusive creation: a file that appears meanwhile is not overwritten either.
        with file.open("wb" if force else "xb") as out:
            out.write(data)
    except FileExistsError:
        raise UserError(f"{file} exists. Fix: give another name, or --force to overwrite it") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}. Fix: choose another folder") from None
    click.echo(f"{file}: written ({template}). Next: campaign validate {file}")
