"""The query behind each number: SQL that anybody can run inside the run folder.

Row queries are DuckDB over `rows/`; ledger queries are SQLite over `ledger.db`. Each yields exactly the inputs
of the number it stands beside, and `Source.n` is how many.
"""

from campaign.analysis.model import AnchorResult, Speculation, Verdict
from campaign.report.model import Source

_FROM = "FROM read_parquet('rows/*/*/*.parquet', hive_partitioning = true, hive_types_autocast = false)"
_GOOD = "validity = 'valid' AND state = 'ok'"


def text(value: str) -> str:
    """A string literal of SQL."""
    return "'" + value.replace("'", "''") + "'"


def verdict(v: Verdict, group: str) -> Source:
    """One row for each block that every boot of both arms has: the log ratio b/a."""
    a, b, metric = text(v.a), text(v.b), v.metric
    query = (
        f"WITH x AS (SELECT arm, boot_index, block, avg(ln({metric})) AS y {_FROM}\n"  # noqa: S608  # shown to be run by hand; literals are quoted
        f'  WHERE session = {text(v.session)} AND "group" = {text(group)} AND arm IN ({a}, {b})\n'
        f"    AND phase IN ('measure', 'anchor') AND {_GOOD} AND {metric} > 0 GROUP BY ALL)\n"
        f"SELECT block, avg(y) FILTER (arm = {b}) - avg(y) FILTER (arm = {a}) AS log_ratio FROM x\n"
        "GROUP BY block HAVING count(*) = (SELECT count(*) FROM (SELECT DISTINCT arm, boot_index FROM x))\n"
        "ORDER BY block"
    )
    return Source(query, v.n, "blocks")


def anchor(a: AnchorResult) -> Source:
    """One row for each block of an anchor: its step time in ms."""
    query = (
        f"SELECT block, exp(avg(ln(step_ms))) AS step_ms, count(*) AS requests {_FROM}\n"
        f'WHERE session = {text(a.session)} AND "group" = {text("anchor." + a.position)} AND {_GOOD}\n'
        "  AND phase = 'anchor' AND step_ms > 0 GROUP BY block ORDER BY block"
    )
    return Source(query, a.n, "blocks")


def speculation(s: Speculation, n: int) -> Source:
    """The requests behind verify cost, acceptance and slope of one ladder."""
    query = (
        "SELECT arm, boot_index, slot, window_ms, tokens_in_window, steps, drafts, undrafted, drafted, accepted\n"
        f"{_FROM}\nWHERE session = {text(s.session)}\n"
        f"  AND split_part(\"group\", '@', 1) = {text('ladder.' + s.ladder)}\n"
        f"  AND phase = 'measure' AND {_GOOD} ORDER BY arm, boot_index, slot"
    )
    return Source(query, n)


def requests(n: int) -> Source:
    """The valid requests of the run, warm-up not counted."""
    return Source(
        f"SELECT * {_FROM}\nWHERE validity = 'valid' AND phase IN ('measure', 'anchor') ORDER BY sent_utc_ns",
        n,
    )


def events(types: tuple[str, ...], n: int) -> Source:
    """The ledger events of some types."""
    listed = ", ".join(text(t) for t in types)
    return Source(
        f"SELECT seq, utc_ns, type, session, payload FROM events WHERE type IN ({listed}) ORDER BY seq",  # noqa: S608
        n,
        "events",
        "sqlite",
    )
