"""Framing: any cut of any bytes gives the same events."""

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given

from campaign.client.http1 import Piece, Response, parse_response
from campaign.client.interpret import read
from campaign.client.sse import parse

WIRE = st.lists(
    st.sampled_from(
        [
            b"\n",
            b"\r",
            b"\r\n",
            b":",
            b" ",
            b"data",
            b"data:",
            b"event: x",
            b"id: 1",
            b"\xe2\x80\xa8",
            b"\xc2\x85",
            b"{}",
            b"\x00",
            b"\xef\xbb\xbf",
            b"[DONE]",
        ]
    ),
    max_size=40,
).map(b"".join)


def datas(body):
    return [e.data for e in parse(body).events]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (b"data:a\n\ndata: b\n\ndata:  c\n\n", [b"a", b"b", b" c"]),
        (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [b"a", b"b", b"c"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b": ping\n\ndata: a\n\n: ping\n\n", [b"a"]),
        (b"event: x\nid: 3\n\ndata: a\n\n", [b"a"]),
        (b"data\n\n", [b""]),
        (b"\xef\xbb\xbfdata: a\n\n", [b"a"]),
        (b"data: \xe2\x80\xa8\xc2\x85\x0b\x0c\n\n", [b"\xe2\x80\xa8\xc2\x85\x0b\x0c"]),
        (b"retry: 5\nfoo: bar\ndata: a\n\n", [b"a"]),
        (b"data: a\n", []),
        (b"", []),
    ],
)
def test_framing(body, events):
    assert datas(body) == events


def test_type_and_id():
    (first, second) = parse(b"event: error\nid: 7\ndata: a\n\ndata: b\n\n").events
    assert (first.type, first.id) == ("error", "7")
    assert (second.type, second.id) == ("message", "7")


@pytest.mark.parametrize(
    ("body", "tail"),
    [
        (b"data: a\n\n", b""),
        (b"data: a\r\n\r\n", b""),
        (b"data: a\n\n\r\n", b""),
        (b"data: a\n\n: ping\n", b""),
        (b"data: a\n\n: pi", b""),
        (b"data: a\n\ndata: b", b"data: b"),
        (b"data: a\n\ndata: b\n", b"data: b\n"),
        (b"data: a\n\nid: 1\r", b"id: 1\r"),
        (b"\xe2", b"\xe2"),
    ],
)
def test_tail(body, tail):
    assert parse(body).tail == tail


def test_an_event_is_complete_with_its_carriage_return():
    body = b"data: a\r\n\r\ndata: b\r\n\r\n"
    assert [e.end for e in parse(body).events] == [body.index(b"\r\n\r\n") + 3, len(body) - 1]


@given(WIRE)
def test_prefixes_only_ever_add_events(body):
    """Incremental view: what was dispatched after n bytes stays, and `end` says when it appeared."""
    whole = parse(body).events
    for n in range(len(body) + 1):
        expected = [e.data for e in whole if e.end <= n]
        assert datas(body[:n]) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_some_stream(body):
    parse(body)


CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}'
TEXTS = st.lists(st.text(alphabet="a\u2028\u0085é漢🎈\u00a0", min_size=1, max_size=4), min_size=1, max_size=6)


@given(TEXTS, st.sampled_from([b"\n", b"\r\n", b"\r"]), st.data())
def test_cuts_change_times_and_nothing_else(texts, eol, data):
    stop = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}'
    parts = [CHUNK % t.encode() for t in texts] + [stop, b"data: [DONE]"]
    body = b"".join(p + eol + eol for p in parts)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=20)))
    bounds = [0, *cuts, len(body)]
    pieces = tuple(Piece(i, body[a:b]) for i, (a, b) in enumerate(pairwise(bounds)))
    reading = read(Response(200, "", pieces, True, True, 0, None))
    assert [c.text for c in reading.chunks] == texts
    assert reading.text == "".join(texts)
    assert reading.finish == "stop"
    assert reading.done
    assert reading.events == len(parts)
    assert reading.error is None
    assert reading.tail == b""
    stamps = [c.ns for c in reading.chunks]
    assert stamps == sorted(stamps)
    # Each event is timed by the first read that makes the prefix hold it.
    for index, chunk in enumerate(reading.chunks):
        prefix = body[: bounds[chunk.ns + 1]]
        assert len(parse(prefix).events) > index
        assert len(parse(body[: bounds[chunk.ns]]).events) <= index


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=6), st.data())
def test_chunked_bodies_cut_anywhere(bodies, data):
    wire = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    wire += b"".join(b"%x\r\n%b\r\n" % (len(b), b) for b in bodies) + b"0\r\n\r\n"
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, len(wire) - 1), max_size=20))), len(wire)]
    response = parse_response([(i, wire[a:b]) for i, (a, b) in enumerate(pairwise(cuts))])
    assert response.body == b"".join(bodies)
    assert response.complete
    assert response.framed
    assert response.error is None
    assert response.complete_ns == len(cuts) - 2


@given(st.binary(max_size=120))
def test_any_bytes_are_some_response(wire):
    read(parse_response([(1, wire)]))
    read(parse_response([(1, b"HTTP/1.1 200 OK\r\n\r\n"), (2, wire)]))
