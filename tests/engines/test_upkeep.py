"""Drain, cache reset and the second look at a server's pages, over real sockets and on recorded bytes."""

import copy
import json
from pathlib import Path

import pytest

from campaign.engines import prometheus, upkeep
from campaign.engines.base import Engine
from campaign.engines.command import CommandServer
from campaign.engines.registry import NAMES, get
from campaign.engines.sglang import SGLang
from campaign.engines.vllm import VLLM
from campaign.spec.models import Arm, Server, Speculation
from campaign.testing.clock import VirtualClock
from campaign.testing.sse_server import Script, ScriptServer

FIXTURES = Path(__file__).parent.parent / "data" / "fixtures"
CACHED = Arm(engine="sglang", model="m", prefix_cache=True)
IDLE = (FIXTURES / "sglang_ngram4.v1_loads.json").read_bytes()


def page(body: bytes, status: int = 200) -> Script:
    return Script(((0, body),), status=status, content_type="application/json", framing="length")


def busy(n: int) -> bytes:
    value = json.loads(IDLE)
    value["loads"][0]["num_running_reqs"] = n
    return json.dumps(value).encode()


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_keeps_the_contract(name: str) -> None:
    assert isinstance(get(name), Engine)


def test_running_requests_on_recorded_pages() -> None:
    assert SGLang().running(IDLE) == 0
    assert SGLang().running(busy(3)) == 3
    assert SGLang().running(b"[]") is None
    assert SGLang().running(b'{"loads": [{}]}') is None
    vllm = (FIXTURES / "vllm_cpu_metrics.txt").read_text()
    assert VLLM().running(vllm.encode()) == 0
    held = vllm.replace('vllm:num_requests_running{engine="0",model_name="smol"} 0.0',
                        'vllm:num_requests_running{engine="0",model_name="smol"} 2.0')  # fmt: skip
    assert VLLM().running(held.encode()) == 2
    assert prometheus.running((FIXTURES / "llamacpp_metrics.txt").read_text()) == 0
    # SGLang's gauge is of its last log interval.
    assert prometheus.running((FIXTURES / "sglang_base.metrics_after.txt").read_text()) is None
    assert prometheus.running("{}") is None


def test_who_resets_what() -> None:
    ngram = Speculation(method="ngram", depth=3, breadth=1)
    assert SGLang().reset_path(CACHED) == "/flush_cache"
    assert SGLang().reset_path(Arm(engine="sglang", model="m", speculation=ngram)) == "/flush_cache"
    assert SGLang().reset_path(Arm(engine="sglang", model="m")) is None
    vllm = Arm(engine="vllm", model="m", prefix_cache=True)
    assert VLLM().reset_path(vllm) is None
    dev = vllm.model_copy(update={"env": {"VLLM_SERVER_DEV_MODE": "1"}})
    assert VLLM().reset_path(dev) == "/reset_prefix_cache"
    mine = Arm(engine="command", model="m", command=Server(argv=("x",), reset="/clear"))
    assert CommandServer(mine.command).reset_path(mine) == "/clear"


async def test_idle_and_flushed() -> None:
    pages = {"/v1/loads": page(IDLE), "/flush_cache": page(b"Cache flushed.\n")}
    async with ScriptServer(pages) as server:
        found = await upkeep.settle(SGLang(), CACHED, server.url, {}, VirtualClock())
        assert found == {"drained": True, "cache_reset": "done", "why": None}
        assert [(s.method, s.path) for s in server.seen] == [("GET", "/v1/loads"), ("POST", "/flush_cache")]


async def test_a_server_that_stays_busy_is_said_to_be() -> None:
    clock = VirtualClock()
    pages = {"/v1/loads": page(busy(2)), "/flush_cache": page(b"", 400)}
    async with ScriptServer(pages) as server:
        found = await upkeep.settle(SGLang(), CACHED, server.url, {}, clock, timeout_s=0.0)
    assert found == {"drained": False, "cache_reset": "failed", "why": "/flush_cache answers 400"}


@pytest.mark.parametrize("status", [401, 404, 500])
async def test_a_reset_that_is_refused_is_not_repeated(status: int) -> None:
    async with ScriptServer({"/v1/loads": page(IDLE), "/flush_cache": page(b"", status)}) as server:
        found = await upkeep.settle(SGLang(), CACHED, server.url, {}, VirtualClock())
        assert len(server.seen) == 2
    assert (found["cache_reset"], found["why"]) == ("failed", f"/flush_cache answers {status}")


async def test_nothing_to_reset_and_nothing_known() -> None:
    arm = Arm(engine="command", model="m", command=Server(argv=("x",)))
    async with ScriptServer({}) as server:
        found = await upkeep.settle(CommandServer(arm.command), arm, server.url, {}, VirtualClock())
    assert found == {"drained": None, "cache_reset": "none", "why": None}


def test_server_info_before_and_after_the_phases_of_a_real_run() -> None:
    before = {"/server_info": json.loads((FIXTURES / "sglang_ngram4.server_info.json").read_text())}
    after = {"/server_info": json.loads((FIXTURES / "sglang_ngram4.server_info_after.json").read_text())}
    # Acceptance since boot and the last throughput did move; no setting did.
    assert before != after
    assert upkeep.changes(before, after) == []
    moved = copy.deepcopy(after)
    moved["/server_info"]["speculative_accept_threshold_single"] = 0.5
    (change,) = upkeep.changes(before, moved)
    assert (change["key"], change["after"]) == ("speculative_accept_threshold_single", 0.5)
    gone = upkeep.changes(before, {"/server_info": None})
    assert len(gone) > 100
