"""The JSON Schema: complete, described, and no narrower than the loader."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from ruamel.yaml import YAML

from campaign.cli.schema import command
from campaign.spec.schema import json_schema, markdown

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "experiments.yaml", *sorted((ROOT / "campaign/spec/templates").glob("*.yaml"))]


def test_every_field_and_every_model_is_described():
    schema = json_schema()
    models = {"Spec": schema, **schema["$defs"]}
    missing = [
        f"{name}.{field}"
        for name, model in models.items()
        for field, info in model["properties"].items()
        if not info.get("description", "").strip()
    ]
    missing += [name for name, model in models.items() if not model.get("description", "").strip()]
    assert missing == []
    assert all(model["additionalProperties"] is False for model in models.values())


def test_from_is_called_from():
    for name in ("Arm", "Ladder"):
        fields = json_schema()["$defs"][name]["properties"]
        assert "from" in fields
        assert "from_" not in fields


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_an_editor_accepts_what_the_loader_accepts(path):
    value = YAML(typ="safe", pure=True).load(path.read_text())
    jsonschema.Draft202012Validator.check_schema(json_schema())
    jsonschema.Draft202012Validator(json_schema()).validate(value)


@pytest.mark.parametrize(
    ("edit", "good"),
    [
        (("prefix_cache: false", "prefix_cache: off"), True),
        (("kv_dtype: f16", "kv_dtype: 24.10"), True),
        (("cap_usd: 0.50", 'cap_usd: "${CAP}"'), True),
        (("boot_timeout: 60s", 'boot_timeout: "${T}"'), True),
        (("reference: establish", "reference: {step_ms: 12.5}"), True),
        (("prefix_cache: false", "prefix_cache: maybe"), False),
        (("cap_usd: 0.50", "cap_usd: -1"), False),
        (("cap_usd: 0.50", 'cap_usd: "0.50"'), False),
        (("drift_delta: 0.25", "drift_delta: 25"), False),
        (("from: plain ", "fron: plain "), False),
        (("provider: local", "provider: locl"), False),
        (("boot_timeout: 60s", "boot_timeout: 60"), False),
    ],
)
def test_an_editor_sees_the_loader_s_rules(edit, good):
    text = FILES[0].read_text()
    assert edit[0] in text
    value = YAML(typ="safe", pure=True).load(text.replace(*edit))
    assert jsonschema.Draft202012Validator(json_schema()).is_valid(value) is good


def test_the_command_prints_json_or_tables():
    result = CliRunner().invoke(command, [])
    assert json.loads(result.output) == json_schema()
    assert CliRunner().invoke(command, ["--markdown"]).output.strip() == markdown().strip()


def test_the_page_is_made_from_the_models():
    page = (ROOT / "docs" / "SPEC.md").read_text()
    assert markdown().strip() in page, "run: campaign schema --markdown, and put it under Reference"
