"""A rented node end to end, and two failure drills, on a real SkyPilot: part of every run. No cloud account, no mock."""

import json
import os
import re
import signal
import stat
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from campaign.store.run import open_run

SPEC = Path(__file__).with_name("rented.yaml")
Lab = Any
"""conftest.Lab, given by the fixture."""

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]


class Allocation(threading.Thread):
    """Polls scontrol: what the scheduler says of our allocation, from its start to its end."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(daemon=True)
        self.lab, self.stop, self.text = lab, threading.Event(), ""

    def run(self) -> None:
        number = None
        while not self.stop.wait(1.0):
            try:
                if number is None:
                    listed = self.lab.squeue()
                    number = listed[0].split()[0] if listed else None
                if number is not None:
                    self.text = self.lab.slurm("scontrol", "show", "job", number) or self.text
            except (subprocess.SubprocessError, OSError):
                continue

    def elapsed_s(self) -> float:
        """From StartTime to EndTime, as scontrol last showed them."""
        start, end = (
            datetime.fromisoformat(found.group(1))
            for key in ("StartTime", "EndTime")
            if (found := re.search(rf" {key}=(\S+)", self.text))
        )
        return (end - start).total_seconds()


CANARIES = {
    ".aws/credentials": "[default]\naws_access_key_id = x\naws_secret_access_key = CANARY-aws\n",
    ".lambda_cloud/lambda_keys": "api_key = CANARY-lambda\n",
    ".runpod/config.toml": '[default]\napi_key = "CANARY-runpod"\n',
    ".kube/config": "apiVersion: v1\nkind: Config\nusers: [{name: u, user: {token: CANARY-kube}}]\n",
}
"""Credential files of a user, as SkyPilot would send them along."""
SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL")
SECRET_TEXT = re.compile(rb"PRIVATE KEY-----|NAMED-secret")


def secrets_on_the_node(lab: Lab, node: str, lease_key: str) -> tuple[set[str], set[str]]:
    """Everything secret that is there: variables by process, files by name.

    A file counts where it holds a private key, a user's credential, or the key of the lease.
    """
    variables, files = set(), set()
    for kind, word in (
        ("agent", b"node_agent"),
        ("engine", b"llamacpp_server"),
        ("ray", b"raylet"),
        ("timer", b"node_timer"),
    ):
        for pid in lab.on_node(word):
            try:
                # A timer of an earlier lease outlives its allocation where the scheduler has no cgroups.
                if kind == "timer" and node.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
                    continue
                environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            names = {e.partition("=")[0] for e in environ if e}
            variables |= {f"{kind}: {n}" for n in names if SECRET_NAME.search(n)}
            variables |= {
                f"{kind}: {e.partition('=')[0]}" for e in environ if "CANARY" in e or lease_key in e
            }
    for root in (lab.folder / "nodehome", lab.folder / "work", lab.folder / "nodetmp"):
        for path in root.rglob("*"):
            inside = set(path.parts)
            if inside & {"site-packages", "campaign-uv", "spool"} or path.is_symlink() or not path.is_file():
                continue
            try:
                data = path.read_bytes() if path.stat().st_size < 5_000_000 else b""
            except OSError:
                continue
            if b"CANARY" in data:
                files.add(f"a credential of yours in {named(path)}")
            if SECRET_TEXT.search(data) or lease_key.encode() in data:
                files.add(named(path) + ("" if private(path, root) else " (others can read it)"))
    return variables, files


def private(path: Path, root: Path) -> bool:
    """Whether the file, or a folder it is in, is closed to everybody else."""
    chain = [path, *(p for p in path.parents if root in p.parents)]
    return any(not stat.S_IMODE(p.stat().st_mode) & 0o077 for p in chain)


def named(path: Path) -> str:
    """A file without what differs from lease to lease."""
    short = re.sub(r"cmp-[0-9a-z-]+", "NODE", "/".join(path.parts[-3:]))
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", short)


def test_campaign_on_a_rented_node(lab: Lab) -> None:
    home = Path(lab.env["HOME"])
    for name, text in CANARIES.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    lab.env["HF_TOKEN"] = lab.env["AWS_SECRET_ACCESS_KEY"] = "CANARY-environment"
    server = lab.server()
    watch = Allocation(lab)
    watch.start()
    began = time.time()
    try:
        process = lab.start("run", str(SPEC))
        lab.until(lambda: lab.on_node(b"llamacpp_server"))
        (order,) = [
            p
            for p in (lab.folder / "nodehome/.campaign").glob("*/order.json")
            if "cmp-" in str(p) and lab.squeue()[0].split()[1].startswith(p.parent.name)
        ]
        variables, files = secrets_on_the_node(lab, order.parent.name, json.loads(order.read_text())["key"])
        code = process.wait(1200)
    finally:
        for name in CANARIES:
            (home / name).unlink(missing_ok=True)
        del lab.env["HF_TOKEN"], lab.env["AWS_SECRET_ACCESS_KEY"]
    ended = time.time()
    watch.stop.set()
    watch.join(10)
    assert code == 0, lab.log()[-6000:]
    assert lab.squeue() == []  # proof from the scheduler itself
    assert lab.server() == server  # not ours to stop, not ours to start anew
    # Rows came back, were sealed and hashed, and give verdicts.
    run = open_run(lab.runs()[-1])
    rows = run.requests()
    assert len(rows) > 0
    report = json.loads((lab.runs()[-1] / "report.json").read_text())
    assert {v["pair"] for v in report["verdicts"]} == {"kv"}
    assert [a["position"] for a in report["anchors"]] == ["first", "last"]
    (opened,) = lab.events("lease_opened")
    assert set(opened.payload["dead_men"]) == {"autodown", "node_timer", "time_limit"}
    assert opened.payload["usd_per_hour_micro"] == 25_000_000
    # Settled: at least the allocation's time, at most that and what lies between the call, the proof and it.
    (settled,) = lab.events("lease_settled")
    (intent,) = lab.events("lease_intent")
    usd = settled.payload["settled_usd_micro"] / 1e6
    elapsed = watch.elapsed_s()
    least = elapsed * 25 / 3600
    held = (settled.payload["until_utc_ns"] - intent.payload["billing_from_utc_ns"]) / 1e9
    latency = held - elapsed
    print(
        f"\nallocation {elapsed:.0f} s = ${least:.4f}; settled ${usd:.4f}; launch call and proof {latency:.1f} s"
    )
    assert least - 25 / 3600 <= usd <= (elapsed + latency + 1) * 25 / 3600
    assert -1 <= latency <= ended - began - elapsed + 1
    told = lab.run("campaign", "spend", str(lab.runs()[-1]))
    print(told.stdout)
    print(lab.run("sky", "cost-report").stdout)
    lab.check_money()
    # Every secret that was on the node, and no other.
    print("variables:", sorted(variables), "\nfiles:", sorted(files))
    assert variables <= VARIABLES
    assert files <= FILES


VARIABLES = {
    "timer: CAMPAIGN_KEY",  # the key of the lease, with which the timer checks what it is told
    "ray: RAY_AUTH_TOKEN",  # made on the node, for the node's own Ray
    "engine: CAMPAIGN_API_KEY",  # made on the node, for the engine's own port
}
FILES = {
    ".campaign/NODE/order.json",  # the lease's key, for the agent
    # SkyPilot's own copies of the task's secrets: the lease's key, and what the file names under `secrets`
    ".sky/.runtime_files/UUID",
    ".sky/sky_app/sky_job_1",
    ".sky_clusters/NODE/.bash_history",
    "nodehome/.ssh/skypilot_host_key",  # SkyPilot's sshd on the node, made there
}
"""Declared: every secret that may be on a node. None is the user's but the named ones."""


