"""`campaign selfcheck`: how good is the instrument on this machine, right now."""

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON (docs/CONTRACTS.md).")
@click.option("--user-stamps", is_flag=True, help="Check user-space stamps, as used under TLS.")
@click.pass_context
def command(ctx: click.Context, *, as_json: bool, user_stamps: bool) -> None:
    """Measure stamp error, chunks per CPU second and start-time error against a reference server.

    Takes about 10 s and one further process. Exits 1 where a figure is not good enough to measure with.
    """
    import asyncio

    from campaign.client.selfcheck import check

    found = asyncio.run(check(kernel_stamps=not user_stamps))
    if as_json:
        import json

        click.echo(json.dumps(found.to_json(), indent=2, allow_nan=False))
    else:
        late = found.server_late_p99_us
        click.echo(
            f"stamps      {found.stamp_source}\n"
            f"lag         p50 {found.lag_p50_us:.0f} us, p99 {found.lag_p99_us:.0f} us "
            f"at {found.streams} streams of 93 chunks/s\n"
            f"user stamp  p50 {found.user_lag_p50_us:.0f} us, p99 {found.user_lag_p99_us:.0f} us, of the same reads\n"
            f"throughput  {found.chunks_per_cpu_s:,.0f} chunks per CPU second, parsed\n"
            f"start time  p99 {found.start_err_p99_us:.0f} us off the plan at 200 requests/s\n"
            f"reads       {found.merged_reads} merged, {found.lost_events} events lost\n"
            f"server      p99 {'unknown' if late is None else f'{late:.0f} us'} behind its own schedule\n"
            f"{'ok' if found.ok else 'NOT OK: ' + '; '.join(found.reasons)}"
        )
    ctx.exit(0 if found.ok else 1)
