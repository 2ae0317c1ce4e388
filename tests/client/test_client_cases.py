"""Streams that broke real clients, through the parser (exact times) and through a real socket."""

import json
import math
from itertools import accumulate
from pathlib import Path

import pytest

from campaign.client.base import Job, Outcome
from campaign.client.http import HttpClient
from campaign.client.http1 import Piece, Response
from campaign.client.interpret import Interpreted, conclude
from campaign.client.measure import row_fields
from campaign.client.reader import Exchange
from campaign.testing.sse_server import Script, ScriptServer

CASES = Path(__file__).parents[1] / "data" / "cases"
NAMES = sorted(
    p.name.removesuffix(".expect.json")
    for p in CASES.glob("0[12468]_*.expect.json")
    if (CASES / p.name.replace(".expect.json", ".sse")).exists()
)
MS = 1_000_000


def load(name):
    case = json.loads((CASES / f"{name}.expect.json").read_text())
    body = (CASES / f"{name}.sse").read_bytes()
    feed = [(f["at_ms"], body[f["start"] : f["end"]]) for f in case["feed"]]
    assert b"".join(part for _, part in feed) == body
    return case, feed


def expect_tokens(case):
    request = case["request"]
    return request["max_tokens"] if request["ignore_eos"] else None


def through_parser(name) -> Interpreted:
    case, feed = load(name)
    clean = case["close"] == "clean"
    end = feed[-1][0] * MS
    reads = tuple((at * MS, part) for at, part in feed)
    response = Response(
        case["http_status"],
        case["content_type"],
        tuple(Piece(*r) for r in reads),
        True,
        clean,
        end if clean else None,
        None,
    )
    exchange = Exchange(0, 0, reads, "complete" if clean else "reset", end)
    return conclude("r", exchange, response, expect_tokens(case))


def test_all_stream_cases_are_here():
    assert len(NAMES) == 13


def check(name: str, case, outcome: Outcome, text: str, row, *, exact: bool) -> None:
    """Hold what was read against every expectation of the case; an unknown key is an error of the test."""
    for key, value in case["expect"].items():
        match key:
            case "state":
                assert outcome.state == value
                assert row["state"] == value
            case "text" | "partial_text":
                assert text == value
            case "has_replacement_char":
                assert ("\ufffd" in text) == value
            case "data_events":
                assert outcome.events == value
            case "content_chunks":
                assert outcome.content_chunks == value
            case "completion_tokens":
                assert row["completion_tokens"] == value
            case "finish_reason":
                assert outcome.finish == value
            case "error_code":
                assert outcome.error_code == str(value)
            case "reason":
                assert value in outcome.reasons
            case "ttft_ms":
                if exact or value is None:
                    assert row["ttft_ms"] == value
                else:
                    assert 0 < row["ttft_ms"] <= row["e2e_ms"]
            case "decode_tps":
                if exact or value is None:
                    assert row["decode_tok_s"] == value
                else:
                    assert row["decode_tok_s"] is not None
                    assert row["decode_tok_s"] > 0
            case "tpot_ms":
                if exact or value is None:
                    assert row["tpot_ms"] == value
            case "last_token_ms":
                if exact:
                    assert outcome.last_ns == value * MS
            case "last_token_ms_any_of":
                if exact:
                    assert outcome.last_ns in [v * MS for v in value]
            case "token_source":
                assert (row["completion_tokens"] is not None) == (value == "usage")
            case "pair_usable":
                assert (row["decode_tok_s"] is not None) == value
            case "in_ttft_stats" | "in_latency_stats":
                assert (row["ttft_ms"] is not None) == value
            case "in_throughput":
                assert (row["decode_tok_s"] is not None) == value
            case "must_not_report":
                if exact:
                    assert not math.isclose(row["decode_tok_s"], value["decode_tps"], rel_tol=0.1)
                    assert not math.isclose(row["tpot_ms"], value["tpot_ms"], rel_tol=0.1)
            case "mean_chunk_gap_ms":
                if exact:
                    assert row["window_ms"] / (outcome.content_chunks - 1) == value
            case "raw_kept" | "raw_tail_kept" | "min_gap_ms":
                pass  # held in the tests of sidecars and of gaps below
            case _:
                pytest.fail(f"{name}: expectation {key!r} is not checked")


@pytest.mark.parametrize("name", NAMES)
def test_parser(name):
    case, _ = load(name)
    read = through_parser(name)
    row = row_fields(read.outcome, None, speculative=False)
    check(name, case, read.outcome, read.reading.text, row, exact=True)
    gaps = [b.ns - a.ns for a, b in zip(read.reading.chunks, read.reading.chunks[1:], strict=False)]
    assert all(gap >= 0 for gap in gaps)
    if case["expect"].get("raw_tail_kept"):
        assert read.reading.tail.endswith(b'"content":"\xe2')
    assert all(v is None or not isinstance(v, float) or math.isfinite(v) for v in row.values())


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
@pytest.mark.parametrize("name", NAMES)
async def test_socket(name, framing, tmp_path):
    case, feed = load(name)
    close = "clean" if case["close"] == "clean" else "rst"
    script = Script(tuple(feed), case["http_status"], case["content_type"], framing, close)
    client = HttpClient()
    async with ScriptServer(script, scale=0.05) as server:
        outcome = await client.run(
            Job(
                "r1",
                server.url,
                "/v1/chat/completions",
                {"stream": True},
                20,
                expect_tokens(case),
                sidecar_dir=str(tmp_path),
            )
        )
    await client.close()
    kept = json.loads((tmp_path / "text.jsonl").read_text())
    text = kept["content"] + kept["reasoning"] + kept["tool_call"]
    row = row_fields(outcome, None, speculative=False)
    check(name, case, outcome, text, row, exact=False)
    times = json.loads((tmp_path / "chunks.jsonl").read_text())
    assert times["read_ns"] == sorted(times["read_ns"])
    assert all(ns > 0 for ns in times["read_ns"])
    assert set(times["event_ns"]) <= set(times["read_ns"])
    body = b"".join(part for _, part in feed)
    if kept["body"] is not None:
        assert kept["body"].encode() == body
    else:
        assert case["expect"]["raw_tail_kept"]
        assert kept["tail_b64"]


@pytest.mark.parametrize("name", NAMES)
async def test_socket_reads_are_the_cuts_of_the_case(name, tmp_path):
    """Each read of the socket ends where the case cuts its body, and no two writes are read as one."""
    case, feed = load(name)
    close = "clean" if case["close"] == "clean" else "rst"
    script = Script(tuple(feed), case["http_status"], case["content_type"], "close", close)
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        client = HttpClient()
        # On a busy machine two writes may still be read as one: then it is done again, slower.
        async with ScriptServer(script, scale=0.0, gap_s=0.005 * (1 + 9 * attempt)) as server:
            where = server.url
            await client.run(
                Job("r", where, "/v1/chat/completions", {"stream": True}, 20, None, sidecar_dir=str(folder))
            )
        await client.close()
        record = json.loads((folder / "chunks.jsonl").read_text())
        ends, sent = list(accumulate(record["read_bytes"])), list(accumulate(len(part) for _, part in feed))
        head = ends[-1] - sent[-1]
        found = [end - head for end in ends if end > head]
        assert set(found) <= set(sent)
        if found == sent:
            return
    pytest.fail(f"reads end at {found}, writes at {sent}")