def test_controller_dies_mid_cell_and_reconcile_brings_the_rows_and_ends_the_node(lab: Lab) -> None:
    process = lab.start("run", str(SPEC))
    lab.until(lambda: lab.events("round_committed"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    assert lab.squeue()  # the node does not know; it goes on inside its lease
    foreign = [look_alike(lab, name) for name in LOOK_ALIKES]
    said = lab.reconcile()
    assert "settled" in said
    assert lab.squeue_numbers() == sorted(foreign)
    assert not lab.spend()["open_leases"]
    lab.check_money()
    # What the node had measured is here.
    assert len(open_run(lab.runs()[-1]).requests()) > 0
    assert lab.reconcile().strip() in {"nothing is left behind", ""}
    assert lab.squeue_numbers() == sorted(foreign)
    lab.slurm("scancel", *foreign)
    lab.until(lambda: not lab.squeue_numbers(), 120)


LOOK_ALIKES = ("cmp-000000000000-0a1b2c3d-000001-fcd1e5cf", "cmp-node-fcd1e5cf")
"""Of another installation, its deadline long past; and of nobody who names nodes as we do."""


def look_alike(lab: Lab, name: str) -> str:
    """A node of somebody else's, as the scheduler lists it. Returns its number."""
    script = (
        "sbatch",
        "--parsable",
        "-J",
        name,
        "--gres=gpu:1",
        "--chdir=/tmp",
        "-o",
        "/dev/null",
        "--wrap=sleep 3000",
    )
    number: str = lab.slurm(*script)
    return number


def test_price_above_the_limit_is_never_launched(lab: Lab) -> None:
    done = lab.run("campaign", "run", str(SPEC), "--set", "nodes.rent.max_usd_per_hour=20")
    assert done.returncode == 3, done.stdout[-2000:]
    assert "price" in done.stdout
    assert not lab.events("lease_intent")
    assert lab.squeue() == []
