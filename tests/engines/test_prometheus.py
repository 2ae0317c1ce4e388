"""Counters from metrics pages: reported failures of other tools, captured pages of real servers, properties."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.engines import prometheus as p
from campaign.engines.base import Counters

DATA = Path(__file__).parent.parent / "data"


def case(name: str) -> str:
    return (DATA / "cases" / name).read_text()


def expected(name: str) -> dict:
    return json.loads(case(f"{name}.expect.json"))["expect"]


def page(name: str) -> str:
    return (DATA / "fixtures" / name).read_text()


# --- reported failures


def test_created_samples_are_not_counters() -> None:
    d = p.delta(p.read(case("09_created_before.prom")), p.read(case("09_created_after.prom")))
    want = expected("09_created")
    assert (d.drafts, d.drafted, d.accepted) == (want["drafts"], want["draft_tokens"], want["accepted"])
    figures = p.acceptance(d, depth=4)
    assert figures.rate == want["acceptance_rate"]
    assert figures.length == want["mean_accept_length"]
    assert list(figures.per_position) == want["per_position"]
    assert "1+accepted/drafts" in figures.formula


def test_a_length_beyond_depth_plus_one_is_void() -> None:
    d = p.delta(p.read(case("09_created_before.prom")), p.read(case("09_created_after.prom")))
    assert p.acceptance(d, depth=2).reasons == ("out_of_range",)
    assert p.acceptance(d, depth=2).length is None


@pytest.mark.parametrize("name", ["vllm_new", "vllm_old", "sglang_colon", "sglang_under"])
def test_one_value_from_four_names(name: str) -> None:
    want = expected("10_names")["first_four"]["generation_tokens"]
    assert p.read(case(f"10_names_{name}.prom")).generated == want


def test_absent_is_none_with_a_reason() -> None:
    counters = p.read(case("10_names_gone.prom"))
    assert counters.generated is None
    assert f"generated:{expected('10_names')['gone']['reason']}" in counters.reasons


@pytest.mark.parametrize(
    "body",
    [case("10_names_not_prometheus.json"), '{"error": {"code": 501}}', "<!DOCTYPE html><p>no", "", "hello"],
)
async def test_a_wrong_body_is_found_once_and_not_polled_again(body: str) -> None:
    want = expected("10_names")["not_prometheus"]
    polls = 0

    async def fetch() -> tuple[int, bytes]:
        nonlocal polls
        polls += 1
        return 200, body.encode()

    poller = p.Poller(p.read)
    for _ in range(5):
        assert await poller.scrape(fetch) is None
    assert poller.status == want["status"]
    assert polls - 1 == want["scrapes_after_first"]


async def test_a_busy_server_is_asked_again_and_a_missing_page_is_not() -> None:
    answers = [(503, b""), OSError("refused"), (200, page("llamacpp_metrics.txt").encode()), (404, b"")]

    async def fetch() -> tuple[int, bytes]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    poller = p.Poller(p.read)
    assert await poller.scrape(fetch) is None
    assert await poller.scrape(fetch) is None
    counters = await poller.scrape(fetch)
    assert counters is not None
    assert counters.generated == 48
    assert await poller.scrape(fetch) is None
    assert poller.status == "incompatible_endpoint"
    assert await poller.scrape(fetch) is None


@pytest.mark.parametrize(
    ("after", "key"),
    [
        ("after_flush", "flush"),
        ("after_restart", "restart"),
        ("after_absent", "absent"),
        ("spec_off", "spec_off"),
    ],
)
def test_resets_restarts_and_silence(after: str, key: str) -> None:
    d = p.delta(p.read(case("13_reset_before.prom")), p.read(case(f"13_reset_{after}.prom")))
    figures = p.acceptance(d)
    assert figures.rate is None
    assert figures.length is None
    assert figures.reasons[0] == expected("13_reset")[key]["reason"]
    assert d.drafts is None
    counts = p.step_counts(d, 64)
    assert counts.steps is None
    assert counts.undrafted is None


def test_prefix_cache_hit_rates() -> None:
    scrape = {t: p.read(case(f"34_prefix_{t}.prom")) for t in ("t0", "t1", "t2")}
    document = json.loads(case("34_prefix.expect.json"))
    for arm, (start, end) in document["windows"].items():
        rate = p.hit_rate(p.delta(scrape[start], scrape[end]))
        assert rate == document["expect"]["hit_rate"][arm.removeprefix("arm")]


# --- captured pages


def test_llamacpp_page() -> None:
    c = p.read(page("llamacpp_metrics.txt"))
    assert (c.drafts, c.drafted, c.accepted, c.accept_pos) == (14, 39, 16, (8, 5, 3))
    assert (c.generated, c.prompt_tokens, c.cached_tokens, c.forward_calls) == (48, 273, 0, 32)
    # One request of 48 tokens: 47 = 16 accepted + 14 drafts + 17 undrafted, and one prefill batch.
    counts = p.step_counts(p.delta(Counters(drafts=0, drafted=0, accepted=0), c), 48)
    assert (counts.steps, counts.undrafted) == (31, 17)
    assert c.forward_calls == 1 + counts.steps


def test_vllm_page() -> None:
    c = p.read(page("vllm_cpu_metrics.txt"))
    assert (c.drafts, c.drafted, c.accepted, c.accept_pos) == (17, 51, 27, (12, 8, 7))
    assert (c.generated, c.prompt_tokens, c.cache_queries, c.cached_tokens) == (112, 367, 367, 0)
    assert c.started == 1.79612809226e9


@pytest.mark.parametrize("arm", ["base", "ngram4"])
def test_sglang_pages_say_what_the_client_counted(arm: str) -> None:
    truth = json.loads(page("sglang_phase_counters.json"))[arm]
    before = p.read(page(f"sglang_{arm}.metrics_before.txt"))
    after = p.read(page(f"sglang_{arm}.metrics_after.txt"))
    d = p.delta(before, after)
    phases = truth["phases"]
    captured = truth["captured_after_the_phases"]
    assert d.generated == sum(x["client_tokens"] for x in phases) + sum(sum(v) for v in captured.values())
    if arm == "base":
        assert d.verify_steps is None
        assert "absent" in d.reasons
        return
    assert before.verify_steps + sum(x["verify_calls"] for x in phases) == phases[-1]["verify_calls_after"]
    assert after.verify_steps >= phases[-1]["verify_calls_after"]
    # SGLang creates the counter of cached tokens at the first hit: absent before, so no difference.
    assert before.cached_tokens is None
    assert after.cached_tokens == 378
    assert d.cached_tokens is None


# --- the format


def test_sums_over_ranks_exponents_and_spaces() -> None:
    text = (
        "# TYPE vllm:generation_tokens_total counter\n"
        'vllm:generation_tokens_total{engine="0",model_name="a b, c=\\"d\\" }"} 1.5e+03\n'
        'vllm:generation_tokens_total{engine="1"} 250.0 1700000000000\n'
    )
    assert p.read(text).generated == 1750


def test_positions_are_summed_over_ranks() -> None:
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text = "".join(f'{name}{{engine="{e}",position="{i}"}} {10 - i}\n' for e in (0, 1) for i in (0, 2))
    assert p.read(text).accept_pos == (20, 0, 16)


@pytest.mark.parametrize(
    ("value", "code"),
    [("NaN", "not_finite"), ("+Inf", "not_finite"), ("-3", "out_of_range"), ("1.5", "out_of_range")],
)
def test_what_no_counter_can_be(value: str, code: str) -> None:
    counters = p.read(f"vllm:generation_tokens_total {value}\n")
    assert counters.generated is None
    assert f"generated:{code}" in counters.reasons


def test_a_strangers_malformed_line_costs_nothing() -> None:
    text = 'weird{a="b} 1\n# TYPE\nvllm:generation_tokens_total 7\nother:metric{x=} zz\n'
    assert p.read(text).generated == 7


def test_a_total_and_its_old_name_are_not_added() -> None:
    text = "vllm:generation_tokens 640\n# TYPE vllm:generation_tokens_total counter\nvllm:generation_tokens_total 640\n"
    assert p.read(text).generated == 640


def test_restart_wins_over_everything() -> None:
    a = Counters(drafts=5, drafted=9, accepted=4, generated=10, started=1.0)
    b = Counters(drafts=50, drafted=90, accepted=40, generated=100, started=2.0)
    assert p.delta(a, b) == p.Delta(reasons=("engine_restarted",))


def test_no_draft_in_the_window_is_no_reset() -> None:
    a = Counters(drafts=5, drafted=9, accepted=4, accept_pos=(3, 1), generated=10, started=1.0)
    b = Counters(drafts=5, drafted=9, accepted=4, accept_pos=(3, 1), generated=20, started=1.0)
    d = p.delta(a, b)
    assert d.reasons == ("no_drafts",)
    assert p.step_counts(d, 10).steps == 9
    assert p.acceptance(d).reasons == ("no_drafts",)


def test_positions_that_cannot_be_are_out_of_range() -> None:
    a = Counters(drafts=0, drafted=0, accepted=0, accept_pos=(0, 0))
    b = Counters(drafts=4, drafted=8, accepted=3, accept_pos=(1, 2))
    assert p.delta(a, b).reasons == ("out_of_range",)


def test_more_accepted_than_the_answer_holds_gives_no_steps() -> None:
    d = p.Delta(drafts=4, drafted=16, accepted=12)
    counts = p.step_counts(d, 10)
    assert counts.steps is None
    assert counts.reasons == ("out_of_range",)


# --- properties

counts_ = st.integers(0, 2**53)


@given(counts_, counts_, st.sampled_from(["vllm:", "sglang:", "sglang_", "llamacpp:"]), st.booleans())
def test_what_is_written_is_read(a: int, b: int, prefix: str, total: bool) -> None:
    name = f"{prefix}spec_decode_num_drafts{'_total' if total else ''}"
    text = f'# TYPE {name} counter\n{name}{{dp="0"}} {a}\n{name}{{dp="1"}} {b}\n'
    value = p.read(text).drafts
    assert value is not None
    assert math.isclose(value, a + b, rel_tol=1e-15)


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        counters = p.read(text)
    except p.NotPrometheus:
        return
    assert counters.drafts is None or counters.drafts >= 0


maybe = st.none() | st.integers(0, 1000)
scrapes = st.builds(
    Counters,
    drafts=maybe,
    drafted=maybe,
    accepted=maybe,
    accept_pos=st.none() | st.lists(st.integers(0, 50), max_size=4).map(tuple),
    generated=maybe,
    started=st.none() | st.sampled_from([1.0, 2.0]),
)


@given(scrapes, scrapes, st.none() | st.integers(0, 500))
def test_nothing_is_ever_negative_and_every_none_has_a_reason(
    a: Counters, b: Counters, completion: int | None
) -> None:
    d = p.delta(a, b)
    for name in ("drafts", "drafted", "accepted", "generated"):
        value = getattr(d, name)
        assert value is None or value >= 0
    counts = p.step_counts(d, completion)
    assert counts.undrafted is None or counts.undrafted >= 0
    if counts.steps is not None:
        assert completion - 1 == counts.accepted + counts.drafts + counts.undrafted
    else:
        assert counts.reasons
    figures = p.acceptance(d, depth=3)
    assert figures.rate is None or 0 <= figures.rate <= 1
    assert figures.length is None or 1 <= figures.length <= 4
    assert (figures.rate is None) == bool(figures.reasons)
