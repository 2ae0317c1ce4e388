"""The client against a real socket: ends, timeouts, refusals, cancelling, and what it sends."""

import asyncio
import datetime as dt
import ipaddress
import json
import socket
import ssl
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from campaign.client.base import Client, Job
from campaign.client.http import HttpClient
from campaign.client.http1 import get, post, target
from campaign.testing.sse_server import Script, ScriptServer


def event(value):
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def token(text, finish=None):
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}})
DONE = b"data: [DONE]\n\n"
GOOD = ((0, token("a")), (20, token("b", "stop")), (30, USAGE + DONE))


def job(url, timeout_s=20, **kw):
    return Job("r", url, "/v1/chat/completions", {"stream": True, "x": "é"}, timeout_s, None, **kw)


@pytest.fixture
async def client():
    client = HttpClient()
    yield client
    await client.close()


def test_it_is_a_client():
    assert isinstance(HttpClient(), Client)


async def test_what_is_sent(client, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with ScriptServer(Script(GOOD), scale=1.0) as server:
        first = await client.run(job(server.url, headers={"Authorization": "Bearer k"}))
        second = await client.run(job(server.url + "/prefix/"))
    assert first.state == second.state == "ok"
    sent = server.seen[0]
    assert (sent.method, sent.path) == ("POST", "/v1/chat/completions")
    assert server.seen[1].path == "/prefix/v1/chat/completions"
    assert sent.json() == {"stream": True, "x": "é"}
    assert sent.headers["authorization"] == "Bearer k"
    assert sent.headers["accept-encoding"] == "identity"
    assert sent.headers["connection"] == "close"
    assert first.sent_ns < first.first_ns < first.last_ns <= first.done_ns
    assert first.reads >= 2
    assert abs(first.sent_utc_ns - time.time_ns()) < 60 * 10**9


async def test_a_server_that_keeps_the_connection_open_does_not_hold_us(client):
    """The end of the response is found in the bytes, not in the server's close."""
    for framing in ("chunked", "length"):
        body = b"".join(part for _, part in GOOD)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        if framing == "chunked":
            raw = head + b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        else:
            raw = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
        async with ScriptServer(Script((), raw=raw, close="hang")) as server:
            assert (await client.run(job(server.url))).state == "ok"


async def test_an_interim_answer_is_skipped(client):
    raw = b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with ScriptServer(Script(GOOD, raw=raw, framing="close")) as server:
        outcome = await client.run(job(server.url))
    assert (outcome.state, outcome.http_status) == ("ok", 200)


@pytest.mark.parametrize(
    ("script", "state", "code", "reasons"),
    [
        (Script(GOOD[:2], close="rst"), "failed", "connection_reset", ("connection_reset",)),
        (Script(GOOD[:2], close="cut"), "truncated", None, ()),
        (Script(GOOD[:2], close="cut", framing="length"), "truncated", None, ()),
        (Script(GOOD[:2], close="clean", framing="close"), "incomplete", None, ()),
        (Script((), close="clean", framing="close", raw=b"SSH-2.0-OpenSSH\r\n"), "failed", "bad_http", ()),
        (Script((), close="clean", framing="close", raw=b""), "failed", "bad_http", ()),
        (Script((), close="rst", raw=b""), "failed", "connection_reset", ("connection_reset",)),
        (
            Script(
                ((0, b'{"error":{"message":"busy","code":429}}'),),
                status=429,
                content_type="application/json",
            ),
            "failed",
            "429",
            (),
        ),
        (Script(((0, b"moved"),), status=302, headers={"Location": "/x"}), "failed", "302", ()),
    ],
)
async def test_ends(client, script, state, code, reasons):
    async with ScriptServer(script) as server:
        outcome = await client.run(job(server.url))
        assert len(server.seen) == 1  # nothing is retried, no redirect followed
    assert (outcome.state, outcome.error_code) == (state, code)
    assert outcome.reasons == reasons


async def test_timeout_keeps_what_came(client, tmp_path):
    async with ScriptServer(Script(GOOD[:2], close="hang")) as server:
        outcome = await client.run(job(server.url, timeout_s=0.3, sidecar_dir=str(tmp_path)))
    assert (outcome.state, outcome.error_code, outcome.reasons) == ("failed", "timeout", ("timeout",))
    assert json.loads((tmp_path / "text.jsonl").read_text())["content"] == "ab"


async def test_refused(client):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        outcome = await client.run(job(f"http://{host}:{port}"))
        assert (outcome.state, outcome.error_code) == ("failed", "connection_refused")
        assert outcome.http_status is None
        assert outcome.done_ns >= outcome.sent_ns


async def test_cancel_drops_what_is_in_flight_and_later_requests_run(client):
    async with ScriptServer({"/v1/chat/completions": Script(GOOD[:2], close="hang")}) as server:
        flying = [asyncio.create_task(client.run(job(server.url, timeout_s=60))) for _ in range(3)]
        for _ in flying:
            await server.hangs.acquire()
        await client.cancel()
        outcomes = await asyncio.gather(*flying)
        assert [o.state for o in outcomes] == ["cancelled"] * 3
        server.scripts = Script(GOOD)
        assert (await client.run(job(server.url))).state == "ok"


async def test_cancel_while_connecting(client):
    # A listening socket whose backlog is full answers no further connection.
    with socket.socket() as full, socket.socket() as filler:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        filler.connect(full.getsockname())
        more = [socket.socket() for _ in range(3)]
        for sock in more:
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        port = full.getsockname()[1]
        task = asyncio.create_task(client.run(job(f"http://127.0.0.1:{port}", timeout_s=60)))
        for _ in range(5):
            await asyncio.sleep(0)
        await client.cancel()
        assert (await task).state == "cancelled"
        for sock in more:
            sock.close()


async def test_a_cancelled_task_lets_go_of_its_socket(client):
    async with ScriptServer(Script(GOOD[:1], close="hang")) as server:
        task = asyncio.create_task(client.run(job(server.url, timeout_s=60)))
        await server.hangs.acquire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not client._flights


async def test_many_in_flight_keep_apart(client, tmp_path):
    async with ScriptServer(Script(GOOD)) as server:
        jobs = [
            Job(f"r{i}", server.url, "/v1/completions", {}, 20, None, sidecar_dir=str(tmp_path))
            for i in range(20)
        ]
        outcomes = await asyncio.gather(*(client.run(j) for j in jobs))
    assert [o.request_id for o in outcomes] == [j.request_id for j in jobs]
    assert {o.state for o in outcomes} == {"ok"}
    for name in ("chunks.jsonl", "text.jsonl"):
        ids = [json.loads(line)["request_id"] for line in (tmp_path / name).read_text().splitlines()]
        assert sorted(ids) == sorted(j.request_id for j in jobs)


async def test_sidecars_begin_anew_where_a_seal_took_them(client, tmp_path):
    folder = tmp_path / "cell"
    async with ScriptServer(Script(GOOD)) as server:
        await client.run(job(server.url, sidecar_dir=str(folder)))
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        await client.run(job(server.url, sidecar_dir=str(folder)))
    assert len((folder / "text.jsonl").read_text().splitlines()) == 1


async def test_fetch(client):
    pages = {
        "/metrics": Script(((0, b"a 1\n"),), content_type="text/plain"),
        "/slow": Script((), close="hang", framing="length"),
    }
    async with ScriptServer(pages) as server:
        assert await client.fetch(server.url + "/metrics", 5) == (200, b"a 1\n")
        assert (await client.fetch(server.url + "/none?q=1", 5))[0] == 404
        with pytest.raises(TimeoutError):
            await client.fetch(server.url + "/slow", 0.2)
        url = server.url
    with pytest.raises(ConnectionError):
        await client.fetch(url + "/metrics", 5)


def certificate(folder):
    """A certificate for 127.0.0.1 that vouches for itself: (server context, file to trust)."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    pem, secret = folder / "cert.pem", folder / "key.pem"
    pem.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, secret)
    return context, pem


async def test_tls_on_the_same_reader(client, tmp_path, monkeypatch):
    context, pem = certificate(tmp_path)
    async with ScriptServer(Script(GOOD), tls=context) as server:
        stranger = await client.run(job(server.url))
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        trusted = await client.run(job(server.url))
    assert (stranger.state, stranger.error_code) == ("failed", "unreachable")
    assert "certificate" in stranger.error
    assert (trusted.state, trusted.stamp_source) == ("ok", "user")
    assert trusted.sent_ns < trusted.first_ns < trusted.last_ns


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://", "http://u:p@h/"])
def test_urls_that_are_refused(url):
    with pytest.raises(ValueError):
        target(url)


def test_request_bytes():
    head, _, body = post(target("http://[::1]:8080", "/v1/completions"), {"a": 1}, {}).partition(b"\r\n\r\n")
    assert body == b'{"a":1}'
    assert b"Host: [::1]:8080" in head
    assert b"Content-Length: 7" in head
    assert get(target("http://h/m?x=1")).startswith(b"GET /m?x=1 HTTP/1.1\r\nHost: h:80\r\n")
    assert target("https://h").port == 443
    for headers in ({"a": "b\r\nc: d"}, {"a b": "c"}, {"Content-Length": "1"}):
        with pytest.raises(ValueError):
            post(target("http://h"), {}, headers)
    with pytest.raises(ValueError):
        post(target("http://h"), {"a": float("nan")}, {})
