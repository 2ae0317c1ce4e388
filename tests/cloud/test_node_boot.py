"""The script a rented node runs first, with a home of its own and a package manager that only writes down what it is told."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from campaign.cloud import node_timer, templates

UV = """#!/bin/bash
echo "$* token=${HF_TOKEN:-none}" >> "$LOG"
"""


@pytest.fixture
def account(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An account whose home is a folder here, with the files of a launch in it."""
    home, bin_ = tmp_path / "home", tmp_path / "bin"
    files = home / ".campaign-node"
    files.mkdir(parents=True)
    bin_.mkdir()
    (files / "node_setup.sh").write_text(
        'mkdir -p "$1/bin"\nprintf \'#!/bin/bash\\nenv > "$PWD/env"\\n\' > "$1/bin/python"\nchmod +x "$1/bin/python"\n'
    )
    (files / "node_timer.py").write_bytes(Path(node_timer.__file__).read_bytes())
    (files / "constraints.txt").touch()
    for name, text in {"uv": UV, "getent": f"#!/bin/bash\necho me:x:1:1::{home}:/bin/bash\n"}.items():
        (bin_ / name).write_text(text)
        (bin_ / name).chmod(0o755)
    yield {
        "PATH": f"{bin_}:{os.environ['PATH']}", "HOME": str(home), "LOG": str(tmp_path / "log"), "HF_TOKEN": "hub-secret",
        "CAMPAIGN_NODE": "cmp-x", "CAMPAIGN_KEY": "ab" * 32, "CAMPAIGN_LEASE": "s.1", "CAMPAIGN_LEASE_S": "300",
        "CAMPAIGN_DEADLINE_UTC": "99999999999", "CAMPAIGN_END": "kill -9 $PPID", "CAMPAIGN_REQUIREMENT": "campaign",
        "CAMPAIGN_NO_DEPS": "", "CAMPAIGN_NAMED": "HF_TOKEN", "CAMPAIGN_HUB": "org/model@abc123",
        "CAMPAIGN_UNWANTED": "~/.lambda_cloud/lambda_keys ~/.aws/credentials",
    }  # fmt: skip
    for timer in home.rglob("timer.json"):
        os.kill(json.loads(timer.read_text())["pid"], signal.SIGKILL)


def boot(env: dict[str, str], what: str, limit_s: float = 120) -> subprocess.CompletedProcess[str]:
    script = templates.path("node_boot.sh")
    return subprocess.run(
        ["bash", script, what], env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )


def test_token_is_there_for_the_download_and_gone_before_the_agent(account: dict[str, str]) -> None:
    done = boot(account, "setup")
    assert done.returncode == 0, done.stderr
    log = Path(account["LOG"]).read_text()
    assert "hf download org/model --revision abc123 --quiet token=hub-secret" in log
    folder = Path(account["HOME"]) / ".campaign" / "cmp-x"
    (folder / "order.json").write_text("{}")
    with subprocess.Popen(
        ["bash", templates.path("node_boot.sh"), "run"],
        env=account,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    ) as run:
        try:
            for _ in range(1200):  # it stays until it is taken down
                if (folder / "exit").exists():
                    break
                time.sleep(0.05)
            assert run.poll() is None
        finally:
            os.killpg(run.pid, signal.SIGKILL)
    seen = (folder / "env").read_text()
    assert "hub-secret" not in seen
    assert account["CAMPAIGN_KEY"] not in seen
    assert (folder / "exit").read_text() == "0\n"


def test_credentials_that_came_along_are_removed_first(account: dict[str, str]) -> None:
    home = Path(account["HOME"])
    sent = home / ".sky" / "file_mounts" / ".lambda_cloud" / "lambda_keys"
    sent.parent.mkdir(parents=True)
    sent.write_text("api_key = yours")
    (home / ".lambda_cloud").mkdir()
    (home / ".lambda_cloud" / "lambda_keys").symlink_to(sent)
    staged = home / ".sky" / ".runtime_files"
    staged.mkdir()
    (staged / "one").write_text("api_key = yours")
    (staged / "two").write_text("the wheel")
    done = boot(account, "setup")
    assert [p.name for p in staged.iterdir()] == ["two"]
    assert "removed ~/.lambda_cloud/lambda_keys" in done.stdout
    assert not sent.exists()
    assert not (home / ".lambda_cloud" / "lambda_keys").is_symlink()


def test_your_own_home_on_a_shared_cluster_is_left_alone(account: dict[str, str]) -> None:
    mine = Path(account["HOME"]) / ".aws" / "credentials"
    mine.parent.mkdir()
    mine.write_text("mine")
    before = Path(account["HOME"]).stat().st_mode
    boot({**account, "SLURM_JOB_ID": "7"}, "setup")
    assert mine.read_text() == "mine"
    assert Path(account["HOME"]).stat().st_mode == before
