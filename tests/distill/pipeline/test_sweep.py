"""A sweep over training settings: the target is trained once, finished points are kept, one report holds them all."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from tiny_run import run_tiny, tiny_settings
from wandb.sdk.launch.sweeps import utils

from decode.commands.command_line import parse, run_main
from decode.commands.sweep import Point
from distill import __main__ as command
from distill.config.settings import Settings
from distill.core.run_dir import RunDir
from distill.pipeline.reuse import adopt
from distill.pipeline.sweep import merged
from distill.tracking.logger import _summary

SMALL = {"prompts": 2, "accuracy_prompts": 2, "decode_prompts": 2, "max_new_tokens": 6}


@pytest.fixture
def config(tmp_path: Path) -> str:
    settings = asdict(tiny_settings(tmp_path / "runs", comparisons=[]))
    settings["evaluation"] |= SMALL | {"temperatures": [0.0], "draft_lengths": [2]}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def test_the_sweep_file_gives_commands_that_distill_accepts_and_names_a_metric_that_it_logs() -> None:
    content = yaml.safe_load(Path("configs/sweeps/distill.yaml").read_text())
    values = {key: {"value": choices["values"][0]} for key, choices in content["parameters"].items()}
    flags = utils.create_sweep_command_args({"args": values})["args"]
    command_line = [part for part in content["command"] if part not in ("${env}", "${args}")]
    assert command_line[:3] == ["python", "-m", "${program}"]
    settings = parse(Settings, [*command_line[3:], *flags], prog="", description="", foreign=command.FOREIGN)
    settings.validate()
    assert (settings.draft.k, settings.draft.iso) == (0.2, "epochs")
    assert content["metric"]["name"] in _summary({"drafts": [{"name": "adaspec", "offline_alpha": 0.5}]})


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = run_main(lambda: command.main(list(argv)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_sweep_trains_the_target_once_and_goes_on_where_it_was(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs/tiny-sweep"
    status, out, _ = run(capsys, "--config", config, "--sweep", "draft.k=0.3,1.0")
    assert status == 0
    assert out.count("already made: target, initial, reference") == 1
    weights = [folder / name / "target/model.safetensors" for name in ("k=0.3", "k=1.0")]
    assert os.path.samefile(*weights)
    drafts = [(folder / name / "draft/model.safetensors").read_bytes() for name in ("k=0.3", "k=1.0")]
    assert drafts[0] != drafts[1]
    before = (folder / "k=0.3/report.json").stat().st_mtime_ns
    (folder / "k=1.0/point.json").unlink()  # as if the process had been killed at the second point
    status, out, _ = run(capsys, "--config", config, "--sweep", "draft.k=0.3,1.0")
    assert status == 0
    assert "[1/2] k=0.3: finished before, kept" in out
    assert out.count("up to date") == 5  # four stages and the evaluation of the second point
    assert (folder / "k=0.3/report.json").stat().st_mtime_ns == before
    report = json.loads((folder / "report.json").read_text())
    assert report["sweep"]["axes"] == {"draft.k": [0.3, 1.0]}
    assert [p["swept"] for p in report["sweep"]["points"]] == [{"draft.k": 0.3}, {"draft.k": 1.0}]
    names = {r["name"] for r in report["methods"]}
    assert names >= {"autoregressive", "generate", "adaspec k=0.3, length 2", "adaspec k=1.0, length 2"}
    assert len(names) == len(report["methods"])
    assert "<svg" in (folder / "report.html").read_text()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--sweep", "draft.k=0.3,1.5"), "draft.k is 1.5, wanted a share"),
        (("--sweep", "draft.kk=0.3"), "the nearest known key is 'draft.k'"),
        (("--sweep", "draft.k"), "wanted KEY=VALUE,VALUE"),
        (("--sweep", "draft.k=0.3", "--sweep", "draft.k=1"), "swept twice"),
        (("--sweep", "draft.k=0.3", "--dry-run"), "--sweep goes with neither"),
    ],
)
def test_mistakes_in_any_point_end_the_sweep_before_anything_is_trained(
    config: str, tmp_path: Path, argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "--config", config, *argv)
    assert status == 2
    assert words in err
    assert not (tmp_path / "runs").exists()


def test_stages_made_from_other_inputs_are_not_taken_over_and_a_donor_made_anew_changes_nothing(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path / "a", comparisons=[])
    _, donor, _ = run_tiny(settings)
    other = tiny_settings(tmp_path / "b", comparisons=[])
    other.initial.training.lr = 1e-3
    taker = RunDir(tmp_path / "b/tiny")
    assert adopt(taker, other, [donor]) == {"target": donor.target}
    assert adopt(taker, other, [donor]) == {}  # it is there now
    kept = (taker.target / "model.safetensors").read_bytes()
    settings.seed = 5
    run_tiny(settings)
    assert (donor.target / "model.safetensors").read_bytes() != kept
    assert (taker.target / "model.safetensors").read_bytes() == kept
    record = taker.record("target")
    assert record is not None


def test_a_point_without_timed_decoding_still_has_its_acceptance_rate() -> None:
    report = {"drafts": [{"name": "adaspec", "offline_alpha": 0.5}], "decoding": [], "machine": {}}
    content = merged([Point({"draft.k": "0.2"})], [report])
    assert content["sweep"]["points"][0]["offline_alpha"] == 0.5
    assert content["sweep"]["points"][0]["speedup"] is None
