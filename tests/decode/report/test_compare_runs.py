"""The page of all runs: every result is there, told apart, escaped, filterable, and from nowhere else."""

from __future__ import annotations

import functools
import html
import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from decode.__main__ import main
from decode.bench.compare_runs import FIGURE_BYTES, SAMPLE_BYTES, all_runs_page, find_reports, read_runs
from decode.errors import UserError

EVIL = '<script>alert("1")</script>'
MACHINE = {"cpu": "a CPU", "cores": 2, "threads": 1, "torch": "2", "transformers": "5"}


def row(name: str, suite: str = "gsm8k", temperature: float = 0.0, **values: Any) -> dict[str, Any]:
    plain = {"method": name, "draft": None, "draft_length": None, "lossless": True, "peer": False, "note": ""}
    plain |= {"tokens_per_second": 100.0, "speedup": 1.0, "speedup_ci95": [1.0, 1.0], "predicted_speedup": 1.0}
    plain |= {"block_efficiency": 1.0, "alpha": None, "tv_spent": 0.0, "accuracy": 0.5, "accuracy_se": 0.1}
    plain |= {"identical_to_target": True if temperature == 0 else None, "prompts": 3, "repeats": 1}
    return plain | {"name": name, "suite": suite, "temperature": temperature} | values


def rows(suite: str, temperature: float) -> list[dict[str, Any]]:
    at = {"suite": suite, "temperature": temperature}
    return [
        row("autoregressive", **at),
        row("generate", **at, peer=True, speedup=0.5, predicted_speedup=None),
        row("vanilla", **at, speedup=1.6, speedup_ci95=[1.4, 1.8], predicted_speedup=1.9, alpha=0.8, alpha_se=0.02),
        row("ears", **at, speedup=1.9, speedup_ci95=[1.7, 2.2], lossless=False, tv_spent=0.03, accuracy=0.25),
        row(EVIL, **at, speedup=0.8, speedup_ci95=[0.7, 0.9], note=EVIL),
    ]


def bench_report(suite: str = "gsm8k", tokens: int = 3) -> dict[str, Any]:
    marks = [{"text": EVIL, "who": "accepted"}, {"text": "b", "who": "corrected"}, {"text": "c", "who": "bonus"}]
    sample = {"prompt": f"How many? {EVIL}", "text": "", "tokens": (marks * tokens)[:tokens]}
    analysis = [
        {"name": name, "suite": suite, "temperature": 0.0, "samples": [sample], "draft_lengths": {"5": 9},
         "acceptance_by_position": [{"position": 1, "tested": 40, "conditional": 0.9}] * 3}
        for name in ("vanilla", "ears")
    ]  # fmt: skip
    bench = {"created": "2026-05-04T03:02:01+00:00", "settings": {}, "costs": {}, "analysis": analysis, "notes": {}}
    return {"methods": rows(suite, 0.0) + rows(suite, 1.0), "machine": MACHINE, "bench": bench}


def distill_report() -> dict[str, Any]:
    drafted = [
        row("adaspec 5", method="vanilla", draft="adaspec", draft_length=5, speedup=1.4),
        row("adaspec 7", method="vanilla", draft="adaspec", draft_length=7, speedup=1.5),
    ]
    sample = {"prompt": "p", "tokens": [{"text": "distilled", "who": "accepted"}]}
    return {"name": "small", "created": "2026-05-05T00:00:00+00:00", "decoding": drafted, "samples": [sample]}


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(content))
    (folder / "report.html").write_text("its own page")
    return folder


