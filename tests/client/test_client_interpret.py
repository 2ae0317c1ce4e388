"""Channels, usage, errors and states."""

import json

import pytest

from campaign.client.http1 import Piece, Response
from campaign.client.interpret import conclude
from campaign.client.reader import Exchange

DONE = b"data: [DONE]\n\n"


def chat(delta, finish=None, **extra):
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **extra}


STOP = chat({}, "stop")


def usage(n, **extra):
    return {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n, **extra},
    }


def run(
    *events,
    end="complete",
    complete=True,
    framed=True,
    done=True,
    expect=None,
    status=200,
    kind="text/event-stream",
):
    """One event a read, stamped 1, 2, ... ms after the request."""
    parts = [e if isinstance(e, bytes) else b"data: " + json.dumps(e).encode() + b"\n\n" for e in events]
    if done:
        parts.append(DONE)
    pieces = tuple(Piece((i + 1) * 10**6, p) for i, p in enumerate(parts))
    last = len(pieces) * 10**6
    response = Response(status, kind, pieces, framed, complete, last if complete else None, None)
    exchange = Exchange(0, 0, tuple((p.ns, p.data) for p in pieces), end, last)
    return conclude("r", exchange, response, expect)


@pytest.mark.parametrize(
    ("delta", "channel"),
    [
        ({"content": "x"}, "content"),
        ({"reasoning_content": "x"}, "reasoning"),
        ({"reasoning": "x"}, "reasoning"),
        ({"reasoning": "x", "reasoning_content": "x"}, "reasoning"),
        ({"refusal": "x"}, "content"),
        ({"tool_calls": [{"index": 0, "function": {"name": "x", "arguments": ""}}]}, "tool_call"),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]}, "tool_call"),
        ({"function_call": {"name": "x"}}, "tool_call"),
    ],
)
def test_the_first_token_of_any_channel_starts_the_clock(delta, channel):
    read = run(
        chat({"role": "assistant", "content": ""}), chat(delta), chat({"content": "y"}), STOP, usage(2)
    )
    assert read.outcome.first_ns == 2_000_000
    assert read.outcome.last_ns == 3_000_000
    assert read.outcome.content_chunks == 2
    assert read.reading.chunks[0].channel == channel
    assert read.reading.text == "xy"


@pytest.mark.parametrize(
    "delta",
    [
        {},
        {"role": "assistant"},
        {"content": ""},
        {"content": None},
        {"content": None, "reasoning_content": None, "tool_calls": None},
        {"reasoning_content": ""},
        {"tool_calls": []},
        {
            "tool_calls": [
                {"index": 0, "id": "c", "type": "function", "function": {"name": "", "arguments": ""}}
            ]
        },
        {"tool_calls": [{"index": 0}]},
        {"content": 0},
        None,
    ],
)
def test_what_is_not_a_token(delta):
    read = run(chat(delta), chat({"content": "y"}), STOP, usage(1))
    assert read.outcome.first_ns == 2_000_000
    assert read.outcome.content_chunks == 1


def test_completions_text():
    read = run(
        {"choices": [{"text": "", "finish_reason": None}]},
        {"choices": [{"text": "a", "finish_reason": "stop"}]},
        usage(1),
    )
    assert (read.outcome.state, read.outcome.first_ns, read.reading.text) == ("ok", 2_000_000, "a")


def test_an_event_with_two_channels_is_one_chunk():
    read = run(chat({"content": "a", "reasoning": "b"}), STOP, usage(2))
    assert read.outcome.content_chunks == 1
    assert read.reading.text == "ab"


def test_usage_is_the_last_that_is_not_null():
    empty = {"choices": [], "usage": None, "sglext": {"cached_tokens_details": {"device": 63}}}
    read = run(chat({"content": "a"}), STOP, usage(5, prompt_tokens_details={"cached_tokens": 2}), empty)
    assert read.outcome.usage.completion_tokens == 5
    assert read.outcome.usage.cached_tokens == 2
    assert read.outcome.first_chunk_tokens is None
    assert read.outcome.timings == {"sglext": {"cached_tokens_details": {"device": 63}}}


def test_continuous_usage_gives_the_tokens_of_the_first_chunk():
    read = run(
        chat({"role": "assistant"}, usage={"completion_tokens": 0}),
        chat({"content": "abc"}, usage={"completion_tokens": 3}),
        chat({"content": "d"}, usage={"completion_tokens": 4}),
        STOP,
        usage(4),
    )
    assert read.outcome.first_chunk_tokens == 3


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, None])
def test_a_count_is_a_whole_number_or_unknown(value):
    read = run(chat({"content": "a"}), STOP, {"choices": [], "usage": {"completion_tokens": value}})
    assert read.outcome.usage.completion_tokens is None
    assert "no_usage" in read.outcome.reasons


def test_surrogates_cut_between_chunks_are_one_character():
    read = run(
        b'data: {"choices":[{"delta":{"content":"\\ud83c"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":"\\udf88"}}]}\n\n',
        STOP,
    )
    assert read.reading.text == "\N{BALLOON}"
    assert read.outcome.text_sha256 is not None


