"""From a run folder: what was put into the simulation comes out, and every number has its query."""

import math
import sqlite3

import duckdb
import pytest

from campaign.report.assemble import assemble
from campaign.store.run import open_run
from campaign.testing.sample_run import TRUTH


def test_header(assembled, sample):
    state = open_run(sample.root).state()
    assert (assembled.run, assembled.campaign, assembled.status) == ("whole", "sample", "finished")
    assert assembled.simulated
    assert not assembled.partial
    assert (assembled.head_hash, assembled.ledger_length) == (state.head, state.seq)
    assert assembled.ended_utc_ns > assembled.started_utc_ns
    assert assembled.versions["simulated"] == assembled.versions["campaign"]


def test_known_effects_are_found(assembled):
    found = {(v.pair, v.metric): v for v in assembled.verdicts}
    kv = found["kv", "step_ms"]
    assert kv.verdict == "slower"
    assert kv.lo < TRUTH["kv_ratio"] < kv.hi
    assert found["aa", "step_ms"].verdict == "equivalent"
    (spec,) = assembled.speculation
    assert spec.slope_lo < TRUTH["verify_slope_ms"] < spec.slope_hi
    assert spec.t1_ms == pytest.approx(TRUTH["t1_ms"], rel=0.02)


def test_every_planned_comparison_has_all_metrics_and_one_primary(assembled, sample):
    plan = open_run(sample.root).plan()
    pairs = [c.pair for s in plan.sessions for c in s.comparisons]
    assert [v.pair for v in assembled.primary] == pairs
    assert len(assembled.verdicts) == 4 * len(pairs)


def test_every_query_runs_and_yields_its_n(assembled, sample, monkeypatch):
    monkeypatch.chdir(sample.root)
    rows = duckdb.connect()
    ledger = sqlite3.connect("file:ledger.db?mode=ro", uri=True)
    assert len(assembled.sources) > 30
    for key, source in assembled.sources.items():
        engine = rows if source.language == "duckdb" else ledger
        assert len(engine.execute(source.query).fetchall()) == source.n, key
        assert source.n > 0, key
    ledger.close()


def test_a_verdict_rederives_from_its_query(assembled, sample, monkeypatch):
    monkeypatch.chdir(sample.root)
    for v in assembled.verdicts:
        query = assembled.sources[f"verdict/{v.session}/{v.pair}/{v.metric}"].query
        got = dict(duckdb.sql(query).fetchall())
        assert got == pytest.approx(dict(v.blocks), abs=1e-9)
        assert math.exp(sum(got.values()) / len(got)) == pytest.approx(v.ratio, rel=1e-9)


def test_names_cannot_break_out_of_a_query():
    from campaign.report.queries import text

    name = "a' OR '1'='1"
    assert duckdb.sql(f"SELECT {text(name)}").fetchall() == [(name,)]


def test_money_adds_up_and_the_curve_ends_at_it(assembled):
    spend = assembled.spend
    assert sum(spend["phases"].values()) == pytest.approx(spend["spent_usd"], abs=1e-6)
    points = [p.usd for p in assembled.spend_points]
    assert points == sorted(points)
    assert points[0] == 0
    assert points[-1] == pytest.approx(spend["spent_usd"], abs=2e-5)
    assert len(points) <= 122
    groups = {v.pair: v.usd for v in assembled.primary}
    assert 0 < groups["kv"] < spend["spent_usd"]


def test_plan_and_outcome(assembled, sample):
    (outcome,) = assembled.plan_actual
    rows = open_run(sample.root).requests().rows()
    assert outcome.requests == outcome.requests_planned == sum(r.phase != "warmup" for r in rows)
    assert (outcome.boots, outcome.requests_void, outcome.possibly_spent) == (outcome.boots_planned, 0, 0)
    assert outcome.minutes == pytest.approx(
        (assembled.ended_utc_ns - assembled.started_utc_ns) / 60e9, rel=0.01
    )


def test_names_that_say_nothing_get_labels(assembled):
    assert assembled.labels == {"kv.b": "kv_dtype q8_0"}
    assert [r.value for r in assembled.ladders["depth"]] == [None, 3.0, 5.0, 8.0]


def test_in_the_middle_of_a_run(broken):
    run = open_run(broken.root)
    report = assemble(run)
    assert report.partial
    assert (report.status, report.why_ended) == ("interrupted", "its controller is gone")
    found = {(v.pair, v.metric): v for v in report.verdicts}
    assert found["kv", "step_ms"].verdict == "slower"
    assert found["aa", "step_ms"].verdict == "equivalent"
    rung = found["depth:plain|depth=3", "step_ms"]
    assert rung.verdict == "unresolved"
    assert "partial" in rung.reasons
    assert not report.spend["final"]
    # The clock of a simulation is not this machine's: the lease has not billed since.
    assert report.spend["spent_usd"] < 0.25
    assert report.nodes[0].state == "open"
    # Only committed rounds count; what the journals hold is there and not used.
    (outcome,) = report.plan_actual
    assert 0 < outcome.requests < outcome.requests_planned
    assert outcome.requests_void > 0


def test_while_a_controller_holds_the_run(broken):
    from campaign.ledger.journal import Ledger
    from campaign.testing.clock import VirtualClock

    with Ledger.open(broken, VirtualClock()):
        assert assemble(open_run(broken.root)).status == "running"
    assert assemble(open_run(broken.root)).status == "interrupted"


def test_control_characters_from_outside_are_dropped():
    from campaign.report.facts import plain

    assert plain("a\x1b[31mred\x07\nb") == "a[31mred b"
