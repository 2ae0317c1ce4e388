"""`campaign validate`: every problem of a file, with its line and the fix."""

import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experiments.yaml"))
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a field, e.g. budget.cap_usd=5."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: ok, counts and hash, or the problems.")
def command(file: Path, sets: tuple[str, ...], *, as_json: bool) -> None:
    """Check FILE and the prompts it names; exits 2 where something must be fixed."""
    import json
    from dataclasses import asdict

    from campaign.errors import SpecError
    from campaign.spec.load import load
    from campaign.workloads.packs import describe, load_all

    try:
        loaded = load(file, sets)
        prompts = load_all(loaded, file.parent)
    except SpecError as error:
        if not as_json:
            for problem in error.problems:
                click.echo(str(problem), err=True)
            n = len(error.problems)
            click.echo(f"{file}: {n} problem{'s' if n > 1 else ''}", err=True)
        else:
            problems = [asdict(p) for p in error.problems]
            click.echo(json.dumps({"file": str(file), "ok": False, "problems": problems}, indent=2))
        sys.exit(error.exit_code)
    counts = {s: len(getattr(loaded.spec, s)) for s in ("arms", "ladders", "pairs", "workloads", "sessions")}
    if as_json:
        result = {
            "file": str(file),
            "ok": True,
            "counts": counts,
            "canonical_sha256": loaded.canonical_sha256,
            "source_sha256": loaded.source_sha256,
            "workloads": describe(prompts),
        }
        click.echo(json.dumps(result, indent=2))
    else:
        words = ", ".join(f"{n} {s if n != 1 else s[:-1]}" for s, n in counts.items())
        click.echo(f"{file}: ok ({words}; canonical {loaded.canonical_sha256})")
