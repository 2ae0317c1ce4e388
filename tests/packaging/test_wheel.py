"""What a user without a checkout gets: the wheel, installed, used from another folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "build", "--wheel", "--quiet", "--out-dir", out, ROOT], check=True, timeout=300)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    uv = Path(sys.executable).with_name("uv")
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--no-deps", "--target", target, wheel], check=True, timeout=300
    )
    return target


def run(installed: Path, cwd: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-P", *argv],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_templates_travel_as_package_data(installed: Path, tmp_path: Path) -> None:
    code = (
        "import campaign, importlib.resources as r\n"
        "print(campaign.__file__)\n"
        "print((r.files('campaign') / '_templates' / 'node_setup.sh').read_text()[:19])"
    )
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    where, first = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    assert first == "#!/usr/bin/env bash"


def test_starter_file_is_written_and_valid(installed: Path, tmp_path: Path) -> None:
    written = run(installed, tmp_path, "-m", "campaign", "init", "mine.yaml")
    assert written.returncode == 0, written.stderr
    assert (tmp_path / "mine.yaml").read_bytes() == (ROOT / "experiments.yaml").read_bytes()
    checked = run(installed, tmp_path, "-m", "campaign", "validate", "mine.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_wheel_holds_no_sky_package_and_no_third_party_rows(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert not [n for n in names if n.startswith(("sky/", "tests/"))]
    assert not [n for n in names if "brl11" in n and not n.endswith(".py")]
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_sky_folder_is_never_a_python_package() -> None:
    # A regular package named sky on sys.path would shadow SkyPilot.
    assert not list((ROOT / "sky").rglob("*.py"))
    done = subprocess.run(["bash", "-n", ROOT / "sky" / "node_setup.sh"], check=False, timeout=30)
    assert done.returncode == 0
