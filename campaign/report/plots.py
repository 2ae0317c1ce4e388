"""Plots as inline SVG: real text, no fixed colours, no outside reference.

matplotlib draws with marker colours that are replaced by CSS variables afterwards, so one drawing serves
light, dark and print. Widths suit a phone: text stays readable when a figure shrinks to 360 pixels.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

from campaign.analysis.model import AnchorResult, Verdict
from campaign.report import words
from campaign.report.model import Report
from campaign.spec.models import Metric

_INK, _SOFT, _GRID, _A, _B, _C, _BAND = (
    "#010101", "#020202", "#030303", "#040404", "#050505", "#060606", "#070707",
)  # fmt: skip
_VARIABLE = {
    _INK: "var(--ink)",
    _SOFT: "var(--soft)",
    _GRID: "var(--grid)",
    _A: "var(--c1)",
    _B: "var(--c2)",
    _C: "var(--c3)",
    _BAND: "var(--band)",
}
_SIZE = (5.0, 2.9)
_MANY = 600
"""Dots beyond which a plot is drawn as an image: an SVG of thousands of dots is slow and large."""
MAX_PAIR_PLOTS = 16


@dataclass(frozen=True, slots=True)
class Plot:
    """One figure: inline SVG, its caption, and the same in words for who cannot see it."""

    section: Literal["comparisons", "anchors", "spend"]
    title: str
    caption: str
    svg: str


def plots(report: Report) -> tuple[Plot, ...]:
    """Every figure of a report that has data for it."""
    import warnings

    import matplotlib as mpl

    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "campaign",
        "font.family": "sans-serif",
        # A dollar sign in a name is not mathematics.
        "text.parse_math": False,
    }
    with mpl.rc_context(style), warnings.catch_warnings():
        # The text is drawn by the reader's browser, whose fonts have the glyphs ours may lack.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        drawn = [
            *_ladder_plots(report),
            *_verify_plots(report),
            *_pair_plots(report),
            _anchor_plot(report),
            _spend_plot(report),
        ]
        return tuple(p for p in drawn if p is not None)


def _axes(width: float = _SIZE[0], height: float = _SIZE[1]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(_GRID)
    axes.tick_params(colors=_SOFT, labelcolor=_SOFT, labelsize=9, length=3)
    axes.grid(axis="y", color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    return figure, axes


def _label(axes: Any, x: str, y: str) -> None:
    """Name the axes; the name of y stands above it, where it can be read."""
    axes.set_xlabel(x, color=_SOFT, fontsize=9, labelpad=3)
    axes.set_title(y, color=_SOFT, fontsize=9, loc="left", pad=7)


def _legend(axes: Any, **kwargs: Any) -> None:
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, **kwargs)


def _svg(figure: Any, prefix: str, alt: str) -> str:
    """The drawing as an `<svg>` element with a name, unique ids and no namespace or metadata."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = re.sub(r'(\sid=")', rf"\1{prefix}-", text)
    text = re.sub(r'((?:xlink:)?href="#)', rf"\1{prefix}-", text)
    text = text.replace("url(#", f"url(#{prefix}-")
    for marker, variable in _VARIABLE.items():
        text = text.replace(marker, variable)
    # Decimals of a pixel that nobody sees are a third of the file.
    text = re.sub(r"(\d+\.\d{2})\d+", r"\1", text)
    text = re.sub(r'width="[\d.]+pt"', "", re.sub(r'height="[\d.]+pt"', "", text, count=1), count=1)
    return re.sub(r"<svg", f'<svg role="img" aria-label="{escape(alt)}"', text, count=1).replace("\n", " ")


def _pct(value: float) -> float:
    return words.pct(value)


# --- pairs: one dot per block


def _pair_plots(report: Report) -> list[Plot]:
    shown = []
    for v in report.primary:
        rungs = report.ladders.get(v.family) if v.kind == "ladder" else None
        if v.blocks and (not rungs or v.a == rungs[0].arm):
            shown.append(v)
    return [_pair_plot(report, v, f"pair{i}") for i, v in enumerate(shown[:MAX_PAIR_PLOTS])]


def _block_order(block: str) -> tuple[int, str]:
    digits = re.sub(r"\D", "", block)
    return (int(digits) if digits else 0, block)


