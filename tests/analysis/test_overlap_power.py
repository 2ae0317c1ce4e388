"""Steps of overlapping requests, and what rows say of GPUs, on rows of a real H200."""

from dataclasses import replace
from pathlib import Path

import pytest

from campaign.analysis.forecast import foresee
from campaign.analysis.overlap import shared
from campaign.analysis.power import clocks, energy, idle
from campaign.report.further import further
from campaign.store.run import open_run

DEPTH = next((Path(__file__).parents[2] / "examples/runs/h200").glob("*-174951"))
ARM, BASE = "depth8=ngram-breadth1-depth1", "plain"


@pytest.fixture(scope="module")
def rows():
    every = open_run(DEPTH).requests().rows()
    return [r for r in every if r.group == "ladder.depth8" and r.phase == "measure" and r.arm in {ARM, BASE}]


def test_a_cell_s_counters_are_shared_out_whole(rows):
    mine = [r for r in rows if r.arm == ARM]
    key = (mine[0].session, mine[0].cell)
    found = shared(mine, {key: {"counters": {"verify_steps": 8999, "generated": 9216}}}, {ARM: 1})
    assert sum(r.steps for r in found) == sum(r.drafts for r in found) == 8999
    assert sum(r.accepted for r in found) == 48 * 191 - 8999
    assert {r.accept_len for r in found} == {48 * 191 / 8999}
    for r in found:
        assert r.decode_tok_s == pytest.approx(1000 * r.accept_len / r.step_ms)
        assert "counters_of_cell" in r.reasons


def test_each_wave_s_counters_where_the_round_scraped_them(rows):
    mine = [r for r in rows if r.arm == ARM]
    key = (mine[0].session, mine[0].cell)
    asked = {"requests": 8, "tokens": 8 * 192}
    waves = [
        asked | {"steps": s, "drafts": s, "drafted": s, "accepted": 8 * 191 - s} for s in range(1500, 1506)
    ]
    found = shared(mine, {key: {"waves": waves}}, {ARM: 1})
    for i in range(6):
        assert sum(r.steps for r in found if r.block == f"w{i}") == 1500 + i


def test_ramp_and_tail_lend_their_acceptance_and_no_step(rows):
    """A steady loop is scraped around all it sends: two slot sets of the six are cut and stand in no row here."""
    mine = [r for r in rows if r.arm == ARM]
    kept = [r for r in mine if r.block not in {"w0", "w5"}]
    assert (len(mine), len(kept)) == (48, 32)
    window = {
        "requests": 48, "tokens": 48 * 192, "steps": 4584, "drafts": 4584, "drafted": 4584, "accepted": 4584,
    }  # fmt: skip
    key = (mine[0].session, mine[0].cell)
    found = shared(kept, {key: {"overlapping": window, "waves": [window]}}, {ARM: 1})
    assert {r.accept_len for r in found} == {2.0}
    assert sum(r.steps for r in found) == 32 * 191 // 2
    assert all(r.step_ms == pytest.approx(2000 / r.decode_tok_s) for r in found)
    assert all(r.reasons[-2:] == ("counters_of_cell", "counters_with_ramp") for r in found)
    # Fewer tokens than the rows hold: these counters are of something else.
    few = window | {"tokens": 32 * 192 - 1, "requests": 32}
    assert shared(kept, {key: {"overlapping": few}}, {ARM: 1}) == kept


@pytest.mark.parametrize("counters", [{}, {"generated": 9216}, {"verify_steps": 8999, "generated": 9300}])
def test_counters_that_do_not_add_up_give_no_steps(rows, counters):
    mine = [r for r in rows if r.arm == ARM]
    assert shared(mine, {(mine[0].session, mine[0].cell): {"counters": counters}}, {ARM: 1}) == mine


