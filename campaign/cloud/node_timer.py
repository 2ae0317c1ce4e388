"""The lease timer of a node: stops the engine, lets rows be flushed, and ends the node. Standard library only.

    python node_timer.py FOLDER      with CAMPAIGN_* in the environment (sky/node.yaml)

It is started in a session of its own before anything else is, and trusts nobody: not the agent, which may hang,
and not the controller, which may be dead. It counts on CLOCK_BOOTTIME; the wall clock of a node may be wrong, so a
lease never lasts longer here than the seconds it was granted. Only a signed record extends it.
"""

import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FLUSH_S = 20.0
"""From the polite signal to the agent to the end of the node."""
POLL_S = 1.0
RETRY_S = 15.0
END_TRIES = 60
"""A timer whose node has ended already may itself live on, where a scheduler does not end what it did not start."""


def now() -> float:
    """Seconds that also pass while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def granted(deadline_utc: float, lease_s: float, utc: float) -> float:
    """Seconds left: by the wall clock, but never more than the lease is long."""
    return max(0.0, min(deadline_utc - utc, lease_s))


def extension(folder: Path, key: str, lease: str) -> float | None:
    """The latest deadline (UTC seconds) that a signed record grants, or None."""
    latest = None
    for file in sorted(folder.glob("*.json")):
        try:
            outer = json.loads(file.read_bytes())
            body = json.dumps(outer["record"], sort_keys=True, separators=(",", ":")).encode()
            mac = hmac.new(bytes.fromhex(key), body, hashlib.sha256).hexdigest()
            record = outer["record"]
            if (
                not hmac.compare_digest(mac, outer["hmac"])
                or record["lease"] != lease
                or record["kind"] != "extend"
            ):
                continue
            latest = max(latest or 0.0, record["deadline_utc_ns"] / 1e9)
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return latest


def end_agent(folder: Path) -> None:
    """TERM to the agent's group, so that it seals what it has; KILL once its time is over."""
    try:
        pid = int((folder / "agent.pid").read_text())
    except (OSError, ValueError):
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(pid, number)
        except OSError:
            return
        until = now() + FLUSH_S
        while number == signal.SIGTERM and now() < until:
            try:
                os.killpg(pid, 0)
            except OSError:
                return
            time.sleep(0.2)


def write(folder: Path, **more: object) -> None:
    """What the controller reads back."""
    temporary = folder / "timer.tmp"
    temporary.write_text(json.dumps({"pid": os.getpid(), "boottime": now(), **more}))
    temporary.replace(folder / "timer.json")


def main(folder: Path) -> None:
    """Wait for the lease's end; then end everything, again and again until this process is gone with it."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    env = os.environ
    key, lease, end = env["CAMPAIGN_KEY"], env["CAMPAIGN_LEASE"], env["CAMPAIGN_END"]
    deadline_utc, lease_s = float(env["CAMPAIGN_DEADLINE_UTC"]), float(env["CAMPAIGN_LEASE_S"])
    started = now()
    ends = started + granted(deadline_utc, lease_s, time.time())
    write(folder, left_s=ends - now(), end=end)
    while now() < ends:
        time.sleep(POLL_S)
        later = extension(folder / "control", key, lease)
        if later is not None and later > deadline_utc:
            ends += later - deadline_utc
            deadline_utc = later
            write(folder, left_s=ends - now(), end=end)
    end_agent(folder)
    write(folder, left_s=0, end=end, ended=True)
    for _ in range(END_TRIES):
        subprocess.run(["bash", "-c", end], check=False, timeout=60)  # ours, from the launch call
        time.sleep(RETRY_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
