"""Properties of the loader: nothing but SpecError, canonical forms round-trip, order does not matter."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from campaign.errors import SpecError
from campaign.spec.load import canonical_json, load_bytes, parse_canonical

QUICKSTART = (Path(__file__).parents[2] / "experiments.yaml").read_bytes()

words = st.sampled_from(
    ["version: 1", "arms:", "a: {", "}", "[", "]", "- ", "&x ", "*x", "<<: ", "!!float ", "${X}", "\n", "  ", "\t",
     "'", '"', "|\n", "? ", ": ", "#", "---", "%YAML 1.1", "null", "1e3", ".nan", "\x00", "\ud800", "\u200b", "é"]
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_spec_error(data):
    with pytest.raises(SpecError) as caught:
        load_bytes(data, "f.yaml", (), {})
    assert caught.value.problems
    assert all(p.file == "f.yaml" for p in caught.value.problems)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(words, st.text(max_size=8)), max_size=25).map("".join))
def test_yaml_like_text_raises_nothing_but_spec_error(text):
    with pytest.raises(SpecError):
        load_bytes(text.encode("utf-8", "surrogatepass"), "f.yaml", (), {})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_quickstart_loads_or_raises_spec_error(data):
    lines = QUICKSTART.decode().splitlines(keepends=True)
    i = data.draw(st.integers(0, len(lines) - 1))
    lines[i] = data.draw(st.one_of(st.just(""), st.text(max_size=30), words)) + data.draw(
        st.sampled_from(["", "\n", lines[i]])
    )
    sets = data.draw(st.lists(st.text(max_size=20), max_size=2))
    try:
        loaded = load_bytes("".join(lines).encode("utf-8", "surrogatepass"), "f.yaml", sets, {})
    except SpecError as error:
        problems = error.problems
    else:
        problems = ()
        assert parse_canonical(loaded.canonical) == loaded.spec
    assert all(p.why and p.fix and str(p).isprintable() for p in problems)


def emit(value) -> str:
    """YAML flow text of plain data: JSON is YAML, but text and numbers keep their type."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)}: {emit(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(emit, value)) + "]"
    return json.dumps(value).replace("${", "$${")


names = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True)
texts = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=12
)
money = st.decimals(Decimal("0.000001"), Decimal(1_000_000), places=6, allow_nan=False).map(float)
fractions = st.floats(1e-9, 1, exclude_max=True, allow_subnormal=False)


@st.composite
def specs(draw):
    """A valid spec as plain data."""
    arm = {
        "engine": "llamacpp",
        "model": "m",
        "kv_dtype": draw(texts),
        "env": draw(st.dictionaries(st.sampled_from(["A", "B_1"]), texts)),
    }
    if draw(st.booleans()):
        arm["estimate"] = {"step_ms": draw(st.floats(0.01, 1e6))}
    return {
        "version": 1,
        "campaign": draw(names),
        "budget": {"cap_usd": draw(money)},
        "nodes": {"here": {"provider": "local", "usd_per_hour": draw(money), "max_hours": 0.5}},
        "models": {"m": {"path": draw(texts)}},
        "arms": {"a": arm, "b": {"from": "a", "threads": draw(st.integers(1, 1_000_000)), "kv_dtype": None}},
        "workloads": {"w": {"pack": draw(texts), "n": 3, "max_tokens": 9, "seed": draw(st.integers(0, 10**9)), "temperature": draw(st.just(0.0) | st.floats(0.001, 2))}},
        "anchor": {"arm": "a", "workload": "w", "drift_delta": draw(fractions)},
        "pairs": {"p": {"a": "a", "b": "b", "workload": "w", "margin": draw(fractions)}, "q": {"kind": "aa", "a": "b", "workload": "w"}},
        "sessions": {draw(names): {"node": "here", "pairs": draw(st.permutations(["p", "q"]))}},
        "statistics": {"boot_sd": {"step_ms": draw(fractions)}},
    }  # fmt: skip


def shuffled(value, data):
    if isinstance(value, dict):
        return {k: shuffled(value[k], data) for k in data.draw(st.permutations(list(value)))}
    return value


@settings(max_examples=40, deadline=None)
@given(specs(), st.data())
def test_canonical_form_round_trips_and_key_order_does_not_matter(spec, data):
    loaded = load_bytes(emit(spec).encode(), "f", (), {})
    assert parse_canonical(loaded.canonical) == loaded.spec
    assert canonical_json(parse_canonical(loaded.canonical)) == loaded.canonical
    assert loaded.spec.arms["a"].kv_dtype == spec["arms"]["a"]["kv_dtype"]
    assert loaded.spec.anchor.drift_delta == spec["anchor"]["drift_delta"]
    assert float(loaded.spec.budget.cap_usd) == spec["budget"]["cap_usd"]
    other = load_bytes(emit(shuffled(spec, data)).encode(), "f", (), {})
    assert other.canonical == loaded.canonical
    assert list(other.spec.arms) == list(loaded.spec.arms)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.recursive(st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)).map(lambda v: json.dumps(v).encode())))  # fmt: skip
def test_parse_canonical_raises_nothing_but_spec_error(data):
    with pytest.raises(SpecError):
        parse_canonical(data)


def test_parse_canonical_refuses_what_only_looks_canonical():
    good = load_bytes(QUICKSTART, "f", (), {}).canonical
    assert parse_canonical(good).campaign == "quickstart"
    for old, new in (
        (b'"version":1', b'"version":1,"version":1'),
        (b'"cap_usd":0.5', b'"cap_usd":NaN'),
        (b'"cap_usd":0.5', b'"cap_usd":"0.5"'),
        (b'"cap_usd":0.5', b'"cap_usd":true'),
        (b'"boots":2', b'"boots":2.0'),
        (b'"store":', b'"stored":'),
    ):
        assert old in good
        with pytest.raises(SpecError):
            parse_canonical(good.replace(old, new))


@pytest.mark.parametrize("text", ["\ue962=", "\x07=1", "a\u2028b=2", "\ud800=3"])
def test_a_problem_is_one_printable_line_whatever_it_quotes(text):
    with pytest.raises(SpecError) as caught:
        load_bytes(QUICKSTART, "f.yaml", [text], {})
    assert all(str(p).isprintable() for p in caught.value.problems)
