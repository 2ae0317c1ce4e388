"""Markdown for a pull request."""

import re

from campaign.report import markdown


def test_headline_table_spend_and_head(report):
    text = markdown.render(report)
    assert text.startswith("### quick\n")
    assert "- **depth**: every rung is slower per step than plain" in text
    assert "| depth 5 vs plain | `step_ms` | +31 | [27, 36] | 12 | 3 | **slower** | slower |  |" in text
    assert r"\$0.0460 spent of a cap of \$0.10" in text
    assert report.head_hash in text


def test_only_deciding_verdicts_are_listed(report):
    rows = [line for line in markdown.render(report).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(report.primary)
    assert len({line.count("|") - line.count(r"\|") for line in rows}) == 1


def test_marks_trips_and_overrides(build, trip, override):
    text = markdown.render(
        build(simulated=True, partial=True, status="stopped", why_ended="gate", gates=(trip, override))
    )
    assert "**SIMULATED**" in text
    assert "**PARTIAL**" in text
    assert "Gate drift tripped at 0.31 (limit 0.25): between2" in text
    assert r"Gate drift overridden: the fan was off \<script\>" in text


def test_hostile_names_stay_text(build):
    text = markdown.render(build(campaign="x | y\n# z", labels={"kv.b": "<img src=x>|`[a](b)`@all"}))
    assert text.splitlines()[0] == r"### x \| y \# z"
    row = next(line for line in text.splitlines() if "img" in line and line.startswith("|"))
    assert not re.search(r"(?<!\\)<img", row)
    assert row.count("|") - row.count(r"\|") == 10
