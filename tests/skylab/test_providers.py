"""The conformance suite and whole campaigns where a launch, a host or a server is real; long, like the drills."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from campaign.clock import SystemClock
from campaign.cloud.attach import AttachProvider
from campaign.cloud.sky import SkyProvider
from campaign.errors import ProviderError
from campaign.plan import codec
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.spec.load import load
from campaign.spec.models import Node, SkyNode
from campaign.testing.conformance_provider import (
    ProviderConformance,
    ProviderRig,
    attach_node,
    intent_for,
    local_node,
    sky_node,
)

SPEC = Path(__file__).with_name("rented.yaml")
Lab = Any
"""conftest.Lab, given by the fixture."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(2400),
    pytest.mark.filterwarnings(
        "ignore"
    ),  # SkyPilot's own modules warn while they are imported into this process
    pytest.mark.skipif(not os.environ.get("DRILL_REAL"), reason="long: `make drill-real` runs it"),
]


@pytest.fixture
def here(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """The lab's environment in this process, for providers that run in it."""
    for name in ("SKYPILOT_API_SERVER_ENDPOINT", "XDG_STATE_HOME", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "SLURM_CONF", "SKYPILOT_API_SERVER_LOCAL_PORT", "SKYLAB_TOKEN"):
        monkeypatch.setenv(name, lab.env[name])
    ssh = Path(lab.env["HOME"]) / ".ssh" / "config"
    options = f"IdentityFile {lab.folder}/ssh/id\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  IdentitiesOnly yes\n"
    if not ssh.is_file() or "Host 127.0.0.1" not in ssh.read_text():
        with ssh.open("a") as file:
            file.write(f"\nHost 127.0.0.1\n  {options}")
    return lab


def target(lab: Lab) -> str:
    """The lab's login node, as a host somebody has."""
    port = next(
        w.split()[1]
        for w in (lab.folder / "ssh/sshd_config").read_text().splitlines()
        if w.startswith("Port ")
    )
    return f"skynode@127.0.0.1:{port}"


def rig_of(provider: Any, node: Node, wrong: Node, tmp_path: Path) -> ProviderRig:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    loaded = load(SPEC, ())
    plan = build(loaded.spec, declared_prices(loaded.spec))
    plan = replace(plan, sessions=(replace(plan.sessions[0], name="s"),))
    (run_dir / "plan.json").write_bytes(codec.dump(plan))
    (run_dir / "canonical.json").write_bytes(loaded.canonical)

    async def settle() -> None: ...

    intent = intent_for(node, str(run_dir), SystemClock().utc_ns() + 1500 * 10**9)
    return ProviderRig(provider, intent, wrong, settle)


class TestRented(ProviderConformance):
    @pytest.fixture
    def rig(self, here: Lab, tmp_path: Path) -> Iterator[ProviderRig]:
        provider = SkyProvider(SystemClock(), Path(here.env["HOME"]) / ".local/state/campaign/wheels")
        node = SkyNode.model_validate(sky_node().model_dump() | {"infra": "slurm/fakeb200"})
        yield rig_of(provider, node, local_node(), tmp_path)
        assert here.squeue() == []


class TestAttachedBySsh(ProviderConformance):
    @pytest.fixture
    def rig(self, here: Lab, tmp_path: Path) -> ProviderRig:
        provider = AttachProvider(SystemClock(), Path(here.env["HOME"]) / ".local/state/campaign/wheels")
        return rig_of(provider, attach_node(ssh=target(here), gpus=[0, 1]), sky_node(), tmp_path)

    async def test_gpus_are_held_on_the_host(self, rig: ProviderRig) -> None:
        first = await rig.provider.launch(rig.intent)
        with pytest.raises(ProviderError, match="held by another session") as caught:
            await rig.provider.launch(replace(rig.intent, lease="s.2"))
        assert caught.value.kind == "capacity"
        await rig.provider.down(first)
        assert (await rig.provider.prove_down(first)).gone


def attached(lab: Lab, **node: object) -> Path:
    """The campaign of the lab, on a node somebody has."""
    words = ", ".join(f'{k}: "{v}"' for k, v in node.items())
    lines = [
        f"  rent: {{provider: attach, {words}, usd_per_hour: 0, max_hours: 0.3}}"
        if "provider: sky" in line
        else line
        for line in SPEC.read_text().splitlines()
    ]
    path: Path = lab.work / "attached.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_campaign_on_a_host_over_ssh(here: Lab) -> None:
    done = here.run("campaign", "run", str(attached(here, ssh=target(here))), timeout=1200)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert here.check_money()["spent_usd"] == 0
    left = [p for p in here.on_node(b"node_agent") if "attach-" in Path(f"/proc/{p}/cmdline").read_text()]
    assert not left


def test_colleagues_cluster_survives_and_can_be_attached_to(here: Lab) -> None:
    """On the same API server: never taken down, by a reconcile or after a campaign has run on it."""
    up = here.run(
        "sky", "launch", "-y", "-c", "dev-anna", "--infra", "slurm/fakeb200", "--gpus", "B200:1", "true"
    )
    assert up.returncode == 0, up.stdout[-2000:] + up.stderr[-2000:]
    (number,) = here.squeue_numbers()
    try:
        process = here.start("run", str(SPEC))
        here.until(here.squeue)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(60)
        here.reconcile()
        assert here.squeue_numbers() == [number]
        done = here.run("campaign", "run", str(attached(here, cluster="dev-anna")), timeout=1200)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        here.reconcile()
        assert here.squeue_numbers() == [number]
        assert "dev-anna" in here.run("sky", "status").stdout
    finally:
        here.run("sky", "down", "-y", "dev-anna")
    here.until(lambda: not here.squeue_numbers(), 120)


def test_campaign_through_a_server_elsewhere(lab: Lab, tmp_path: Path) -> None:
    """A client with a home of its own, an endpoint and a workspace: it has no server, and stops none."""
    server, home = lab.server(), tmp_path / "client"
    (home / ".sky").mkdir(parents=True)
    (home / ".sky" / "config.yaml").write_text("active_workspace: bench\n")
    port = lab.env["SKYPILOT_API_SERVER_LOCAL_PORT"]
    client = {k: v for k, v in lab.env.items() if k != "SKYPILOT_API_SERVER_LOCAL_PORT"}
    client |= {"HOME": str(home), "SKYPILOT_API_SERVER_ENDPOINT": f"http://127.0.0.1:{port}"}
    lab.env = client
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("lease_opened"))
    listed = lab.run("python", "-c", LIST)
    code = process.wait(1500)
    assert code == 0, lab.log()[-4000:]
    assert lab.squeue() == []
    (opened,) = lab.events("lease_opened")
    assert f"{opened.payload['node_id']} bench" in listed.stdout
    lab.check_money()
    time.sleep(1)
    lab.env = {**lab.env, "HOME": str(home)}
    assert lab.server() == []  # none was started for this client
    lab.env = {**lab.env, "HOME": str(lab.folder / "home")}
    assert lab.server() == server


LIST = "import sky; print(*(f\"{r['name']} {r['workspace']}\" for r in sky.get(sky.status(all_users=True))), sep='\\n')"
