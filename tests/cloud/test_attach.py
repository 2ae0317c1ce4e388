"""A node you have: GPU sets held with flock, only our own processes ended. Its scripts run in a local shell here, where
ssh would hand them to the host, and the installation of the environment is left out."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaign.clock import SystemClock
from campaign.cloud import attach, shipping, templates
from campaign.cloud.attach import AttachProvider
from campaign.errors import ProviderError
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.spec.load import load
from campaign.testing.conformance_provider import (
    ProviderConformance,
    ProviderRig,
    attach_node,
    intent_for,
    sky_node,
)

ROOT = Path(__file__).parents[2]
TEMPLATES = templates.path


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderRig]:
    home, run_dir = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    run_dir.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(attach, "_argv", lambda _: ["bash", "-c", 'exec bash -c "$0"'])
    empty = tmp_path / "nothing.sh"
    empty.write_text("mkdir -p venv/bin\n")
    monkeypatch.setattr(templates, "path", lambda name: empty if name == "node_setup.sh" else TEMPLATES(name))
    monkeypatch.setattr(shipping, "wheel", lambda _: None)
    monkeypatch.setattr(shipping, "weight_packages", lambda *_: [])
    loaded = load(ROOT / "experiments.yaml", ())
    plan = build(loaded.spec, declared_prices(loaded.spec))
    plan = replace(plan, sessions=(replace(plan.sessions[0], name="s"),))
    (run_dir / "plan.json").write_bytes(codec.dump(plan))
    (run_dir / "canonical.json").write_bytes(loaded.canonical)
    clock = SystemClock()
    provider = AttachProvider(clock, tmp_path / "cache" / "wheels")
    intent = intent_for(attach_node(gpus=[0, 1]), str(run_dir), clock.utc_ns() + 120 * 10**9)

    async def settle() -> None: ...

    yield ProviderRig(provider, intent, sky_node(), settle)
    for file in home.rglob("holder.pid"):
        subprocess.run(["kill", "-9", "--", f"-{file.read_text().strip()}"], capture_output=True, check=False)


class TestAttach(ProviderConformance):
    pass


def lease(rig: ProviderRig, name: str, gpus: list[int]) -> Any:
    return replace(rig.intent, lease=name, node=attach_node(gpus=gpus))


async def test_two_of_us_do_not_share_a_gpu(rig: ProviderRig) -> None:
    first = await rig.provider.launch(lease(rig, "s.1", [0, 1]))
    with pytest.raises(ProviderError, match="held by another session") as caught:
        await rig.provider.launch(lease(rig, "s.2", [1, 2]))
    assert caught.value.kind == "capacity"
    other = await rig.provider.launch(lease(rig, "s.3", [2, 3]))  # a disjoint set is free
    await rig.provider.down(first)
    again = await rig.provider.launch(lease(rig, "s.4", [0, 1]))
    for handle in (other, again):
        await rig.provider.down(handle)
        assert (await rig.provider.prove_down(handle)).gone


@pytest.fixture
def theirs() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["tail", "-f", "/dev/null"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


async def test_processes_of_others_are_left_alone(rig: ProviderRig, theirs: subprocess.Popen[bytes]) -> None:
    handle = await rig.provider.launch(rig.intent)
    # A stale pid file that now names somebody else's process.
    folder = Path.home() / ".campaign" / handle.data["folder"]
    (folder / "agent.pid").write_text(str(theirs.pid))
    await rig.provider.down(handle)
    assert theirs.poll() is None
