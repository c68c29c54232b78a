"""The W&B sweep files: the commands that ``wandb agent`` makes of them, and the metrics that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import yaml
from wandb.sdk.launch.sweeps import utils

from decode.commands.bench import sweep_summary
from decode.commands.parsing import parse
from decode.commands.settings import bench_settings
from distill import __main__ as command
from distill.config import Settings
from distill.tracking import log_report


def sweep(name: str, choice: int) -> tuple[dict[str, Any], list[str]]:
    """What the file says, and the command line of one of its points."""
    content = yaml.safe_load(Path(f"configs/sweeps/{name}.yaml").read_text())
    values = {key: {"value": choices["values"][choice]} for key, choices in content["parameters"].items()}
    flags = utils.create_sweep_command_args({"args": values})["args"]
    return content, [part for part in content["command"] if part not in ("${env}", "${args}")] + flags


def test_the_training_sweep_file_gives_commands_that_distill_accepts_and_names_a_metric_that_it_logs() -> None:
    content, argv = sweep("distill", 0)
    assert argv[:3] == ["python", "-m", "${program}"]
    options = command.take_draft_options(argv := argv[3:])
    settings = parse(Settings, argv, prog="", foreign=command.FOREIGN)
    settings.validate()
    assert [draft.name for draft in settings.drafts] == ["distillspec", "adaspec"]
    assert options == {"--drafts.adaspec.k": ("adaspec", "k", "0.2")}
    logger = Mock()
    log_report(logger, {"drafts": [{"name": "adaspec", "offline_alpha": 0.5}], "decoding": []}, dict)
    assert content["metric"]["name"] in logger.log_metrics.call_args.args[0]


def test_the_benchmark_s_sweep_file_gives_commands_that_bench_accepts_and_names_a_metric_that_it_logs() -> None:
    content, argv = sweep("decode", -1)
    assert content["method"] == "grid"
    assert argv[:4] == ["python", "-m", "${program}", "bench"]
    settings = bench_settings(argv[4:])
    assert (settings.draft_length, settings.beta, settings.methods, settings.baselines) == (11, 0.2, ["ears"], False)
    plain = {"method": "autoregressive", "baseline": False, "lossless": True, "speedup": 1.0}
    drafted = plain | {"method": "ears", "lossless": False, "speedup": 0.9, "tv_spent": 0.0, "accuracy": None}
    assert sweep_summary([plain, drafted]) == {content["metric"]["name"]: 0.9, "tv_spent": 0.0}
    assert sweep_summary([plain]) == {}
