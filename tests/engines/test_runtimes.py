"""Runtimes: a venv of its own for real, from a wheel and from a lock file; patches verified on the live install."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from campaign.engines import gpu, runtimes
from campaign.engines.base import BootOrder
from campaign.errors import PreflightError
from campaign.spec.models import Arm, Patch, Runtime

CODE = "VALUE = 1\n"


def wheel(folder: Path, version: str) -> Path:
    path = folder / f"demo_engine-{version}-py3-none-any.whl"
    info = f"demo_engine-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("demo_engine/__init__.py", CODE)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: demo-engine\nVersion: {version}\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.mark.engine
def test_two_versions_side_by_side_and_a_patched_third(tmp_path: Path) -> None:
    base = tmp_path / "runtimes"
    old = Runtime(pip=str(wheel(tmp_path, "1.0")))
    lock = tmp_path / "lock.txt"
    lock.write_text(str(wheel(tmp_path, "2.0")) + "\n")
    new = Runtime(lock=str(lock))
    installed = {name: runtimes.install(r, name, base) for name, r in (("old", old), ("new", new))}
    assert installed["old"].packages["demo-engine"] == "1.0"
    assert installed["new"].packages["demo-engine"] == "2.0"
    assert installed["old"].python != installed["new"].python
    again = runtimes.install(old, "old", base)
    assert (again.seconds, again.python) == (0.0, installed["old"].python)

    # Of another length: bytecode is taken for current by size and whole seconds.
    data = b"VALUE = 2  # patched\n"
    (tmp_path / "patch.py").write_bytes(data)
    patch = Patch(
        file=str(tmp_path / "patch.py"),
        sha256=hashlib.sha256(data).hexdigest(),
        target="demo_engine/__init__.py",
    )
    runtimes.install(old, "old", base, patches=(patch,))
    site = runtimes.site_packages(old, base, (patch,))
    assert site is not None
    arm = Arm(engine="sglang", model="m", patches=(patch,))
    order = BootOrder("b", "a", "0" * 16, arm, {}, "p0", (), (), "x", 1.0, Runtime(venv=str(site.parents[2])))
    with pytest.raises(PreflightError, match="put the patch into the venv"):
        gpu.apply_patches(order)  # a venv of the user's is never written to
    (site / "demo_engine/__init__.py").write_bytes(data)
    assert gpu.apply_patches(order) == {patch.target: patch.sha256}
    exe = str(site.parents[2] / "bin" / "python")
    read = [exe, "-c", "import demo_engine; print(demo_engine.VALUE)"]
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == "2\n"
    read[0] = installed["old"].python
    assert subprocess.run(read, capture_output=True, text=True, check=True).stdout == "1\n", (
        "the unpatched one is as it was"
    )


@pytest.mark.engine
def test_an_install_that_fails_says_why_and_leaves_no_mark(tmp_path: Path) -> None:
    bad = Runtime(pip=str(tmp_path / "none-1.0-py3-none-any.whl"))
    with pytest.raises(PreflightError, match=r"runtime x: install failed.*Fix:"):
        runtimes.install(bad, "x", tmp_path)
    assert not list(tmp_path.rglob("campaign-runtime.json"))


def test_versions_from_the_file_and_from_a_venv(tmp_path: Path) -> None:
    assert runtimes.version(Runtime(pip="sglang[all]==0.5.14"), "sglang") == "0.5.14"
    assert runtimes.version(Runtime(image="x@sha256:" + "0" * 64), "sglang") is None
    assert runtimes.version(Runtime(image="x@sha256:" + "0" * 64, version="0.5.23"), "sglang") == "0.5.23"
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    (site / "vllm-0.24.0.dist-info").mkdir(parents=True)
    assert runtimes.version(Runtime(venv=str(tmp_path)), "vllm") == "0.24.0"


def test_what_cannot_be_done_here_says_so(tmp_path: Path) -> None:
    for runtime, words in (
        (Runtime(venv=str(tmp_path)), "virtual environment"),
        (Runtime(pip="sglang==0.5.14"), "installed at set-up"),
    ):
        with pytest.raises(PreflightError, match=words):
            runtimes.python(runtime, tmp_path)
    with pytest.raises(PreflightError, match="no such file"):
        runtimes.folder(Runtime(lock=str(tmp_path / "none")), tmp_path)


@pytest.mark.parametrize("target", ["../../../etc/x.py", "/etc/x.py"])
def test_a_patch_cannot_leave_site_packages(tmp_path: Path, target: str) -> None:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "p.py").write_bytes(b"x")
    patch = Patch(file=str(tmp_path / "p.py"), sha256=hashlib.sha256(b"x").hexdigest(), target=target)
    order = BootOrder(
        "b",
        "a",
        "0" * 16,
        Arm(engine="sglang", model="m", patches=(patch,)),
        {},
        "p0",
        (),
        (),
        "x",
        1.0,
        Runtime(venv=str(tmp_path)),
    )
    with pytest.raises(PreflightError, match="leaves site-packages"):
        gpu.apply_patches(order)
