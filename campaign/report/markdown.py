"""The report for a pull request: headlines, the deciding verdicts, spend, and the head of the ledger."""

import re

from campaign.report import words
from campaign.report.model import Report


def render(report: Report) -> str:
    """GitHub-flavoured Markdown. Names from the spec and from engines are escaped."""
    lines = [f"### {_safe(report.campaign)}", ""]
    if report.simulated:
        lines += ["**SIMULATED**: not a measurement.", ""]
    if report.partial:
        lines += [f"**PARTIAL** ({report.status}): numbers may still change.", ""]
    elif report.status != "finished":
        lines += [f"**{report.status.upper()}**: {_safe(report.why_ended)}", ""]
    lines += [f"- **{_safe(h.title)}**: {_safe(h.text)}" for h in words.headlines(report)]
    if report.primary:
        level = f"{report.primary[0].ci_level * 100:g} %"
        lines += [
            "",
            f"| comparison | metric | change % | {level} interval | n | boots | verdict | adjusted | why |",
            "|---|---|--:|--:|--:|--:|---|---|---|",
        ]
    for v in report.primary:
        name = words.against(v, report)
        cells = (
            _safe(name),
            f"`{v.metric}`",
            words.signed(v.ratio, v.lo, v.hi),
            words.interval(v.lo, v.hi),
            str(v.n),
            str(v.boots),
            f"**{v.verdict}**",
            v.verdict_adjusted or "",
            _safe(words.reasons(v.reasons)),
        )
        lines.append(f"| {' | '.join(cells)} |")
    if report.further.sentences:
        lines += ["", "Beside the verdicts:", ""]
        lines += [f"- {_safe(kind)}: {_safe(text)}" for kind, text in report.further.sentences]
    lines += ["", words.spend_text(report).replace("$", r"\$")]
    bad = [a for a in report.anchors if a.ok is False]
    if bad:
        lines += ["", "Drifted anchors: " + ", ".join(_safe(f"{a.session} {a.position}") for a in bad) + "."]
    for gate in report.gates:
        what = "overridden" if gate.what == "overridden" else f"tripped at {gate.value} (limit {gate.limit})"
        lines += ["", _safe(f"Gate {gate.gate} {what}: {gate.text}")]
    if sentences := report.instrument.get("sentences"):
        lines += ["", _safe("Instrument: " + " ".join(sentences))]
    foot = (
        f"run `{report.run.replace('`', '')}`, ledger head `{report.head_hash}` "
        f"({report.ledger_length} events), spec `{report.canonical_sha256[:16]}`"
    )
    lines += ["", f"<sub>{foot}</sub>", ""]
    return "\n".join(lines)


def _safe(text: str) -> str:
    """Escape what Markdown or HTML would read as markup; one line."""
    flat = " ".join(text.split())
    return re.sub(r"([\\`*_<>|#\[\]~!@])", r"\\\1", flat)