def test_unequal_clocks_are_fatal_and_the_power_cap_is_a_note(rows):
    assert clocks(rows, (BASE, ARM))[0] == set()
    slow = [replace(r, gpu_sm_mhz=1500.0, gpu_power_cap=0.0) if r.arm == ARM else r for r in rows]
    assert clocks(slow, (BASE, ARM))[0] == {"unequal_clocks"}
    capped = [replace(r, gpu_power_cap=0.4) for r in slow]
    assert clocks(capped, (BASE, ARM)) == (set(), {"power_cap"})
    background = [replace(r, gpu_power_cap=0.2) for r in slow]  # as at full clock on this machine
    assert clocks(background, (BASE, ARM)) == ({"unequal_clocks"}, set())
    hot = [replace(r, gpu_throttle=0.5) for r in slow]
    assert clocks(hot, (BASE, ARM)) == ({"unequal_clocks"}, {"throttled"})
    assert clocks([replace(r, gpu_sm_mhz=None) for r in slow], (BASE, ARM)) == (set(), set())


def test_energy_of_batches_that_overlap_is_not_known(rows):
    """The next batch of a steady loop starts while the last still runs: both would be given the whole GPU's energy."""
    mine = [r for r in rows if r.arm == BASE]
    early = [replace(r, sent_ns=r.sent_ns - 5_000_000) if r.block == "w3" else r for r in mine]
    assert [e.arm for e in energy(mine)] == [BASE]
    gap = min(r.sent_ns for r in mine if r.block == "w3") - max(r.done_ns for r in mine if r.block == "w2")
    late = [replace(r, done_ns=r.done_ns + gap + 1) if r.block == "w2" else r for r in early]
    assert energy(late) == []


def test_joules_by_time_and_idle_by_what_was_in_flight(rows):
    base = next(e for e in energy(rows) if e.arm == BASE)
    assert base.source == "power_by_time"
    assert base.joules_per_token == pytest.approx(0.353, abs=0.001)
    one = [r for r in rows if r.arm == BASE][:1]
    took = (one[0].done_ns - one[0].sent_ns) / 1e9
    (found,) = idle([*one, *one], {"depth": 2 * took})
    assert found.share == pytest.approx(0.5)


def test_a_gpu_that_served_a_void_request_was_not_idle():
    run = open_run(DEPTH)
    rows, plan = run.requests().rows(), run.plan()
    took = replace(rows[0], validity="void", sent_utc_ns=rows[0].sent_utc_ns + 10**13)
    about = {"run": "r", "usd_by_group": {}, "declared": {}, "prior": None, "billed_s": {"depth": 1000.0}}
    base = further(rows, plan, (), **about).gpu_idle[0]["busy_s"]
    more = further(rows, plan, (), **about, sent=[*rows, took]).gpu_idle[0]["busy_s"]
    assert more == pytest.approx(base + (took.done_ns - took.sent_ns) / 1e9)


def test_simulated_acceptance_forecasts_nothing():
    """It shares method and depth with an arm that really drafts, and its rate is the best of all."""
    run = open_run(DEPTH)
    rows = [r for r in run.requests().rows() if r.group == "ladder.depth1" and r.phase == "measure"]
    arms = {n: run.plan().sessions[0].arms[n].config.speculation for n in sorted({r.arm for r in rows})}
    (simulated,) = [n for n, s in arms.items() if s is not None and s.simulated_acceptance is not None]
    new = arms[ARM.replace("depth8", "depth1")].model_copy(update={"depth": 5})
    real = {n: s for n, s in arms.items() if n != simulated}
    said, best = foresee(rows, {**arms, "new": new}, ["new"])
    assert (said, best) == foresee(rows, {**real, "new": new}, ["new"])
    assert said[0].tau == pytest.approx(1.02, abs=0.03)
    assert best == pytest.approx(199, rel=0.02)


def test_no_arm_of_simulated_acceptance_is_the_best():
    run = open_run(DEPTH)
    about = {"run": "r", "usd_by_group": {}, "declared": {}, "prior": None}
    beside = further(run.requests().rows(), run.plan(), (), **about)
    found = beside.champions
    assert [(c["group"], c["arm"], c["k"]) for c in found] == [
        ("ladder.depth1", BASE, 5),
        ("ladder.depth8", BASE, 5),
    ]
    # What the sentences say is no more than what their intervals hold.
    said = [text for kind, text in beside.sentences if kind in {"champion", "speculation"}]
    assert all("luck is not taken off" in text or "these boots only" in text for text in said)
    assert len(said) == 3
