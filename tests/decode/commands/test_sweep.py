"""Sweeps of ``decode bench``: every point of the grid, finished ones kept, all in one report with plots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pairs import save_pair
from wandb.sdk.launch.sweeps import utils

from decode.__main__ import _bench_settings, main
from decode.commands import bench as compare
from decode.commands.agent import summary
from decode.commands.sweep import Point, grid, take_sweep
from decode.core.errors import UserError
from decode.report.markup import Column
from decode.report.read_runs import find_reports, read_runs
from decode.report.sweep_page import bounds, horizontal, swept


def test_sweeps_are_taken_from_the_arguments_and_everything_else_stays() -> None:
    argv = ["--target", "T", "--sweep", "beta=0, 0.1,0.1", "--limit", "3", "--sweep=draft_length=1,3"]
    axes = take_sweep(argv)
    assert argv == ["--target", "T", "--limit", "3"]
    assert axes == {"beta": ["0", "0.1"], "draft_length": ["1", "3"]}
    points = grid(axes)
    assert [p.label for p in points] == [
        "beta=0 draft_length=1", "beta=0 draft_length=3", "beta=0.1 draft_length=1", "beta=0.1 draft_length=3",
    ]  # fmt: skip
    assert points[3].typed == {"beta": 0.1, "draft_length": 3}
    assert points[3].options == ["--beta=0.1", "--draft_length=3"]


@pytest.mark.parametrize("argv", [["--sweep"], ["--sweep", "beta"], ["--sweep", "beta="], ["--sweep==1"]])
def test_a_sweep_without_key_or_values_is_refused(argv: list[str]) -> None:
    with pytest.raises(UserError, match="wanted KEY=VALUE,VALUE"):
        take_sweep(argv)


def test_a_grid_that_nobody_would_wait_for_is_refused() -> None:
    with pytest.raises(UserError, match="the sweep has 400 points, the most is 200"):
        grid({"a": [str(i) for i in range(20)], "b": [str(i) for i in range(20)]})


def test_keys_that_end_alike_stay_apart_and_folders_are_plain_names() -> None:
    point = Point({"target.training.lr": "1e-3", "initial.training.lr": "a/b c"})
    assert point.label == "target.training.lr=1e-3 initial.training.lr=a/b c"
    assert point.folder == "target.training.lr=1e-3,initial.training.lr=a,b,c"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny) -> Path:
    return save_pair(tmp_path_factory.mktemp("pair"), tiny)


def test_a_sweep_measures_every_point_keeps_finished_ones_and_ends_in_one_report(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    argv = ["bench", "--target", str(pair / "target"), "--draft", str(pair / "draft"), "--suite", "arithmetic"]
    argv += ["--limit", "2", "--repeats", "1", "--max-new-tokens", "6", "--temperatures", "1", "--threads", "1"]
    argv += ["--output", str(folder)]
    opened = []
    real = compare.open_models
    monkeypatch.setattr(compare, "open_models", lambda settings: opened.append(1) or real(settings))
    assert main([*argv, "--sweep", "beta=0,0.5", "--sweep", "draft_length=2"]) == 0
    assert len(opened) == 1  # the models stay open from point to point
    before = {p: p.stat().st_mtime_ns for p in folder.glob("points/*/report.json")}
    assert {p.parent.name for p in before} == {"beta=0,draft_length=2", "beta=0.5,draft_length=2"}
    capsys.readouterr()
    assert main([*argv, "--sweep", "beta=0,0.2,0.5", "--sweep", "draft_length=2"]) == 0
    assert capsys.readouterr().out.count("finished before, kept") == 2
    assert all(p.stat().st_mtime_ns == then for p, then in before.items())
    report = json.loads((folder / "report.json").read_text())
    names = [row["name"] for row in report["methods"]]
    assert names == [
        "autoregressive", "generate",
        "ears beta=0 draft_length=2", "ears beta=0.2 draft_length=2", "ears beta=0.5 draft_length=2",
    ]  # fmt: skip
    assert [row["tv_spent"] == 0 for row in report["methods"][2:]] == [True, False, False]
    assert {row["draft_length"] for row in report["methods"][2:]} == {2}
    assert report["sweep"] == {"axes": {"beta": [0, 0.2, 0.5], "draft_length": [2]}, "points": 3}
    assert "speedup by beta" in (folder / "report.html").read_text()
    comparisons, _ = read_runs(find_reports([str(folder)]))
    assert [len(c.rows) for c in comparisons] == [5]  # the page of all runs shows the sweep, not its points again


def test_a_mistake_in_one_point_stops_the_sweep_before_the_first(pair: Path, tmp_path: Path, capsys) -> None:
    argv = ["bench", "--target", str(pair / "target"), "--output", str(tmp_path / "out")]
    assert main([*argv, "--sweep", "betta=1,2"]) == 2
    assert "the nearest known key is 'beta'" in capsys.readouterr().err
    assert main([*argv, "--sweep", "beta=0,0.1"]) == 2
    assert "ears drafts with a model; give one with --draft" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_plot_has_a_line_for_each_value_of_the_other_key_and_an_interval_at_each_point() -> None:
    axes = {"beta": [0, 0.1], "draft_length": [1, 3, 5]}
    rows = [
        {"method": "ears", "swept": {"beta": b, "draft_length": k}, "speedup": k + b, "speedup_ci95": [k - 1, k + 1]}
        for b in axes["beta"]
        for k in axes["draft_length"]
    ]
    assert horizontal(axes) == "draft_length"
    svg = swept(rows, axes, Column("speedup", "speedup"))
    assert "speedup by draft_length" in svg
    assert "beta=0.1" in svg
    assert "ears" not in svg  # one method needs no name
    words = [{"method": "m", "swept": {"iso": w}, "alpha": 0.5, "alpha_se": 0.1} for w in ("steps", "epochs")]
    assert "epochs" in swept(words, {"iso": ["steps", "epochs"]}, Column("alpha", "α"))


def test_intervals_come_from_the_bootstrap_or_from_the_standard_error() -> None:
    assert bounds({"speedup": 2.0, "speedup_ci95": [1, 3]}, "speedup") == (1.0, 3.0)
    assert bounds({"alpha": 0.5, "alpha_se": 0.1}, "alpha") == pytest.approx((0.304, 0.696))
    assert bounds({"accuracy": 0.9, "accuracy_se": 0.1}, "accuracy") == (pytest.approx(0.704), 1.0)
    assert bounds({"alpha": 0.5, "alpha_se": None, "speedup_ci95": None}, "alpha") is None


def test_the_sweep_file_gives_commands_that_bench_accepts_and_names_a_metric_that_it_logs() -> None:
    content = yaml.safe_load(Path("configs/sweeps/decode.yaml").read_text())
    assert content["method"] == "grid"
    values = {key: {"value": choices["values"][-1]} for key, choices in content["parameters"].items()}
    flags = utils.create_sweep_command_args({"args": values})["args"]
    command = [part for part in content["command"] if part not in ("${env}", "${args}")]
    assert command[:4] == ["python", "-m", "${program}", "bench"]
    settings = _bench_settings([*command[4:], *flags], "configs/quickstart.yaml")
    assert (settings.draft_length, settings.beta, settings.methods, settings.peers) == (11, 0.2, ["ears"], False)
    plain = {"method": "autoregressive", "peer": False, "speedup": 1.0}
    drafted = {"method": "ears", "peer": False, "speedup": 0.9, "accuracy": None, "tv_spent": 0.0}
    assert summary([plain, drafted]) == {"speedup": 0.9, "tv_spent": 0.0}
    assert content["metric"]["name"] in summary([plain, drafted])
    assert summary([plain]) == {}
