"""The page: escaping, self-containedness, well-formedness, traces, colours."""

import dataclasses
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from speculative import records
from speculative.reports import page, style
from speculative.reports.chart import gamma_chart

DATA = Path(__file__).parent / "data"
VOID = {"meta", "br"}
HOSTILE = "</li></span><script>alert(\"x\")</script><img src=x onerror='y'>&amp;"


class Page(HTMLParser):
    """Elements with attributes, and text by the classes that enclose it."""

    def __init__(self, html):
        super().__init__()
        self.elements, self.open, self.texts = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class")))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, kind = self.open[-1] if self.open else (None, None)
        self.texts.append((tag, kind, data))


@pytest.fixture
def record():
    return records.read_record(DATA / "record_v1.json")


def with_traces(record, *rounds, **fields):
    trace = records.Trace(0, "input", "output", rounds)
    fields = {"examples": (trace,), **fields}
    setting = dataclasses.replace(record.settings[0], **fields)
    return dataclasses.replace(record, settings=(setting,))


def test_is_well_formed_and_asks_for_nothing_outside(record):
    html = page.to_html(record)
    parsed = Page(html)
    assert parsed.open == []
    tags = {tag for tag, _ in parsed.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "a"}
    for _, attributes in parsed.elements:
        assert not {"src", "href", "srcset", "action", "data"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?:|url\(|@import|//", html)


def test_hostile_text_is_text_everywhere(record):
    rounds = (
        records.Round((HOSTILE,), (HOSTILE,), HOSTILE, "correction"),
        records.Round((HOSTILE,), (), HOSTILE, "bonus"),
    )
    record = with_traces(
        record,
        *rounds,
        task=HOSTILE,
        verifier=HOSTILE,
        note=HOSTILE,
        draft=records.Model(HOSTILE, None, HOSTILE),
        quality=records.Quality({HOSTILE: 1.0}, {HOSTILE: 1.0}),
        gamma_search=dataclasses.replace(record.settings[0].gamma_search, split=HOSTILE),
        examples=(records.Trace(0, HOSTILE, HOSTILE, rounds),),
    )
    record = dataclasses.replace(
        record,
        run_mode=HOSTILE,
        target=records.Model(HOSTILE, 1, HOSTILE),
        provenance=dataclasses.replace(
            record.provenance,
            command=HOSTILE,
            commit=HOSTILE,
            devices=(HOSTILE,),
            versions={HOSTILE: HOSTILE},
            host=records.Host(HOSTILE, 1),
            config_hash=HOSTILE,
        ),
    )
    html = page.to_html(record)
    parsed = Page(html)
    assert parsed.open == []
    assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
    for kind in ("accepted", "rejected", "correction", "bonus"):
        assert HOSTILE in [text for _, k, text in parsed.texts if k == kind]
    assert "<script" not in html and "<img" not in html and "onerror='" not in html


def test_a_trace_has_a_line_per_round_with_its_marks(record):
    parsed = Page(page.to_html(record))
    kinds = ("accepted", "rejected", "correction", "bonus")
    shown = [(tag, kind, text) for tag, kind, text in parsed.texts if kind in kinds]
    assert [(tag, kind) for tag, kind, _ in shown[:4]] == [  # the legend, in its own marks
        ("span", "accepted"),
        ("s", "rejected"),
        ("b", "correction"),
        ("u", "bonus"),
    ]
    assert shown[4:10] == [
        ("span", "accepted", " Das"),
        ("span", "accepted", " ist"),
        ("s", "rejected", " schön"),
        ("s", "rejected", " und"),
        ("s", "rejected", "."),
        ("b", "correction", " gut"),
    ]
    assert ("u", "bonus", " ?") in shown
    assert [tag for tag, _ in parsed.elements].count("li") == 3 + 3  # caveats, rounds
    assert any(text == "Example 7: 11 tokens in 3 target runs" for _, _, text in parsed.texts)


def test_tokens_without_text_are_visible(record):
    html = page.to_html(with_traces(record, records.Round(("\n", ""), (), "", "end")))
    assert '<li><span class="accepted">\N{RETURN SYMBOL}</span>' in html
    assert '<span class="accepted">\N{EMPTY SET}</span></li>' in html


def test_a_record_with_the_required_fields_only(record):
    empty = {f.name: None for f in dataclasses.fields(records.Setting) if f.default is None}
    html = page.to_html(with_traces(record, **empty))
    assert Page(html).open == []
    assert "Traces" not in html and "<svg" not in html and "<h2>Results</h2>" in html


def test_the_page_holds_the_figures(record):
    text = " ".join(text for _, _, text in Page(page.to_html(record)).texts)
    for figure in ("[0.791, 0.808]", "2.70x", "[2.61, 2.78]", "128/128", "bleu 28.3", "cpu"):
        assert figure in text


def test_charts(record):
    search = record.settings[0].gamma_search
    svg = gamma_chart(search, chosen=5, title="a < b")
    parsed = Page(svg)
    circles = [attributes for tag, attributes in parsed.elements if tag == "circle"]
    assert len(circles) == len(search.points)
    assert [c["class"] for c in circles].count("point chosen") == 1
    assert "<title>a &lt; b</title>" in svg
    heights = [float(c["cy"]) for c in circles]
    speedups = [p.speedup for p in search.points]
    assert [heights.index(h) for h in sorted(heights)] == [
        speedups.index(s) for s in sorted(speedups, reverse=True)
    ]


@pytest.mark.parametrize("speedups", [[0.0004], [1.0], [250.0], [0.5 + i / 7 for i in range(40)]])
def test_charts_of_any_range_stay_inside(speedups):
    points = tuple(records.GammaPoint(g, 1.0, s) for g, s in enumerate(speedups))
    parsed = Page(gamma_chart(records.GammaSearch("validation", points), 0, "t"))
    for tag, attributes in parsed.elements:
        if tag == "circle":
            assert 0 <= float(attributes["cx"]) <= 420 and 0 <= float(attributes["cy"]) <= 240
    assert sum(a.get("class") == "grid" for _, a in parsed.elements) <= 9


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("palette", [style.LIGHT, style.DARK])
@pytest.mark.parametrize("name", ["ink", "faint", "accepted", "rejected", "correction", "bonus"])
def test_contrast(palette, name):
    bright, dark = sorted((luminance(palette["paper"]), luminance(palette[name])), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_writes_the_page_whole(record, tmp_path):
    path = page.write_page(record, tmp_path / "out" / "report.html")
    assert path.read_text() == page.to_html(record)
    assert [p.name for p in path.parent.iterdir()] == ["report.html"]
