"""How an engine gets onto this node: a pinned requirement or a lock file in a venv of its own, or a venv that is there.

Installed once a node, before the first anchor, into a folder named after what was asked for. Two arms with two
versions of one engine have two venvs. An image is pulled by its digest and started with podman
(campaign.engines.container).
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from campaign.engines.base import BootOrder
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Patch, Runtime

_PINNED = re.compile(r"^\s*[A-Za-z0-9_.-]+(?:\[[^\]]*\])?\s*==\s*([A-Za-z0-9_.!+-]+)")
_DONE = "campaign-runtime.json"
IMAGE_PYTHON = "python3"
"""The interpreter of an image, as its own PATH has it."""
DIGEST = re.compile(r"@(sha256:[0-9a-f]{64})$")


@dataclass(frozen=True, slots=True)
class Installed:
    """A runtime on this node."""

    name: str
    python: str
    packages: Mapping[str, str]
    """Distribution -> version, as installed."""
    seconds: float
    """What the install took; 0 where it was there."""


def version(runtime: Runtime | None, engine: str) -> str | None:
    """The engine's version, as far as the file or an existing venv says it."""
    if runtime is None:
        return None
    if runtime.version is not None:
        return runtime.version
    if runtime.pip is not None and (found := _PINNED.match(runtime.pip)):
        return found[1]
    site = site_packages(runtime)
    if site is not None:
        infos = sorted(site.glob(f"{engine}-*.dist-info"))
        if infos:
            return infos[0].name.removesuffix(".dist-info").partition("-")[2]
    return None


def folder(runtime: Runtime, base: Path | None = None, patches: tuple[Patch, ...] = ()) -> Path:
    """Where its venv is, or will be. A patched install is another one: arms that share a runtime stay apart."""
    if runtime.venv is not None:
        return Path(runtime.venv).expanduser()
    asked: dict[str, str | None] = {"pip": runtime.pip, "python": _host_python()}
    if runtime.lock is not None:
        asked["lock"] = hashlib.sha256(_lock(runtime).read_bytes()).hexdigest()
    if patches:
        asked["patches"] = ",".join(f"{p.target}={p.sha256}" for p in patches)
    name = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
    root = base or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "campaign" / "runtimes"
    return root / name


def python(runtime: Runtime | None, base: Path | None = None, patches: tuple[Patch, ...] = ()) -> str:
    """The interpreter that starts the engine. Raises PreflightError where there is none."""
    if runtime is None:
        return sys.executable
    if runtime.image is not None:
        if patches:
            raise PreflightError(
                "patches: an image is not written to. Fix: build the patched image, or use a `pip` runtime"
            )
        return IMAGE_PYTHON
    found = folder(runtime, base, patches) / "bin" / "python"
    if not found.exists():
        how = (
            "give the folder of a virtual environment"
            if runtime.venv
            else "it is installed at set-up; run again"
        )
        raise PreflightError(f"runtime {runtime.venv or runtime.pip or runtime.lock}: no {found}. Fix: {how}")
    return str(found)


def site_packages(runtime: Runtime, base: Path | None = None, patches: tuple[Patch, ...] = ()) -> Path | None:
    """Folder of its installed packages, if it is there."""
    if runtime.image is not None or (runtime.lock is not None and not Path(runtime.lock).is_file()):
        return None
    found = sorted((folder(runtime, base, patches) / "lib").glob("python3*/site-packages"))
    return found[0] if found else None


