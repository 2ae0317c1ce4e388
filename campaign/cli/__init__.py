"""The command line: one small module per verb, loaded when it is used."""

import errno
import importlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import click

from campaign import __version__
from campaign.errors import CampaignError, SpecError

VERBS = {
    "init": "Write a starter experiments.yaml.",
    "validate": "Check a file: every problem with file:line and the fix.",
    "schema": "Print the JSON Schema for editors.",
    "preflight": "Check every flag and variable of every arm against the engines' own source.",
    "plan": "Boots, requests, minutes, dollars and power, before anything is spent.",
    "selfcheck": "How good this machine's stamps are: lag, chunks per CPU second, start times.",
    "run": "Run a campaign under its budget.",
    "add": "Run further arms on a node that `run --hold` keeps; exploratory.",
    "rerun": "Repeat one pair in a new session of the same campaign.",
    "resume": "Go on with a run that was interrupted.",
    "status": "What is running, what it may still cost, and how to stop it.",
    "report": "Verdicts, anchors and spend: terminal, HTML, Markdown or JSON.",
    "spend": "Where the dollars went.",
    "stop": "Ask a running campaign to stop, tear down and settle.",
    "import": "Published result files as a run folder.",
    "verify": "Recompute every printed number from the raw rows; name each difference.",
    "cells": "One line per cell: rates, tokens per step, step times.",
    "forecast": "Depths that have not run: said before, scored after.",
    "compare": "Two runs across sessions: a separate result that carries the session variance.",
    "reconcile": "Take down and bill what dead controllers left behind; for cron.",
    "doctor": "What could be rented for a file, at what price, and what would end it; launches nothing.",
}


class _Lazy(click.Group):
    """Imports a verb's module only when that verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        # `import` is a word of Python, so its module is `import_`.
        module = "import_" if cmd_name == "import" else cmd_name
        command = importlib.import_module(f"campaign.cli.{module}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="campaign")
def cli() -> None:
    """Budgeted, paired LLM-serving experiments, with verdicts that re-derive from raw rows.

    Exit codes: 0 done; 1 `fail_on` tripped; 2 you can fix it; 3 a gate or the budget stopped it;
    4 infrastructure; 70 our bug; 130 Ctrl-C.
    """


def main() -> None:
    """Entry point: every CampaignError becomes one message and its exit code."""
    try:
        code = cli.main(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except SpecError as error:
        # One problem a line, `file:line:` first, as editors and CI annotations read it.
        click.echo(str(error), err=True)
        sys.exit(error.exit_code)
    except CampaignError as error:
        click.echo(f"campaign: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # `campaign report | head`: the reader has gone, which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except KeyboardInterrupt:
        click.echo(
            "campaign: interrupted; a run that was going on is not settled: `campaign resume`", err=True
        )
        sys.exit(130)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}:
            _our_bug(error)
        click.echo(f"campaign: cannot write: {error.strerror}", err=True)
        sys.exit(4)
    except Exception as error:
        _our_bug(error)


def _our_bug(error: BaseException) -> NoReturn:
    click.echo(f"campaign: our bug: {error!r}; details in {_bug_report(error)}", err=True)
    sys.exit(70)


def _bug_report(error: BaseException) -> Path:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="campaign-bug-", suffix=".txt", delete=False) as file:
        file.write("".join(traceback.format_exception(error)))
        return Path(file.name)
