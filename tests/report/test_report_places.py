"""What a reader of a large run needs: where a comparison was made, why a round is void, what a session waits for."""

import io
from dataclasses import replace

from rich.console import Console

from campaign.fleet.snapshot import SessionSnapshot, Snapshot
from campaign.ledger.events import Event
from campaign.ledger.state import fold
from campaign.report import facts, markdown, terminal, words
from campaign.report.live import LiveDisplay


def shown(report, width):
    out = io.StringIO()
    terminal.render(report, Console(file=out, width=width, color_system=None))
    return out.getvalue()


def test_one_concurrency_and_one_session_are_not_repeated_at_every_row(report):
    assert all(words.place(v, report) == "" for v in report.verdicts)


def test_several_concurrencies_and_sessions_are_told_apart(report):
    first = report.verdicts[0]
    more = tuple(replace(v, concurrency=32, session="late") for v in report.verdicts if v.pair == first.pair)
    both = replace(report, verdicts=(*report.verdicts, *more))
    assert words.place(first, both) == f"{first.concurrency} in flight, session {first.session}"
    assert words.place(more[0], both) == "32 in flight, session late"
    assert "32 in flight, session late" in " ".join(shown(both, 60).split())
    assert "32 in flight, session late" in markdown.render(both)


def test_sixty_columns_keep_words_whole(assembled):
    lines = shown(assembled, 60).splitlines()
    assert max(map(len, lines)) <= 60
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("Verdicts")) :]
    header = next(line for line in table if line.startswith("metric"))
    rows = [line for line in table if line.lstrip("* ").startswith("step_ms")]
    assert rows
    # The verdict stands under its heading in the table of every comparison.
    assert {row[header.index("verdict") :].split()[0] for row in rows} <= {
        "slower", "faster", "equivalent", "unresolved", "invalid",
    }  # fmt: skip
    assert any(line.startswith("depth 3 ") for line in lines)


def event(seq, type_, **payload):
    return Event(seq, seq, type_, "agent:main", seq, "main", payload, "", "")


def test_every_void_round_says_why():
    events = [
        event(1, "round_started", round_id="pair.kv/r0", attempt=0),
        event(2, "round_voided", round_id="pair.kv/r0", attempt=0, reason="the server is gone (oom)"),
        event(3, "round_started", round_id="pair.kv/r0", attempt=1),
        event(4, "round_voided", round_id="pair.kv/r0", attempt=1, reason="no answer within 60 s"),
    ]
    said = facts.warnings(fold(events), events)
    assert said == (
        "Round pair.kv/r0 of main, attempt 0, was voided: the server is gone (oom).",
        "Round pair.kv/r0 of main, attempt 1, was voided: no answer within 60 s.",
    )


def test_the_first_line_says_what_is_waited_for():
    session = SessionSnapshot("main", "here", "waiting", "setup", "", 0, 0, None)
    snap = Snapshot("r", "quick", 0.0, None, 250_000, 0, 0, (session,), ())
    out = io.StringIO()
    with LiveDisplay(Console(file=out, width=80), monotonic=lambda: 1.0) as display:
        display.update(snap)
    assert out.getvalue().splitlines() == ["[0 s] main: waiting for its lease; $0.00 of $0.25"]