def install(
    runtime: Runtime,
    name: str,
    base: Path | None = None,
    timeout_s: float = 1800,
    patches: tuple[Patch, ...] = (),
) -> Installed:
    """Make the runtime ready; idempotent. Raises PreflightError with pip's last words.

    A venv that a kill left half-made has no mark, and is made anew.
    """
    import time

    started = time.monotonic()
    if runtime.image is not None:
        from campaign.engines import container

        found = container.pull(runtime.image, timeout_s)
        return Installed(name, python(runtime, base, patches), found, time.monotonic() - started)
    if runtime.venv is not None:
        exe = python(runtime, base)
        return Installed(name, exe, _packages(exe), 0.0)
    target = folder(runtime, base, patches)
    mark = target / _DONE
    if mark.is_file():
        return Installed(
            name, python(runtime, base, patches), json.loads(mark.read_text(encoding="utf-8")), 0.0
        )
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    host, exe = _host_python(), str(target / "bin" / "python")
    # Bootstrapping pip into a venv takes longer than most installs; the host's can install into it.
    borrowed = _answers([host, "-m", "pip", "--python", host, "--version"])
    _call([host, "-m", "venv", *["--without-pip"] * borrowed, str(target)], name, timeout_s)
    pip = [host, "-m", "pip", "--python", exe] if borrowed else [exe, "-m", "pip"]
    what = ["-r", str(_lock(runtime))] if runtime.lock is not None else [str(runtime.pip)]
    _call([*pip, "install", "--disable-pip-version-check", "--no-input", *what], name, timeout_s)
    packages = _packages(exe)
    temporary = mark.with_suffix(".tmp")
    temporary.write_text(json.dumps(packages, sort_keys=True), encoding="utf-8")
    temporary.replace(mark)
    return Installed(name, exe, packages, time.monotonic() - started)


def needed(
    arms: Iterable[Arm], runtimes: Mapping[str, Runtime]
) -> list[tuple[str, Runtime, tuple[Patch, ...]]]:
    """Installs that these arms need, each once, in the order they are first used."""
    found = {
        (a.runtime, a.patches): (a.runtime, runtimes[a.runtime], a.patches)
        for a in arms
        if a.runtime is not None and a.runtime in runtimes
    }
    return list(found.values())


def _host_python() -> str:
    """The interpreter itself, not the venv that campaign runs in."""
    base = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return str(base) if base.exists() else sys.executable


def _lock(runtime: Runtime) -> Path:
    path = Path(str(runtime.lock)).expanduser()
    if not path.is_file():
        raise PreflightError(
            f"runtime lock {runtime.lock}: no such file. Fix: give a requirements lock that exists"
        )
    return path


def _answers(argv: list[str]) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _call(argv: list[str], name: str, timeout_s: float) -> None:
    from campaign.redact import REDACTOR

    # pip reads its own configuration; what a shell exported for our Python must not reach the new one.
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False, env=env)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PreflightError(
            f"runtime {name}: {error}. Fix: install it by hand and give `venv: FOLDER`"
        ) from error
    if done.returncode:
        last = REDACTOR.text(" / ".join((done.stderr or done.stdout).strip().splitlines()[-3:]))
        raise PreflightError(
            f"runtime {name}: install failed: {last}. Fix: check the requirement and the index"
        )


_RECORDED = re.compile(
    r"^(?:torch|triton|sglang|sglang-kernel|sgl-kernel|vllm|flashinfer[\w-]*|transformers|tokenizers|xgrammar"
    r"|nvidia-(?:nccl|cudnn|cublas|cuda-runtime)[\w-]*|flash-attn[\w-]*|deep-gemm|tensorrt[\w-]*)$",
    re.IGNORECASE,
)


def versions(exe: str, order: BootOrder) -> dict[str, str]:
    """Versions of engine, torch, NCCL, CUDA and kernels in the interpreter that runs; none for our own."""
    if order.runtime is not None and order.runtime.image is not None:
        from campaign.engines import container

        inside = container.packages(order.runtime.image)
        return {name: found for name, found in sorted(inside.items()) if _RECORDED.match(name)}
    if order.runtime is None or not exe.startswith("/"):
        return {}
    return {name: found for name, found in sorted(_packages(exe).items()) if _RECORDED.match(name)}


@lru_cache(maxsize=16)
def _packages(exe: str) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json;"
        # The first of a name on the path is the one that is imported.
        "print(json.dumps({d.metadata['Name']: d.version for d in reversed(list(m.distributions()))"
        " if d.metadata['Name']}))"
    )
    done = subprocess.run([exe, "-I", "-c", code], capture_output=True, text=True, timeout=120, check=False)
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {}
