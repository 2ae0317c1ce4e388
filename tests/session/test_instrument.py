"""Lag figures of a cell, and the self-check that is never a reason to stop."""

from dataclasses import replace

from campaign.client.base import Outcome
from campaign.client.lag import lag_counts
from campaign.session.instrument import CellLag, self_check
from campaign.session.ports import Ports

OUTCOME = Outcome(
    "r", "ok", 0, 0, 1, 2, 3, "kernel", 10, 11, 10, None, None, "length", 200, None, None, None, None
)


def cell(lag_us, step_ms, **kw):
    found = CellLag(**kw)
    for i in range(3):
        outcome = replace(
            OUTCOME,
            sent_ns=i * 500_000_000,
            lag=lag_counts([int(lag_us * 1000)] * 10),
            start_error_us=float(i),
            merged_reads=1,
        )
        found.add(outcome, step_ms)
    return found


def test_figures_and_verdicts():
    assert cell(20, 10.0).verdict is None
    assert cell(400, 10.0).verdict == "flag"
    assert cell(2000, 10.0).verdict == "void"
    assert cell(2000, None).verdict is None
    shown = cell(20, 10.0, requested_rate=2.0).to_json()
    assert shown["stamp_source"] == "kernel"
    assert (shown["probes"], shown["reads"], shown["merged_reads"]) == (30, 30, 3)
    assert abs(shown["lag_p99_us"] - 20) < 1
    assert (shown["requested_rate"], shown["achieved_rate"], shown["start_err_p99_us"]) == (2.0, 2.0, 2.0)
    mixed = cell(20, 10.0)
    mixed.add(replace(OUTCOME, stamp_source="user"), 10.0)
    assert mixed.to_json()["stamp_source"] == "mixed"
    assert CellLag().to_json()["lag_p99_us"] is None


class Broken:
    async def selfcheck(self):
        raise OSError("no server")


async def test_a_broken_check_stops_nothing():
    assert (await self_check(Ports(None, Broken(), None)))["reasons"] == ["OSError: no server"]
    assert (await self_check(Ports(None, object(), None)))["ok"] is None
