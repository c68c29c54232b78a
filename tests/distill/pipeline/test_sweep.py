"""The W&B sweep files: the commands that ``wandb agent`` makes of them, and the metrics that they name."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import yaml
from wandb.sdk.launch.sweeps import utils

from decode.commands.bench import sweep_summary
from decode.commands.parsing import parse
from decode.commands.settings import bench_settings
from distill import __main__ as command
from distill.config.run import Settings
from distill.tracking import log_report


def test_the_training_sweep_file_gives_commands_that_distill_accepts_and_names_a_metric_that_it_logs() -> None:
    content = yaml.safe_load(Path("configs/sweeps/distill.yaml").read_text())
    values = {key: {"value": choices["values"][0]} for key, choices in content["parameters"].items()}
    flags = utils.create_sweep_command_args({"args": values})["args"]
    command_line = [part for part in content["command"] if part not in ("${env}", "${args}")]
    assert command_line[:3] == ["python", "-m", "${program}"]
    argv = [*command_line[3:], *flags]
    options = command.take_draft_options(argv)
    settings = parse(Settings, argv, prog="", description="", foreign=command.FOREIGN)
    settings.validate()
    assert [draft.name for draft in settings.drafts] == ["distillspec", "adaspec"]
    assert options == {"--drafts.adaspec.k": ("adaspec", "k", "0.2")}
    logger = Mock()
    log_report(logger, {"drafts": [{"name": "adaspec", "offline_alpha": 0.5}], "decoding": []}, dict)
    assert content["metric"]["name"] in logger.log_metrics.call_args.args[0]


def test_the_benchmark_s_sweep_file_gives_commands_that_bench_accepts_and_names_a_metric_that_it_logs() -> None:
    content = yaml.safe_load(Path("configs/sweeps/decode.yaml").read_text())
    assert content["method"] == "grid"
    values = {key: {"value": choices["values"][-1]} for key, choices in content["parameters"].items()}
    flags = utils.create_sweep_command_args({"args": values})["args"]
    command = [part for part in content["command"] if part not in ("${env}", "${args}")]
    assert command[:4] == ["python", "-m", "${program}", "bench"]
    settings = bench_settings([*command[4:], *flags])
    assert (settings.draft_length, settings.beta, settings.methods, settings.baselines) == (11, 0.2, ["ears"], False)
    plain = {"method": "autoregressive", "baseline": False, "lossless": True, "speedup": 1.0}
    drafted = {
        "method": "ears",
        "baseline": False,
        "lossless": False,
        "speedup": 0.9,
        "tv_spent": 0.0,
        "accuracy": None,
    }
    assert sweep_summary([plain, drafted]) == {"speedup": 0.9, "tv_spent": 0.0}
    assert content["metric"]["name"] in sweep_summary([plain, drafted])
    assert sweep_summary([plain]) == {}
