"""Progress while a campaign runs: one live panel on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from campaign.fleet.snapshot import SessionSnapshot, Snapshot
from campaign.money import usd
from campaign.report import words

_EVERY_S = 15.0
_NOTES = 4
_DOING = {
    "waiting": "waiting for its lease",
    "launching": "launching its node",
    "running": "setting up its node",
}
_STATE = {"measuring": "green", "failed": "bold red", "stopped": "bold yellow", "done": "dim"}


class LiveDisplay:
    """Shows snapshots. On a terminal a panel that redraws; else a line at each note and every 15 s.

    ::

        with LiveDisplay(console) as display:
            display.update(snapshot)
    """

    def __init__(self, console: Console, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._monotonic = monotonic
        self._live: Live | None = None
        self._noted = 0
        self._last_note: str | None = None
        self._last_line_s: float | None = None
        self._last_shape: tuple[tuple[str, str], ...] = ()

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, snapshot: Snapshot) -> None:
        """Show the newest state. Cheap; may be called as often as the controller likes."""
        if self._live is not None:
            self._live.update(self._panel(snapshot))
        else:
            self._lines(snapshot)

    def _panel(self, s: Snapshot) -> RenderableType:
        parts: list[RenderableType] = [
            _top(s),
            *(_session(x, self._console.width) for x in s.sessions),
            _money(s, self._console.width),
            *(
                Text(f"  {note}", style="dim", no_wrap=True, overflow="ellipsis")
                for note in s.notes[-_NOTES:]
            ),
        ]
        return Group(*parts)

    def _lines(self, s: Snapshot) -> None:
        now = self._monotonic()
        for note in self._fresh(s.notes):
            self._print(f"[{words.duration(s.elapsed_s)}] {note}")
        # A session that changes its state is news; a request that ends is not.
        # Nor is another shard: `loading shard 3/7` is news once.
        shape = tuple((x.name, x.state.partition(" ")[0]) for x in s.sessions)
        due = self._last_line_s is None or now - self._last_line_s >= _EVERY_S
        if not due and shape == self._last_shape:
            return
        self._last_line_s, self._last_shape = now, shape
        left = "" if s.left_s is None else f", about {words.duration(s.left_s)} left"
        money = f"{words.dollars(usd(s.spent_usd))} of {words.dollars(usd(s.cap_usd))}"
        for x in s.sessions:
            if x.state in {"waiting", "done"} and not due:
                continue
            rate = "" if x.tok_s is None else f", {words.number(x.tok_s)} tok/s"
            cell = f" {x.cell}" if x.cell else ""
            # Before its agent has read the plan a session has nothing to count.
            count = f", {x.done}/{x.total}" if x.total else ""
            doing = _DOING.get(x.state, x.state)
            self._print(
                f"[{words.duration(s.elapsed_s)}] {x.name}: {doing}{cell}{count}{rate}; {money}{left}"
            )

    def _fresh(self, notes: tuple[str, ...]) -> tuple[str, ...]:
        """Notes not yet printed, whether the controller sends all of them or a sliding window."""
        if self._last_note is None:
            new = notes
        else:
            seen = [i for i, note in enumerate(notes) if note == self._last_note]
            new = notes[seen[-1] + 1 :] if seen else notes
        if notes:
            self._last_note = notes[-1]
        return new

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True)


def _top(s: Snapshot) -> Text:
    line = Text(s.campaign, style="bold", no_wrap=True, overflow="ellipsis")
    line.append(f"  {s.run}  ", style="dim").append(words.duration(s.elapsed_s))
    if s.left_s is not None:
        line.append(f", about {words.duration(s.left_s)} left")
    return line


def _session(x: SessionSnapshot, width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True, min_width=8)
    grid.add_column(no_wrap=True, min_width=9)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, justify="right", min_width=9)
    grid.add_column(no_wrap=True, justify="right", min_width=10)
    grid.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
    grid.add_row(
        Text(x.name, style="bold"),
        Text(_DOING.get(x.state, x.state), style=_STATE.get(x.state, "cyan")),
        ProgressBar(total=max(x.total, 1), completed=min(x.done, x.total), width=max(8, min(28, width // 5))),
        f"{x.done}/{x.total}" if x.total else "",
        "" if x.tok_s is None else f"{words.number(x.tok_s)} tok/s",
        Text(x.cell, style="dim"),
    )
    return grid


def _money(s: Snapshot, width: int) -> RenderableType:
    spent, committed, cap = usd(s.spent_usd), usd(s.committed_usd), usd(s.cap_usd)
    grid = Table.grid(padding=(0, 1))
    for _ in range(3):
        grid.add_column(no_wrap=True)
    tight = bool(cap) and committed / cap > 0.9
    grid.add_row(
        Text("spent", style="bold"),
        ProgressBar(
            total=max(s.cap_usd, 1), completed=min(s.spent_usd, s.cap_usd), width=max(8, min(28, width // 5))
        ),
        Text(f"{words.dollars(spent)} of {words.dollars(cap)}").append(
            f"  worst case {words.dollars(committed)}", style="yellow" if tight else "dim"
        ),
    )
    return grid
