"""The same command once more, in a session of its own: it survives this terminal and a closed laptop lid."""

import os
import subprocess
import sys
from pathlib import Path

import click


def detached(results: Path) -> None:
    """Start this command line without `--detach` in the background, and say where it writes."""
    results.mkdir(parents=True, exist_ok=True)
    argv = [a for a in sys.argv[1:] if a != "--detach"]
    number = 1
    while True:
        log = results / f"detached-{number}.log"
        try:
            out = log.open("xb")
            break
        except FileExistsError:
            number += 1
    with out:
        child = subprocess.Popen(
            [sys.executable, "-m", "campaign", *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(os.environ),
        )
    click.echo(f"running in the background as pid {child.pid}; it writes to {log}")
    click.echo("`campaign status` shows it, `campaign stop` ends it")
