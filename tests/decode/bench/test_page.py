"""Pages and plots: valid, self-contained, escaped, with every number, and honest about the best value."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import pytest

from decode.bench import page as p
from decode.bench import plots

METHODS = [
    {"name": "vanilla", "speedup": 1.6, "speedup_ci95": [1.5, 1.7], "predicted_speedup": 1.7, "tv_spent": 0.0},
    {"name": "a<b>&c", "speedup": 1.9, "lossless": False, "predicted_speedup": 2.0, "tv_spent": 0.02},
]
HISTOGRAM = {"edges": [-1, 1, 2, 3], "counts": [5, 0, 2]}
RATES = [{"conditional": 0.9}, {"conditional": 0.8}, {"conditional": None}]
PLOTS = {
    "bars": (plots.speedup_bars(METHODS), ["tokens/s ÷ tokens/s without a draft"]),
    "quality": (plots.points(METHODS, "tv_spent", "speedup", "", "p/q", "speedup"), ["p/q", "speedup"]),
    "positions": (plots.acceptance_by_position({"vanilla": RATES, "rest": RATES[:1]}), ["accepted ÷ reached"]),
    "lengths": (plots.draft_lengths({"vanilla": {"4": 10, "2": 1}, "b": {"0": 3}}), ["drafted tokens in a round"]),
    "predicted": (plots.points(METHODS, "predicted_speedup", "speedup", "", "p", "", diagonal=True), ["p"]),
    "by_length": (plots.speedup_by_length({1: 1.2, 2: 1.4}, {2: METHODS[0]}), ["draft length k", "speedup"]),
    "costs": (plots.verify_cost({"a": [1, 1.5], "b": {"1": 1.0, "8": 2.0}}), ["v(n) = time of n tokens ÷ of 1"]),
    "calibration": (plots.calibration({"a": [(0.1, 0.2, 30), (0.9, 0.8, 300)]}, "c"), ["accepted ÷ tested"]),
    "lines": (plots.lines({"a": [(0, 1), (1, float("nan")), (2, 3)]}, "title", "x = 1", "y = 2"), ["x = 1", "y = 2"]),
    "histograms": (plots.histograms({"a": HISTOGRAM, "b": HISTOGRAM}, "t", "KL(p‖q)", {}, log_y=True), ["KL(p‖q)"]),
}  # fmt: skip


class Tags(HTMLParser):
    """Requires that tags are balanced; keeps names and attributes."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(document)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "input"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page(*blocks: p.Block, **values: Any) -> str:
    return p.Page("T", "headline", "kicker", blocks, **values).html()


def full_page(word: str = "word") -> str:
    columns = [
        p.Column("name", word, word, best="max"),
        p.Column("speedup", word, word, ".2f", "max", "speedup_ci95", bar=True),
    ]
    group = p.Group([{"name": word, "speedup": 1.25}], word, word)
    blocks = [
        p.Tiles([p.Tile(word, word, word, "good")], folded=word),
        p.Heading(word, word), p.Text(word), p.Text(word, "bad"),
        p.Table(columns, [*METHODS, group], word),
        p.Figures([(svg, word) for svg, _ in PLOTS.values()] * 2),
        p.Samples([p.Sample([{"text": word, "who": "accepted"}, {"text": word, "who": word}], word)]),
        p.Code(word, word), p.Facts({word: word, "absent": None}),
    ]  # fmt: skip
    return p.Page(word, word, word, blocks).html()


def test_a_page_is_valid_html_that_loads_nothing_from_elsewhere():
    document = full_page()
    assert document.startswith("<!doctype html>")
    for tag, attributes in Tags(document).seen:
        assert tag not in ("link", "iframe", "object", "embed", "img")
        assert not attributes.keys() & {"src", "onclick", "onload"}
        assert not re.match("(https?:)?//", attributes.get("href") or "")
    assert "@import" not in document
    assert "url(" not in re.sub(r"url\(#[^)]+\)", "", document)
    assert "prefers-color-scheme:dark" in document
    assert "@media(max-width" in document