def test_a_lone_surrogate_does_not_break_the_hash():
    read = run(b'data: {"choices":[{"delta":{"content":"\\ud83c"}}]}\n\n', STOP)
    assert read.outcome.state == "ok"
    assert len(read.outcome.text_sha256) == 64


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ({"error": {"message": "m", "code": 500}}, "500"),
        ({"error": {"message": "m", "type": "Overloaded", "code": None}}, "Overloaded"),
        ({"error": "plain"}, "error"),
        ({"object": "error", "message": "m", "code": 400}, "400"),
        ({"choices": [], "error": {"message": "m", "code": "overloaded"}}, "overloaded"),
        (b'event: error\ndata: {"message":"m","code":503}\n\n', "503"),
        (b"data: not json\n\n", "bad_event"),
        (b"data: \xff\xfe\n\n", "bad_event"),
        (b"data: [1]\n\n", "bad_event"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "bad_event"),
        (chat({}, "error"), "finish_error"),
        (chat({}, "abort"), "finish_abort"),
    ],
)
def test_an_error_anywhere_fails_the_request_and_keeps_the_text(event, code):
    for events in (
        (event,),
        (chat({"content": "a"}), event),
        (chat({"content": "a"}), STOP, usage(1), event),
    ):
        read = run(*events)
        assert read.outcome.state == "failed"
        assert read.outcome.error_code == code
        assert read.reading.text == ("a" if len(events) > 1 else "")


def test_a_null_error_is_none():
    assert run(chat({"content": "a"}, error=None), STOP, usage(1)).outcome.state == "ok"


@pytest.mark.parametrize(
    ("arguments", "state"),
    [
        ({"done": True}, "ok"),
        ({"done": False}, "ok"),  # framed by HTTP, so its end is proven
        ({"done": False, "framed": False, "complete": False, "end": "eof"}, "incomplete"),
        ({"done": True, "framed": False, "complete": False, "end": "eof"}, "ok"),
        ({"done": False, "complete": False, "end": "eof"}, "truncated"),
        ({"done": True, "complete": False, "end": "eof"}, "ok"),
        ({"done": True, "complete": False, "end": "reset"}, "ok"),
        ({"done": False, "complete": False, "end": "reset"}, "failed"),
        ({"done": False, "complete": False, "end": "timeout"}, "failed"),
        ({"done": False, "complete": False, "end": "cancelled"}, "cancelled"),
        ({"done": True, "expect": 2}, "ok"),
        ({"done": True, "expect": 3}, "short"),
    ],
)
def test_how_a_stream_with_a_finish_reason_ends(arguments, state):
    assert run(chat({"content": "ab"}), STOP, usage(2), **arguments).outcome.state == state


@pytest.mark.parametrize("done", [True, False])
def test_tokens_without_a_finish_reason_are_incomplete(done):
    assert run(chat({"content": "ab"}), usage(2), done=done).outcome.state == "incomplete"


def test_a_stream_cut_inside_an_event_is_truncated():
    read = run(chat({"content": "ab"}), b'data: {"choi', done=False)
    assert read.outcome.state == "truncated"
    assert read.reading.tail == b'data: {"choi'


def test_nothing_at_all():
    assert run(done=False).outcome.state == "incomplete"
    assert run(done=True).outcome.state == "empty"


def test_done_without_its_blank_line_counts():
    read = run(
        chat({"content": "a"}),
        STOP,
        usage(1),
        b"data: [DONE]\n",
        done=False,
        framed=False,
        complete=False,
        end="eof",
    )
    assert (read.outcome.state, read.outcome.events) == ("ok", 4)


@pytest.mark.parametrize(
    ("body", "status", "kind", "code", "message"),
    [
        (b'{"error":{"message":"busy","code":503}}', 503, "application/json", "503", "busy"),
        (b'{"object":"error","message":"bad","code":400}', 400, "application/json", "400", "bad"),
        (b"Bad Gateway", 502, "text/html", "502", "Bad Gateway"),
        (b'{"detail":"not here"}', 404, "application/json", "404", "not here"),
        (b'{"choices":[]}', 200, "application/json", "not_a_stream", '{"choices": []}'),
        (b'{"error":{"message":"x","type":"T"}}', 200, "", "T", "x"),
        (b"<html>", 200, "text/html", "not_a_stream", "<html>"),
    ],
)
def test_answers_that_are_no_stream(body, status, kind, code, message):
    outcome = run(body, done=False, status=status, kind=kind).outcome
    assert (outcome.state, outcome.error_code, outcome.error) == ("failed", code, message)
    assert outcome.http_status == status


def test_llamacpp_timings_are_flat():
    last = usage(1)
    last["timings"] = {"predicted_n": 1, "draft_n": 3}
    assert run(chat({"content": "a"}), STOP, last).outcome.timings == {"predicted_n": 1, "draft_n": 3}
