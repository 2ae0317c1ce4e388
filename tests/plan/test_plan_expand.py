import pytest

from campaign.errors import SpecError
from campaign.plan.expand import anchor, expand


def test_a_ladder_is_the_base_and_its_rungs(quickstart):
    depth = expand(quickstart(), "main")[-1]
    assert depth.name == "ladder.depth"
    assert [a.name for a in depth.arms] == ["plain", "depth=3", "depth=5", "depth=8"]
    assert [a.config.speculation and a.config.speculation.depth for a in depth.arms] == [None, 3, 5, 8]
    assert all(a.config.from_ is None for a in depth.arms)


def test_rungs_meet_the_base_and_their_neighbours_in_one_family(quickstart):
    depth = expand(quickstart(), "main")[-1]
    assert [c.pair for c in depth.comparisons] == [
        "depth:plain|depth=3",
        "depth:plain|depth=5",
        "depth:plain|depth=8",
        "depth:depth=3|depth=5",
        "depth:depth=5|depth=8",
    ]
    assert {c.family for c in depth.comparisons} == {"depth"}
    assert {c.kind for c in depth.comparisons} == {"ladder"}


def test_pairs_come_in_the_files_order_before_ladders(quickstart):
    assert [d.name for d in expand(quickstart(), "main")] == ["pair.aa", "pair.kv", "ladder.depth"]


def test_both_sides_of_an_aa_are_one_configuration(quickstart):
    aa = expand(quickstart(), "main")[0]
    assert [a.name for a in aa.arms] == ["plain", "plain#2"]
    assert aa.arms[0].hash == aa.arms[1].hash
    assert aa.arms[0].config == aa.arms[1].config


def test_a_varied_arm_differs_in_that_field_alone(quickstart):
    kv = expand(quickstart(), "main")[1]
    a, b = kv.arms
    assert b.name == "kv.b"
    assert b.hash != a.hash
    assert b.config.model_copy(update={"kv_dtype": "f16"}) == a.config


def test_an_arm_has_one_hash_wherever_it_stands(quickstart):
    drafts = expand(quickstart(), "main")
    hashes = {arm.hash for d in drafts for arm in d.arms if arm.name == "plain"}
    assert hashes == {anchor(quickstart()).arms[0].hash}


def test_each_concurrency_is_a_group_of_its_own(rented):
    names = [(d.name, d.concurrency, d.comparisons[0].pair) for d in expand(rented(), "main")]
    assert names[1:3] == [("pair.small@c1", 1, "small@c1"), ("pair.small@c8", 8, "small@c8")]


def test_a_list_of_one_concurrency_keeps_the_plain_name(rented):
    drafts = expand(rented("pairs.small.concurrency=[8]"), "main")
    assert (drafts[1].name, drafts[1].concurrency) == ("pair.small", 8)


def test_values_that_are_not_file_names_make_distinct_names(quickstart):
    spec = quickstart()
    ladder = spec.ladders["depth"].model_copy(
        update={"field": "extra_args", "values": (("-a", "x/y"), ("-a", "x:y"), ("../..",))}
    )
    names = [a.name for a in expand(spec.model_copy(update={"ladders": {"depth": ladder}}), "main")[-1].arms]
    assert len(set(names)) == 4
    assert all("/" not in n and "\\" not in n and ":" not in n for n in names)


def test_a_rung_equal_to_the_base_is_refused(quickstart):
    spec = quickstart()
    ladder = spec.ladders["depth"].model_copy(update={"base": "ngram"})
    with pytest.raises(SpecError, match=r"depth=3 is the same configuration as ngram"):
        expand(spec.model_copy(update={"ladders": {"depth": ladder}}), "main")


def test_a_pair_of_equals_is_refused(quickstart):
    spec = quickstart()
    pair = spec.pairs["kv"].model_copy(update={"vary": {"kv_dtype": "f16"}})
    with pytest.raises(SpecError, match="nothing to compare"):
        expand(spec.model_copy(update={"pairs": {**spec.pairs, "kv": pair}}), "main")
