"""``draftsmith decode paper``: the papers' data are consistent, and ours stand in the right cells."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from pairs import save_pair

from decode.__main__ import main
from decode.commands.paper import BASELINES, PUBLISHED, measured, table_of
from decode.methods import METHODS


@pytest.mark.parametrize("paper", PUBLISHED)
def test_published_columns_and_methods_are_known_and_ratios_follow_from_speeds(paper: str) -> None:
    with PUBLISHED[paper].open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    speeds = {(row["setting"], row["method"]): row.get("tokens/s") for row in rows}
    assert len(speeds) == len(rows)
    for row in rows:
        assert row.keys() - {"setting", "method"} <= measured({}, {}).keys()
        assert row["method"] in {"draft alone", "distillspec", "adaspec"} or row["method"].split()[0] in METHODS
        if row.get("ratio"):
            wanted = float(row["tokens/s"]) / float(speeds[row["setting"], BASELINES[paper]])
            assert float(row["ratio"]) == pytest.approx(wanted, abs=0.02)


def row(name: str, speed: float, **more: object) -> dict:
    return {"name": name, "suite": "s", "temperature": 0.6, "tokens_per_second": speed, **more}


def test_our_numbers_stand_beside_the_papers() -> None:
    ours = [row("autoregressive", 20.0), row("vanilla draft_length=5", 50.0)]
    table = table_of("adasd", [*ours, row("adasd", 75.0, verification_threshold=0.3)])
    columns = {str(column.header): map(str, column.cells) for column in table.columns}
    rows = [dict(zip(columns, cells)) for cells in zip(*columns.values())]
    shown = {(row["method"], row["setting"]): row for row in rows}
    llama = next(r["setting"] for r in rows if "1B, mmlu" in r["setting"])
    mine = "ours: s, T = 0.6"
    assert (shown["vanilla", llama]["tokens/s"], shown["vanilla draft_length=5", mine]["ratio"]) == ("8.746", "1.000")
    of_adasd = [(shown["adasd", where]["ratio"], shown["adasd", where]["threshold"]) for where in (mine, llama)]
    assert of_adasd == [("1.500", "0.300"), ("1.136", "0.463")]


def test_a_configuration_is_measured_and_its_report_read_again(tmp_path: Path, tiny, capsys, monkeypatch) -> None:
    save_pair(tmp_path, tiny)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs/papers/ears").mkdir(parents=True)
    (tmp_path / "configs/papers/ears/quickstart.yaml").write_text(
        f"name: e\nbench: {{target: {tmp_path}/target, draft: [{tmp_path}/draft], suite: [open], limit: 1, "
        "max_new_tokens: 8, temperatures: [0.9], threads: 1, "
        "methods: ['vanilla:draft_length=5', 'ears:draft_length=5:beta=0.1']}\n"
    )
    out = str(tmp_path / "out")
    assert main(["paper", "ears", "--output", out]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"configs/papers/ears/quickstart.yaml is measured now; later, --run {out} prints")
    assert "58.47" in said
    assert main(["paper", "ears", "--run", out]) == 0
    assert "58.47" in capsys.readouterr().out


def test_adaspec_reads_the_drafts_of_a_training_by_its_own_measure_beside_a_benchmark(tmp_path: Path, capsys) -> None:
    alphas = {"distillspec": 0.6, "adaspec": 0.65}
    drafts = [{"name": name, "offline_alpha": 0.5, "greedy_accepted_per_tested": a} for name, a in alphas.items()]
    (tmp_path / "report.json").write_text(json.dumps({"drafts": drafts, "decoding": [row("adaspec", 999.0)]}))
    (tmp_path / "bench-20260101-000000.json").write_text(json.dumps({"methods": [row("vanilla", 999.0)]}))
    assert main(["paper", "adaspec", "--run", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "65.000" in shown
    assert "62.63" in shown
    assert "999" not in shown  # no speed of a toy beside those of the paper


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "choose one: draftsmith decode paper adaptix|adasd"),
        (["ears", "--run", "nowhere"], "nowhere has no bench-DATE.json"),
        (["adaspeed"], "no probes in 'runs/quickstart/probes'; make them with `make probe`"),
        (["ears", "--scale", "nowhere"], "no configuration file 'configs/papers/ears/nowhere.yaml'"),
    ],
)
def test_mistakes_are_reported_before_anything_is_loaded(argv: list[str], message: str, capsys, monkeypatch) -> None:
    monkeypatch.setattr("decode.commands.bench.load_tokenizer", None)  # no call is reached
    monkeypatch.setattr("decode.drafters.probe.read_model_json", lambda path: {})
    assert main(["paper", *argv]) == 2
    assert message in capsys.readouterr().err
