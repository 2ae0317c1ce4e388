"""The published files, imported once."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from campaign.cli import cli
from campaign.interop import brl11, imported
from campaign.store.run import open_run

FILES = sorted((Path(__file__).parents[1] / "data" / "brl11").glob("*.json"))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    into = tmp_path_factory.mktemp("import") / "brl11"
    imported.write([brl11.read(path) for path in FILES], into)
    return into


@pytest.fixture(scope="session")
def run(folder):
    return open_run(str(folder))


@pytest.fixture(scope="session")
def call():
    """Run a verb; (exit code, JSON)."""

    def run_verb(*args, code=0):
        result = CliRunner().invoke(cli, [str(a) for a in args])
        assert result.exit_code == code, result.output
        return json.loads(result.output)

    return run_verb


@pytest.fixture
def stage():
    """A published stage as data, to be damaged."""
    path = next(p for p in FILES if p.stem == "brl11_stage600a")
    return json.loads(path.read_text())
