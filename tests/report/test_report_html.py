"""The page: self-contained, escaped, accessible, small."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from campaign.report import html

HOSTILE = '<script>alert("x")</script>$x^{2}$ & \' "'
VOID = {"meta", "br", "link", "img", "input", "hr", "use", "path"}


class Page(HTMLParser):
    """Collects tags and complains about what does not nest."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.problems, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if "id" in attrs:
            self.ids.append(attrs["id"])
        if tag not in VOID - {"use", "path"} and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if "id" in dict(attrs):
            self.ids.append(dict(attrs)["id"])

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(tag)


@pytest.fixture(scope="module")
def rendered():
    return {}


def page(rendered, report):
    key = report.run + report.status
    if key not in rendered:
        rendered[key] = html.render(report)
    return rendered[key]


def test_nothing_is_fetched_and_nothing_runs(rendered, report):
    text = page(rendered, report)
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    tags = Page(text).tags
    assert not [t for t, _ in tags if t in {"script", "link", "iframe", "object", "embed", "form"}]
    for tag, attrs in tags:
        assert "src" not in attrs or attrs["src"].startswith("data:"), tag
        assert not [a for a in attrs if a.startswith("on")], tag
        for name in ("href", "xlink:href"):
            assert attrs.get(name, "#").startswith(("#", "data:"))


def test_it_is_well_formed_small_and_ids_are_unique(rendered, report):
    text = page(rendered, report)
    parsed = Page(text)
    assert parsed.problems == []
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert len(text.encode()) < 1_000_000


def test_svg_references_resolve(rendered, report):
    text = page(rendered, report)
    ids = set(Page(text).ids)
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used
    assert used <= ids


def test_plots_have_words_and_no_fixed_colour(rendered, report):
    svgs = re.findall(r"<svg.*?</svg>", page(rendered, report), re.DOTALL)
    # ladder, verify cost, three rungs, kv, aa, one, anchors, spend
    assert len(svgs) == 10
    for svg in svgs:
        label = re.search(r'role="img" aria-label="([^"]{30,})"', svg)
        assert label, svg[:200]
        assert not re.search(r"#0[0-9]0[0-9]0[0-9]", svg)
        assert "<text" in svg


def test_tables_have_headers_and_scroll(rendered, report):
    tags = Page(page(rendered, report)).tags
    assert all(a.get("scope") for t, a in tags if t == "th")
    assert any(t == "meta" and a.get("name") == "viewport" for t, a in tags)
    assert sum(1 for t, a in tags if t == "div" and a.get("class") == "scroll") >= 4
    assert next(a for t, a in tags if t == "html")["lang"] == "en"


def test_every_verdict_carries_its_query_and_n(rendered, report):
    text = page(rendered, report)
    for key, source in report.sources.items():
        assert f'title="{source.n} blocks: {source.query}"' in text, key


def test_hostile_text_stays_text(build, override, trip):
    report = build(
        campaign=HOSTILE, run=HOSTILE, why_ended=HOSTILE, status="stopped", warnings=(HOSTILE,),
        labels={"kv.b": HOSTILE, "depth=3": HOSTILE, "plain": HOSTILE}, gates=(override, replace(trip, text=HOSTILE)),
        versions={HOSTILE: HOSTILE},
    )  # fmt: skip
    report = replace(report, boots=(replace(report.boots[1], error=HOSTILE, boot_id=HOSTILE),))
    text = html.render(report)
    parsed = Page(text)
    assert parsed.problems == []
    assert "script" not in {t for t, _ in parsed.tags}
    assert "&lt;script&gt;" in text
    assert "$x^{2}$" in re.findall(r"<svg.*?</svg>", text, re.DOTALL)[0]


def test_a_name_in_any_script_is_drawn(build, verdict, recwarn):
    one = BARE | {"verdicts": (verdict("p", "a", "b", "step_ms", 1.1, 0.02, "slower"),)}
    text = html.render(build(labels={"a": "基準", "b": "深さ 3"}, **one))
    assert "深さ" in text
    assert not recwarn.list


BARE = {"verdicts": (), "speculation": (), "spend_points": (), "anchor_times": ()}
"""No plots: what matters is elsewhere on the page."""


def test_marks(build, override, verdict):
    one = BARE | {"verdicts": (verdict("p", "a", "b", "step_ms", None, 0, "invalid"),)}
    plain = html.render(build(**one))
    assert "SIMULATED" not in plain
    assert "PARTIAL" not in plain
    text = html.render(
        build(simulated=True, partial=True, status="running", ended_utc_ns=None, gates=(override,), **one)
    )
    assert text.index("SIMULATED") < text.index("<h1>")
    assert text.index("PARTIAL") < text.index("<h1>")
    after = text[text.index('id="h-verdicts"') :]
    assert "gate <b>drift</b> was overridden: the fan was off &lt;script&gt;" in after


def test_empty(build):
    nothing = BARE | {"anchors": (), "plan_actual": (), "boots": (), "sources": {}}
    spend = {"cap_usd": 1.0, "committed_usd": 0.1, "settled_usd": 0.0, "spent_usd": 0.0, "final": False}
    text = html.render(build(**nothing, spend=spend | {"measured_share": None, "phases": {}, "sessions": []}))
    assert "No comparison has rows yet" in text
    assert "still billing: $0.10 at worst" in text
    assert "<svg" not in text


def test_many_comparisons_stay_under_a_megabyte(build, verdict):
    report = build(
        verdicts=tuple(
            verdict(f"p{i}", "a", f"b{i}", "step_ms", 1 + i / 100, 0.03, "slower", n=700) for i in range(30)
        )
    )
    text = html.render(report)
    assert len(text.encode()) < 1_000_000
    assert "Dots are drawn for the first 16 comparisons" in text


def test_the_same_report_gives_the_same_bytes(build):
    few = {"verdicts": build().verdicts[:1]}
    assert html.render(build(**few)) == html.render(build(**few))


def test_write_replaces_whole_files_and_leaves_no_other(build, tmp_path):
    path = tmp_path / "report.html"
    path.write_text("old")
    html.write(build(**BARE), path)
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
