"""The node's shipper: `python -m campaign.fleet.shipper FOLDER`, beside the session agent and apart from it.

A process of its own, so that an upload never delays a stamp, and so that what an agent wrote before it died is shipped
all the same. It ends when its standard input closes, which the agent's death does too: then everything is shipped once
more, every object looked for, for as long as that may take.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from campaign.errors import StoreError, StoreUnreachable
from campaign.store.objects import FolderObjects, ObjectStore, address, open_objects
from campaign.store.ship import Shipper

EVERY_S = 2.0
LAST_S = 90.0
"""The longest that the last upload may take after the agent has ended."""


@contextmanager
def shipping(folder: Path, store: str) -> Iterator[None]:
    """Ship the folder while the agent works, and to the end before this returns; nothing where `store` is a folder."""
    if address(store) is None:
        yield
        return
    process = start(folder)
    try:
        yield
    finally:
        finish(process)


def start(folder: Path) -> "subprocess.Popen[bytes]":
    """The shipper of this folder, niced; it ends with its standard input."""
    with (folder / "shipper.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "campaign.fleet.shipper", str(folder)],
            stdin=subprocess.PIPE, stdout=log, stderr=log,
        )  # fmt: skip


def finish(process: "subprocess.Popen[bytes]", seconds: float = LAST_S) -> int | None:
    """Tell it that nothing will be added, and wait; None where it was not done in time."""
    if process.stdin is not None:
        with suppress(OSError):
            process.stdin.close()
    try:
        return process.wait(seconds + EVERY_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return None


def work(folder: Path, remote: ObjectStore, until: IO[bytes], every_s: float = EVERY_S) -> bool:
    """Ship until `until` closes, then once more; whether everything arrived."""
    shipper = Shipper(folder / "run", FolderObjects(folder / "spool"), remote)
    while not _closed(until, every_s):
        try:
            shipper.collect()
            shipper.push()
        except StoreError as error:
            # A role whose credential comes late, a disk that is full for a while: asked again as long as there is time.
            print(f"shipper: {error}", flush=True)  # its log
    shipper.collect(final=True)
    end = time.monotonic() + LAST_S
    while True:
        try:
            shipper.push(whole=True)
        except StoreUnreachable as error:
            print(f"shipper: {error}", flush=True)  # its log
            if time.monotonic() >= end:
                return False
            time.sleep(every_s)
        else:
            return True


def _closed(stream: IO[bytes], seconds: float) -> bool:
    ready, _, _ = select.select([stream], [], [], seconds)
    return bool(ready) and not os.read(stream.fileno(), 1)


def main(folder: Path) -> int:
    """The whole life of the shipper's process."""
    order = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    spec = json.loads((folder / "run" / "canonical.json").read_text(encoding="utf-8"))
    with suppress(OSError):
        os.nice(10)
    try:
        remote = open_objects(spec["store"], order["run"], order["terms"]["lease"])
        if remote is None:
            return 0
        # The node's timer sends SIGTERM to agent and shipper alike: the agent then ends, and closes our input.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return 0 if work(folder, remote, sys.stdin.buffer) else 4
    except StoreError as error:
        print(f"shipper: {error}", flush=True)  # its log
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
