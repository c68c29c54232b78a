"""Pages and plots: self-contained, escaped, honest about the best value, no clashing ids, never half written."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from decode.report import plots
from decode.report.page import LOSSLESS, RELAXED, Column, Page, Tile, unique_ids

METHODS = [
    {"name": "vanilla", "speedup": 1.6, "speedup_ci95": [1.5, 1.7], "predicted_speedup": 1.7, "tv_spent": 0.0},
    {"name": "a<b>&c", "speedup": 1.9, "exact": False, "predicted_speedup": 2.0, "tv_spent": 0.02},
]
HISTOGRAM = {"edges": [0, 1, 2, 3], "counts": [5, 0, 2]}
FIGURES = {
    "bars": plots.speedup_bars(METHODS),
    "quality": plots.speed_quality(METHODS),
    "positions": plots.acceptance_by_position({"vanilla": [0.9, 0.8, None], "rest": [0.4]}),
    "lengths": plots.draft_lengths({"vanilla": {4: 10, 2: 1}, "adasd": {0: 3, 7: 1}}),
    "predicted": plots.measured_against_predicted(METHODS),
    "by_length": plots.speedup_by_length({1: 1.2, 2: 1.4}, {2: (1.3, 1.2, 1.4)}),
    "calibration": plots.calibration({"layer 3": [(0.1, 0.2, 30), (0.9, 0.8, 300)]}),
    "lines": plots.lines({"a": [(0, 1), (1, float("nan")), (2, 3)]}, "title", "x", "y"),
    "histograms": plots.histograms({"a": HISTOGRAM, "b": HISTOGRAM}, "title", "x", log_y=True, zero=True),
}


class Tags(HTMLParser):
    """Requires that tags are balanced; keeps names and attributes."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parse(page: Page) -> list[tuple[str, dict]]:
    tags = Tags()
    tags.feed(page.html())
    assert not tags.open
    return tags.seen


def full_page() -> Page:
    page = Page("T", "lead", "kicker").tiles([Tile("speed", "1.6×", "note", "good")]).section("Heading", "why")
    page.table([Column("name", "method"), Column("speedup", "speedup", "a ÷ b", ".2f", "max")], METHODS)
    page.gallery((svg, name) for name, svg in FIGURES.items()).note("n", "bad").paragraph("p").code("x = 1", "py")
    page.facts({"cpu": "one", "gpu": None}).details("more", "text")
    return page.tokens([{"text": "a", "who": "accepted"}, {"text": "b\n", "who": "corrected"}])


def test_the_page_needs_nothing_from_outside_and_runs_no_script():
    page = full_page()
    for tag, attributes in parse(page):
        assert tag not in ("script", "link", "iframe", "object", "embed", "img")
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert "@import" not in page.html()
    assert not re.search(r"url\((?!#)", page.html())


def test_every_text_is_escaped():
    evil = '<script>alert("1")</script>&'
    page = Page(evil, evil, evil).tiles([Tile(evil, evil, evil)]).section(evil, evil).paragraph(evil).note(evil)
    page.table([Column("a", evil, evil), Column("b", "b", format=lambda _: evil)], [{"a": evil, "b": 1}], evil)
    page.tokens([{"text": evil, "who": "accepted"}, {"text": evil, "who": evil}], evil).code(evil, evil)
    page.facts({evil: evil}).details(evil, evil).figure(FIGURES["bars"], evil)
    assert "script" not in [tag for tag, _ in parse(page)]
    assert "<script" not in page.html()


def test_backticks_become_code():
    assert "<code>model.generate</code>" in Page("t", "over `model.generate`").html()


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_valid_svg_in_the_colour_of_the_page(name):
    svg = FIGURES[name]
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert root.get("aria-label")
    assert root.get("viewBox")
    assert root.get("width") is None  # so that it scales with the page
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    assert texts
    for element in texts:  # black text would vanish in dark mode
        assert "currentColor" in element.get("style", "") + element.get("fill", ""), "".join(element.itertext())
    assert "#000000" not in svg
    assert "#ffffff" not in svg
    assert "metadata" not in svg


