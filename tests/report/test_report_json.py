"""The JSON contract: keys, types and units of docs/CONTRACTS.md."""

import json

import jsonschema
import pytest

from campaign.report import jsonview

NUMBER = {"type": ["number", "null"]}
TEXT = {"type": "string"}
BOOL = {"type": ["boolean", "null"]}
WORDS = ["faster", "slower", "higher", "lower", "equivalent", "unresolved", "invalid"]


def shape(required, **properties):
    return {"type": "object", "required": [*required, *properties], "properties": properties}


VERDICT = shape(
    [], pair=TEXT, kind={"enum": ["pair", "ladder", "null", "aa"]}, family=TEXT, session=TEXT, workload=TEXT,
    concurrency={"type": "integer"}, a=TEXT, b=TEXT,
    metric={"enum": ["step_ms", "accept_len", "decode_tok_s", "ttft_ms"]}, primary={"type": "boolean"}, ratio=NUMBER,
    lo=NUMBER, hi=NUMBER, ci_level={"type": "number"}, lo_boots_only=NUMBER, hi_boots_only=NUMBER, lo90=NUMBER,
    hi90=NUMBER, n={"type": "integer"}, boots={"type": "integer"}, df=NUMBER, boot_sd=NUMBER,
    boot_sd_source={"enum": ["estimated", "declared", "prior", "unknown"]}, differs=BOOL, equivalent=BOOL,
    margin={"type": "number"}, verdict={"enum": WORDS}, verdict_adjusted={"enum": [*WORDS, None]},
    reasons={"type": "array", "items": TEXT}, usd=NUMBER,
)  # fmt: skip
ANCHOR = shape([], session=TEXT, position=TEXT, step_ms=NUMBER, drift_pct=NUMBER, ok=BOOL)
SPEND = shape(
    [], cap_usd=NUMBER, committed_usd=NUMBER, settled_usd={"type": "number"}, measured_share=NUMBER,
    phases={"type": "object", "additionalProperties": {"type": "number"}}, sessions={"type": "array"},
)  # fmt: skip
REPORT = shape(
    [], run=TEXT, campaign=TEXT, simulated={"type": "boolean"}, anchors={"type": "array", "items": ANCHOR},
    verdicts={"type": "array", "items": VERDICT},
    speculation=shape([], ladders={"type": "array", "items": shape(
        [], session=TEXT, ladder=TEXT, t1_ms=NUMBER, verify_slope_ms=NUMBER, widths={"type": "array"})}),
    spend=SPEND, partial={"type": "boolean"},
)  # fmt: skip


@pytest.fixture(params=["by hand", "sample"])
def value(request):
    which = "report" if request.param == "by hand" else "assembled"
    return json.loads(jsonview.dumps(request.getfixturevalue(which)))


def test_it_has_the_shape_of_the_contract(value):
    jsonschema.validate(value, REPORT)


def test_the_schema_refuses_what_breaks_the_contract(value):
    value["verdicts"][0].pop("lo_boots_only")
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, REPORT)


def test_the_contract_keys_come_first(value):
    assert list(value)[:7] == ["run", "campaign", "simulated", "anchors", "verdicts", "speculation", "spend"]
    assert list(value["verdicts"][0])[:30] == list(VERDICT["properties"])


def test_percent_is_percent_and_fractions_are_fractions(build):
    value = jsonview.report_json(build())
    last = value["anchors"][-1]
    assert last["drift_pct"] == pytest.approx(6.0)
    assert (last["lo_pct"], last["hi_pct"]) == (pytest.approx(-31.0), pytest.approx(44.0))
    assert value["verdicts"][0]["ratio"] == pytest.approx(1.182)
    assert value["started"] == "2026-09-21T14:13:20.000000Z"


def test_unknown_is_null_with_a_reason(build):
    value = jsonview.report_json(build())
    one = next(v for v in value["verdicts"] if v["pair"] == "one")
    assert (one["lo"], one["boot_sd"], one["reasons"]) == (None, None, ["boot_sd_unknown"])
    first = value["anchors"][0]
    assert (first["drift_pct"], first["ok"], first["reasons"]) == (None, None, ["established"])


def test_nothing_that_is_not_a_number_is_written(build, verdict):
    with pytest.raises(ValueError, match="JSON"):
        jsonview.dumps(build(verdicts=(verdict("p", "a", "b", "step_ms", float("nan"), 0.1, "slower"),)))


def test_every_source_named_is_there(assembled):
    value = jsonview.report_json(assembled)
    named = [v["source"] for v in value["verdicts"]] + [a["source"] for a in value["anchors"]]
    named += [s["source"] for s in value["speculation"]["ladders"]]
    assert set(named) <= set(value["sources"])


def test_trips_and_overrides_are_apart(build, trip, override):
    value = jsonview.report_json(build(gates=(trip, override)))
    assert [g["limit"] for g in value["gates"]] == ["0.25"]
    assert [g["by"] for g in value["overrides"]] == ["me"]
