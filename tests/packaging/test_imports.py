"""What a command may import, and that the whole environment resolves."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("ray", "sky", "pyarrow", "scipy", "matplotlib")


@pytest.mark.parametrize(
    "argv", [["--help"], ["run", "--help"], ["report", "--help"], ["spend", "--help"], ["--version"]]
)
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import json, sys\n"
        "from campaign.cli import cli\n"
        f"cli.main({argv!r}, standalone_mode=False)\n"
        "print('\\n' + json.dumps(sorted(m.split('.')[0] for m in sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & set(HEAVY)


def test_every_module_imports() -> None:
    names = [
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for p in sorted((ROOT / "campaign").rglob("*.py"))
        if p.name != "__main__.py"
    ]
    code = "import importlib\n" + "\n".join(f"importlib.import_module({n!r})" for n in names)
    done = subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_constraints_hold_names_and_versions_only() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    for line in lines:
        name, _, version = line.partition("==")
        assert name, line
        assert version, line
        assert not set(version) & set("/:@ "), line
