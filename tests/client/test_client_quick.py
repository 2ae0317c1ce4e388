"""The quick ways through a usual stream give what the long ways give."""

import itertools
import json

import httptools
from hypothesis import given
from hypothesis import strategies as st

from campaign.client import reading, sse
from campaign.client.http1 import Response, parse_response
from campaign.client.interpret import read
from campaign.client.stamps import NONE, realtimes_ns

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def framed(data, form):
    return form % len(data) + b"\r\n" + data + b"\r\n"


parts = st.lists(
    st.tuples(
        st.one_of(
            st.binary(min_size=1, max_size=20),
            st.sampled_from([b"\r\n", b"5\r\n", b"0\r\n\r\n", b"5\r\n5\r\n", b"1\r\na\r\n", b"x" * 300]),
        ),
        st.sampled_from([b"%x", b"%X", b"0%x", b"%x;a=b"]),
    ),
    max_size=12,
)


class Plain:
    """What llhttp alone says."""

    def __init__(self):
        self.body, self.complete = b"", False

    def on_body(self, data):
        self.body += b"" if self.complete else data

    def on_message_complete(self):
        self.complete = True


@given(parts, st.booleans(), st.data())
def test_whole_chunks_are_taken_as_llhttp_takes_them(chunks, ended, data):
    whole = [framed(*chunk) for chunk in chunks] + [b"0\r\n\r\n"] * ended
    raw = HEAD + b"".join(whole)
    bounds = {len(HEAD) + sum(map(len, whole[:i])) for i in range(len(whole) + 1)}
    cuts = bounds | data.draw(st.sets(st.integers(1, len(raw)), max_size=6))
    cuts -= data.draw(st.sets(st.sampled_from(sorted(cuts)), max_size=6))
    edges = sorted({0, len(raw)} | cuts)
    reads = [raw[a:b] for a, b in itertools.pairwise(edges)]
    truth = Plain()
    parser = httptools.HttpResponseParser(truth)
    brought = []
    for number, one in enumerate(reads):
        before = len(truth.body)
        parser.feed_data(one)
        if len(truth.body) > before:
            brought.append((number, truth.body[before:]))
    found = parse_response(list(enumerate(reads)))
    assert (found.pieces, found.complete, found.error) == (tuple(brought), truth.complete, None)


def event(text, *, like=0, escape=False):
    value = {"id": "x", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]}
    if like == 1:
        value["id"] = "y"
    if like == 2:
        value["usage"] = {"completion_tokens": 3}
    if like == 3:
        value["choices"][0] = {"index": 0, "logprobs": {"content": text}, "delta": {"content": "same"}}
    if like == 4:
        return text.encode("utf-8", "replace") + b"\n\n"
    line = json.dumps(value, separators=(",", ":"), ensure_ascii=escape)
    return b"data: " + line.encode("utf-8", "surrogatepass") + b"\n\n"


texts = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["content", "same", '"', '","', "\n\n", "\\", "\ud83d", "é", '"}}]}\n\ndata: {"']),
)
events = st.lists(
    st.builds(event, texts, like=st.sampled_from([0, 0, 0, 0, 1, 2, 3, 4]), escape=st.booleans()),
    max_size=40,
)


def one_by_one(response):
    """Every event through the JSON parser."""
    take = reading._Taker(response)
    stream = sse._parse(response.body, first=True)
    for one in stream.events:
        take.event(one.data, one.type, one.end)
    take.reading.tail = stream.tail
    return take.finished()


@given(events, st.sampled_from([b"", b"data: [DONE]\n\n", b"data: {", b": note\n\ndata: 1\n\n"]), st.data())
def test_events_alike_are_taken_as_each_would_be(lines, end, data):
    body = b"".join(lines) + end
    bounds = {sum(map(len, lines[:i])) for i in range(1, len(lines) + 1)}
    cuts = bounds if data.draw(st.booleans()) else set()
    if len(body) > 1:
        cuts = cuts | data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8))
    edges = sorted({0, len(body)} | cuts)
    pieces = tuple((i, body[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges)))
    response = Response(200, "text/event-stream", pieces, True, True, 0, None)
    assert read(response) == one_by_one(response)


def test_a_long_stream_in_blocks():
    """Beyond one block, with events of other forms between."""
    lines = [event(f"w{i}", like=1 if i % 700 == 0 else 0) for i in range(2000)]
    pieces = tuple(enumerate(lines))
    response = Response(200, "text/event-stream", pieces, True, True, 0, None)
    found = read(response)
    assert found == one_by_one(response)
    assert found.texts == [f"w{i}" for i in range(2000)]
    assert found.merged_reads == 0


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 2**33), st.integers(0, 10**9 - 1)))))
def test_stamps_as_the_kernel_writes_them(times):
    raw = [NONE if t is None else b"".join(x.to_bytes(8, "little") for x in (*t, 0, 0, 0, 0)) for t in times]
    assert realtimes_ns(raw) == [0 if t is None else t[0] * 10**9 + t[1] for t in times]
