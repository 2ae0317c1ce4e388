"""A provider's endpoint, for real over HTTP: key, price, 429 between requests, and a whole campaign run on it."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaign.engines.api import Api, backoff_s, retry_after_s, tokens_usd_micro
from campaign.engines.base import BootOrder
from campaign.engines.host import LocalEngineHost
from campaign.errors import EngineError, PreflightError
from campaign.spec.models import Arm, Endpoint
from campaign.testing.clock import VirtualClock

KEY = "canary-7f3a9c51e2d84b60-secret"
WORDS = [f"w{i} " for i in range(16)]


class Provider(BaseHTTPRequestHandler):
    """An OpenAI-compatible provider: bearer key, one 429 with Retry-After, usage at the end."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server.state
        state["requests"].append((time.monotonic(), body))
        if self.headers.get("Authorization") != f"Bearer {KEY}":
            return self.answer(401, {"error": {"message": f"bad key {self.headers.get('Authorization')}"}})
        if body["model"] != "prov/model":
            return self.answer(404, {"error": {"message": "no such model"}})
        if state["refuse"] > 0 and body.get("stream"):
            state["refuse"] -= 1
            state["refused"].append(time.monotonic())
            return self.answer(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.3"})
        usage = {"prompt_tokens": 100, "completion_tokens": min(body["max_tokens"], 16), "total_tokens": 116}
        if not body.get("stream"):
            return self.answer(
                200,
                {
                    "model": "prov/model-7",
                    "choices": [{"message": {"content": "w"}}],
                    "usage": {**usage, "completion_tokens": 1},
                },
                {"x-request-id": "abc", "Set-Cookie": "session=1"},
            )
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for i, word in enumerate(WORDS[: body["max_tokens"]]):
            time.sleep(0.002)
            last = i == min(body["max_tokens"], 16) - 1
            self.event(
                {
                    "choices": [
                        {"index": 0, "delta": {"content": word}, "finish_reason": "length" if last else None}
                    ]
                }
            )
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True
        return None

    def event(self, value: dict) -> None:
        self.wfile.write(f"data: {json.dumps(value)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: int, value: dict, headers: dict[str, str] | None = None) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def provider() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    server.state = {"requests": [], "refuse": 0, "refused": []}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def arm(base_url: str, **changes: object) -> Arm:
    fields = {"base_url": base_url, "key_env": "PROV_KEY", "model_id": "prov/model", "usd_per_mtok_in": Decimal("1.5"),
              "usd_per_mtok_out": Decimal(4), "region": "eu-1", **changes}  # fmt: skip
    return Arm(engine="api", api=Endpoint.model_construct(max_backoff=timedelta(seconds=60), **fields))


def order(config: Arm) -> BootOrder:
    return BootOrder("s/g/r0/a@0", "a", "0" * 16, config, {}, "p0", (), (), "x.log", 10.0)


async def test_an_endpoint_is_proven_with_one_token_and_its_key_is_nowhere(provider, monkeypatch) -> None:
    monkeypatch.setenv("PROV_KEY", KEY)
    host = LocalEngineHost()
    record = await host.boot(order(arm(url(provider))))
    assert len(provider.state["requests"]) == 1
    assert record.headers == {"Authorization": f"Bearer {KEY}"}
    kept = record.provenance
    assert KEY not in json.dumps(kept)
    assert (kept["region"], kept["model_id"], kept["model_answered"]) == (
        "eu-1",
        "prov/model",
        "prov/model-7",
    )
    assert kept["response_headers"]["x-request-id"] == "abc"
    assert "set-cookie" not in kept["response_headers"]
    assert kept["ttft"] == "includes the network"
    assert record.gpu_set == "api:eu-1"
    assert await host.counters(record.boot_id) is None
    assert await host.alive(record.boot_id)
    await host.stop(record.boot_id)
    assert not await host.alive(record.boot_id)


@pytest.mark.parametrize(
    ("changes", "key", "kind"),
    [({}, "wrong-key-1234567", "config"), ({"model_id": "other"}, KEY, "missing_model")],
)
async def test_what_a_user_can_fix_is_no_infrastructure(provider, monkeypatch, changes, key, kind) -> None:
    monkeypatch.setenv("PROV_KEY", key)
    with pytest.raises(EngineError) as caught:
        await LocalEngineHost().boot(order(arm(url(provider), **changes)))
    assert caught.value.kind == kind
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    ("base_url", "env", "words"),
    [
        ("https://host/v1", "k", "leave it out"),
        ("http://host.example", "k", "in the clear"),
        ("https://user:pw@host", "k", "not an address"),
        ("https://host", None, "export PROV_KEY"),
    ],
)
def test_preflight(monkeypatch, base_url, env, words) -> None:
    monkeypatch.delenv("PROV_KEY", raising=False)
    if env:
        monkeypatch.setenv("PROV_KEY", env)
    with pytest.raises(PreflightError, match=words) as caught:
        Api().preflight(arm(base_url), {})
    assert "pw@" not in str(caught.value)


def test_backoff_and_retry_after() -> None:
    endpoint = arm("https://h").api
    assert endpoint is not None
    assert [backoff_s(endpoint, n) for n in (1, 2, 3, 7)] == [1, 2, 4, 60]
    assert backoff_s(endpoint, 1, 7.5) == 7.5
    assert backoff_s(endpoint, 1, 900.0) == 60
    assert retry_after_s("3") == 3
    assert retry_after_s("Tue, 01 Dec 2026 00:00:10 GMT", 1796083200.0) == 10
    for text in (None, "soon", "-1", "nan", "Tue, 01 Dec 2020 00:00:10 GMT"):
        assert retry_after_s(text, 1796083200.0) is None


def test_a_dollar_a_million_is_a_micro_dollar_a_token() -> None:
    endpoint = arm("https://h").api
    assert endpoint is not None
    assert tokens_usd_micro(endpoint, 100, 16) == 150 + 64
    assert tokens_usd_micro(endpoint, 1, 0) == 2, "rounded up"


async def test_a_429_at_the_door_is_waited_for(monkeypatch) -> None:
    monkeypatch.setenv("PROV_KEY", KEY)
    answers = iter([(429, {"retry-after": "5"}, b"{}"), (429, {}, b"{}"), (200, {}, b'{"model": "m"}')])

    async def post(*_args):
        return next(answers)

    monkeypatch.setattr("campaign.engines.fetch.post_full", post)
    clock = VirtualClock()

    async def connect():
        return await Api().connect(order(arm("https://h")), clock)

    record = await clock.run(connect()) if hasattr(clock, "run") else await connect()
    assert record.boot_ns >= 7e9


SPEC = """\
version: 1
campaign: replay
budget: {{cap_usd: 1}}
nodes: {{here: {{provider: local, usd_per_hour: 0, max_hours: 0.2}}}}
arms:
  prov:
    engine: api
    api: {{base_url: "{url}", key_env: PROV_KEY, model_id: prov/model, usd_per_mtok_in: 1.5, usd_per_mtok_out: 4, region: eu-1}}
workloads:
  chat: {{pack: quickstart-chat, n: 4, max_tokens: 16, tokens: [20, 100]}}
anchor: {{arm: prov, workload: chat, drift_delta: 0.5}}
pairs:
  aa: {{kind: aa, a: prov, workload: chat, primary: decode_tok_s, boots: 2}}
sessions:
  main: {{node: here, pairs: [aa], anchor: false}}
ray: {{mode: inline}}
store: {store}
"""


def test_a_campaign_on_an_endpoint(provider, tmp_path: Path, monkeypatch) -> None:
    from campaign.cli import cli
    from campaign.store.folder import FolderStore
    from campaign.store.layout import RunDir

    monkeypatch.setenv("PROV_KEY", KEY)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "e.yaml"
    file.write_text(SPEC.format(url=url(provider), store=tmp_path / "results"))
    planned = json.loads(CliRunner().invoke(cli, ["plan", str(file), "--json"]).output)
    # 2 arms x 2 boots x (4 + warm-up) requests of at most 100 + 16 tokens; the worst case pays each round twice.
    per_request = (100 * 1.5 + 16 * 4) / 1e6
    assert planned["usd_expected"] == pytest.approx(20 * per_request)
    assert planned["usd_worst"] == pytest.approx(40 * per_request)
    provider.state["refuse"] = 2
    result = CliRunner().invoke(cli, ["run", str(file)])
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "results").iterdir()
    rows = list(FolderStore(RunDir(folder)).rows())
    refused = [r for r in rows if r.http_status == 429]
    measured = [r for r in rows if r.phase != "warmup" and r.validity == "valid"]
    assert len(refused) == 2
    assert all(r.validity == "void" for r in refused)
    assert len(measured) == 16
    assert all("ttft_over_network" in r.reasons and r.steps is None and r.step_ms is None for r in measured)
    assert all(r.decode_tok_s and r.gpu_set == "api:eu-1" for r in measured)
    # The pause is between requests: no timed one contains it.
    assert max(r.e2e_ms or 0 for r in rows) < 300
    after = [t for t, b in provider.state["requests"] if b.get("stream") and t > provider.state["refused"][0]]
    assert after[0] - provider.state["refused"][0] >= 0.3
    spend = json.loads(CliRunner().invoke(cli, ["spend", str(folder), "--json"]).output)
    # Every answered request of 100 + 16 tokens, refused ones free.
    answered = sum(r.http_status == 200 for r in rows)
    assert spend["settled_usd"] == pytest.approx(answered * per_request)
    # Ledger, journals, rows, raw text, provenance, and what is kept outside the run.
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert folder / "ledger.db" in files
    assert [p for p in files if KEY.encode() in p.read_bytes()] == []
    kept = [json.loads(p.read_text()) for p in (folder / "provenance").rglob("*.json")]
    boots = [k for k in kept if k.get("engine") == "api"]
    assert len(boots) == 4
    assert all(
        b["response_headers"]["x-request-id"] == "abc" and b["endpoint"] == url(provider) for b in boots
    )
    assert all(b["ttft"] == "includes the network" and b["region"] == "eu-1" for b in boots)
    assert KEY not in result.output
