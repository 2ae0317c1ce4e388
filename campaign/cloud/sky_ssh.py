"""`ssh` to a cluster of SkyPilot's."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from campaign.errors import ProviderError


def ssh_argv(name: str, cache: Path) -> list[str]:
    """`ssh` to a cluster through SkyPilot's own configuration, its keys found under this HOME."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  # ssh reads the password file, SkyPilot HOME
    config, key = cache / name, home / ".sky/generated/ssh-keys" / f"{name}.key"
    if not config.is_file():
        _write_ssh_config(name, home, config)
    identity = ["-i", str(key)] if key.is_file() else []
    master = [
        "-o",
        "ControlMaster=auto",
        "-o",
        f"ControlPath=/tmp/cmpssh-{os.getuid()}-%C",
        "-o",
        "ControlPersist=60",
    ]
    quiet = [
        "-o",
        "BatchMode=yes",
        "-o",
        "LogLevel=ERROR",
        "-o",
        "ConnectTimeout=20",
        "-o",
        "ServerAliveInterval=15",
    ]
    return ["ssh", "-F", str(config), *identity, *master, *quiet, name]


def _write_ssh_config(name: str, home: Path, config: Path) -> None:
    """Ask `sky status NAME`, SkyPilot's public way to write it, and keep a copy.

    A server of this account writes a file of the same name for itself, without the way through the server.
    """
    sky_command = Path(sys.executable).with_name("sky")
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [str(sky_command), "status", name],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=120, check=False,
        )  # fmt: skip
    try:
        text = (home / ".sky/generated/ssh" / name).read_text(encoding="utf-8")
    except OSError:
        raise ProviderError("unreachable", f"SkyPilot has no SSH configuration for {name}") from None
    config.parent.mkdir(parents=True, exist_ok=True)
    temporary = config.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(config)