def _pair_plot(report: Report, v: Verdict, prefix: str) -> Plot:
    from math import exp

    a, b = words.arm(v.a, report.labels), words.arm(v.b, report.labels)
    blocks = sorted(v.blocks, key=lambda x: _block_order(x[0]))
    values = [(exp(log) - 1) * 100 for _, log in blocks]
    x = [_block_order(name)[0] for name, _ in blocks]
    if len(set(x)) < len(x):
        x = list(range(len(blocks)))
    figure, axes = _axes()
    axes.axhspan(-v.margin * 100, v.margin * 100, color=_BAND, linewidth=0)
    axes.axhline(0, color=_SOFT, linewidth=0.9)
    if v.lo is not None and v.hi is not None and v.ratio is not None:
        axes.axhspan(_pct(v.lo), _pct(v.hi), color=_A, alpha=0.16, linewidth=0)
        axes.axhline(_pct(v.ratio), color=_A, linewidth=1.4)
    axes.plot(
        x, values, "o", color=_A, markersize=5.5, markeredgewidth=0, alpha=0.8, rasterized=len(x) > _MANY
    )
    unit = "wave" if v.concurrency > 1 else "prompt (slot)"
    _label(axes, unit, f"{words.METRIC[v.metric]}, change in %")
    axes.xaxis.get_major_locator().set_params(integer=True)
    caption = f"{words.sentence(v, report.labels)}."
    alt = f"{len(x)} dots, one for each {unit}, {min(values):.1f} % to {max(values):.1f} %. {caption}"
    return Plot("comparisons", f"{b} vs {a}", words.keep(caption), _svg(figure, prefix, alt))


# --- ladders: metrics against the rung


def _ladder_plots(report: Report) -> list[Plot]:
    made = []
    for i, ((session, family), verdicts) in enumerate(_ladders(report.verdicts).items()):
        rungs = report.ladders.get(family, ())
        base = rungs[0].arm if rungs else verdicts[0].a
        against = [v for v in verdicts if v.a == base and v.ratio is not None]
        if against:
            made.append(_ladder_plot(report, (session, family), base, against, f"ladder{i}"))
    return made


def _ladders(verdicts: Sequence[Verdict]) -> Mapping[tuple[str, str], list[Verdict]]:
    found: dict[tuple[str, str], list[Verdict]] = {}
    for v in verdicts:
        if v.kind == "ladder":
            found.setdefault((v.session, v.family), []).append(v)
    return found


def _ladder_plot(
    report: Report, where: tuple[str, str], base: str, verdicts: Sequence[Verdict], prefix: str
) -> Plot:
    session, family = where
    rungs = [r for r in report.ladders.get(family, ()) if r.arm != base]
    arms = [r.arm for r in rungs] or list(dict.fromkeys(v.b for v in verdicts))
    numeric = bool(rungs) and all(r.value is not None for r in rungs)
    place = {r.arm: r.value if numeric else float(i) for i, r in enumerate(rungs)}
    place = place or {arm: float(i) for i, arm in enumerate(arms)}
    figure, axes = _axes()
    axes.axhline(0, color=_SOFT, linewidth=0.9)
    metrics: tuple[tuple[Metric, str, str, float], ...] = (
        ("step_ms", _A, "o", -1.0),
        ("accept_len", _C, "^", 0.0),
        ("decode_tok_s", _B, "s", 1.0),
    )
    spread = max((v or 0 for v in place.values()), default=1) - min(
        (v or 0 for v in place.values()), default=0
    )
    said = []
    for metric, color, marker, side in metrics:
        points = sorted((place[v.b] or 0.0, v) for v in verdicts if v.metric == metric and v.b in place)
        if not points:
            continue
        shift = side * 0.012 * (spread or 1)
        x = [p + shift for p, _ in points]
        y = [_pct(v.ratio) for _, v in points if v.ratio is not None]
        axes.plot(
            x, y, marker, linestyle="-", color=color, linewidth=1.2, markersize=5, label=words.METRIC[metric]
        )
        for (p, v), at in zip(points, x, strict=True):
            if v.lo is not None and v.hi is not None:
                axes.vlines(at, _pct(v.lo), _pct(v.hi), color=color, linewidth=1.6)
            said.append(f"{words.METRIC[metric]} at {p:g}: {words.signed(v.ratio, v.lo, v.hi)} %")
    axes.set_xticks(
        [place[a] for a in arms], [words.arm(a, report.labels).removeprefix(f"{family} ") for a in arms]
    )
    _label(axes, family, f"change against {words.arm(base, report.labels)}, %")
    # Beside the bars, never over them.
    _legend(
        axes,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.07),
        ncol=3,
        handlelength=1.2,
        columnspacing=1.0,
        borderpad=0,
    )
    caption = (
        f"Ladder {family}, session {session}: each rung against {words.arm(base, report.labels)}, with "
        "unadjusted intervals. Decode rate is tokens per step over step time."
    )
    return Plot(
        "comparisons", f"Ladder {family}", caption, _svg(figure, prefix, f"{caption} {'; '.join(said)}")
    )


# --- verify cost against width