class Reader(HTMLParser):
    """Keeps tags with their attributes, and of each row of results the attributes of its group and its text."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.results: list[tuple[dict[str, str | None], list[str]]] = []
        self.body: dict[str, str | None] = {}
        self.inside = False
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag == "tbody":
            self.body = found
        if tag == "tr":
            self.inside = bool(self.body) and "class" not in found
            if self.inside:
                self.results.append((self.body, []))

    def handle_data(self, data: str) -> None:
        if self.inside and data.strip():
            self.results[-1][1].append(data.strip())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("all")
    write(tmp_path / "runs/big", bench_report())
    write(tmp_path / "runs/papers/ears", bench_report("open"))
    write(tmp_path / "runs/small", distill_report())
    return tmp_path / "runs"


@functools.cache
def page(folder: Path) -> str:
    comparisons, notes = read_runs(find_reports([str(path) for path in sorted(folder.iterdir())]))
    return all_runs_page(comparisons, notes, folder).html()


def test_every_row_of_every_report_is_in_the_table_under_its_run_suite_and_temperature(folder: Path) -> None:
    found = {
        (b["data-run"], b["data-suite"], b["data-temperature"], cells[0]) for b, cells in Reader(page(folder)).results
    }
    for run, suite in (("big", "gsm8k"), ("papers/ears", "open")):
        for temperature in ("0", "1"):
            for name in ("autoregressive", "generate", "vanilla", "ears", EVIL):
                assert (run, suite, temperature, name) in found
    assert ("small", "gsm8k", "0", "adaspec 7") in found
    assert len(found) == 2 * 2 * 5 + 2


def test_a_row_shows_speed_with_its_interval_and_prediction_and_what_it_costs(folder: Path) -> None:
    results = Reader(page(folder)).results
    cells = next(c for b, c in results if (b["data-run"], b["data-temperature"], c[0]) == ("big", "0", "ears"))
    assert cells[1:5] == ["relaxed", "1.90", "1.70–2.20", "1.00"]
    assert {"0.030", "0.250", "± 0.100", "100"} <= set(cells)


def test_the_filter_offers_what_the_comparisons_carry_and_waits_for_the_script(folder: Path) -> None:
    tags = Reader(page(folder)).tags
    offered = {a["value"] for tag, a in tags if tag == "option"}
    for tag, attributes in tags:
        for key in ("data-run", "data-suite", "data-temperature"):
            assert attributes.get(key, "") in offered, (tag, attributes)
    form = next(a for tag, a in tags if tag == "form")
    assert "hidden" in form
    assert not [a for tag, a in tags if tag in ("tr", "tbody", "section", "div") and "hidden" in a]


def test_the_answer_names_the_fastest_lossless_method_and_the_price_of_a_relaxed_one(folder: Path) -> None:
    document = html.unescape(re.sub(r"<[^>]+>", " ", page(folder)))
    assert (
        "Fastest without changing the output: vanilla, 1.60× the same loop without a draft (95 %: 1.40–1.80)"
        in document
    )
    assert "Relaxed: ears 1.90×, TV spent 0.030, accuracy 0.25, the target's 0.50" in document


def test_where_nothing_is_faster_than_no_draft_the_page_says_so(tmp_path: Path) -> None:
    write(tmp_path / "slow", {"methods": [row("autoregressive"), row("vanilla", speedup=0.7, speedup_ci95=[0.6, 0.8])]})
    write(tmp_path / "unsure", {"methods": [row("vanilla", speedup=1.1, speedup_ci95=[0.9, 1.3])]})
    document = page(tmp_path)
    assert "slower than no draft: use none here" in document
    assert "perhaps no faster than no draft" in document


def test_lists_of_results_are_found_whoever_wrote_them_and_of_several_settings_the_fastest(tmp_path: Path) -> None:
    probed = [row("adaspeed E2", best=True), row("adaspeed E1", best=False), row("generate", best=False, peer=True)]
    write(
        tmp_path / "run",
        {"self_speculation": probed, "probe_settings": {"machine": MACHINE}, "drafts": [{"name": "d"}]},
    )
    (comparison,), notes = read_runs(find_reports([str(tmp_path)]))
    assert [r["name"] for r in comparison.rows] == ["adaspeed E2", "generate"]
    assert (comparison.part, comparison.machine[:5], notes) == ("self speculation", "a CPU", [])


def test_all_text_is_escaped_and_nothing_comes_from_elsewhere(folder: Path) -> None:
    document = page(folder)
    tags = Reader(document).tags
    assert [tag for tag, _ in tags].count("script") == 1  # the page's own
    assert EVIL not in document
    assert not re.search(r"https?://(?!www\.w3\.org)", document)
    for tag, attributes in tags:
        assert tag not in ("link", "iframe", "object", "embed", "img")
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
    links = {a["href"] for tag, a in tags if tag == "a"}
    assert links == {"big/report.html", "papers/ears/report.html", "small/report.html"}


def test_samples_carry_a_mark_on_every_token_and_the_methods_stand_side_by_side(folder: Path) -> None:
    document = page(folder)
    assert document.count('<span class="corrected">b</span>') == 2 * 2  # two reports, two methods
    assert '<span class="accepted">distilled</span>' in document
    assert "33% accepted, 33% corrected, 33% bonus" in document


def test_the_page_stays_small_whatever_the_number_of_runs_and_says_what_it_left_out(tmp_path: Path) -> None:
    for i in range(12):
        write(tmp_path / f"run{i}", bench_report(tokens=400))
    document = page(tmp_path)
    assert len(document.encode()) < 1_000_000
    assert FIGURE_BYTES + SAMPLE_BYTES < 600_000
    assert "older comparisons are on the pages of their runs" in document
    assert len(Reader(document).results) == 12 * 10


def test_a_report_that_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    write(tmp_path / "good", bench_report())
    write(tmp_path / "bad", {})
    (tmp_path / "bad/report.json").write_text("{")
    write(tmp_path / "empty", {"name": "x", "methods": [{"name": "no suite"}]})
    comparisons, notes = read_runs(find_reports([str(tmp_path)]))
    assert {c.run for c in comparisons} == {"good"}
    assert len(notes) == 2
    assert any("bad/report.json cannot be read" in note for note in notes)
    assert any("empty/report.json holds no speeds" in note for note in notes)


def test_the_newest_run_comes_first_and_a_report_without_a_date_takes_its_files(tmp_path: Path) -> None:
    write(tmp_path / "old", bench_report())
    new = write(tmp_path / "new", {"methods": [row("vanilla")]})
    os.utime(new / "report.json", (1_800_000_000, 1_800_000_000))
    comparisons, _ = read_runs(find_reports([str(tmp_path)]))
    assert [c.run for c in comparisons] == ["new", "old", "old"]
    assert [c.date for c in comparisons][:2] == ["2027-01-15 08:00", "2026-05-04 03:02"]


def test_the_command_takes_folders_without_an_option_and_passes_over_its_own_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(folder, runs)
    for _ in range(2):
        assert main(["report", *(str(path) for path in sorted(runs.iterdir()))]) == 0
    assert "3 runs, 5 comparisons, 22 results" in capsys.readouterr().out
    assert (runs / "index.html").read_text().startswith("<!doctype html>")
    assert main(["report", str(runs / "big"), "--output", str(tmp_path / "other.html")]) == 0
    assert "papers/ears" not in (tmp_path / "other.html").read_text()


def test_folders_that_are_not_there_or_hold_no_report_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no"):
        find_reports([str(tmp_path / "absent")])
    with pytest.raises(UserError, match=r"no report\.json in"):
        find_reports([str(tmp_path)])


def test_of_a_paper_s_folder_the_runs_of_its_configurations_are_taken_and_not_its_summary(tmp_path: Path) -> None:
    summary, inner = tmp_path / "papers/ears-quickstart", tmp_path / "papers/ears-quickstart/quickstart"
    inner.mkdir(parents=True)
    for file in (summary / "report.json", summary / "table.md", inner / "report.json"):
        file.write_text("{}")
    assert find_reports([str(tmp_path / "papers")]) == [inner / "report.json"]
