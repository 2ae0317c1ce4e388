from collections import Counter, defaultdict
from itertools import product
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.plan.order import Layout, build_rounds, orders, place_gpus, place_shift, waves
from campaign.plan.seeds import seed_table


def layout(arms=2, slots=4, boots=2, concurrency=1, gpus=(), needs=None, sides=None):
    return Layout(
        group="pair.x",
        arms=tuple("abcdefgh"[:arms]),
        gpus=gpus,
        needs=needs or (0,) * arms,
        slots=slots,
        boots=boots,
        concurrency=concurrency,
        workload="copy",
        workload_seed=1,
        sides=sides or (0,) * arms,
    )


shapes = {"arms": st.integers(2, 6), "slots": st.integers(1, 9), "boots": st.integers(1, 8)}


def as_text(rounds):
    return " ".join("".join(r.arm for r in rnd.sequence) for rnd in rounds)


# --- alternated


def test_two_arms_alternate_in_quads_and_rounds_flip():
    assert as_text(build_rounds("alternated", layout(slots=4, boots=2))) == "abbaabba baabbaab"


def test_four_arms_run_forth_and_back():
    first, second = build_rounds("alternated", layout(arms=4, slots=2, boots=2))
    assert as_text([first, second]) == "abcddcba dcbaabcd"


@given(**shapes)
def test_every_arm_has_the_same_mean_position(arms, slots, boots):
    rounds = build_rounds("alternated", layout(arms, slots, boots))
    positions = defaultdict(list)
    for rnd in rounds:
        for request in rnd.sequence:
            positions[request.arm].append(request.order)
    totals = {arm: sum(p) for arm, p in positions.items()}
    spread = max(totals.values()) - min(totals.values())
    if slots * boots % 2 == 0:
        assert spread == 0
    elif boots > 1:
        # An odd number of orders balances exactly for odd arms and to within one position for even arms.
        assert spread == (0 if arms % 2 else 1)
    else:
        assert spread == arms - 1  # one half quad is left over and `plan` says so
    assert {len(p) for p in positions.values()} == {slots * boots}


@given(**shapes)
def test_within_a_round_an_even_number_of_slots_balances_exactly(arms, slots, boots):
    for rnd in build_rounds("alternated", layout(arms, 2 * slots, boots)):
        means = {a: mean(r.order for r in rnd.sequence if r.arm == a) for a in {r.arm for r in rnd.sequence}}
        assert len(set(means.values())) == 1


@given(**shapes)
def test_every_arm_is_in_every_place_equally_often(arms, slots, boots):
    rounds = build_rounds("alternated", layout(arms, slots, boots))
    count = Counter((b.arm, b.place) for r in rounds for b in r.boots)
    each = [count[a, f"p{p}"] for a, p in product("abcdefgh"[:arms], range(arms))]
    assert max(each) - min(each) <= 1
    for rnd in rounds:
        assert {b.place for b in rnd.boots} == {f"p{p}" for p in range(arms)}
        assert {b.arm for b in rnd.boots} == set("abcdefgh"[:arms])


def test_place_and_order_do_not_change_in_step():
    """Over four rounds of two arms, every combination of first arm and its place occurs once."""
    rounds = build_rounds("alternated", layout(arms=2, slots=3, boots=4))
    first = Counter()
    for rnd in rounds:
        arm = rnd.sequence[0].arm
        first[arm, next(b.place for b in rnd.boots if b.arm == arm)] += 1
    assert first == Counter({("a", "p0"): 1, ("a", "p1"): 1, ("b", "p0"): 1, ("b", "p1"): 1})


@given(arms=st.integers(2, 7), cycles=st.integers(1, 4))
def test_places_rotate_in_whole_cycles(arms, cycles):
    shifts = Counter(place_shift(arms, i) for i in range(arms * cycles))
    assert set(shifts.values()) == {cycles}


@given(**shapes)
def test_requests_are_sent_one_after_the_other(arms, slots, boots):
    for rnd in build_rounds("alternated", layout(arms, slots, boots)):
        assert [r.order for r in rnd.sequence] == list(range(arms * slots))
        assert {r.wave for r in rnd.sequence} == {0}


@given(arms=st.integers(1, 9), count=st.integers(1, 12))
def test_orders_are_permutations_as_balanced_as_can_be(arms, count):
    made = orders(arms, count)
    assert len(made) == count
    assert all(sorted(o) == list(range(arms)) for o in made)
    sums = [sum(o.index(a) for o in made) for a in range(arms)]
    if count > 1:
        assert max(sums) - min(sums) <= (1 if count % 2 and arms % 2 == 0 else 0)


