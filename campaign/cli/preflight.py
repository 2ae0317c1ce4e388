"""`campaign preflight`: every flag and variable of every arm, against the engine's own source."""

import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("experiments.yaml"))
@click.option(
    "--set", "sets", multiple=True, metavar="KEY=VALUE", help="Change a field, e.g. budget.cap_usd=5."
)
@click.option(
    "--engine-wheel",
    "wheels",
    multiple=True,
    metavar="WHEEL",
    help="A wheel, sdist, folder or FOLDER@GIT_REVISION of an engine; for arms of its version, or of an unknown one.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: ok, problems, warnings, what was checked.")
def command(file: Path, sets: tuple[str, ...], wheels: tuple[str, ...], *, as_json: bool) -> None:
    """Check FILE against the engines' source: no GPU, no engine installed, nothing imported.

    Unknown, removed, renamed and abbreviated flags, values outside their choices, and environment variables
    that nothing reads; exits 2 where there is one.
    """
    import json
    from dataclasses import asdict

    from campaign.engines.flags.spec import check_spec
    from campaign.spec.load import load

    report = check_spec(load(file, sets), wheels)
    if as_json:
        result = {
            "file": str(file),
            "ok": not report.problems,
            "problems": [asdict(p) for p in report.problems],
            "warnings": list(report.warnings),
            "checked": [
                {"arm": arm, "engine": engine, "table": table, "words": words}
                for arm, engine, table, words in report.checked
            ],
        }
        click.echo(json.dumps(result, indent=2))
    else:
        for problem in report.problems:
            click.echo(str(problem), err=True)
        for warning in report.warnings:
            click.echo(f"warning: {warning}", err=True)
        seen = dict.fromkeys((engine, table) for _, engine, table, _ in report.checked)
        for engine, table in seen:
            arms = [arm for arm, e, t, _ in report.checked if (e, t) == (engine, table)]
            click.echo(f"{engine} {table}: {len(arms)} arms checked")
        if not report.problems:
            click.echo(f"{file}: ok" if report.checked else f"{file}: no arm of sglang or vllm to check here")
        else:
            n = len(report.problems)
            click.echo(f"{file}: {n} problem{'s' if n > 1 else ''}", err=True)
    sys.exit(2 if report.problems else 0)
