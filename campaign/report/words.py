"""Verdicts and codes in plain words, and numbers with honest digits.

A sentence states the estimate in the direction it is read ("18 % less time per step"), its interval in the
same direction, and the verdict. Nothing here computes: it only turns signs and picks digits.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from campaign.analysis.model import Speculation, Verdict
from campaign.report.model import Report
from campaign.spec.models import Metric

METRIC: Mapping[Metric, str] = {
    "step_ms": "step time",
    "accept_len": "tokens per step",
    "decode_tok_s": "decode rate",
    "ttft_ms": "time to first token",
}
_MORE: Mapping[Metric, str] = {
    "step_ms": "is {} % slower per step than",
    "accept_len": "yields {} % more tokens per step than",
    "decode_tok_s": "decodes {} % more tokens per second than",
    "ttft_ms": "takes {} % longer to its first token than",
}
_LESS: Mapping[Metric, str] = {
    "step_ms": "takes {} % less time per step than",
    "accept_len": "yields {} % fewer tokens per step than",
    "decode_tok_s": "decodes {} % fewer tokens per second than",
    "ttft_ms": "takes {} % less time to its first token than",
}
REASON: Mapping[str, str] = {
    "boot_sd_unknown": "boot variance unknown",
    "too_few_blocks": "too few blocks",
    "no_spread": "no spread",
    "autocorrelated": "batches not independent: the boot is the block",
    "drift": "the machine drifted",
    "drift_unproven": "drift not excluded",
    "cache_hits": "prefix cache hits",
    "unequal_lengths": "unequal lengths",
    "engine_restarted": "engine restarted",
    "missing_slots": "slots missing",
    "failed_requests": "failed requests",
    "mixed_rate_definition": "two rate definitions",
    "mixed_simulated": "simulated beside measured",
    "partial": "partial",
    "client_lag": "client lag",
    "unequal_clocks": "GPU clocks differ",
    "power_cap": "slower clocks at the power cap",
    "throttled": "GPU throttled",
    "counters_of_cell": "one acceptance for the whole cell",
    "counters_with_ramp": "acceptance of ramp and tail too",
    "look_not_repeatable": "the look's interval cannot be made again",
    "cold_first_wave": "first requests found a cold server",
    "across_sessions": "across sessions",
    "session_sd_unknown": "session variance unknown",
    "accept_moves": "acceptance moves with concurrency",
    "accept_may_move": "acceptance may move with concurrency",
    "established": "first of its kind",
    "screen": "screen only: no boot prior",
    "too_few_boots": "too few boots",
    "no_reference": "no reference",
}


def keep(text: str) -> str:
    """No-break spaces where a line must not break: before a percent sign, and inside an interval."""
    out: list[str] = []
    depth = 0
    for i, char in enumerate(text):
        depth += (char == "[") - (char == "]")
        held = char == " " and (depth > 0 or text[i + 1 : i + 2] == "%")
        out.append("\xa0" if held else char)
    return "".join(out)


def reason(code: str) -> str:
    """A reason code as a few words; an unknown code as itself."""
    head, _, name = code.partition(":")
    if head == "stopped_early":
        rounds, _, quads = name.partition("+")
        within = f" and {quads.removesuffix('q')} quads" if quads else ""
        return f"stopped early after round {rounds}{within}"
    if code == "exploratory":
        return "exploratory: added while the run went on"
    if head == "gate_overridden":
        return f"gate {name} overridden"
    return REASON.get(code, code.replace("_", " "))


def reasons(codes: Iterable[str]) -> str:
    """Reason codes as one phrase."""
    return ", ".join(reason(c) for c in codes)


def pct(ratio: float) -> float:
    """Relative change of a ratio, in percent."""
    return (ratio - 1) * 100


def digits(lo: float | None, hi: float | None) -> int:
    """Decimals that an interval of this width supports: its half-width decides."""
    if lo is None or hi is None:
        return 1
    half = abs(hi - lo) / 2
    return 0 if half >= 2 else 1 if half >= 0.15 else 2


def _fixed(value: float, places: int) -> str:
    text = f"{value:.{places}f}"
    return text.lstrip("-") if float(text) == 0 else text


def signed(ratio: float | None, lo: float | None = None, hi: float | None = None) -> str:
    """`+31` or `-0.4`: percent change with the digits of its interval; an en dash where unknown."""
    if ratio is None:
        return "–"
    places = digits(None if lo is None else pct(lo), None if hi is None else pct(hi))
    text = _fixed(pct(ratio), places)
    return text if text.startswith("-") or float(text) == 0 else f"+{text}"


def interval(lo: float | None, hi: float | None) -> str:
    """`[27, 36]` in percent; an en dash where unknown."""
    if lo is None or hi is None:
        return "–"
    places = digits(pct(lo), pct(hi))
    return f"[{_fixed(pct(lo), places)}, {_fixed(pct(hi), places)}]"


def number(value: float | None, significant: int = 3) -> str:
    """A magnitude with a few significant digits, never in exponent form; an en dash where unknown."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    from math import floor, log10

    places = max(0, significant - 1 - floor(log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def dollars(value: float | None) -> str:
    """`$1.23`; four decimals below ten cents, because small campaigns are measured too."""
    if value is None:
        return "–"
    if 0 < value < 0.00005:
        return "<$0.0001"
    return f"${value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"${value:.4f}"


def duration(seconds: float | None) -> str:
    """`48 s`, `7 min 05 s`, `3 h 20 min`."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def arm(name: str, labels: Mapping[str, str]) -> str:
    """An arm as it is read: its label from the plan, else `depth=5` as `depth 5`, `plain#2` as a copy."""
    if name in labels:
        return labels[name]
    base, copy, _ = name.partition("#")
    return f"{base} (again)" if copy else name.replace("=", " ")


def _turned(v: Verdict) -> tuple[str, str, bool]:
    """(size, interval, more): the change in the direction it is read."""
    assert v.ratio is not None
    more = v.ratio >= 1
    if v.lo is None or v.hi is None:
        return signed(v.ratio).lstrip("+-"), "", more
    places = digits(pct(v.lo), pct(v.hi))
    sign = 1 if more else -1
    ends = sorted((sign * pct(v.lo), sign * pct(v.hi)))
    span = f"[{_fixed(ends[0], places)}, {_fixed(ends[1], places)}]"
    return _fixed(abs(pct(v.ratio)), places), span, more


def sentence(v: Verdict, labels: Mapping[str, str]) -> str:
    """One comparison in plain words, ending in its verdict."""
    a, b = arm(v.a, labels), arm(v.b, labels)
    why = f" ({reasons(v.reasons)})" if v.reasons else ""
    adjusted = (
        f"; adjusted over {v.family}: {v.verdict_adjusted}"
        if v.verdict_adjusted is not None and v.verdict_adjusted != v.verdict
        else ""
    )
    if v.verdict == "invalid" or v.ratio is None:
        return f"{b} against {a}: no number is claimed - {v.verdict}{why}"
    if v.verdict == "equivalent":
        span = f" [{interval(v.lo90, v.hi90)[1:-1]}] at 90 %" if v.lo90 is not None else ""
        return (
            f"{b} and {a} are the same within {v.margin * 100:g} %: "
            f"{METRIC[v.metric]} {signed(v.ratio, v.lo90, v.hi90)} %{span} - equivalent{why}{adjusted}"
        )
    if v.verdict == "unresolved":
        lo, hi, span = v.lo, v.hi, f" {interval(v.lo, v.hi)}"
        if lo is None:
            lo, hi = v.lo_boots_only, v.hi_boots_only
            span = f" {interval(lo, hi)} these boots only"
            if v.boot_sd_overturn is not None:
                span += f"; a boot sd of {number(v.boot_sd_overturn * 100, 2)} % would overturn it"
        span = "" if lo is None else span
        return (
            f"{b} against {a}: {METRIC[v.metric]} {signed(v.ratio, lo, hi)} %{span} - "
            f"unresolved{why}{adjusted}"
        )
    size, span, more = _turned(v)
    claim = (_MORE if more else _LESS)[v.metric].format(size)
    surprise = " (no difference was expected)" if v.kind in {"null", "aa"} else ""
    return f"{b} {claim} {a} {span} - {v.verdict}{surprise}{why}{adjusted}"


def place(v: Verdict, report: Report) -> str:
    """Where a comparison was made, as far as the run has more than one such place; empty where it has one."""
    parts = []
    if len({x.concurrency for x in report.verdicts}) > 1:
        parts.append(f"{v.concurrency} in flight")
    if len({x.session for x in report.verdicts}) > 1:
        parts.append(f"session {v.session}")
    return ", ".join(parts)


def against(v: Verdict, report: Report) -> str:
    """`b vs a`, and where."""
    where = place(v, report)
    pair = f"{arm(v.b, report.labels)} vs {arm(v.a, report.labels)}"
    return f"{pair} ({where})" if where else pair


def by_comparison(report: Report) -> tuple[tuple[Verdict, ...], ...]:
    """Verdicts of one comparison together, the deciding metric first."""
    found: dict[tuple[str, str], list[Verdict]] = {}
    for v in report.verdicts:
        found.setdefault((v.session, v.pair), []).append(v)
    return tuple(tuple(sorted(vs, key=lambda v: not v.primary)) for vs in found.values())


def further(v: Verdict, first: Verdict) -> str:
    """Reasons of a verdict beyond those that the deciding one of its comparison states already."""
    return reasons(v.reasons if v is first else [c for c in v.reasons if c not in first.reasons])


@dataclass(frozen=True, slots=True)
class Headline:
    """What one ladder or pair came to."""

    title: str
    kind: str
    text: str
    words: tuple[str, ...]
    """The verdicts it speaks of, without repeats."""

    @property
    def claim(self) -> str:
        """The text without the verdict words, for views that show them apart."""
        text = self.text
        for word in self.words:
            text = text.replace(f" - {word}", "")
        return text


def headlines(report: Report) -> tuple[Headline, ...]:
    """One sentence for each ladder and pair, in running order."""
    found: dict[tuple[str, str, str], list[Verdict]] = {}
    for v in report.primary:
        key = (v.session, v.kind, v.family if v.kind == "ladder" else v.pair)
        found.setdefault(key, []).append(v)
    many = len({s for s, _, _ in found}) > 1
    result = []
    for (session, kind, name), verdicts in found.items():
        shown = _against_base(report, name, verdicts) if kind == "ladder" else verdicts
        text = _ladder_text(name, shown, report.labels) if len(shown) > 1 else ""
        text = text or "; ".join(sentence(v, report.labels) for v in shown)
        title = f"{session} / {name}" if many else name
        result.append(Headline(title, kind, text, tuple(dict.fromkeys(v.verdict for v in shown))))
    return tuple(result)


def _against_base(report: Report, ladder: str, verdicts: Sequence[Verdict]) -> list[Verdict]:
    rungs = report.ladders.get(ladder)
    shown = [v for v in verdicts if rungs and v.a == rungs[0].arm]
    return shown or list(verdicts)


def _ladder_text(name: str, verdicts: Sequence[Verdict], labels: Mapping[str, str]) -> str:
    """All rungs in one sentence where they agree; empty where they do not."""
    first = verdicts[0]
    same = {(v.verdict, v.verdict_adjusted, v.a, v.metric, v.reasons) for v in verdicts}
    if len(same) > 1 or first.verdict_adjusted not in {None, first.verdict}:
        return ""
    why = f" ({reasons(first.reasons)})" if first.reasons else ""
    if first.verdict == "unresolved" and all(v.lo is not None for v in verdicts):
        parts = [
            f"{arm(v.b, labels).removeprefix(f'{name} ')} {signed(v.ratio, v.lo, v.hi)} % {interval(v.lo, v.hi)}"
            for v in verdicts
        ]
        base = arm(first.a, labels)
        return f"{METRIC[first.metric]} against {base}: {', '.join(parts)} - unresolved{why}"
    directed = first.verdict in {"faster", "slower", "higher", "lower"}
    if not directed or first.ratio is None or len({(v.ratio or 0) >= 1 for v in verdicts}) > 1:
        return ""
    parts = []
    for v in verdicts:
        size, span, _ = _turned(v)
        parts.append(f"{arm(v.b, labels).removeprefix(f'{name} ')} by {size} % {span}")
    claim = (_MORE if first.ratio >= 1 else _LESS)[first.metric].replace("{} % ", "")
    return f"every rung {claim} {arm(first.a, labels)}: {', '.join(parts)} - {first.verdict}{why}"


def speculation_text(s: Speculation, labels: Mapping[str, str]) -> str:
    """What a ladder says about the cost of verified tokens, in a sentence or two."""
    parts = []
    if s.t1_ms is not None:
        parts.append(f"A bare step takes {number(s.t1_ms)} ms.")
    if s.verify_slope_ms is not None:
        span = ""
        if s.slope_lo is not None and s.slope_hi is not None:
            span = f" [{number(s.slope_lo)}, {number(s.slope_hi)}]"
        parts.append(f"Each further verified token costs {number(s.verify_slope_ms)} ms{span}.")
    pays = [
        arm(w.arm, labels)
        for w in s.widths
        if w.accept_len is not None
        and w.break_even_accept_len is not None
        and w.accept_len > w.break_even_accept_len
    ]
    known = [w for w in s.widths if w.break_even_accept_len is not None and w.depth]
    if known:
        parts.append(
            f"Tokens per step lie above break-even at {', '.join(pays)} (estimates; the verdict is on decode rate)."
            if pays
            else "No width reaches its break-even tokens per step."
        )
    if s.reasons:
        parts.append(f"Not identified: {reasons(s.reasons)}.")
    return " ".join(parts)


def spend_text(report: Report) -> str:
    """Spent, cap, what may still come, measured share and price of an answer in one sentence."""
    spend = report.spend
    spent, cap = spend["spent_usd"], spend["cap_usd"]
    text = f"{dollars(spent)} spent"
    if cap:
        text += f" of a cap of {dollars(cap)} ({number(spent / cap * 100, 2)} %)"
    if not spend["final"]:
        worst = spend["committed_usd"]
        text += f", still billing: {'unknown' if worst is None else dollars(worst)} at worst"
    if spend["measured_share"] is not None:
        text += f"; {spend['measured_share'] * 100:.0f} % of it measuring"
    if spend.get("usd_per_verdict"):
        text += f"; {dollars(spend['usd_per_verdict'])} per comparison measured"
    return text + "."