def test_the_same_arm_is_not_always_first():
    assert {o[0] for o in orders(4, 8)} == {0, 1, 2, 3}


# --- seeds


@given(
    **shapes, concurrency=st.sampled_from([1, 4]), design=st.sampled_from(["alternated", "duet", "blocks"])
)
def test_compared_arms_share_slots_and_seeds(arms, slots, boots, concurrency, design):
    rounds = build_rounds(design, layout(arms, slots, boots, concurrency))
    sent = defaultdict(set)
    boot_of = {(r.id, b.arm): b.index for r in rounds for b in r.boots}
    for rnd in rounds:
        for q in rnd.sequence:
            sent[q.arm].add((boot_of[rnd.id, q.arm], q.slot, q.seed))
    assert len({frozenset(s) for s in sent.values()}) == 1


@given(slots=st.integers(1, 9), boots=st.integers(1, 6), concurrency=st.sampled_from([1, 3]))
def test_sides_of_an_aa_share_no_seed(slots, boots, concurrency):
    rounds = build_rounds("alternated", layout(2, slots, boots, concurrency, sides=(0, 1)))
    seeds = defaultdict(list)
    for rnd in rounds:
        for q in (*rnd.sequence, *rnd.warmup):
            seeds[q.arm].append(q.seed)
    assert not set(seeds["a"]) & set(seeds["b"])
    for own in seeds.values():
        assert len(own) == len(set(own))


@given(**shapes, design=st.sampled_from(["alternated", "duet", "blocks", "bracketed", "anchor"]))
@pytest.mark.parametrize("concurrency", [1, 3])
def test_warm_up_is_one_wave_per_boot_off_the_measured_slots_and_seeds(
    arms, slots, boots, design, concurrency
):
    """As many requests as will be in flight: one at concurrency 1."""
    if design == "bracketed":
        boots = 1
    rounds = build_rounds(design, layout(arms, slots, boots, concurrency))
    measured = {q.seed for r in rounds for q in r.sequence}
    for rnd in rounds:
        assert sorted(w.arm for w in rnd.warmup) == sorted(
            b.arm for b in rnd.boots for _ in range(min(concurrency, slots))
        )
        assert len({(w.arm, w.seed) for w in rnd.warmup}) == len(rnd.warmup)
        assert all(w.slot == slots for w in rnd.warmup)
        assert not {w.seed for w in rnd.warmup} & measured


def test_seeds_fit_every_engine_and_do_not_collide():
    table = seed_table(7, "copy", slots=2000, repeats=10, sides=2)
    assert len(set(table.values())) == len(table) == 2001 * 20
    assert all(0 < seed < 2**31 for seed in table.values())


def test_a_collision_moves_on(monkeypatch):
    """With three bits there are seven seeds; all are used once, whatever the hashes say."""
    monkeypatch.setattr("campaign.plan.seeds.SEED_BITS", 3)
    assert sorted(seed_table(1, "copy", slots=6, repeats=1).values()) == [1, 2, 3, 4, 5, 6, 7]


def test_more_boots_keep_the_seeds_of_the_first():
    few, many = seed_table(1, "copy", 8, 2), seed_table(1, "copy", 8, 6)
    assert few.items() <= many.items()


def test_seeds_are_those_of_other_days():
    """Heads of `printf 1/copy/SLOT/0/0/0 | sha256sum`: a change here changes what is measured."""
    table = seed_table(1, "copy", 2, 1)
    assert [table[s, 0, 0] for s in range(3)] == [541439738, 1397158293, 493663274]


def test_another_workload_seed_or_name_gives_other_seeds():
    tables = [set(seed_table(s, n, 50, 2).values()) for s, n in ((1, "copy"), (2, "copy"), (1, "chat"))]
    assert not tables[0] & tables[1]
    assert not tables[0] & tables[2]


# --- the other designs


def test_blocks_go_abba_by_boot():
    rounds = build_rounds("blocks", layout(arms=2, slots=3, boots=4))
    assert "".join(r.boots[0].arm for r in rounds) == "abbaabba"
    assert [r.boots[0].index for r in rounds] == [0, 0, 1, 1, 2, 2, 3, 3]
    for rnd in rounds:
        assert len(rnd.boots) == 1
        assert [q.slot for q in rnd.sequence] == [0, 1, 2]


