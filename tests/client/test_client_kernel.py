"""Kernel stamps, lag figures, planned starts and the reference server, over real sockets."""

import asyncio
import json
import sys
import threading
import time
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from campaign.client import lag, stamps
from campaign.client.base import Job
from campaign.client.http import HttpClient
from campaign.client.http1 import parse_response
from campaign.client.interpret import read
from campaign.client.pacer import Pacer
from campaign.client.selfcheck import rank
from campaign.client.split import processes_needed
from campaign.testing.reference_server import Answer, ReferenceServer, Schedule

linux = pytest.mark.skipif(sys.platform != "linux", reason="kernel receive stamps are Linux's")
ORACLE = {"ttft_ms": 5.0, "rate": 500.0, "tokens": 20}


@pytest.fixture(scope="module")
def server():
    with ReferenceServer() as running:
        yield running


@pytest.fixture
async def client():
    client = HttpClient()
    yield client
    await client.close()


def job(server, tmp_path=None, start_ns=None, **schedule):
    plan = asdict(Schedule(**{**ORACLE, **schedule}))
    body = {"model": "reference", "stream": True, "schedule": plan}
    folder = None if tmp_path is None else str(tmp_path)
    return Job(
        "r",
        server.url,
        "/v1/chat/completions",
        body,
        30,
        plan["tokens"],
        start_ns=start_ns,
        sidecar_dir=folder,
    )


@linux
async def test_kernel_stamps_follow_the_sends(server, client, tmp_path):
    await client.fetch(server.url + "/stamps", 10)
    outcome = await client.run(job(server, tmp_path))
    (truth,) = json.loads((await client.fetch(server.url + "/stamps", 10))[1]).values()
    record = json.loads((tmp_path / "chunks.jsonl").read_text())
    assert (outcome.state, outcome.stamp_source, outcome.content_chunks) == ("ok", "kernel", 20)
    at = [record["sent_ns"] + ns for ns in record["event_ns"]]
    assert len(at) == len(truth["send_ns"])
    # A receive stamp never lies before its send, but for what the offset is uncertain.
    assert all(a > abs(s) - 50_000 for a, s in zip(at, truth["send_ns"], strict=True))
    assert all(u >= k for u, k in zip(record["read_user_ns"], record["read_ns"], strict=True))
    assert outcome.segments >= 21
    assert outcome.user_lag


async def test_user_stamps_where_asked_for(server):
    client = HttpClient(kernel_stamps=False)
    outcome = await client.run(job(server))
    await client.close()
    assert (outcome.state, outcome.stamp_source) == ("ok", "user")


async def test_no_probes_no_lag(server):
    client = HttpClient(probes=False)
    outcome = await client.run(job(server))
    await client.close()
    assert outcome.state == "ok"
    assert outcome.lag == ()


@linux
async def test_a_step_of_the_clock_voids(server, client, monkeypatch):
    real = stamps.offset
    calls = []

    def offset():
        calls.append(1)
        found = real()
        return found if len(calls) == 1 else found._replace(ns=found.ns + 1_000_000)

    await client.run(job(server))
    monkeypatch.setattr(stamps, "offset", offset)
    outcome = await client.run(job(server))
    assert "clock_step" in outcome.reasons


def test_stepped_allows_for_uncertainty():
    first = stamps.Offset(0, 500)
    assert not stamps.stepped(first, stamps.Offset(20_900, 500))
    assert stamps.stepped(first, stamps.Offset(21_100, 500))


async def test_a_planned_start(server, client):
    due = time.monotonic_ns() + 50_000_000
    outcome = await client.run(job(server, start_ns=due))
    assert outcome.sent_ns >= due
    assert outcome.start_error_us == (outcome.sent_ns - due) / 1e3
    late = await client.run(job(server, start_ns=due))
    assert late.state == "ok"
    assert late.start_error_us > 0


@pytest.mark.parametrize(
    ("schedule", "chunks", "state"),
    [
        ({"cut_seed": 3}, 20, "ok"),
        ({"per_event": 3}, 7, "ok"),
        ({"stall_at": 2, "stall_ms": 20.0}, 20, "ok"),
        ({"reset_at": 4}, 4, "failed"),
        ({"paced": False, "tokens": 3000}, 3000, "ok"),
    ],
)
async def test_what_the_server_can_do(server, client, schedule, chunks, state):
    outcome = await client.run(job(server, **schedule))
    assert (outcome.state, outcome.content_chunks) == (state, chunks)
    if schedule.get("per_event"):
        assert outcome.first_chunk_tokens == 3
    if state == "ok":
        assert outcome.usage.completion_tokens == schedule.get("tokens", 20)


