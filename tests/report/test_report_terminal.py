"""The terminal report: fits, reads, keeps numbers whole, and sends no escape where none belongs."""

import io
import re

import pytest
from rich.console import Console

from campaign.report import terminal


def shown(report, width=80, **kwargs):
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=width, **kwargs))
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
def test_no_line_is_wider_than_the_terminal(report, width):
    assert max(len(line) for line in shown(report, width).splitlines()) <= width


@pytest.mark.parametrize("width", [80, 104, 160])
def test_numbers_and_intervals_are_never_broken(report, width):
    lines = shown(report, width).splitlines()
    for line in lines:
        assert line.count("[") == line.count("]"), line
        assert not re.match(r"\s*%", line), line
    text = "\n".join(lines)
    for whole in ("[27, 36]", "[-0.4, 1.0]", "[-31, 44]", "[9.70, 10.5]", "decode_tok_s", "unresolved"):
        assert whole in text


def test_headline_comes_before_the_tables(report):
    text = shown(report, 200)
    assert (
        text.index("every rung is slower per step than plain")
        < text.index("Anchors")
        < text.index("Verdicts")
    )


def test_the_deciding_metric_is_marked_and_only_it(report):
    text = shown(report, 120)
    table = text[text.index("Verdicts") : text.index("Verify cost")]
    assert len(re.findall(r"^.*\* step_ms", table, re.MULTILINE)) == len(report.primary)
    assert "* accept_len" not in table


def test_reasons_and_adjusted_verdicts_show_at_every_width(report):
    for width in (80, 140):
        text = " ".join(shown(report, width).split())
        assert "boot variance unknown" in text
        assert "prefix cache hits" in text
    assert "adj. unresolved" in shown(report, 80)


def test_no_colour_off_a_terminal_or_with_no_color(report, monkeypatch):
    assert "\x1b" not in shown(report)
    monkeypatch.setenv("NO_COLOR", "1")
    out = shown(report, force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", out)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert re.search(r"\x1b\[[0-9;]*3[0-7]m", shown(report, force_terminal=True))


def test_partial_and_simulated_are_said_first(build):
    text = shown(build(simulated=True, partial=True, status="interrupted", ended_utc_ns=None))
    head = text[: text.index("every rung")]
    assert "SIMULATED" in head
    assert "PARTIAL" in head
    assert "campaign resume" in head


def test_trips_and_overrides_stand_at_the_top_and_beside_the_verdicts(build, trip, override):
    text = shown(build(gates=(trip, override), status="stopped", why_ended="gate drift"), 120)
    assert text.index("gate drift tripped in main: 0.31 against limit 0.25") < text.index("every rung")
    after = text[text.index("Verdicts") :]
    assert "gate drift was overridden: the fan was off" in after


def test_an_empty_report_is_still_a_report(build):
    text = shown(build(verdicts=(), anchors=(), speculation=(), plan_actual=(), boots=(), partial=True, status="running",
                       spend={"cap_usd": 1.0, "committed_usd": 0.1, "settled_usd": 0.0, "spent_usd": 0.0, "final": False, "measured_share": None,
                              "phases": {}, "sessions": []}))  # fmt: skip
    assert "No comparison has rows yet." in text
    assert "Nothing has been spent." in text


def test_an_ascii_terminal_gets_ascii_bars(report):
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="replace")
    terminal.render(report, Console(file=out, width=80))
    out.flush()
    text = raw.getvalue().decode("ascii")
    assert "###" in text
    assert "?" * 3 not in text
