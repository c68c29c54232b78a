"""Every file in ``configs/`` is read and checked, sweeps included; ``--dry-run`` runs any of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from wandb.sdk.launch.sweeps import utils

from decode.commands import bench as compare
from decode.commands.parsing import parse, read_config
from decode.commands.settings import bench_settings
from distill import __main__ as command
from distill.ablation import AblateSettings
from distill.config import Settings
from distill.tracking import log_report
from probes.settings import ProbesSettings

ROOT = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.yaml")), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_is_read_by_its_commands(path: Path) -> None:
    content, argv = read_config([path]), ["--config", str(path)]
    commands = {"ablation": AblateSettings, "drafts": Settings, "probes": ProbesSettings}
    for section in commands.keys() & content.keys():
        parse(commands[section], argv, prog="", foreign=command.FOREIGN - {section}).validate()
    if not commands.keys() & content.keys() or "bench" in content:
        settings = bench_settings(argv)
        assert settings.target
        compare.check_methods(
            settings, settings.methods, has_draft="drafts" in content or bool(settings.draft), has_corpus=True
        )


def sweep(name: str, choice: int) -> tuple[dict[str, Any], list[str]]:
    """What the file says, and the command line of one of its points."""
    content = yaml.safe_load((ROOT / "sweeps" / f"{name}.yaml").read_text())
    values = {key: {"value": choices["values"][choice]} for key, choices in content["parameters"].items()}
    flags = utils.create_sweep_command_args({"args": values})["args"]
    return content, [part for part in content["command"] if part not in ("${env}", "${args}")] + flags


def test_the_training_sweep_gives_commands_that_distill_accepts_and_names_a_metric_that_it_logs() -> None:
    content, argv = sweep("distill", 0)
    options = command.take_draft_options(argv := argv[3:])
    settings = parse(Settings, argv, prog="", foreign=command.FOREIGN)
    settings.validate()
    assert [draft.name for draft in settings.drafts] == ["distillspec", "adaspec"]
    assert options == {"--drafts.adaspec.k": ("adaspec", "k", "0.2")}
    logger = Mock()
    log_report(logger, {"drafts": [{"name": "adaspec", "offline_alpha": 0.5}], "decoding": []}, dict)
    assert content["metric"]["name"] in logger.log_metrics.call_args.args[0]


def test_the_benchmark_sweep_gives_commands_that_bench_accepts_and_names_a_metric_that_it_logs() -> None:
    content, argv = sweep("decode", -1)
    settings = bench_settings(argv[4:])
    assert (settings.draft_length, settings.beta, settings.methods, settings.baselines) == (11, 0.2, ["ears"], False)
    plain = {"method": "autoregressive", "baseline": False, "lossless": True, "speedup": 1.0}
    drafted = plain | {"method": "ears", "lossless": False, "speedup": 0.9, "tv_spent": 0.0, "accuracy": None}
    assert compare.sweep_summary([plain, drafted]) == {content["metric"]["name"]: 0.9, "tv_spent": 0.0}
    assert compare.sweep_summary([plain]) == {}
