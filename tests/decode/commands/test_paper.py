"""``python -m decode paper``: the papers' data are consistent, and ours stand in the right cells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pairs import save_pair

from decode.__main__ import main
from decode.commands.paper import BASELINES, TITLES, measured, published, tables
from decode.errors import UserError
from decode.method_options import split_spec
from decode.methods import METHODS


@pytest.mark.parametrize("paper", TITLES)
def test_published_columns_and_methods_are_known_and_ratios_follow_from_speeds(paper: str) -> None:
    drafts = {"draft alone", "distillspec", "adaspec"}
    for setting, methods in published(paper).items():
        for name, row in methods.items():
            assert row.keys() <= measured({}, {}).keys()
            assert name in drafts or split_spec(name.replace(" ", ":"))[0] in METHODS, setting
            if row.get("ratio"):
                wanted = float(row["tokens/s"]) / float(methods[BASELINES[paper]]["tokens/s"])
                assert float(row["ratio"]) == pytest.approx(wanted, abs=0.02)


def cells(table) -> dict[str, list[str]]:
    first, *others = [list(column.cells) for column in table.columns]
    return {name: [column[i] for column in others] for i, name in enumerate(first)}


def test_our_numbers_stand_beside_the_papers() -> None:
    def row(name: str, speed: float, **more: object) -> dict:
        return {"name": name, "suite": "gsm8k", "temperature": 0.6, "tokens_per_second": speed, **more}

    ours = [row("autoregressive", 20.0), row("vanilla draft_length=5", 50.0, block_efficiency=3.5), row("adasd", 75.0)]
    detail = {"name": "adasd", "suite": "gsm8k", "temperature": 0.6, "verification_threshold": 0.3}
    (table,) = tables("adasd", {"methods": ours, "bench": {"analysis": [detail]}}, "1B, mmlu")
    found = cells(table)
    assert found["vanilla"][:2] == ["50.000", "8.746"]
    assert found["adasd"][-4:-2] == ["1.500", "1.136"]
    assert found["vanilla"][-2:] == ["3.500", "–"]  # the paper has no lengths
    assert found["adasd"][2:4] == ["0.300", "0.463"]
    assert found["draft alone"][:2] == ["–", "95.141"]
    with pytest.raises(UserError, match="no published setting is named '9B'"):
        tables("adasd", {"methods": ours}, "9B")


def test_sampled_blocks_are_compared_with_the_papers_sampled_numbers() -> None:
    ours = [{"name": "layerskip", "suite": "s", "temperature": t, "tokens_per_second": 1.0} for t in (0.0, 0.6)]
    greedy, sampled = tables("adaspeed", {"methods": ours}, "")
    assert (cells(greedy)["adaspeed"][1], cells(sampled)["adaspeed"][1]) == ("79", "61")


def test_away_from_the_repository_a_paper_says_where_its_configurations_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["paper", "ears"]) == 2
    assert "there is no configuration in configs/papers/ears: copy the repository's folder" in capsys.readouterr().err


def test_a_configuration_is_measured_and_its_report_can_be_read_again(tmp_path: Path, tiny, capsys) -> None:
    save_pair(tmp_path, tiny)
    (tmp_path / "ears").mkdir()
    (tmp_path / "ears/quickstart.yaml").write_text(
        f"name: e\nbench: {{target: {tmp_path}/target, draft: [{tmp_path}/draft], suite: [open], limit: 1, repeats: 1, "
        "max_new_tokens: 8, temperatures: [0.9], threads: 1, "
        "methods: ['vanilla:draft_length=5', 'ears:draft_length=5:beta=0.1']}\n"
    )
    out = str(tmp_path / "out")
    assert main(["paper", "ears", "--configs", str(tmp_path), "--output", out]) == 0
    assert "58.47" in capsys.readouterr().out
    assert main(["paper", "ears", "--run", out]) == 0
    assert "58.47" in capsys.readouterr().out


def test_adaspec_reads_the_report_of_a_training(tmp_path: Path, capsys) -> None:
    drafts = [{"name": name, "offline_alpha": alpha} for name, alpha in (("distillspec", 0.6), ("adaspec", 0.65))]
    (tmp_path / "report.json").write_text(json.dumps({"drafts": drafts, "decoding": []}))
    assert main(["paper", "adaspec", "--run", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "65.000" in shown
    assert "62.63" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["adasdd"], "did you mean 'adasd'"),
        (["ears", "--run", "nowhere"], "there is no nowhere/report.json"),
    ],
)
def test_mistakes_are_reported(argv: list[str], message: str, capsys) -> None:
    assert main(["paper", *argv]) == 2
    assert message in capsys.readouterr().err