def test_hostile_text_is_escaped_wherever_it_stands():
    evil = '"><script>alert("1")</script><b x="'
    tags = [tag for tag, _ in Tags(full_page(evil)).seen]
    assert "script" not in tags
    assert "b" not in [tag for tag, attributes in Tags(full_page(evil)).seen if "x" in attributes]
    assert "<script>alert" not in full_page(evil)


def test_backticks_become_code():
    assert "<code>model.generate</code>" in page(p.Text("over `model.generate`"))


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_valid_svg_in_the_colour_of_the_page_with_formulas_on_the_axes(name):
    svg, labels = PLOTS[name]
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("viewBox")
    assert root.get("width") is None  # so that it scales with the page
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    written = " ".join("".join(element.itertext()) for element in texts)
    for label in labels:
        assert label in written
        assert label in root.get("aria-label")
    for element in texts:  # black text would vanish in dark mode
        assert "currentColor" in element.get("style", "") + element.get("fill", ""), "".join(element.itertext())
    assert not re.search("#000000|#ffffff|metadata", svg)


def test_a_line_without_a_colour_of_its_own_takes_one_that_no_other_line_has():
    series = {"a": [(0, 1), (1, 2)], "b": [(0, 2), (1, 3)]}
    svg = plots.lines(series, "t", "x", "y", {"b": plots.BLUE})  # BLUE is the first of the colours
    assert plots.BLUE in svg
    assert plots.ORANGE in svg


def test_ids_of_plots_do_not_clash_and_references_still_resolve():
    document = full_page()
    ids = [attributes["id"] for _, attributes in Tags(document).seen if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    references = re.findall(r'(?:url\(#|href="#)([^)"]+)', document)
    assert references
    assert set(references) <= set(ids)


def cells(document: str) -> list[tuple[str, str]]:
    return [(classes, value) for classes, value in re.findall(r"<td(?: class=\"([^\"]*)\")?>(.*?)</td>", document)]


def test_numbers_are_aligned_right_with_their_errors_and_the_best_of_a_column_is_marked():
    columns = [
        p.Column("n", "name"), p.Column("s", "speed", "f", ".1f", "max", "ci"),
        p.Column("e", "error", "", ".1f", "min", "se"),
    ]  # fmt: skip
    rows = [
        {"n": "a", "s": 1.0, "ci": [0.5, 1.5], "e": 0.5, "se": 0.12},
        {"n": "b", "s": 2.0, "ci": [None, None], "e": 0.7},
        {"n": "c", "s": None, "ci": [1.0, 2.0], "e": float("nan")},
    ]
    assert cells(page(p.Table(columns, rows))) == [
        ("", "a"), ("num", "1.0 <small>0.5–1.5</small>"), ("num best", "0.5 <small>± 0.1</small>"),
        ("", "b"), ("num best", "2.0"), ("num", "0.7"),
        ("", "c"), ("num", "–"), ("num", "–"),
    ]  # fmt: skip


def test_formulas_stand_in_the_tooltip_and_below_the_table_and_empty_columns_are_left_out():
    columns = [p.Column("s", "speed", 'Σ"m"'), p.Column("x", "never measured", "unseen formula")]
    document = page(p.Table(columns, [{"s": 1.0}, {"s": 2.0, "x": None}]))
    assert 'title="Σ&#34;m&#34;"' in document
    assert "<dd>Σ&#34;m&#34;</dd>" in document
    assert "unseen formula" not in document


def test_tokens_say_who_wrote_them_and_line_ends_stay_visible():
    tokens = [{"text": "a", "who": "accepted"}, {"text": "\n", "who": "bonus"}]
    document = page(p.Samples([p.Sample(tokens)]))
    assert '<span class="accepted">a</span><span class="bonus"><i class="newline">⏎</i>\n</span>' in document
    assert "drafted and accepted" in document
    assert "corrected by the target" not in document  # the legend lists only what occurs


def test_a_standard_error_has_no_sign_beside_a_signed_difference() -> None:
    column = p.Column("difference", "Δα", "", "+.4f", error="se")
    row = {"difference": 0.0017, "se": 0.0007}
    assert (column.text(row), column.error_text(row)) == ("+0.0017", "± 0.0007")