def test_a_figure_is_the_same_bytes_every_time():
    assert plots.speedup_bars(METHODS) == FIGURES["bars"]


def test_names_in_figures_are_escaped():
    assert "a&lt;b&gt;&amp;c" in FIGURES["bars"]
    assert "<b>" not in FIGURES["bars"]


def test_ids_of_figures_do_not_clash_and_references_still_resolve():
    page = Page("t").gallery([(FIGURES["bars"], ""), (FIGURES["bars"], ""), (FIGURES["histograms"], "")])
    ids = [attributes["id"] for _, attributes in parse(page) if "id" in attributes]
    assert len(ids) == len(set(ids))
    document = page.html()
    references = re.findall(r'(?:url\(#|href="#)([^)"]+)', document)
    assert references
    assert set(references) <= set(ids)


def test_unique_ids_leaves_other_attributes_alone():
    svg = (
        '<?xml version="1.0"?><svg viewBox="0 0 1 1"><path id="a" grid="b"/><use href="#a" clip-path="url(#a)"/></svg>'
    )
    assert unique_ids(svg, "x-") == (
        '<svg viewBox="0 0 1 1"><path id="x-a" grid="b"/><use href="#x-a" clip-path="url(#x-a)"/></svg>'
    )


def cells(page: Page) -> list[tuple[str, str]]:
    return re.findall(r"<td(?: class=\"([^\"]*)\")?>(.*?)</td>", page.html())


def test_numbers_are_aligned_right_and_the_best_of_a_column_is_marked():
    columns = [
        Column("n", "name"), Column("s", "speed", "f", ".1f", "max"), Column("e", "error", "", ".1f", "min"),
    ]  # fmt: skip
    rows = [{"n": "a", "s": 1.0, "e": 0.5}, {"n": "b", "s": 2.0, "e": 0.7}, {"n": "c", "s": None, "e": float("nan")}]
    found = cells(Page("t").table(columns, rows))
    assert found[:3] == [("", "a"), ("num", "1.0"), ("num best", "0.5")]
    assert found[3:6] == [("", "b"), ("num best", "2.0"), ("num", "0.7")]
    assert [value for _, value in found[7:]] == ['<span class="none">–</span>'] * 2


def test_a_column_in_which_all_are_equal_has_no_best():
    rows = [{"s": 1.0}, {"s": 1.0}, {"s": 1.0}]
    assert [classes for classes, _ in cells(Page("t").table([Column("s", "s", best="max")], rows))] == ["num"] * 3


def test_formulas_stand_in_the_tooltip_and_in_the_legend_and_empty_columns_are_left_out():
    columns = [Column("s", "speed", 'Σ"m"'), Column("x", "never measured", "unseen formula")]
    page = Page("t").table(columns, [{"s": 1.0}, {"s": 2.0, "x": None}]).html()
    assert 'title="Σ&quot;m&quot;"' in page
    assert "<dd>Σ&quot;m&quot;</dd>" in page
    assert "unseen formula" not in page


def test_lossless_and_relaxed_are_told_apart_in_words():
    page = Page("t").table([Column("rule", "rule")], [{"rule": LOSSLESS}, {"rule": RELAXED}]).html()
    assert '<span class="badge good">lossless</span>' in page
    assert '<span class="badge warn">relaxed</span>' in page


def test_tokens_say_who_wrote_them_and_line_ends_stay_visible():
    page = Page("t").tokens([{"text": "a", "who": "accepted"}, {"text": "\n", "who": "bonus"}]).html()
    assert '<span class="w-accepted" title="drafted and accepted">a</span>' in page
    assert "⏎</i>\n</span>" in page
    assert "corrected by the target" not in page  # the legend lists only what occurs


def test_a_page_is_written_to_a_folder_that_did_not_exist(tmp_path):
    full_page().write(tmp_path / "new" / "page.html")
    assert (tmp_path / "new" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