def _verify_plots(report: Report) -> list[Plot]:
    made = []
    for i, s in enumerate(report.speculation):
        points = [
            (w.verified_tokens, w.verify_ms, w)
            for w in s.widths
            if w.verified_tokens is not None and w.verify_ms is not None
        ]
        if not points:
            continue
        figure, axes = _axes()
        if s.t1_ms is not None:
            axes.plot([1], [s.t1_ms], "D", color=_C, markersize=5, label="bare step")
        for x, y, w in points:
            if w.lo is not None and w.hi is not None:
                axes.vlines(x, w.lo, w.hi, color=_A, linewidth=1.6)
            axes.annotate(
                words.arm(w.arm, report.labels).removeprefix(f"{s.ladder} "),
                (x, y), xytext=(0, 8),
                ha="center", textcoords="offset points", fontsize=8.5, color=_SOFT,
            )  # fmt: skip
        axes.plot(
            [p[0] for p in points], [p[1] for p in points], "o", color=_A, markersize=5, label="verify step"
        )
        if s.verify_slope_ms is not None and len(points) > 1:
            mean_x = sum(p[0] for p in points) / len(points)
            mean_y = sum(p[1] for p in points) / len(points)
            ends = [min(p[0] for p in points), max(p[0] for p in points)]
            axes.plot(
                ends,
                [mean_y + s.verify_slope_ms * (e - mean_x) for e in ends],
                color=_A,
                linewidth=1,
                linestyle="--",
            )
        axes.set_ylim(bottom=0)
        _label(axes, "tokens verified in a step", "verify step, ms")
        _legend(axes, loc="lower right")
        caption = f"Cost of a verify step by its mean width, ladder {s.ladder}, session {s.session}."
        alt = f"{caption} {words.speculation_text(s, report.labels)}"
        made.append(Plot("comparisons", "Verify cost", caption, _svg(figure, f"verify{i}", alt)))
    return made


# --- anchors over the session


def _minutes(report: Report, a: AnchorResult) -> float | None:
    for t in report.anchor_times:
        if (t.session, t.position) == (a.session, a.position):
            return (t.utc_ns - report.started_utc_ns) / 60e9
    return None


def _anchor_plot(report: Report) -> Plot | None:
    timed = [(m, a) for a in report.anchors if (m := _minutes(report, a)) is not None]
    if not timed:
        return None
    figure, axes = _axes()
    delta = report.drift_delta * 100
    axes.axhspan(-delta, delta, color=_BAND, linewidth=0)
    axes.axhline(0, color=_SOFT, linewidth=0.9)
    said = []
    for session, color in zip(
        dict.fromkeys(a.session for _, a in timed), (_A, _B, _C) * len(timed), strict=False
    ):
        mine = [
            (m, a)
            for m, a in timed
            if a.session == session and (a.drift is not None or "established" in a.reasons)
        ]
        axes.plot(
            [m for m, _ in mine],
            [(a.drift or 0) * 100 for _, a in mine],
            "o-",
            color=color,
            linewidth=1.2,
            markersize=5,
            label=session,
        )
        for m, a in mine:
            if a.lo is not None and a.hi is not None:
                axes.vlines(m, a.lo * 100, a.hi * 100, color=color, linewidth=1.6)
            ratio = None if a.drift is None else 1 + a.drift
            said.append(f"{a.session} {a.position}: {words.signed(ratio)} % drift")
    _label(axes, "minutes since the start", "drift of step time, %")
    if len({a.session for _, a in timed}) > 1:
        _legend(axes, loc="best")
    caption = f"Step time of the anchors against their reference; the band is the drift delta of {delta:g} %."
    return Plot(
        "anchors",
        "Anchor drift",
        words.keep(caption),
        _svg(figure, "anchors", f"{caption} {'; '.join(said)}"),
    )


# --- money over time


def _spend_plot(report: Report) -> Plot | None:
    if len(report.spend_points) < 2:
        return None
    figure, axes = _axes()
    start = report.started_utc_ns
    x = [(p.utc_ns - start) / 60e9 for p in report.spend_points]
    y = [p.usd for p in report.spend_points]
    axes.fill_between(x, y, color=_A, alpha=0.14, linewidth=0)
    axes.plot(x, y, color=_A, linewidth=1.6, label="spent")
    risks = [((p.utc_ns - start) / 60e9, p.usd) for p in report.risk_points]
    if risks:
        # It holds until the next change, and at the end until now.
        risks.append((max(x[-1], risks[-1][0]), risks[-1][1]))
        axes.step(
            [t for t, _ in risks],
            [r for _, r in risks],
            where="post",
            color=_C,
            linewidth=1.2,
            label="committed",
        )
        _legend(axes, loc="center right")
        y = [*y, *(r for _, r in risks)]
    cap = report.spend["cap_usd"] or 0
    if cap:
        axes.axhline(cap, color=_B, linewidth=1.4, linestyle="--")
    axes.annotate(
        f"cap {words.dollars(cap)}",
        (0, cap),
        xytext=(4, -11),
        textcoords="offset points",
        fontsize=8.5,
        color=_B,
    )
    axes.set_ylim(0, max(cap, *y) * 1.06)
    axes.set_xlim(left=0)
    _label(axes, "minutes since the start", "dollars")
    against = ", and what open leases could still come to (committed), against the cap" if risks else ""
    caption = f"Dollars spent over time{against}: {words.spend_text(report)}"
    return Plot("spend", "Spend", words.keep(caption), _svg(figure, "spend", caption))
