import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.money import MicroUsd
from campaign.plan.codec import dump, load, plan_hash
from campaign.plan.model import (
    ArmPlan,
    BootPlan,
    CampaignPlan,
    Comparison,
    GroupPlan,
    Power,
    RequestPlan,
    RoundPlan,
    SessionPlan,
)
from campaign.spec.models import Arm

text = st.text(max_size=12)
written = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=12)
count = st.integers(0, 2**31)
money = st.integers(0, 10**12).map(MicroUsd)
real = st.floats(allow_nan=False, allow_infinity=False)
some = {"max_size": 2}


def tuples(strategy):
    return st.lists(strategy, **some).map(tuple)


arm = st.builds(
    lambda env, args, depth, from_: Arm.model_validate(
        {
            "engine": "sglang",
            "from": from_,
            "env": env,
            "extra_args": args,
            "speculation": None if depth is None else {"method": "ngram", "depth": depth},
            "estimate": {"step_ms": 0.1},
        }
    ),
    st.dictionaries(written, written, **some),
    st.lists(written, **some),
    st.none() | st.integers(0, 9),
    st.none() | st.just("base"),
)
request = st.builds(RequestPlan, text, count, count, count, count)
boot = st.builds(BootPlan, text, count, text, tuples(count))
rounds = st.builds(RoundPlan, text, count, tuples(boot), tuples(request), tuples(request))
groups = st.builds(
    GroupPlan,
    text,
    st.sampled_from(["anchor", "ladder", "pair", "null", "aa"]),
    st.sampled_from(["alternated", "duet", "blocks", "bracketed", "anchor"]),
    text,
    tuples(text),
    text,
    count,
    tuples(rounds),
    real,
    money,
)
comparison = st.builds(
    Comparison, text, st.just("pair"), text, text, text, text, text, count, st.just("step_ms"), real
)
session = st.builds(
    SessionPlan,
    text,
    text,
    count,
    st.dictionaries(text, st.builds(ArmPlan, text, text, arm), **some),
    tuples(groups),
    tuples(comparison),
    count,
    count,
    real,
    money,
    st.sampled_from(["declared", "quoted", "cap"]),
    money,
    money,
    real,
)
power = st.builds(Power, text, st.just("ttft_ms"), count, count, real, real, st.just("default"))
plans = st.builds(
    CampaignPlan,
    text,
    money,
    tuples(session),
    tuples(text),
    tuples(power),
    tuples(text),
    tuples(text),
    tuples(text),
)


@given(plans)
def test_a_plan_comes_back_as_it_was(plan):
    data = dump(plan)
    assert load(data) == plan
    assert dump(load(data)) == data


def test_the_quickstart_comes_back_and_is_canonical(quickstart, planned):
    plan = planned(quickstart())
    data = dump(plan)
    again = load(data)
    assert again == plan
    assert again.sessions[0].arms["depth=5"].config.speculation.depth == 5
    parsed = json.loads(data)
    assert data == json.dumps(parsed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_the_hash_is_of_the_content(quickstart, planned):
    plan = planned(quickstart())
    assert plan_hash(plan) == plan_hash(planned(quickstart())) == plan_hash(load(dump(plan)))
    assert plan_hash(plan) != plan_hash(planned(quickstart("workloads.copy.seed=2")))
    assert plan_hash(plan) != plan_hash(replace(plan, warnings=("x",)))
    assert len(plan_hash(plan)) == 64


def test_a_number_that_is_none_is_refused(quickstart, planned):
    plan = planned(quickstart())
    broken = replace(plan, sessions=(replace(plan.sessions[0], seconds=float("nan")),))
    with pytest.raises(ValueError, match="JSON compliant"):
        dump(broken)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"campaign": 1}'])
def test_what_is_no_plan_is_refused(data):
    with pytest.raises(ValueError):
        load(data)
