"""`campaign forecast`: depths that have not run, said before and scored after."""

import json
from pathlib import Path

import click


@click.command(short_help="Forecast depths that have not run; score those that have.")
@click.argument("run", required=False)
@click.option(
    "--depth", "depths", multiple=True, type=click.IntRange(1, 64), help="A depth to forecast; repeatable."
)
@click.option(
    "--score", "as_score", is_flag=True, help="Score every stored forecast against later runs instead."
)
@click.option("--store", type=click.Path(path_type=Path), default=Path("results"), show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(run: str | None, depths: tuple[int, ...], store: Path, *, as_score: bool, as_json: bool) -> None:
    """From the depths that RUN has measured, say tokens per step and tok/s of others, and store it.

    A ladder need not go on where no deeper arm can reach the best rate so far: `stop` says so.
    """
    from campaign.clock import SystemClock
    from campaign.errors import UserError
    from campaign.report import forecasts
    from campaign.store.layout import find_run
    from campaign.store.run import open_run

    if as_score:
        found = forecasts.scored(store)
        table = forecasts.calibration(found)
        shown = [
            {"run": x.entry["run"], "session": x.entry["session"], "scored_on": x.on, "method": x.entry["method"],
             "workload": x.entry["workload"], "depth": s.depth, "quantity": s.quantity, "said": s.said, "lo": s.lo,
             "hi": s.hi, "came": s.came, "inside": s.inside, "retrospective": x.retrospective}
            for x in found
            for s in x.scores
        ]  # fmt: skip
        if as_json:
            click.echo(json.dumps({"scores": shown, "calibration": table}, indent=2, allow_nan=False))
            return
        for s in shown:
            mark = "inside" if s["inside"] else "OUTSIDE"
            click.echo(
                f"{s['run']}/{s['session']} depth {s['depth']} {s['quantity']}: said {s['said']:.4g} "
                f"[{s['lo']:.4g}, {s['hi']:.4g}], came {s['came']:.4g} in {s['scored_on']}: {mark}"
            )
        for t in table:
            when = " (recorded before the forecast was made)" if t["retrospective"] else ""
            click.echo(f"{t['quantity']}: {t['inside']} of {t['n']} inside their 95 % interval{when}")
        return
    if not depths:
        raise UserError("nothing to forecast. Fix: --depth N (repeatable), or --score")
    made = forecasts.make(open_run(str(find_run(run, store).root)), depths, SystemClock())
    forecasts.append(store, made)
    if as_json:
        click.echo(json.dumps({"forecasts": made}, indent=2, allow_nan=False))
        return
    for f in made:
        if f["tok_s"] is None or f["tok_s_lo"] is None:
            click.echo(
                f"{f['session']} / {f['workload']} depth {f['depth']}: not identified ({', '.join(f['reasons'])})"
            )
            continue
        click.echo(
            f"{f['session']} / {f['workload']} {f['method']} depth {f['depth']}: {f['tau']:.2f} tokens per step "
            f"[{f['tau_lo']:.2f}, {f['tau_hi']:.2f}], {f['tok_s']:.0f} tok/s [{f['tok_s_lo']:.0f}, {f['tok_s_hi']:.0f}]"
        )
    if made[0]["stop"]:
        click.echo("stop: no deeper arm can reach the best rate so far")
