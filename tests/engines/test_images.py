"""Tags become digests, against a registry that speaks the distribution API over a socket."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from campaign.cli import cli
from campaign.engines.images import Reference, Unresolved, resolve
from campaign.store.run import open_run

MANIFEST = json.dumps({"schemaVersion": 2, "manifests": [{"platform": {"architecture": "amd64"}}]}).encode()
DIGEST = f"sha256:{hashlib.sha256(MANIFEST).hexdigest()}"


class Registry(BaseHTTPRequestHandler):
    """Anonymous pull of one image, behind a token as public registries have it."""

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        port = self.server.server_address[1]
        state = self.server.state
        state["seen"].append((self.path, self.headers.get("Accept", "")))
        if self.path.startswith("/token?"):
            assert "scope=repository%3Aorg%2Fengine%3Apull" in self.path
            return self.answer(200, b'{"token": "anonymous"}')
        if self.headers.get("Authorization") != "Bearer anonymous":
            realm = f'Bearer realm="http://127.0.0.1:{port}/token",service="reg",scope="repository:org/engine:pull"'
            return self.answer(401, b"{}", {"WWW-Authenticate": state.get("challenge", realm)})
        if self.path != "/v2/org/engine/manifests/v1.2":
            return self.answer(404, b"{}")
        return self.answer(200, MANIFEST, {"Docker-Content-Digest": state.get("digest", DIGEST)})

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def registry() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    server.state = {"seen": []}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def image(server: ThreadingHTTPServer, tag: str = "v1.2") -> str:
    return f"127.0.0.1:{server.server_address[1]}/org/engine:{tag}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ubuntu:24.04", ("registry-1.docker.io", "library/ubuntu", "24.04")),
        ("vllm/vllm-openai:v0.33.0", ("registry-1.docker.io", "vllm/vllm-openai", "v0.33.0")),
        ("docker.io/lmsysorg/sglang:x", ("registry-1.docker.io", "lmsysorg/sglang", "x")),
        ("ghcr.io/a/b/c:1", ("ghcr.io", "a/b/c", "1")),
        ("localhost:5000/a:1", ("localhost:5000", "a", "1")),
        ("localhost/a", ("localhost", "a", "latest")),
    ],
)
def test_references_are_read_as_container_tools_read_them(text, expected) -> None:
    found = Reference.parse(text)
    assert (found.host, found.name, found.tag) == expected
    assert found.url.startswith("http://" if "localhost" in text else "https://")


@given(st.text(max_size=60))
def test_any_text_is_read_without_failing(text: str) -> None:
    assert Reference.parse(text).url.startswith("http")


def test_a_tag_becomes_the_digest_of_what_came(registry) -> None:
    found = resolve(image(registry))
    assert found == f"{image(registry)}@{DIGEST}"
    assert [path.partition("?")[0] for path, _ in registry.state["seen"]] == [
        "/v2/org/engine/manifests/v1.2",
        "/token",
        "/v2/org/engine/manifests/v1.2",
    ]
    assert "application/vnd.oci.image.index.v1+json" in registry.state["seen"][0][1]
    registry.state["seen"].clear()
    assert resolve(found) == found
    assert registry.state["seen"] == []


def test_a_claimed_digest_is_not_believed(registry) -> None:
    registry.state["digest"] = "sha256:" + "0" * 64
    with pytest.raises(Unresolved, match="what it sent is"):
        resolve(image(registry))


def test_what_cannot_be_resolved_says_why(registry) -> None:
    with pytest.raises(Unresolved, match="answers 404 for org/engine:none"):
        resolve(image(registry, "none"))
    registry.state["challenge"] = 'Basic realm="x"'
    with pytest.raises(Unresolved, match="only anonymous access"):
        resolve(image(registry))
    with pytest.raises(Unresolved, match="refused"):
        resolve("127.0.0.1:1/org/engine:v1.2")


SPEC = """\
version: 1
campaign: tagged
budget: {{cap_usd: 5}}
nodes: {{gpu: {{provider: local, usd_per_hour: 1, max_hours: 1, gpus: [0]}}}}
models: {{m: {{hub: o/m, revision: abc}}}}
runtimes: {{new: {{image: "{image}", version: "0.5.23"}}}}
arms: {{a: {{engine: sglang, model: m, runtime: new, tp: 1, max_running_requests: 1}}}}
workloads: {{w: {{pack: health, n: 2, max_tokens: 8}}}}
anchor: {{arm: a, workload: w, drift_delta: 0.1}}
pairs: {{aa: {{kind: aa, a: a, workload: w}}}}
sessions: {{s: {{node: gpu, pairs: [aa]}}}}
ray: {{mode: inline}}
store: {store}
"""


def test_plan_and_run_pin_the_tag(registry, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "e.yaml"
    file.write_text(SPEC.format(image=image(registry), store=tmp_path / "results"))
    planned = CliRunner().invoke(cli, ["plan", str(file)])
    assert planned.exit_code == 0, planned.output
    assert f"runtimenew:{image(registry)}@{DIGEST}" in "".join(planned.output.split())
    # There is no such engine to run: refused by the image's name, with the digest in the run's own record.
    ran = CliRunner().invoke(cli, ["run", str(file)])
    assert ran.exit_code == 2, ran.output
    assert "runtime image 127.0.0.1:" in " ".join(ran.output.split())
    run = open_run(None, tmp_path / "results")
    assert DIGEST in (run.dir.root / "canonical.json").read_text()
    assert "v1.2" in run.dir.spec.read_text()
    registry.state["digest"] = "sha256:" + "0" * 64
    refused = CliRunner().invoke(cli, ["plan", str(file)])
    assert refused.exit_code != 0
    assert "e.yaml:6: runtimes.new.image" in refused.output + str(refused.exception)
