"""What the README tells a newcomer to write and run is true."""

import re
from pathlib import Path

import pytest

from campaign.cli import VERBS
from campaign.plan.build import build
from campaign.plan.cost import declared_prices
from campaign.spec.load import load
from campaign.workloads.packs import load_all

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_its_file_validates_plans_and_finds_its_prompts(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(version: 1\n.*?)```", README, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "Question {n}?"}}\n' for n in range(17)))
    loaded = load(tmp_path / "mine.yaml")
    plan = build(loaded.spec, declared_prices(loaded.spec))
    assert plan.admitted == ("main",)
    assert len(load_all(loaded, tmp_path)["mine"].items) == 16


def test_its_table_lists_every_verb() -> None:
    listed = set(re.findall(r"^\| `campaign (\w+)", README, re.MULTILINE))
    assert listed == set(VERBS)


@pytest.mark.parametrize("name", re.findall(r"docs/[A-Za-z0-9_/]+\.(?:md|png)", README))
def test_its_links_exist(name: str) -> None:
    assert (ROOT / name).is_file()
