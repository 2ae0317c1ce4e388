"""Progress: a panel on a terminal, few lines elsewhere."""

import io

from rich.console import Console

from campaign.fleet.snapshot import SessionSnapshot, Snapshot
from campaign.report.live import LiveDisplay


def snap(t, done=0, state="measuring", notes=(), cell="pair.kv/plain/chat/c1/b0"):
    session = SessionSnapshot("main", "here", state, "measure", cell, done, 200, 121.4)
    return Snapshot("r", "quick", t, 200.0 - t, 250_000, 12_000, 74_000, (session,), tuple(notes))


class Time:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def feed(snaps, step=0.5):
    out, time = io.StringIO(), Time()
    with LiveDisplay(Console(file=out, width=80), monotonic=time) as display:
        for s in snaps:
            display.update(s)
            time.now += step
    return out.getvalue().splitlines()


def test_a_line_every_fifteen_seconds_not_one_a_request():
    lines = feed([snap(i / 2, done=i) for i in range(120)])
    assert len(lines) == 4
    assert (
        lines[0]
        == "[0 s] main: measuring pair.kv/plain/chat/c1/b0, 0/200, 121 tok/s; $0.0120 of $0.25, about 3 min 20 s left"
    )
    assert "30/200" in lines[1]


def test_every_note_is_printed_once():
    lines = feed(
        [
            snap(0),
            snap(1, notes=["a"]),
            snap(2, notes=["a", "b"]),
            snap(3, notes=["b", "c"]),
            snap(4, notes=["b", "c"]),
        ]
    )
    assert [line.split("] ")[1] for line in lines[1:]] == ["a", "b", "c"]


def test_a_change_of_state_is_told_at_once():
    lines = feed([snap(0, state="booting"), snap(1), snap(2), snap(3, state="tearing down")])
    assert [line.split(": ")[1].split(" pair")[0] for line in lines] == [
        "booting",
        "measuring",
        "tearing down",
    ]


def test_a_terminal_gets_a_panel_and_is_left_clean(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, _environ={"TERM": "xterm-256color"})
    with LiveDisplay(console) as display:
        display.update(snap(5, done=50, notes=["anchor first: established"]))
        display._live.refresh()
        text = out.getvalue()
    for part in (
        "quick",
        "main",
        "measuring",
        "50/200",
        "121 tok/s",
        "anchor first: established",
        "worst case",
    ):
        assert part in text
    assert out.getvalue().count("\x1b[?25h") >= 1


def test_panel_lines_fit_a_narrow_terminal():
    out = io.StringIO()
    console = Console(file=out, width=60)
    console.print(LiveDisplay(console)._panel(snap(5, done=50, cell="c" * 300, notes=["n" * 300])))
    assert max(len(line) for line in out.getvalue().splitlines()) <= 60


def test_hostile_cell_names_are_not_markup():
    lines = feed([snap(0, cell="[red]x[/red]")])
    assert "[red]x[/red]" in lines[0]
