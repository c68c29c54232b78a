"""Trains draft models: data, target, DistillSpec, AdaSPEC, measurement, export, report.

from distill import train

run = train("configs/quickstart.yaml", "--name", "mine", "--drafts.adaspec.k", "0.2")
print(run.export)
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from distill.config import Settings
    from distill.run import Run


def train(settings: "Settings | str | Path", *options: str) -> "Run":
    """Do what ``draftsmith distill`` does, in one process.

    Args:
        settings: Of the run, or the path of a configuration.
        options: As on the command line, over those of a configuration.

    Raises:
        decode.errors.UserError: Settings, data or models that cannot be used.
    """
    from decode.options import check
    from distill.__main__ import read_settings
    from distill.pipeline import run_pipeline

    if isinstance(settings, (str, Path)):
        settings = read_settings(["--config", str(settings), *options])
    else:
        check(type(settings), asdict(settings))
    return run_pipeline(settings)
