"""``python -m distill``: what the command accepts, prints and returns."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from tiny_run import tiny_settings

from decode.commands.parsing import run_main
from distill import __main__ as command
from distill.config.run import Settings


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    content = asdict(tiny_settings(tmp_path / "runs")) | {"bench": {"anything": 1}, "probes": {"else": 2}}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = run_main(lambda: command.main(list(argv)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_show_example_prints_one_example_and_trains_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "--config", config, "--show-example")
    assert status == 0
    assert "####" in out
    assert "learned" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("form", [("--tracker", "nonsense"), ("--tracker=nonsense",), ("--tracker.kind", "nonsense")])
def test_tracker_is_short_for_its_kind(config: str, form: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "--config", config, *form)
    assert status == 2
    assert "tracker.kind" in err
    assert "Got value: nonsense" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--drafts.adaspec.k", "1.5"), "drafts[1].k is 1.5"),
        (("--drafts.adaspec.kk", "0.5"), "'kk' is not one of name, reference, k"),
        (("--drafts.adaspek.k=0.5",), "'adaspek' is not one of distillspec, adaspec"),
        (("--data.train_file", "no.jsonl"), "no.jsonl"),
        (("--name", "eagle3"), "eagle3"),
        (("--seed", "-1"), "seed"),
    ],
)
def test_mistakes_end_with_one_line_and_status_two(
    config: str, argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "--config", config, *argv)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_the_whole_run_goes_to_its_report_and_a_second_one_changes_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"prompts": "2", "accuracy_prompts": "2", "decode_prompts": "2", "max_new_tokens": "6"}
    small |= {"temperatures": "[0.0]", "draft_lengths": "[2]"}
    options = [f"--evaluation.{key}={value}" for key, value in small.items()]
    status, out, _ = run(capsys, "--config", config, *options)
    assert status == 0
    folder = tmp_path / "runs/tiny"
    report = folder / "report.json"
    assert {path.name for path in folder.iterdir()} >= {
        "target", "initial", "distillspec", "adaspec", "export", "report.json", "report.html", "settings.yaml", "work",
    }  # fmt: skip
    assert not list(folder.rglob(".tmp-*"))
    before = report.stat().st_mtime_ns
    status, out, _ = run(capsys, "--config", str(folder / "settings.yaml"))
    assert status == 0
    assert out.count("up to date") == 5
    assert report.stat().st_mtime_ns == before
    report.write_text(json.dumps(json.loads(report.read_text()) | {"probes": [{"layer": 1}]}))
    status, out, _ = run(capsys, "--config", str(folder / "settings.yaml"), "--evaluation.prompts", "3")
    assert (status, out.count("up to date")) == (0, 4)
    assert json.loads(report.read_text())["probes"] == [{"layer": 1}]


def test_the_settings_written_beside_a_report_are_a_configuration_of_the_same_run(config: str, tmp_path: Path) -> None:
    from decode.commands.parsing import parse
    from distill.pipeline import write_settings

    settings = tiny_settings(tmp_path)
    write_settings(settings, tmp_path / "again.yaml")
    assert parse(Settings, ["--config", str(tmp_path / "again.yaml")], prog="", description="") == settings


@pytest.mark.parametrize("name", ["ablate", "bench", "--dry-run", "--estimate"])
def test_a_command_of_one_process_is_refused_in_several(
    name: str, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    status, _, err = run(capsys, name, "--config", config)
    assert status == 2
    assert f"python -m distill {name} runs in one process, but 2 were started" in err
