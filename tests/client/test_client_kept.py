"""Proxies, TLS and kept connections, over real sockets."""

import asyncio
import contextlib
from dataclasses import asdict

import pytest

from campaign.client.base import Job
from campaign.client.http import HttpClient
from campaign.testing.reference_server import ReferenceServer, Schedule
from campaign.testing.sse_server import Script, ScriptServer

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]}\n\n'
GOOD = ((0, TOKEN % (b"a", b"null")), (100, TOKEN % (b"b", b'"stop"')), (200, b"data: [DONE]\n\n"))


@pytest.fixture
async def client():
    client = HttpClient()
    yield client
    await client.close()


def job(url, **kw):
    return Job("r", url, "/v1/chat/completions", {"stream": True}, 20, None, **kw)


class Relay:
    """An HTTP proxy that forwards bytes; or, with `target`, a plain relay that counts connections."""

    def __init__(self, target=None):
        self.target, self.connections, self.lines = target, 0, []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks = set()
        return self

    async def __aexit__(self, *_):
        self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader, writer):
        self.connections += 1
        self._tasks.add(asyncio.current_task())
        first = b""
        host, port = ("127.0.0.1", self.target) if self.target else (None, None)
        if host is None:
            head = await reader.readuntil(b"\r\n\r\n")
            line = head.split(b"\r\n")[0].decode()
            self.lines.append(line)
            method, where, _ = line.split(" ")
            place = where if method == "CONNECT" else where.split("/")[2]
            host, _, port = place.rpartition(":")
            first = b"" if method == "CONNECT" else head
        up_reader, up_writer = await asyncio.open_connection(host, int(port))
        if first:
            up_writer.write(first)
        elif self.target is None:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def pump(source, sink):
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    sink.write(data)
                    await sink.drain()
            with contextlib.suppress(ConnectionError, OSError):
                sink.close()

        try:
            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))
        finally:
            up_writer.close()
            writer.close()


async def test_a_declared_proxy(client, tmp_path):
    async with Relay() as proxy, ScriptServer(Script(GOOD)) as server:
        outcome = await client.run(job(server.url, proxy=proxy.url, sidecar_dir=str(tmp_path)))
        assert proxy.lines == [f"POST {server.url}/v1/chat/completions HTTP/1.1"]
    assert (outcome.state, outcome.stamp_source, outcome.content_chunks) == ("ok", "user", 2)
    assert outcome.sent_ns < outcome.first_ns < outcome.last_ns <= outcome.done_ns
    sent = server.seen[0]
    assert (sent.json(), sent.headers["accept-encoding"]) == ({"stream": True}, "identity")
    assert outcome.lag


async def test_a_proxy_that_is_not_there(client):
    async with ScriptServer(Script(GOOD)) as server:
        outcome = await client.run(job(server.url, proxy="http://127.0.0.1:9"))
    assert (outcome.state, outcome.error_code) == ("failed", "connection_refused")
    assert server.seen == []


@pytest.mark.parametrize(
    ("script", "state", "code"),
    [
        (Script(GOOD, close="rst"), "ok", None),
        # The relay makes an end of what was a reset.
        (Script(GOOD[:1], close="rst"), "truncated", None),
        (Script(GOOD[:1], close="cut"), "truncated", None),
        (Script(GOOD, framing="close"), "ok", None),
        (Script(GOOD, framing="length"), "ok", None),
        (Script(((0, b"busy"),), 503, "text/plain", "length"), "failed", "503"),
        (Script(((0, b""),), raw=b"not http\r\n\r\n"), "failed", None),
    ],
)
async def test_what_servers_do_behind_a_proxy(client, script, state, code):
    async with Relay() as proxy, ScriptServer(script) as server:
        outcome = await client.run(job(server.url, proxy=proxy.url))
    assert outcome.state == state
    if code is not None:
        assert outcome.error_code == code


async def test_timeouts_and_cancelling_behind_a_proxy(client):
    async with Relay() as proxy, ScriptServer(Script(GOOD[:1], close="hang")) as server:
        late = Job("r", server.url, "/v1/chat/completions", {}, 0.3, None, proxy=proxy.url)
        outcome = await client.run(late)
        assert (outcome.state, outcome.reasons) == ("failed", ("timeout",))
        running = asyncio.create_task(client.run(job(server.url, proxy=proxy.url)))
        await server.hangs.acquire()
        await server.hangs.acquire()
        await client.cancel()
        assert (await running).state == "cancelled"


@pytest.fixture(scope="module")
def reference():
    with ReferenceServer() as running:
        yield running


def short(url, connection):
    body = {"stream": True, "schedule": asdict(Schedule(ttft_ms=2.0, rate=500.0, tokens=5))}
    return Job("r", url, "/v1/chat/completions", body, 20, 5, connection=connection)


async def test_connections_are_new_unless_declared(client, reference):
    port = int(reference.url.rpartition(":")[2])
    async with Relay(port) as relay:
        new = [await client.run(short(relay.url, "new")) for _ in range(3)]
        assert relay.connections == 3
        kept = [await client.run(short(relay.url, "reuse")) for _ in range(3)]
        assert relay.connections == 4
        both = await asyncio.gather(*(client.run(short(relay.url, "reuse")) for _ in range(2)))
        assert relay.connections == 5
    assert {o.state for o in [*new, *kept, *both]} == {"ok"}
    assert {o.content_chunks for o in kept} == {5}
    # Segments are counted for each request, not for the connection.
    assert all(o.segments is None or o.segments < 12 for o in kept)


async def test_a_kept_connection_that_the_server_closed_is_not_used(client):
    keeping = Script(GOOD, headers={"Connection": "keep-alive"})
    async with ScriptServer(keeping) as server:
        for _ in range(2):
            first = await client.run(job(server.url, connection="reuse"))
            assert first.state == "ok"
            await asyncio.sleep(0.05)  # the server closes; the system needs a moment to hear of it
    assert len(server.seen) == 2