async def test_many_at_once_lose_nothing(server, client):
    outcomes = await asyncio.gather(*(client.run(job(server, rate=50.0, tokens=10)) for _ in range(200)))
    assert {o.state for o in outcomes} == {"ok"}
    assert {o.content_chunks for o in outcomes} == {10}


def body(tokens: int, seed: int | None) -> list[bytes]:
    answer = Answer(
        "cmpl-1", Schedule(tokens=tokens, cut_seed=seed, per_event=2 if seed else 1), 0, chat=True
    )
    parts = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n",
        answer.data,
    ]
    while answer.advance():
        parts.append(answer.data)
    return parts


@given(st.integers(1, 30), st.one_of(st.none(), st.integers(1, 9)), st.data())
def test_any_cut_gives_the_same_events(tokens, seed, data):
    whole = b"".join(body(tokens, seed))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    reads = [(i, whole[a:b]) for i, (a, b) in enumerate(zip([0, *cuts], [*cuts, len(whole)], strict=True))]
    cut, one = read(parse_response(reads)), read(parse_response([(0, whole)]))
    assert [(c.text, c.tokens, c.event) for c in cut.chunks] == [
        (c.text, c.tokens, c.event) for c in one.chunks
    ]
    assert (cut.text, cut.usage, cut.finish, cut.done, cut.events) == (
        one.text, one.usage, one.finish, one.done, one.events
    )  # fmt: skip
    assert sum(cut.read_events) == cut.events
    assert all(a.ns <= b.ns for a, b in zip(cut.chunks, cut.chunks[1:], strict=False))


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=12), st.booleans())
def test_events_alike_read_as_json_does(texts, spaced):
    """The quick way for events that differ only in their text gives what a JSON parser gives."""
    separators = (", ", ": ") if spaced else (",", ":")
    events = [
        {"id": "x", "choices": [{"index": 0, "delta": {"content": t}, "finish_reason": None}]} for t in texts
    ]
    lines = [json.dumps(e, separators=separators, ensure_ascii=i % 2 == 0) for i, e in enumerate(events)]
    raw = b"".join(b"data: " + line.encode("utf-8", "surrogatepass") + b"\n\n" for line in lines)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(raw)
    found = read(parse_response([(0, head + raw)]))
    assert [c.text for c in found.chunks] == texts


@given(st.lists(st.integers(-500, 10**9), min_size=1, max_size=200), st.sampled_from([0.5, 0.99, 1.0]))
def test_bucketed_percentiles_are_near_exact(values, share):
    found = lag.percentile(lag.lag_counts(values), share)
    true = rank(sorted(values), share) / 1e3
    assert found == 0.5 if true < 1 else found == pytest.approx(true, rel=0.03)


@given(st.lists(st.lists(st.integers(0, 10**7), max_size=20), max_size=5))
def test_counts_add_up(parts):
    together = lag.lag_counts([v for part in parts for v in part])
    assert lag.merge(lag.lag_counts(part) for part in parts) == together


def test_judgement_of_a_lag():
    assert lag.judge(None, 10.0) is None
    assert lag.judge(150.0, 10.0) is None
    assert lag.judge(250.0, 10.0) == "flag"
    assert lag.judge(1500.0, 10.0) == "void"
    assert lag.percentile((), 0.5) is None


def test_processes_needed():
    assert processes_needed(200_000, 24_000) == 1
    assert processes_needed(50_000, 60_000) == 3


def test_the_pacer_keeps_the_order():
    pacer, got, finished = Pacer(), [], threading.Event()
    base = time.monotonic_ns() + 300_000_000
    for k in (3, 1, 2):
        pacer.at(base + k, lambda k=k: got.append(k))
    pacer.at(base + 4, finished.set)
    assert finished.wait(20)
    pacer.close()
    assert got == [1, 2, 3]
    assert time.monotonic_ns() >= base
