"""``python -m decode paper``: orderings on numbers made by hand, the papers' data, and the command in miniature."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from pairs import save_pair

from decode.__main__ import main
from decode.papers import adaptix, adaspec, adaspeed, ears, papers
from decode.papers.adasd import COLUMNS, PUBLISHED, ROWS, paper_rows
from decode.papers.claims import (
    Estimate,
    Ordering,
    PaperTable,
    Result,
    Results,
    accepted_length,
    accounting,
    difference,
    score,
    speed_ratio,
)

ROOT = Path(__file__).parents[3]


def made(seconds, scores=None, accepted=None, **row):
    """A result of prompts with ten tokens each in so many seconds, in five forwards."""
    prompts = [
        {"tokens": [10], "seconds": [s], "forwards": 5, "score": None if scores is None else scores[i],
         "accepted": 5 if accepted is None else accepted[i]}
        for i, s in enumerate(seconds)
    ]  # fmt: skip
    return Result({"name": "x"} | row, prompts, {}, None)


@pytest.mark.parametrize(
    ("estimate", "bound", "verdict"),
    [
        (Estimate(1.2, 1.1, 1.3, 9), 1.0, "held"),
        (Estimate(0.8, 0.7, 0.9, 9), 1.0, "not held"),
        (Estimate(1.2, 0.9, 1.5, 9), 1.0, "within error"),
        (Estimate(1.0, 1.0, 1.0, 9), 1.0, "within error"),
        (Estimate(-0.01, -0.015, 0.0, 9), -0.02, "held"),
        (Estimate(-0.01, -0.03, 0.0, 9), -0.02, "within error"),
        (Estimate(-0.05, -0.06, -0.03, 9), -0.02, "not held"),
    ],
)
def test_an_ordering_is_held_only_if_its_whole_interval_is(estimate, bound, verdict):
    assert Ordering("claim", estimate, bound).verdict == verdict


def test_a_sentence_gives_the_reason_only_where_the_claim_is_not_held():
    held = Ordering("A beats B", Estimate(1.2, 1.1, 1.3, 9), 1.0, "ratio", "it costs", "toy")
    assert held.sentence() == "held: A beats B: 1.200 × (95 % 1.100 × to 1.300 ×, 9 prompts) [toy]"
    lost = Ordering("A keeps it", Estimate(-0.05, -0.06, -0.03, 9), -0.02, "points", "it costs")
    assert lost.sentence().startswith("not held: A keeps it: -5.00 points")
    assert lost.sentence().endswith("expected above -2.00 points. it costs")


def test_speeds_are_compared_prompt_by_prompt():
    slow, fast = made([1.0, 4.0, 9.0] * 5), made([0.5, 2.0, 4.5] * 5)
    assert speed_ratio(fast, slow) == Estimate(2.0, 2.0, 2.0, 15)
    assert speed_ratio(fast, None) is None


def test_differences_are_paired_by_prompt():
    hard = [float(i % 2) for i in range(40)]
    ours, theirs = made([1.0] * 40, hard), made([1.0] * 40, [*hard[:-1], 0.0])
    found = difference(ours, theirs, score)
    assert found is not None
    assert found.value == pytest.approx(1 / 40)
    assert 0 <= found.low <= found.value <= found.high < 0.1  # unpaired, the error would be 0.2
    assert difference(made([1.0]), made([1.0]), score) is None
    longer = difference(made([1.0] * 8, accepted=[10] * 8), made([1.0] * 8), accepted_length)
    assert longer == Estimate(1.0, 1.0, 1.0, 8)


def test_costs_explain_a_round():
    costs = SimpleNamespace(cost_ratio=0.1, v=lambda n: 1 + n / 10, target_seconds=0.01)
    row = {"name": "m", "draft": "d", "drafted_per_round": 5.0, "block_efficiency": 4.2, "rounds": 10}
    told = accounting(Result(row, [], {}, costs))  # type: ignore[arg-type]
    assert told.startswith("m: 4.20 tokens for 2.10 one-token forwards a round (5.0 × c 0.10 + v(6) 1.60)")
    assert told.endswith("predicted 2.00 ×")
    own = row | {"draft": None, "draft_seconds": 0.25}
    assert "5.0 × 0.50 of drafting" in accounting(Result(own, [], {}, costs))  # type: ignore[arg-type]


def test_the_papers_tables_are_complete():
    settings = list(dict.fromkeys((row["pair"], row["suite"]) for row in PUBLISHED))
    for setting in settings:
        rows = paper_rows(*setting)
        assert set(rows) == {"Draft", *ROWS}
        vanilla = float(rows["Vanilla"][0])
        for cells in rows.values():  # the speedup column follows from the others
            assert float(cells[-1]) == pytest.approx(float(cells[0]) / vanilla, abs=0.002)
            if cells[2] != "–":
                assert float(cells[4]) == pytest.approx(float(cells[3]) / float(cells[2]), abs=0.02)
    assert len(settings) == 9
    assert len(COLUMNS) == 7
    assert len(adaptix.PUBLISHED) == 15
    assert all(float(row[heading]) > 0 for row in adaptix.PUBLISHED.values() for heading in adaptix.HEADINGS)
    assert len(adaspec.MAIN_RESULTS) == len(adaspec.TASKS) * len(adaspec.SETTINGS) == 20
    assert all(float(row["adaspec"]) > float(row["distillspec"]) for row in adaspec.PUBLISHED)
    assert set(adaspeed.PUBLISHED) == {"layerskip", "draft-verify", "adaspeed", "adaspeed-probe"}
    assert set(ears.PUBLISHED) == {ears.BASELINE, ears.MAIN}


def test_nothing_outside_the_papers_imports_them():
    for package in ("decode", "distill", "probes"):
        for file in (ROOT / package).rglob("*.py"):
            if file.parent.name != "papers":
                assert "import decode.papers" not in (text := file.read_text()), file
                assert "from decode.papers" not in text, file


def test_tables_are_markdown():
    table = PaperTable("T", ["", "a"], [["x", "1"]], "note")
    assert table.markdown() == "**T**\n\n|  | a |\n| --- | ---: |\n| x | 1 |\n\nnote"
    assert adaptix.store_of("adaptix texts=5 order=2") == "texts-5/ngrams-2"
    assert adaptix.store_of("adaptix") == "ngrams-3"


@pytest.mark.parametrize("name", ["adasd", "adaptix", "ears", "adaspeed"])
def test_a_papers_tables_and_orderings_in_miniature(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    argv = ["paper", name, "--dry-run", "--configs", str(ROOT / "configs/papers"), "--output", str(tmp_path)]
    assert main(argv) == 0
    told = capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["title"] == papers()[name].title
    assert report["orderings"]
    assert {o["verdict"] for o in report["orderings"]} <= {"held", "not held", "within error"}
    for ordering in report["orderings"]:
        assert ordering["sentence"] in told
        assert all(math.isfinite(ordering["estimate"][k]) for k in ("value", "low", "high"))
    for table in report["tables"]:
        assert table["rows"]
        assert all(len(row) == len(table["columns"]) for row in table["rows"])
    assert (tmp_path / "table.md").read_text().startswith(f"### {report['title']}")


def test_ours_stand_in_the_places_of_the_papers_own_settings(tmp_path):
    argv = ["paper", "adasd", "--scale", "full", "--only", "llama-70b-1b-mmlu", "--dry-run"]
    assert main([*argv, "--configs", str(ROOT / "configs/papers"), "--output", str(tmp_path)]) == 0
    (table,) = json.loads((tmp_path / "report.json").read_text())["tables"]
    assert table["rows"][0][0] == "Draft"
    assert table["rows"][2][8] == "8.746"  # vanilla, Llama 3.1 70B – 3.2 1B, MMLU
    assert "Llama 3.1 70B – Llama 3.2 1B, mmlu" in table["note"]


def test_measurements_are_kept_and_probes_may_be_missing(tmp_path, tiny, capsys):
    run = save_pair(tmp_path / "run", tiny)
    configs = tmp_path / "configs" / "adaspeed"
    configs.mkdir(parents=True)
    source = (ROOT / "configs/papers/adaspeed/quickstart.yaml").read_text()
    (configs / "quickstart.yaml").write_text(source.replace("max_new_tokens: 96", "max_new_tokens: 8"))
    argv = ["paper", "adaspeed", "--run", str(run), "--configs", str(configs.parent), "--limit", "2", "--repeats", "1"]
    argv += ["--output", str(tmp_path / "out")]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert "adaspeed-probe, confidence-probe are left out" in told
    assert "up to date" not in told
    rows = json.loads((tmp_path / "out/report.json").read_text())["tables"][0]["rows"]
    assert [row[0] for row in rows] == ["LayerSkip", "Draft & Verify", "AdaSPEED (no probe)"]
    assert main(argv) == 0
    assert "up to date" in capsys.readouterr().out
    shutil.rmtree(run / "target")
    assert main(argv) == 2
    assert "train it first: python -m distill --config configs/quickstart.yaml" in capsys.readouterr().err


def test_adaspec_reads_the_report_of_a_distillation(tmp_path, capsys):
    argv = ["paper", "adaspec", "--run", str(tmp_path / "run"), "--output", str(tmp_path / "out")]
    assert main(argv) == 2
    assert "python -m distill --config configs/quickstart.yaml" in capsys.readouterr().err
    drafts = [
        {"name": name, "offline_alpha": alpha, "offline_alpha_se": 0.01, "offline_alpha_greedy": alpha}
        for name, alpha in (("undistilled", 0.5), ("distillspec", 0.6), ("adaspec", 0.65))
    ]
    pair = {"a": "adaspec", "b": "distillspec", "label": "T = 1; equal steps", "difference": 0.05, "se": 0.01, "n": 50}
    report = {"drafts": drafts, "paired": [pair, pair | {"difference": 0.01}], "decoding": []}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    assert main(argv) == 0
    found = json.loads((tmp_path / "out/report.json").read_text())
    assert [o["verdict"] for o in found["orderings"]] == ["held", "within error"]
    assert "undistilled 0.5000, DistillSpec 0.6000" in found["orderings"][1]["sentence"]
    assert ["ours: run", "60.00 → 65.00", "–", "–", "–"] in found["tables"][1]["rows"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["paper"], "no paper is named"),
        (["paper", "adasdd"], "did you mean 'adasd'"),
        (["paper", "ears", "--scale", "ful"], "did you mean 'full'"),
        (["paper", "ears", "--scale", "full", "--only", "qwen"], "unknown configuration 'qwen'"),
        (["paper", "ears", "--configs", "nowhere"], "there are no configurations in nowhere/ears"),
        (["paper", "adaspec", "--dry-run"], "python -m distill --dry-run"),
    ],
)
def test_mistakes_are_told(argv, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_method_is_found_by_its_name_or_with_its_options():
    rows = [
        {"name": name, "suite": "s", "temperature": 0.0, "method": "ears", "prompts": 1, "draft": None}
        for name in ("ears beta=0.1", "ears-like", "vanilla draft_length=5")
    ]
    results = Results({"methods": rows, "bench": {"analysis": [], "costs": {}}})
    block = ("s", 0.0)
    assert [results.find(n, block) and results.find(n, block).name for n in ("ears", "vanilla", "adasd")] == [
        "ears beta=0.1",
        "vanilla draft_length=5",
        None,
    ]


def test_models_that_have_to_be_trained_first_are_named_with_their_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: pytest.fail("something was started"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    argv = ["paper", "adasd", "--scale", "gpu-small", "--configs", str(ROOT / "configs/papers")]
    monkeypatch.chdir(tmp_path)
    assert main([*argv, "--output", str(tmp_path / "out")]) == 2
    assert "python -m distill --config configs/papers/gpu-small.yaml" in capsys.readouterr().err
