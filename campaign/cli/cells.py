"""`campaign cells`: one line per cell."""

import json

import click


@click.command(short_help="One line per cell: rates, tokens per step, step times.")
@click.argument("run", required=False)
@click.option("--json", "as_json", is_flag=True, help="The contract of docs/CONTRACTS.md.")
def command(run: str | None, *, as_json: bool) -> None:
    """List the cells of RUN (a folder or name; the newest if left out), valid rows only.

    `*_as_published` follow the formulas of the published statistics; the others follow docs/CONTRACTS.md.
    """
    from campaign.interop.verify import cells
    from campaign.store.layout import find_run
    from campaign.store.run import open_run

    found = cells(open_run(str(find_run(run).root)))
    if as_json:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from campaign.report import words

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("session", "arm", "cell"):
        table.add_column(name, overflow="fold")
    for name in ("n", "tok/s", "agg", "tok/step", "step ms", "tau pub.", "step pub.", "ttft ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for c in found:
        values = ("decode_tok_s_median", "decode_tok_s_agg", "accept_len", "step_ms", "tau_as_published",
                  "step_ms_as_published", "ttft_ms_median")  # fmt: skip
        shown = [words.number(c[v], 4) for v in values]
        table.add_row(Text(c["file"]), Text(c["arm"]), Text(c["cell"]), str(c["n"]), *shown)
    Console(highlight=False).print(table)