@given(arms=st.integers(2, 6), boots=st.integers(2, 8))
def test_blocks_give_every_arm_the_same_mean_boot_position(arms, boots):
    rounds = build_rounds("blocks", layout(arms, 1, boots))
    sums = Counter()
    for rnd in rounds:
        sums[rnd.boots[0].arm] += rnd.index
    assert max(sums.values()) - min(sums.values()) <= (1 if boots % 2 and arms % 2 == 0 else 0)


def test_bracketed_is_a_b_once():
    rounds = build_rounds("bracketed", layout(arms=2, slots=3, boots=1))
    assert [r.boots[0].arm for r in rounds] == ["a", "b"]


@given(**shapes)
def test_duet_starts_the_same_slot_on_every_arm_together(arms, slots, boots):
    for rnd in build_rounds("duet", layout(arms, slots, boots)):
        together = defaultdict(list)
        for q in rnd.sequence:
            together[q.order, q.wave].append(q)
        assert sorted(o for o, _ in together) == list(range(slots))
        for requests in together.values():
            assert len({q.arm for q in requests}) == arms
            assert len({q.slot for q in requests}) == len({q.seed for q in requests}) == 1


# --- waves


def test_a_wave_is_the_whole_slot_set_on_one_arm():
    (rnd, *_) = build_rounds("alternated", layout(arms=2, slots=3, boots=3, concurrency=2))
    runs = [(q.arm, q.wave) for q in rnd.sequence]
    assert runs == [("a", 0)] * 3 + [("b", 0)] * 3 + [("b", 1)] * 3 + [("a", 1)] * 3


@given(boots=st.integers(1, 20), concurrency=st.integers(2, 64))
def test_at_least_six_waves_an_arm_in_whole_quads(boots, concurrency):
    assert waves(boots, concurrency) * boots >= 6
    assert waves(boots, concurrency) % 2 == 0
    assert waves(boots, 1) == 1


@given(
    slots=st.integers(1, 5), boots=st.integers(1, 6), design=st.sampled_from(["alternated", "blocks", "duet"])
)
def test_a_row_key_is_unique_above_concurrency_one(slots, boots, design):
    """(cell's boot, phase, slot, seed) is what tells two requests of one arm apart."""
    rounds = build_rounds(design, layout(2, slots, boots, concurrency=4))
    keys = [
        (q.arm, next(b.index for b in r.boots if b.arm == q.arm), q.slot, q.seed)
        for r in rounds
        for q in (*r.sequence, *r.warmup)
    ]
    assert len(keys) == len(set(keys))


# --- GPUs


@given(needs=st.lists(st.integers(1, 3), min_size=2, max_size=4), boots=st.integers(1, 6))
def test_resident_arms_have_gpus_of_their_own(needs, boots):
    gpus = tuple(range(10, 10 + sum(needs)))
    rounds = build_rounds("alternated", layout(len(needs), 2, boots, gpus=gpus, needs=tuple(needs)))
    for rnd in rounds:
        used = [g for b in rnd.boots for g in b.gpus]
        assert len(used) == len(set(used))
        assert set(used) <= set(gpus)
        assert {b.arm: len(b.gpus) for b in rnd.boots} == dict(zip("abcd", needs, strict=False))


def test_places_of_equal_arms_are_the_same_gpus_in_every_round():
    rounds = build_rounds("alternated", layout(2, 2, 4, gpus=(4, 5, 6, 7), needs=(2, 2)))
    places = {(b.place, b.gpus) for r in rounds for b in r.boots}
    assert places == {("p0", (4, 5)), ("p1", (6, 7))}


def test_arms_share_the_first_gpus_where_there_are_too_few():
    assert place_gpus((3,), (1, 1)) == [(3,), (3,)]


def test_a_single_boot_takes_the_first_gpus():
    rounds = build_rounds("blocks", layout(2, 1, 2, gpus=(0, 1, 2, 3), needs=(2, 4)))
    assert {(b.arm, b.gpus) for r in rounds for b in r.boots} == {("a", (0, 1)), ("b", (0, 1, 2, 3))}


@pytest.mark.parametrize("design", ["alternated", "duet", "blocks", "bracketed", "anchor"])
def test_round_ids_count_from_zero(design):
    rounds = build_rounds(design, layout(boots=1 if design == "bracketed" else 3))
    assert [r.id for r in rounds] == [f"pair.x/r{i}" for i in range(len(rounds))]
    assert [r.index for r in rounds] == list(range(len(rounds)))
