"""Bytes captured from real servers parse to what the servers' own counters say."""

import json
from pathlib import Path

import pytest

from campaign.client.http1 import Piece, Response
from campaign.client.interpret import conclude
from campaign.client.measure import row_fields
from campaign.client.reader import Exchange

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"


def run(reads, expect=None):
    pieces = tuple(Piece(ns, data) for ns, data in reads)
    response = Response(200, "text/event-stream", pieces, True, True, pieces[-1].ns, None)
    return conclude("r", Exchange(0, 0, tuple(reads), "complete", pieces[-1].ns), response, expect)


@pytest.mark.parametrize(
    ("name", "completion", "draft", "accepted"),
    [("llamacpp_stream", 48, 39, 16), ("llamacpp_stream_spec", 64, 101, 32)],
)
def test_llamacpp(name, completion, draft, accepted):
    read = run([(1, (FIXTURES / f"{name}.txt").read_bytes())], completion)
    outcome = read.outcome
    assert outcome.state == "ok"
    assert outcome.finish == "length"
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens, outcome.usage.cached_tokens) == (
        273,
        completion,
        0,
    )
    assert outcome.timings["predicted_n"] == completion
    assert outcome.timings["draft_n"] == draft
    assert outcome.timings["draft_n_accepted"] == accepted
    assert outcome.first_chunk_tokens is None
    assert read.reading.text.lstrip().startswith("{")


def test_vllm_chunks_are_not_tokens():
    read = run([(1, (FIXTURES / "vllm_cpu_stream.txt").read_bytes())], 48)
    assert read.outcome.state == "ok"
    assert read.outcome.usage.completion_tokens == 48
    assert read.outcome.content_chunks == 23


SGLANG = sorted(FIXTURES.glob("sglang_*.timed.json"))


def test_all_are_here():
    assert len(SGLANG) == 10


@pytest.mark.parametrize("path", SGLANG, ids=lambda p: p.name.removesuffix(".timed.json"))
def test_sglang(path):
    timed = [(round(s * 1e9), line.encode() + b"\n\n") for s, line in json.loads(path.read_text())]
    read = run(timed, 48)
    outcome, row = read.outcome, row_fields(read.outcome, None, speculative=False)
    # The timed and the raw capture are one stream.
    raw = run([(1, path.with_name(path.name.replace(".timed.json", ".txt")).read_bytes())], 48)
    assert raw.reading.text == read.reading.text
    assert raw.outcome.events == outcome.events == len(timed)
    assert outcome.state == "ok"
    assert outcome.finish == "length"
    nousage, continuous = "nousage" in path.name, "_cont" in path.name
    assert row["completion_tokens"] == (None if nousage else 48)
    assert outcome.first_chunk_tokens == (1 if continuous else None)
    tokens = read.reading.text.split()
    assert len(tokens) == 48  # the model of this capture says one word a token
    assert row["ttft_ms"] == outcome.first_ns / 1e6
    if "chat" in path.name:
        assert outcome.first_ns > timed[0][0]  # the role chunk is not a token
    if nousage:
        assert row["decode_tok_s"] is None
        assert "no_usage" in row["reasons"]
    else:
        assert row["rate_definition"] == ("after-first-chunk" if continuous else "all-but-one")
        assert row["tokens_in_window"] == 47
        assert row["decode_tok_s"] == pytest.approx(47e3 / row["window_ms"])
    if "ngram4" in path.name:
        assert outcome.content_chunks < 48
    else:
        assert outcome.content_chunks == 48
    if continuous:
        last = [c.tokens for c in read.reading.chunks]
        assert last == sorted(last)
        assert last[-1] == 48
