"""A campaign command in a folder of its own; whatever it started is ended with the test."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_support import Campaign


@pytest.fixture
def campaign(tmp_path: Path) -> Iterator[Campaign]:
    command = Campaign(tmp_path)
    yield command
    for process in command.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()
