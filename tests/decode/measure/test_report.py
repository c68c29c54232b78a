"""Pages and plots: valid, self-contained, escaped, with every number."""

import csv
import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from decode.measure import plots
from decode.measure import report as p

METHODS = [
    {"name": "vanilla", "speedup": 1.6, "speedup_ci95": [1.5, 1.7]},
    {"name": "a<b>&c", "speedup": 1.9, "lossless": False},
]
RATES = [{"position": i, "marginal": rate} for i, rate in enumerate((0.9, 0.8, None), 1)]
CURVES = {"a": [(0, 1), (1, float("nan")), (2, 3)], "b": [(1, 2.0, 1.5, 2.5)]}
PLOTS = {
    "bars": (plots.speedup_bars(METHODS), ["tokens/s ÷ tokens/s without a draft"]),
    "positions": (plots.acceptance_by_position({"vanilla": RATES, "rest": RATES[:1]}), ["accepted ÷ rounds"]),
    "lines": (plots.lines(CURVES, "title", "x = 1", "y = 2"), ["x = 1", "y = 2"]),
    "points": (plots.lines({"a": [(0.5, 1.5)]}, "title", "p/q", "s"), ["p/q", "s"]),
}


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


def page(folder: Path, word: str = "word") -> str:
    """A page with every part, and this text wherever text may stand."""
    rows = [{**METHODS[0], "name": word, "identical_to_target": True}, {**METHODS[1], "speedup": None}]
    keys = ("name", "speedup", "identical_to_target", "accuracy")
    section = p.Section(
        word, word, {word: word, "absent": None},
        [p.Table(keys, rows, word, note=word), p.Table(keys, rows, word, folded=True)],
        [svg for svg, _ in PLOTS.values()],
        {word: word}, [(word, word)],
    )  # fmt: skip
    p.write_page(folder / "page.html", word, word, [section, p.Section(word, word, folded=True)])
    return (folder / "page.html").read_text(encoding="utf-8")


def test_a_page_is_valid_html_that_loads_nothing_from_elsewhere_and_ids_do_not_clash(tmp_path: Path) -> None:
    document = page(tmp_path)
    assert document.startswith("<!doctype html>")
    seen = Tags(document).seen
    for tag, attributes in seen:
        assert tag not in ("link", "iframe", "object", "embed", "img", "script")
        assert not attributes.keys() & {"src", "onclick", "onload"}
        assert not re.match("(https?:)?//", attributes.get("href") or "")
    assert not re.search(r"@import|url\([^#]", document)
    assert "(prefers-color-scheme:dark)" in document
    ids = [attributes["id"] for _, attributes in seen if "id" in attributes]
    assert len(ids) == len(set(ids)) > 20
    assert set() < {*re.findall(r'(?:url\(#|href="#)([^)"]+)', document)} <= {*ids}


def test_hostile_text_is_escaped_wherever_it_stands(tmp_path: Path) -> None:
    document = page(tmp_path, '"><script>alert("1")</script><b x="')
    assert not {"script", "b"} & {tag for tag, _ in Tags(document).seen}
    assert "<code>model.generate</code>" in page(tmp_path, "over `model.generate`")


@pytest.mark.parametrize("name", PLOTS)
def test_plots_are_valid_svg_in_the_colour_of_the_page_with_formulas_on_the_axes(name: str) -> None:
    svg, labels = PLOTS[name]
    root = ElementTree.fromstring(svg)
    assert root.get("viewBox")
    texts = list(root.iter("{http://www.w3.org/2000/svg}text"))
    written = " ".join("".join(element.itertext()) for element in texts)
    assert all(label in written and label in root.get("aria-label", "") for label in labels)
    for element in texts:  # black text would vanish in dark mode
        assert "currentColor" in element.get("style", "") + element.get("fill", ""), "".join(element.itertext())
    assert not re.search("#000000|#ffffff|metadata", svg)


def test_a_table_shows_values_with_their_errors_and_only_columns_that_have_values(tmp_path: Path) -> None:
    document = page(tmp_path)
    cells = re.findall(r"<td(?: class=\"num\")?>(.*?)</td>", document)
    assert cells == ["word", "1.60 (1.50–1.70)", "yes", "a&lt;b&gt;&amp;c", "–", "–"] * 2
    assert document.count(f"<dd>{p.COLUMNS['speedup'].formula}</dd>") == 1  # the definition, once a page
    assert p.COLUMNS["accuracy"].formula not in document
    assert p.cell({"difference": -0.0017, "se": 0.0007}, "difference") == "-0.0017 ± 0.0007"
    assert p.cell({"difference": -0.0017, "se": float("nan")}, "difference") == "-0.0017"  # one text


@pytest.mark.parametrize("width", [60, 100, 130])
def test_a_table_of_a_terminal_keeps_to_its_width_and_marks_what_is_no_result(width: int) -> None:
    name = "vanilla n=5 (kl-tv-accepted)"
    row = {"name": name, "draft_length": 5, "tokens_per_second": 1234.5, "speedup": 1.9, "speedup_ci95": [1.5, 2.25]}
    row |= {"accepted_length": 3.2, "alpha": 0.9, "alpha_se": 0.01, "accuracy": 0.5, "identical_to_target": True}
    text = io.StringIO()
    table = p.console_table("", p.KEYS, [row, row | {"name": "generate", "prompts": 2}], ["beside it"])
    Console(file=text, width=width).print(table)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert lines[-1].strip() == "beside it"
    assert width < 130 or "1.90 (1.50–2.25)   " in text.getvalue()
    assert ("1.90 ?" in text.getvalue()) or width < 100


def test_a_csv_has_the_values_of_a_table() -> None:
    rows = [{"name": "a_b", "offline_alpha": 0.5, "offline_alpha_se": 0.01, "speedup": 2.0, "speedup_ci95": [1, 3]}]
    (line,) = csv.DictReader(p.comma_separated([rows[0] | {"acceptance_by_position": [{"position": 1}]}]).splitlines())
    assert {"name": "a_b", "offline_alpha": "0.5", "speedup_ci95": "[1, 3]", "doubt": ""}.items() <= line.items()
    assert "acceptance_by_position" not in line
