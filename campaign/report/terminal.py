"""The report on a terminal: what came out, in words first, then the tables behind it."""

import textwrap

from rich.console import Console
from rich.table import Table
from rich.text import Text

from campaign.analysis.model import AnchorResult, Verdict
from campaign.clock import iso
from campaign.report import words
from campaign.report.model import Report

STYLE = {
    "faster": "bold green",
    "higher": "bold green",
    "slower": "bold red",
    "lower": "bold red",
    "equivalent": "bold cyan",
    "unresolved": "yellow",
    "invalid": "bold magenta",
}
_WIDE = 104
_NARROW = 76
"""Below it a comparison stands over its rows, and tables leave columns out."""
_MAX = 132
_FEW = 3


def render(report: Report, console: Console) -> None:
    """Print the whole report. Colours, width and encoding are the console's."""
    _title(report, console)
    _headlines(report, console)
    _anchors(report, console)
    _verdicts(report, console)
    _speculation(report, console)
    _further(report, console)
    _spend(report, console)
    _plan_actual(report, console)
    _notes(report, console)


def _width(console: Console) -> int:
    return min(console.width, _MAX)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`; a number stays with its unit and an interval stays whole."""
    lines = textwrap.wrap(words.keep(text), max(width, 20), break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines] or [""]


def _say(console: Console, text: str, style: str = "", first: str = "", rest: str | None = None) -> None:
    """Print wrapped text, with `first` before its first line and `rest` before the others."""
    rest = " " * len(first) if rest is None else rest
    for i, line in enumerate(_wrap(text, _width(console) - len(first))):
        console.print(
            Text(first if i == 0 else rest).append(line, style=style), no_wrap=True, overflow="fold"
        )


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _table(*, wide: bool = False) -> Table:
    return Table(box=None, padding=(0, 2 if wide else 1, 0, 0), pad_edge=False, header_style="dim")


def _title(report: Report, console: Console) -> None:
    console.print()
    line = Text(report.campaign, style="bold").append(f"  {report.run}", style="dim")
    console.print(line, no_wrap=True, overflow="fold")
    if report.simulated:
        console.print(Text("SIMULATED: not a measurement.", style="bold reverse"))
    if report.partial:
        what = {
            "running": "PARTIAL: still running; numbers may change.",
            "interrupted": f"PARTIAL: interrupted; `campaign resume {report.path}` goes on.",
        }.get(report.status, f"PARTIAL: {report.status}{': ' + report.why_ended if report.why_ended else ''}")
        _say(console, what, "bold yellow")
    elif report.status != "finished":
        _say(console, f"{report.status}: {report.why_ended}", "bold yellow")
    for gate in report.gates:
        where = f" in {gate.session}" if gate.session else ""
        if gate.what == "tripped":
            text = f"gate {gate.gate} tripped{where}: {gate.value} against limit {gate.limit}"
            _say(console, text + (f" ({gate.text})" if gate.text else ""), "bold red", "! ")
        else:
            _say(console, f"gate {gate.gate} overridden by {gate.by}: {gate.text}", "bold magenta", "! ")


def _headlines(report: Report, console: Console) -> None:
    console.print()
    lines = words.headlines(report)
    if not lines:
        console.print("No comparison has rows yet.")
    for headline in lines:
        mark = Text("* " if len(headline.words) != 1 else _mark(headline.words[0], console))
        mark.stylize(STYLE[headline.words[0]] if len(headline.words) == 1 else "bold")
        # The closing verdict is coloured where the sentence ends in one.
        body, dash, word = headline.text.rpartition(" - ")
        title = f"{headline.title}: "
        text = headline.text if headline.text.startswith(title) else title + headline.text
        style = STYLE.get(word.split(" ")[0].rstrip(";"), "") if dash and body else ""
        lines_ = _wrap(text, _width(console) - 2)
        for i, line in enumerate(lines_):
            shown = mark.copy() if i == 0 else Text("  ")
            shown.append(line)
            if dash and i == len(lines_) - 1 and style and word in line:
                shown.highlight_words([word], style=style)
            if i == 0 and line.startswith(title.rstrip()):
                shown.stylize("bold", 2, 1 + len(title.rstrip()))
            console.print(shown, no_wrap=True, overflow="fold")


def _mark(verdict: str, console: Console) -> str:
    if not (console.encoding or "").lower().startswith("utf"):
        return "* "
    return {
        "faster": "▲ ", "higher": "▲ ", "slower": "▼ ", "lower": "▼ ",
        "equivalent": "= ", "unresolved": "? ", "invalid": "x ",
    }[verdict]  # fmt: skip


def _anchor_word(a: AnchorResult) -> Text:
    if a.ok is True:
        return Text("ok", style="green")
    if a.ok is False:
        return Text("drifted", style="bold red")
    return Text("established" if "established" in a.reasons else "not proven", style="yellow")


def _anchors(report: Report, console: Console) -> None:
    if not report.anchors:
        return
    _heading(console, f"Anchors (drift beyond {report.drift_delta * 100:g} % of step time stops a session)")
    table = _table(wide=console.width >= _WIDE)
    many = len({a.session for a in report.anchors}) > 1
    if many:
        table.add_column("session", overflow="fold")
    table.add_column("position", overflow="fold")
    for name in ("step ms", "drift %", "95 %", "n", "boots"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    for a in report.anchors:
        ratio = None if a.drift is None else 1 + a.drift
        lo, hi = (None if x is None else 1 + x for x in (a.lo, a.hi))
        word = _anchor_word(a)
        other = [c for c in a.reasons if c != "established"]
        if other:
            word.append(f" ({words.reasons(other)})", style="dim")
        cells: list[Text | str] = [
            a.position,
            words.number(a.step_ms),
            words.signed(ratio, lo, hi),
            words.interval(lo, hi),
            str(a.n),
            str(a.boots),
            word,
        ]
        table.add_row(*([a.session] if many else []), *cells)
    console.print(table, width=_width(console) if many else None)


def _verdicts(report: Report, console: Console) -> None:
    if not report.verdicts:
        return
    wide = console.width >= _WIDE
    _heading(console, "Verdicts (b/a in percent; * is the metric named before the run)")
    if console.width < _NARROW:
        _verdicts_narrow(report, console)
        return
    table = _table(wide=wide)
    table.add_column("comparison", overflow="fold", ratio=1)
    table.add_column("metric", no_wrap=True)
    for name in ("change", f"{report.verdicts[0].ci_level * 100:g} %", "n", "boots"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    if wide:
        table.add_column("adjusted", no_wrap=True)
        table.add_column("why", overflow="fold", ratio=1)
    for i, verdicts in enumerate(words.by_comparison(report)):
        if i:
            table.add_row()
        for v in verdicts:
            if v is not verdicts[0] and _constant(v):
                continue
            title = words.against(v, report) if v is verdicts[0] else ""
            table.add_row(*_verdict_cells(v, title, words.further(v, verdicts[0]), wide=wide))
    console.print(table, width=_width(console))
    _overrides(report, console)


def _overrides(report: Report, console: Console) -> None:
    for gate in report.overrides:
        _say(console, f"gate {gate.gate} was overridden: {gate.text}", "magenta", "  ")


def _verdicts_narrow(report: Report, console: Console) -> None:
    """Each comparison over a table of its own; widths are set, so that the columns of all of them line up."""
    level = f"{report.verdicts[0].ci_level * 100:g} %"
    widths = {"metric": 14, "change": 7, level: 13, "n": 3, "boots": 5, "verdict": 10}
    for i, verdicts in enumerate(words.by_comparison(report)):
        first = verdicts[0]
        table = _table()
        table.show_header = i == 0
        for name, width in widths.items():
            right = name not in {"metric", "verdict"}
            table.add_column(name, justify="right" if right else "left", min_width=width, no_wrap=right)
        for v in verdicts:
            if v is not first and _constant(v):
                continue
            table.add_row(*_verdict_cells(v, "", "", wide=False)[1:])
        _say(console, words.against(first, report), "bold")
        why = words.further(first, first)
        if why:
            _say(console, why, "dim", "  ")
        console.print(table)
    _overrides(report, console)


def _constant(v: Verdict) -> bool:
    """Tokens per step of two arms that do not speculate: 1 against 1, which says nothing."""
    return v.metric == "accept_len" and v.ratio == 1.0 and "no_spread" in v.reasons


def _verdict_cells(v: Verdict, title: str, why: str, *, wide: bool) -> list[Text]:
    """One row; on a narrow terminal the reasons and the adjusted verdict become second lines."""
    dim = "" if v.primary else "dim"
    name = Text(title)
    verdict = Text(v.verdict, style=STYLE[v.verdict] if v.primary else dim)
    if not wide and why:
        name.append(("\n" if title else "") + why, style="dim")
    if not wide and v.verdict_adjusted not in {None, v.verdict}:
        verdict.append(f"\nadj. {v.verdict_adjusted}", style="yellow")
    cells = [
        name,
        Text(("* " if v.primary else "  ") + v.metric, style=dim),
        Text(words.signed(v.ratio, v.lo, v.hi), style=dim),
        Text(words.interval(v.lo, v.hi), style=dim),
        Text(str(v.n), style=dim),
        Text(str(v.boots), style=dim),
        verdict,
    ]
    if wide:
        cells += [Text(v.verdict_adjusted or "", style=dim), Text(why, style="dim")]
    return cells


def _speculation(report: Report, console: Console) -> None:
    for s in report.speculation:
        _heading(console, f"Verify cost: ladder {s.ladder}, session {s.session}")
        narrow = console.width < _NARROW
        table = _table(wide=console.width >= _WIDE)
        table.add_column("arm", overflow="fold", min_width=8)
        names = ("verified", "verify ms", "95 %", *(() if narrow else ("accept",)), "tok/step", "break-even")
        for name in names:
            table.add_column(name, justify="right", no_wrap=True)
        for w in s.widths:
            accept = "–" if w.accept_rate is None else f"{w.accept_rate * 100:.0f} %"
            span = "–" if w.lo is None or w.hi is None else f"[{words.number(w.lo)}, {words.number(w.hi)}]"
            table.add_row(
                words.arm(w.arm, report.labels),
                words.number(w.verified_tokens),
                words.number(w.verify_ms),
                span,
                *(() if narrow else (accept,)),
                words.number(w.accept_len),
                words.number(w.break_even_accept_len),
            )
        console.print(table)
        _say(console, words.speculation_text(s, report.labels), "", "  ")


def _further(report: Report, console: Console) -> None:
    if not report.further.sentences:
        return
    _heading(console, "Beside the verdicts (none of these is a pair's verdict)")
    for kind, text in report.further.sentences:
        _say(console, f"{kind}: {text}", "", "- ", "  ")


def _spend(report: Report, console: Console) -> None:
    spend = report.spend
    phases = {k: v for k, v in spend["phases"].items() if v}
    _heading(console, "Where the dollars went")
    utf = (console.encoding or "").lower().startswith("utf")
    total = sum(phases.values())
    longest = max((len(p) for p in phases), default=0)
    room = max(10, min(48, _width(console) - longest - 22))
    for phase, usd in phases.items():
        share = usd / total if total else 0
        filled = max(1, round(share * room))
        bar = ("█" if utf else "#") * filled
        style = "green" if phase == "measure" else "red" if phase == "lost" else "cyan"
        line = Text(f"  {phase:<{longest}} ").append(f"{bar:<{room}}", style=style)
        line.append(f" {words.dollars(usd):>9} {share * 100:4.0f} %")
        console.print(line, no_wrap=True, overflow="crop")
    if not phases:
        console.print("  Nothing has been spent.")
    _say(console, words.spend_text(report), "", "  ")


def _plan_actual(report: Report, console: Console) -> None:
    if not report.plan_actual:
        return
    to = "→" if (console.encoding or "").lower().startswith("utf") else ">"
    _heading(console, f"Plan and outcome (planned {to} done)")
    table = _table(wide=console.width >= _WIDE)
    table.add_column("session", overflow="fold")
    for name in ("minutes", "boots", "requests", "void", "usd"):
        table.add_column(name, justify="right", no_wrap=True)
    for p in report.plan_actual:
        minutes = "–" if p.minutes is None else f"{p.minutes:.1f}"
        table.add_row(
            p.session,
            f"{p.minutes_planned:.1f} {to} {minutes}",
            f"{p.boots_planned} {to} {p.boots}",
            f"{p.requests_planned} {to} {p.requests}",
            str(p.requests_void),
            f"{words.dollars(p.usd_expected)} {to} {words.dollars(p.usd)}",
        )
    console.print(table)


def _notes(report: Report, console: Console) -> None:
    if report.warnings:
        _heading(console, "Warnings")
        for warning in report.warnings:
            _say(console, warning, "yellow", "- ")
    if report.plan_warnings:
        _heading(console, "Warnings of the plan")
        for warning in report.plan_warnings[:_FEW]:
            _say(console, warning, "dim", "- ")
        if len(report.plan_warnings) > _FEW:
            _say(console, f"and {len(report.plan_warnings) - _FEW} more in report.json", "dim", "- ")
    console.print()
    for n in report.nodes:
        where = f", {n.node_id}" if n.node_id else ""
        _say(console, f"session {n.session} on {n.node} ({n.provider}{where})", "dim")
    for sentence in report.instrument.get("sentences", ()):
        _say(console, sentence, "dim")
    ended = (
        f" to {iso(report.ended_utc_ns)[:19]}Z"
        if report.ended_utc_ns
        else f", as of {iso(report.as_of_utc_ns)[:19]}Z"
    )
    _say(console, f"{iso(report.started_utc_ns)[:19]}Z{ended}", "dim")
    _say(console, f"ledger {report.head_hash[:16]}, {report.ledger_length} events", "dim")
