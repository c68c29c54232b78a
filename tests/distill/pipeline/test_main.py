"""``draftsmith distill``: what the command accepts, prints and returns; every file in ``configs/``."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_run import tiny_settings

from decode.commands import bench as compare
from decode.commands.cli import parse, read_config, run_main
from decode.commands.settings import bench_settings
from decode.files import read_json
from decode.methods import Parts
from distill import __main__ as command
from distill import train
from distill.ablation import AblateSettings
from distill.config import Settings
from distill.pipeline import write_settings
from probes.settings import ProbesSettings

QUICKSTART = str(Path(__file__).parents[3] / "configs" / "quickstart.yaml")


@pytest.fixture
def config(tmp_path) -> str:
    path = tmp_path / "tiny.yaml"
    content = asdict(tiny_settings(tmp_path / "runs")) | {"bench": {"anything": 1}, "probes": {"else": 2}}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = run_main(lambda: command.main(list(argv)))
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_dry_run_goes_on_to_report_and_export_and_a_second_run_changes_nothing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was used"))
    argv = ["--config", QUICKSTART, "--output_dir", str(tmp_path), "--evaluation.temperatures", "0.0"]
    status, out, _ = run(capsys, *argv, "--dry-run")
    assert status == 0
    assert out.endswith(f"To train: draftsmith distill {' '.join(argv)}\n")
    assert not re.search(r"speedup|Δα|\*\*|n\.s\.|measure again|report\.html", out)
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
    assert [path.name for path in dry.glob("export*")] == ["export"]  # of the same draft
    chosen = read_json(dry / "export" / "speculation_profile.json")["export"]["name"]
    for flags, told in (((), 1), (("--overwrite", "true"), 0)):
        other = ({"distillspec", "adaspec"} - {chosen}).pop() if told else chosen
        status, out, _ = run(capsys, *again, "--evaluation", "false", "--export.choose", other, *flags)
        assert (status, out.count("up to date"), out.count("is the export that was there")) == (0, 5, told)
        assert "report.html" not in out
        assert {path.name for path in dry.glob("export*")} == {"export", "export.old-1"}
        assert read_json(dry / "export.old-1" / "speculation_profile.json")["export"]["name"] == chosen


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--drafts.adaspec.k", "1.5"), "1.5"),
        (("--drafts.adaspec.kk", "0.5"), "'--drafts.adaspec.kk'; the nearest known key is 'drafts.NAME.k'"),
        (("--drafts.adaspek.k=0.5",), "'adaspek'"),
        (("--drafts", "[{name: a}]"), "'drafts' is [{'name': 'a'}], expected sections by name"),
        (("--data.files", "{train: no.jsonl}"), "no.jsonl"),
        (("--seed", "-1"), "seed"),
        (("--teacher.engine.keep", "float16"), "Literal['auto', 'float32'"),
        (("--trainer.packing", "9"), "'--trainer.packing'; the nearest known key is 'trainer.precision'"),
    ],
)
def test_mistakes_end_with_one_line_and_status_two(config, argv: tuple[str, ...], words: str, capsys) -> None:
    status, _, err = run(capsys, "--config", config, *argv)
    assert status == 2
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--trainer.devices", {"auto": "auto", "4": 4, "[4, 5]": [4, 5], "4,5": [4, 5]}),
        ("--student.layers", {"2": 2, "[2]": [2], "0,3": [0, 3]}),
    ],
)
def test_one_value_of_a_key_that_takes_a_number_or_a_list_is_the_number(option: str, values: dict, config) -> None:
    section, key = option[2:].split(".")
    for text, expected in values.items():
        settings = command.read_settings(["--config", config, option, text])
        assert getattr(getattr(settings, section), key) == expected


def test_written_settings_are_a_configuration(tmp_path, config, capsys) -> None:
    for settings in (tiny_settings(tmp_path), tiny_settings(tmp_path, evaluation=False)):
        write_settings(settings, tmp_path / "again.yaml")
        assert parse(Settings, ["--config", str(tmp_path / "again.yaml")], prog="") == settings
    status, out, _ = run(capsys, "--config", config, "--show-example")
    assert status == 0
    assert "[[" in out
    assert "learned" in out
    assert not (tmp_path / "runs").exists()


def test_python_takes_settings_as_the_command_does(config, monkeypatch) -> None:
    monkeypatch.setattr("distill.pipeline.run_pipeline", lambda settings: settings)
    settings: Any = train(config, "--name", "mine", "--drafts.adaspec.k", "0.2")
    assert (settings.name, settings.drafts["adaspec"].k, settings.data.train_examples) == ("mine", 0.2, 48)
    assert train(settings) is settings


@pytest.mark.parametrize("name", ["ablate", "check-engine", "--dry-run", "--estimate", "--show-example"])
def test_a_command_of_one_process_is_refused_in_several(name: str, config, capsys, monkeypatch) -> None:
    for variable, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(variable, value)
    status, _, err = run(capsys, name, "--config", config)
    assert status == 2
    assert f"draftsmith distill {name} runs in one process, but 2 were started" in err


ROOT = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_is_read_by_its_commands_and_is_found_from_any_folder(path: Path, tmp_path, monkeypatch) -> None:
    content, argv, name = read_config([path]), ["--config", str(path)], path.relative_to(ROOT)
    monkeypatch.chdir(tmp_path)
    assert read_config([name]) == read_config(["configs" / name]) == content
    commands = {"ablation": AblateSettings, "drafts": Settings, "probes": ProbesSettings}
    for section in commands.keys() & content.keys():
        parse(commands[section], argv, prog="", foreign=command.FOREIGN - {section}).validate()
    if not commands.keys() & content.keys() or "bench" in content:
        settings = bench_settings(argv)
        assert settings.target
        parts = Parts(settings, "model", datastore=True)
        assert compare.chosen_methods(settings, [parts, *(replace(parts, draft=kind) for kind in ("eagle", "block"))])
