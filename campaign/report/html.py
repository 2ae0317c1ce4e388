"""One self-contained page: no network, no script, plots inline, light, dark, phone and paper.

Autoescape is on for everything: names, engine messages and reasons come from outside. The only markup that
passes as it is are the drawings made here.
"""

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from campaign.clock import iso
from campaign.report import words
from campaign.report.model import Report, Source, verdict_key
from campaign.report.plots import MAX_PAIR_PLOTS, plots


def render(report: Report) -> str:
    """The page as text, UTF-8, well under 1 MB."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("campaign.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "minus": lambda text: str(text).replace("-", "−"),
        "keep": _sentence,
        "day": lambda ns: iso(ns)[:10],
        "time": lambda ns: iso(ns)[11:19],
        "stamp": lambda ns: iso(ns)[:19].replace("T", " ") + " UTC",
        "svg": Markup,
    }
    return environment.get_template("report.html.j2").render(
        r=report,
        w=words,
        headlines=words.headlines(report),
        plots=plots(report),
        max_pair_plots=MAX_PAIR_PLOTS,
        groups=_groups(report),
        phases=_phases(report),
        source=lambda key: _hint(report.sources.get(key)),
        verdict_key=verdict_key,
    )


def write(report: Report, path: Path) -> None:
    """Write the page so that a reader sees the old one or the new one, never half of it."""
    replace_text(path, render(report))


def replace_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically (temporary file beside it, then rename)."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _sentence(text: str) -> str:
    """A sentence with real minus signs, which breaks only between words."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", words.keep(text))


def _hint(source: Source | None) -> str:
    return "" if source is None else f"{source.n} {source.unit}: {source.query}"


def _groups(report: Report) -> list[dict[str, Any]]:
    """Verdicts by comparison, the deciding metric first."""
    return [
        {
            "session": vs[0].session,
            "title": f"{words.arm(vs[0].b, report.labels)} vs {words.arm(vs[0].a, report.labels)}",
            "verdicts": vs,
        }
        for vs in words.by_comparison(report)
    ]


def _phases(report: Report) -> list[dict[str, Any]]:
    spent = {k: v for k, v in report.spend["phases"].items() if v}
    total = sum(spent.values())
    return [{"name": k, "usd": v, "share": v / total} for k, v in spent.items()]
