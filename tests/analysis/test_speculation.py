import math

import numpy as np
import pytest

from campaign.analysis.pairs import KNOWN_DF, BootSd
from campaign.analysis.speculation import LadderArm, speculation

KNOWN = BootSd(0.0, KNOWN_DF, "declared", None)
UNKNOWN = BootSd(None, 0.0, "unknown", None)
ARMS = (LadderArm("none", None), LadderArm("d3", 3), LadderArm("d8", 8))


@pytest.fixture
def rows(make):
    """A ladder whose truth is known: t1 10 ms, verify 10 + 4 (w - 1) ms."""

    def build(*, noise=0.0, slots=8, boots=2, widths=(("d3", 3), ("d8", 8)), seed=1, t1=10.0, per_token=4.0):
        rng = np.random.default_rng(seed)
        out = []
        for boot in range(boots):
            for slot in range(slots):
                common = {"boot_index": boot, "slot": slot, "block": f"s{slot}", "group": "ladder.d"}
                window = 96 * t1 * math.exp(noise * rng.normal())
                out.append(
                    make.row(
                        **common,
                        arm="none",
                        cell=f"none{boot}",
                        window_ms=window,
                        steps=96,
                        tokens_in_window=96,
                    )
                )
                for name, depth in widths:
                    drafts = int(rng.integers(8, 16))
                    drafted = drafts * depth
                    accepted = [int(drafts * 0.6 * 0.8**i) for i in range(depth)]
                    undrafted = 96 - sum(accepted) - drafts
                    cost = drafts * (t1 + per_token * depth) + undrafted * t1
                    out.append(
                        make.row(
                            **common,
                            arm=name,
                            cell=f"{name}{boot}",
                            window_ms=cost * math.exp(noise * rng.normal()),
                            steps=drafts + undrafted,
                            tokens_in_window=96,
                            drafts=drafts,
                            undrafted=undrafted,
                            drafted=drafted,
                            accepted=sum(accepted),
                            accept_pos=tuple(accepted),
                        )
                    )
        return out

    return build


def run(rows, arms=ARMS, boot=KNOWN):
    return speculation(rows, session="main", ladder="d", arms=arms, boot=boot)


def test_the_truth_comes_back_exactly_without_noise(rows):
    found = run(rows())
    assert found.t1_ms == pytest.approx(10.0)
    assert [w.verified_tokens for w in found.widths] == pytest.approx([4.0, 9.0])
    assert [w.verify_ms for w in found.widths] == pytest.approx([22.0, 42.0])
    assert found.verify_slope_ms == pytest.approx(4.0)
    assert found.reasons == ()


def test_acceptance_and_break_even(rows):
    data = rows()
    width = run(data).widths[0]
    mine = [r for r in data if r.arm == "d3"]
    assert width.accept_len == pytest.approx(
        sum(r.tokens_in_window for r in mine) / sum(r.steps for r in mine)
    )
    assert width.accept_rate == pytest.approx(sum(r.accepted for r in mine) / sum(r.drafted for r in mine))
    assert width.accept_pos == pytest.approx(
        [sum(r.accept_pos[i] for r in mine) / sum(r.drafts for r in mine) for i in range(3)]
    )
    step = sum(r.window_ms for r in mine) / sum(r.steps for r in mine)
    assert width.break_even_accept_len == pytest.approx(step / 10.0)


def test_intervals_cover_the_truth(rows):
    hits = [0, 0]
    reps = 120
    for seed in range(reps):
        found = run(rows(noise=0.03, seed=seed))
        hits[0] += found.slope_lo < 4.0 < found.slope_hi
        hits[1] += found.widths[1].lo < 42.0 < found.widths[1].hi
    assert min(hits) / reps > 0.88


def test_boot_variance_widens_the_slope_and_without_it_the_reason_is_named(rows):
    data = rows(noise=0.02)
    bare = run(data, boot=UNKNOWN)
    carried = run(data, boot=BootSd(0.03, 6.0, "estimated", None))
    assert carried.slope_hi - carried.slope_lo > bare.slope_hi - bare.slope_lo
    assert bare.reasons == ("boot_sd_unknown",)
    assert bare.widths[0].reasons == ("boot_sd_unknown",)


def test_one_width_has_no_slope(rows):
    found = run(rows(widths=(("d3", 3),)), arms=ARMS[:2])
    assert (found.verify_slope_ms, found.reasons) == (None, ("one_width",))
    assert found.widths[0].verify_ms == pytest.approx(22.0)


def test_a_drafter_that_never_offers_is_named(rows):
    data = [r for r in rows() if r.arm != "d3"]
    silent = [r for r in rows() if r.arm == "none"]
    import dataclasses

    data += [
        dataclasses.replace(r, arm="d3", drafts=0, undrafted=r.steps, drafted=0, accepted=0, accept_pos=None)
        for r in silent
    ]
    width = run(data).widths[0]
    assert width.reasons == ("no_drafts",)
    assert (width.verify_ms, width.verified_tokens, width.accept_rate) == (None, None, None)
    assert width.accept_len == pytest.approx(1.0)


def test_without_the_plain_arm_undrafted_steps_cannot_be_taken_out(rows):
    found = run([r for r in rows() if r.arm != "none"])
    assert found.t1_ms is None
    assert found.reasons == ("no_base", "no_drafts")
    assert all(w.verify_ms is None and "no_base" in w.reasons for w in found.widths)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("accept_pos", (1, 9, 0), "not_identified:accept_pos_increases"),
        ("accepted", 1000, "not_identified:accepted_above_drafted"),
        ("window_ms", 1.0, "not_identified:verify_not_positive"),
        ("steps", 12, "not_identified:accept_len_above_width"),
    ],
)
def test_a_broken_invariant_is_not_a_number(make, rows, field, value, reason):
    data = [make.replace(r, **{field: value}) if r.arm == "d3" else r for r in rows()]
    width = run(data).widths[0]
    assert reason in width.reasons
    if field == "steps":
        assert width.accept_len is None
    else:
        assert (width.verify_ms, width.lo) == (None, None)


def test_a_depth_the_engine_does_not_honour_is_said_and_the_mean_width_stands(rows):
    found = run(rows(), arms=(ARMS[0], LadderArm("d3", 2), ARMS[2]))
    assert "depth_not_honoured" in found.widths[0].reasons
    assert found.widths[0].verified_tokens == pytest.approx(4.0)
    assert found.widths[0].verify_ms == pytest.approx(22.0)


def test_no_rows(rows):
    found = run([])
    assert found.t1_ms is None
    assert all(w.reasons == ("no_rows",) for w in found.widths)
