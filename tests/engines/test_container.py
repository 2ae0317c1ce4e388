"""An engine from an image, with a real podman: built from this Python, started under the guard, and gone afterwards."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.engines import container, fetch, procfs, runtimes
from campaign.engines.base import BootOrder
from campaign.engines.host import LocalEngineHost
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Model, Runtime, Server

SERVER = Path(__file__).parents[1] / "data" / "tiny_openai.py"
SKIPPED = {"test", "site-packages", "__pycache__", "idlelib", "tkinter", "ensurepip", "lib2to3", "turtledemo"}


def libraries(files: list[Path]) -> set[Path]:
    """What the loader needs for these, the loader included."""
    said = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    return {Path(word) for word in said.split() if word.startswith("/") and not word.endswith(":")}


def build(tar: Path) -> None:
    base, version = Path(sys.base_prefix), f"python{sys.version_info[0]}.{sys.version_info[1]}"
    lib = base / "lib" / version
    exe = (base / "bin" / version).resolve()

    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        parts = set(Path(member.name).parts)
        return None if parts & SKIPPED or any(p.startswith("config-") for p in parts) else member

    with tarfile.open(tar, "w", dereference=True) as out:
        out.add(exe, "opt/py/bin/python3")
        out.add(lib, f"opt/py/lib/{version}", filter=wanted)
        for path in libraries([exe, *(lib / "lib-dynload").glob("*.so")]):
            out.add(path, str(path).lstrip("/"))
        out.add(SERVER, "opt/tiny_openai.py")
        for folder in ("tmp", "proc", "sys", "dev", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            out.addfile(entry)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Name and digest of an image; skipped by name where no container can be started."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed here")
    if os.getuid() != 0:
        pytest.skip("needs root: the test writes its own storage of images")
    folder = tmp_path_factory.mktemp("podman")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    conf = folder / "containers.conf"
    runtime = "runc" if shutil.which("runc") else "crun"
    conf.write_text(
        f'[containers]\ndefault_ulimits = ["nofile={soft}:{hard}", "nproc=1000:1000"]\nseccomp_profile = "unconfined"\n'
        f'[engine]\nruntime = "{runtime}"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CONTAINERS_CONF", str(conf))
        build(folder / "image.tar")
        name = "localhost/campaign-test:1"
        made = subprocess.run(
            ["podman", "import", "--quiet", "--change", "ENV PATH=/opt/py/bin", str(folder / "image.tar"), name],
            capture_output=True, text=True, check=False, timeout=200,
        )  # fmt: skip
        if made.returncode:
            pytest.skip(f"podman cannot hold an image here: {made.stderr.strip()[-200:]}")
        tried = subprocess.run(
            ["podman", "run", "--rm", "--network", "host", "--pid", "host", name, "python3", "-c", "print(1)"],
            capture_output=True, text=True, check=False, timeout=100,
        )  # fmt: skip
        if tried.returncode:
            pytest.skip(f"podman cannot start a container here: {tried.stderr.strip()[-200:]}")
        digest = subprocess.run(
            ["podman", "image", "inspect", "--format", "{{.Digest}}", name], capture_output=True, text=True, check=True
        ).stdout.strip()  # fmt: skip
        yield f"localhost/campaign-test@{digest}"
        subprocess.run(["podman", "rmi", "--force", name], capture_output=True, check=False, timeout=100)


def order(image: str, tmp_path: Path, name: str = "s/g/r0/a@0") -> BootOrder:
    server = Server(
        argv=("{python}", "/opt/tiny_openai.py", "--port", "{port}", "--model", "{model}"), key_env="TINY_KEY"
    )
    arm = Arm(engine="command", model="m", runtime="boxed", command=server, env={"TINY_WORD": "a b"})
    models = {"m": Model(path=str(tmp_path))}
    return BootOrder(
        name, "a", "0" * 16, arm, models, "p0", (), (), str(tmp_path / "log"), 60.0, Runtime(image=image)
    )


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def left(boot_id: str) -> str:
    argv = ["podman", "ps", "--all", "--quiet", "--filter", f"label=campaign.boot={boot_id}"]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


async def test_an_engine_runs_from_an_image_and_nothing_of_it_stays(image: str, tmp_path: Path) -> None:
    assert runtimes.install(Runtime(image=image), "boxed").python == "python3"
    host, what = LocalEngineHost(), order(image, tmp_path)
    try:
        record = await host.boot(what)
        # The process of the container itself, not podman's.
        assert record.provenance["argv"][:2] == ["python3", "/opt/tiny_openai.py"]
        assert record.provenance["runtime"]["image_digest"] == image.partition("@")[2]
        assert record.provenance["env"]["TINY_WORD"] == "a b"
        assert record.provenance["env"]["TINY_KEY"] is None
        key = record.headers["Authorization"].rpartition(" ")[2]
        tree = host._servers[what.boot_id].child.pids()
        lines = [command_line(p) for p in tree]
        assert any("podman" in line for line in lines)
        assert not any(key in line for line in lines)
        body = {"model": "m", "prompt": "x", "max_tokens": 5}
        status, _ = await fetch.post(record.base_url + "/v1/completions", record.headers, body, 10)
        assert status == 200
        assert left(what.boot_id)
        await host.stop(what.boot_id)
        assert [p for p in tree if procfs.state(p) not in {None, "Z"}] == []
        assert procfs.port_is_free(record.port)
        assert not left(what.boot_id)
    finally:
        await host.close()


async def test_a_container_that_dies_is_found(image: str, tmp_path: Path) -> None:
    host, what = LocalEngineHost(), order(image, tmp_path, "s/g/r0/b@0")
    try:
        record = await host.boot(what)
        os.kill(record.provenance["pid"], signal.SIGKILL)
        assert not await host.alive(what.boot_id)
        assert (await host.why_dead(what.boot_id))[0] == "died"
    finally:
        await host.close()
    assert not left(what.boot_id)


def test_without_podman_it_is_refused_by_name(tmp_path: Path, monkeypatch) -> None:
    box = Runtime(image=f"org/engine@sha256:{'a' * 64}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        PreflightError,
        match=r"org/engine: podman is not on this node; neither is docker.*Fix: install podman",
    ):
        runtimes.install(box, "boxed")
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    with pytest.raises(PreflightError, match="docker is, and its containers would outlive a killed run"):
        runtimes.install(box, "boxed")


def test_the_command_line_of_a_container(tmp_path: Path, monkeypatch) -> None:
    from campaign.engines.base import Launch

    monkeypatch.setattr(container, "podman", lambda _: "/usr/bin/podman")
    snapshot = tmp_path / "models--o--m" / "snapshots" / "r"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    what = order(f"org/e@sha256:{'a' * 64}", tmp_path)
    with contextlib.suppress(KeyError):
        monkeypatch.delenv("HF_HOME")
    hub = BootOrder(
        what.boot_id, "a", what.arm_hash, what.config, {"m": Model(hub="o/m", revision="r", cache=str(tmp_path))},
        "p0", (4, 6), (), "x", 1.0, what.runtime,
    )  # fmt: skip
    argv = container.wrap(
        hub, Launch(("python3", "-m", "srv"), {"SECRET_KEY": "value-1234", "CUDA_VISIBLE_DEVICES": "4,6"})
    ).argv
    text = " ".join(argv)
    assert "--device nvidia.com/gpu=4 --device nvidia.com/gpu=6" in text
    # Links of the snapshot lead to blobs beside it.
    assert f"--volume {tmp_path / 'models--o--m'}:{tmp_path / 'models--o--m'}:ro" in text
    assert "--env SECRET_KEY" in text
    assert "value-1234" not in text
    assert text.endswith(f"--entrypoint python3 org/e@sha256:{'a' * 64} -m srv")
