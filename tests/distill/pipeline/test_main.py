"""``python -m distill``: what the command accepts, prints and returns; the quickstart's dry run, to its end."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from tiny_run import tiny_settings

from decode.commands.parsing import parse, run_main
from distill import __main__ as command
from distill.config import Settings
from distill.pipeline import write_settings

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


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


def test_a_dry_run_goes_on_to_report_and_export_and_a_second_run_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    argv = ["--config", QUICKSTART, "--output_dir", str(tmp_path), "--evaluation.temperatures", "0.0"]
    status, out, _ = run(capsys, *argv, "--dry-run")
    assert status == 0
    assert out.endswith(f"of random models; to train: python -m distill {' '.join(argv)}\n")
    dry = tmp_path / "quickstart-dry-run"
    for path in ("report.html", "export/model.safetensors", "export/speculation_profile.json", "settings.yaml"):
        assert (dry / path).stat().st_size > 0
    assert not list(dry.rglob(".tmp-*"))
    report, again = dry / "report.json", ("--config", str(dry / "settings.yaml"))
    before = report.stat().st_mtime_ns
    status, out, _ = run(capsys, *again)
    assert (status, out.count("up to date")) == (0, 6)
    assert report.stat().st_mtime_ns == before
    report.write_text(json.dumps(json.loads(report.read_text()) | {"probes": [{"layer": 1}]}))
    status, out, _ = run(capsys, *again, "--evaluation.prompts", "3")
    assert (status, out.count("up to date")) == (0, 5)
    assert json.loads(report.read_text())["probes"] == [{"layer": 1}]
    status, out, _ = run(capsys, *again, "--evaluation", "false", "--export.choose", "distillspec")
    assert (status, out.count("up to date")) == (0, 5)
    assert "report.html" not in out


def test_show_example_prints_one_example_and_trains_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run(capsys, "--config", config, "--show-example")
    assert status == 0
    assert "####" in out
    assert "learned" in out
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--drafts.adaspec.k", "1.5"), "drafts[1].k is 1.5"),
        (("--drafts.adaspec.kk", "0.5"), "'kk' is not one of name, reference, k"),
        (("--drafts.adaspek.k=0.5",), "'adaspek' is not one of distillspec, adaspec"),
        (("--data.files", "{train: no.jsonl}"), "no.jsonl"),
        (("--seed", "-1"), "seed"),
        (("--tracker=nonsense",), "Got value: nonsense"),
        (("--trainer.accelerator", "mps"), "'cpu', 'gpu', 'cuda']. Got value: mps"),
        (("--evaluation", "3"), "evaluation"),
        (("--trainer.packing", "9"), "'--trainer.packing'; the nearest known key is 'trainer.precision'"),
    ],
)
def test_mistakes_end_with_one_line_and_status_two(
    config: str, argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, "--config", config, *argv)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


def test_the_settings_written_beside_a_report_are_a_configuration_of_the_same_run(tmp_path: Path) -> None:
    for settings in (tiny_settings(tmp_path), tiny_settings(tmp_path, evaluation=False)):
        write_settings(settings, tmp_path / "again.yaml")
        assert parse(Settings, ["--config", str(tmp_path / "again.yaml")], prog="") == settings


@pytest.mark.parametrize("name", ["ablate", "--dry-run", "--estimate"])
def test_a_command_of_one_process_is_refused_in_several(
    name: str, config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(variable, value)
    status, _, err = run(capsys, name, "--config", config)
    assert status == 2
    assert f"python -m distill {name} runs in one process, but 2 were started" in err
