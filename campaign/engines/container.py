"""Engines from an image: `podman run` under our guard, so that nothing of it survives.

Podman starts a container as a descendant of the command that asked for it, and the guard, a subreaper, ends all of
its descendants. Containers of Docker belong to its daemon: they would outlive a killed campaign, so Docker alone is
refused. The image's own `python3` starts the engine; it shares the node's network and process numbers, so that port,
command line and environment of the live process are seen as those of any other.
"""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from campaign.engines import models as mirror
from campaign.engines.base import BootOrder, Launch
from campaign.engines.runtimes import IMAGE_PYTHON
from campaign.errors import PreflightError

_LABEL = "campaign.boot"
_PASSED = ("CONTAINERS_CONF", "XDG_RUNTIME_DIR", "REGISTRY_AUTH_FILE")
"""Variables that podman itself reads."""
_FIX = "Fix: install podman on the node, or boot the node from the image (nodes.X.image) and give its interpreter as `venv: FOLDER`"


def podman(image: str) -> str:
    """Path of a podman that works here. Raises PreflightError that names what is missing."""
    exe = shutil.which("podman")
    name = image.partition("@")[0]
    if exe is None:
        docker = shutil.which("docker")
        there = (
            "; docker is, and its containers would outlive a killed run" if docker else "; neither is docker"
        )
        raise PreflightError(f"runtime image {name}: podman is not on this node{there}. {_FIX}")
    said = _call([exe, "info", "--format", "json"], 30.0)
    if said.returncode:
        last = (said.stderr or said.stdout).strip().splitlines()[-1:]
        raise PreflightError(f"runtime image {name}: podman does not work here: {' '.join(last)}. {_FIX}")
    return exe


def pull(image: str, timeout_s: float = 3600.0) -> dict[str, str]:
    """Have the image on the node; versions of the Python packages in it. Raises PreflightError."""
    exe = podman(image)
    if _call([exe, "image", "exists", image], 30.0).returncode:
        said = _call([exe, "pull", "--quiet", image], timeout_s)
        if said.returncode:
            last = " / ".join(said.stderr.strip().splitlines()[-2:])
            raise PreflightError(
                f"runtime image {image}: cannot be had: {last}. Fix: check name, digest and the node's access"
            )
    return packages(image)


@lru_cache(maxsize=16)
def packages(image: str) -> dict[str, str]:
    """Distribution -> version, as the image's own Python has them; empty where it has none."""
    code = (
        "import importlib.metadata as m, json;"
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}))"
    )
    exe = podman(image)
    said = _call(
        [exe, "run", "--rm", "--network", "none", "--entrypoint", IMAGE_PYTHON, image, "-I", "-c", code],
        300.0,
    )
    try:
        return dict(json.loads(said.stdout))
    except ValueError:
        return {}


def wrap(order: BootOrder, launch: Launch) -> Launch:
    """The launch inside the order's image. Values of variables never stand on podman's command line."""
    assert order.runtime is not None
    image = str(order.runtime.image)
    words = [podman(image), "run", "--rm", "--pull", "never", "--label", f"{_LABEL}={order.boot_id}"]
    words += ["--network", "host", "--pid", "host", "--ipc", "host", "--init=false"]
    for index in order.gpus:
        words += ["--device", f"nvidia.com/gpu={index}"]
    for path, mode in _mounts(order).items():
        words += ["--volume", f"{path}:{path}:{mode}"]
    # CDI numbers the GPUs of a container from 0 and shows no others.
    env = {**launch.env, "CUDA_VISIBLE_DEVICES": ",".join(str(i) for i in range(len(order.gpus)))}
    for name in env:
        words += ["--env", name]
    program, *rest = launch.argv
    return replace(launch, argv=(*words, "--entrypoint", program, image, *rest), env=env)


def passed() -> dict[str, str]:
    """Variables of this process that podman reads; the container does not get them."""
    return {name: os.environ[name] for name in _PASSED if name in os.environ}


def sweep(boot_id: str) -> None:
    """Forget the containers of a boot that has ended: its processes are gone, its record may not be."""
    exe = shutil.which("podman")
    if exe is not None:
        listed = _call([exe, "ps", "--all", "--quiet", "--filter", f"label={_LABEL}={boot_id}"], 30.0)
        for found in listed.stdout.split():
            _call([exe, "rm", "--force", "--time", "0", found], 60.0)


def _mounts(order: BootOrder) -> dict[str, str]:
    """Weights, read-only; the hub's cache, which the engine writes to."""
    out: dict[str, str] = {}
    arm = order.config
    drafts = arm.speculation.draft_model if arm.speculation else None
    for model in (order.models.get(str(n)) for n in (arm.model, drafts) if n is not None):
        if model is None:
            continue
        if model.path is not None:
            out[str(Path(model.path).expanduser().resolve())] = "ro"
        found = mirror.folder(model)
        if found is not None:
            # A cache of the hub holds links to blobs beside its snapshots.
            root = found.parents[1] if found.parent.name == "snapshots" else found
            out[str(root)] = "ro"
    if arm.chat_template is not None and Path(arm.chat_template).is_file():
        out[str(Path(arm.chat_template).resolve())] = "ro"
    for name in ("HF_HOME", "HF_HUB_CACHE"):
        if Path(os.environ.get(name, "")).is_absolute():
            out[os.environ[name]] = "rw"
    return out


def _call(argv: list[str], timeout_s: float) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(argv, 1, "", str(error))
