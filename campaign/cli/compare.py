"""`campaign compare`: arms of two runs, across sessions. Never a pair."""

import json
from pathlib import Path

import click


@click.command(short_help="Two runs across sessions: a separate result that carries the session variance.")
@click.argument("run_a")
@click.argument("run_b")
@click.option("--session-a", metavar="NAME", help="Only this session of RUN_A.")
@click.option("--session-b", metavar="NAME", help="Only this session of RUN_B.")
@click.option("--arm", "arms", multiple=True, metavar="A=B", help="Match arm A with arm B; repeatable.")
@click.option("--margin", type=click.FloatRange(0, 1, min_open=True), default=0.02, show_default=True)
@click.option(
    "--session-sd",
    type=click.FloatRange(0, 1, min_open=True),
    help="Declared between-session sd of step_ms (log scale); else estimated, else unknown.",
)
@click.option(
    "--store", "stores", multiple=True, type=click.Path(path_type=Path),
    help="A folder of further runs from which the session variance is estimated too; repeatable.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The contract of docs/CONTRACTS.md.")
def command(
    run_a: str,
    run_b: str,
    session_a: str | None,
    session_b: str | None,
    arms: tuple[str, ...],
    margin: float,
    session_sd: float | None,
    stores: tuple[Path, ...],
    *,
    as_json: bool,
) -> None:
    """Compare arms of RUN_A and RUN_B, which were not measured in one session.

    A pair needs one session; this is a result of another kind, labelled so. Arms are matched by hash, by name (by
    series where both runs carry one), or by the one field they differ in; changed fields are named.
    """
    from campaign.analysis.across import across_json
    from campaign.errors import UserError
    from campaign.report.across import across_runs, store_rows
    from campaign.store.layout import find_run
    from campaign.store.run import open_run

    given = {}
    for text in arms:
        left, equals, right = text.partition("=")
        if not equals or not left or not right:
            raise UserError(f"--arm {text}: not a match of two arms. Fix: --arm NAME_IN_A=NAME_IN_B")
        given[left] = right
    a, b = (open_run(str(find_run(name).root)) for name in (run_a, run_b))
    further = [row for folder in stores for row in store_rows(folder, skip={a.dir.root, b.dir.root})]
    found = across_runs(
        a,
        b,
        session_a=session_a,
        session_b=session_b,
        given=given,
        margin=margin,
        declared=session_sd,
        further=further,
    )
    if as_json:
        click.echo(json.dumps({"across": [across_json(x) for x in found]}, indent=2, allow_nan=False))
        return
    from campaign.report.across import sentence

    click.echo("Across sessions: not pairs; node, day and boots differ with the arm.")
    for x in found:
        click.echo(f"  {sentence(x)}")
