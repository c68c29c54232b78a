"""Experiment tracking: one record per pipeline run, with its stages; it never asks for input or waits for a server.

W&B is the default, offline unless credentials are found and the server answers (`wandb_run`). No tracker is imported
or started before the first number is logged.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.imports import RequirementCache

from decode.core.errors import UserError
from decode.report.bench_tables import markdown_table
from distill.config.run_settings import TrackerSettings
from distill.tracking.wandb_run import StagedWandb, WandbRun


def make_logger(settings: TrackerSettings, run_dir: str | Path, name: str, config: Mapping[str, Any]) -> Logger | None:
    """The logger of a whole pipeline run; `for_stage` turns it into the one for a stage's trainer.

    Args:
        settings: which tracker, and how.
        run_dir: the run's folder; everything is written below it (`wandb/`, `csv/` or `tensorboard/`).
        name: the run's display name.
        config: all settings of the run as plain data, recorded once.

    Returns:
        A Lightning logger, or None for `kind: none`.

    Raises:
        UserError: W&B `online` without a key, or TensorBoard not installed.
    """
    run_dir = Path(run_dir)
    if settings.kind == "none":
        return None
    if settings.kind == "wandb":
        return StagedWandb(WandbRun(settings, run_dir, name, config))
    if settings.kind == "tensorboard" and not _has_tensorboard():
        raise UserError(
            "tracker.kind is 'tensorboard', but tensorboard is not installed. "
            "Install it with `pip install 'draftsmith[tensorboard]'`, or use --tracker csv."
        )
    return _file_logger(settings.kind, run_dir, "run", dict(config))


def for_stage(logger: Logger | None, stage: str) -> Logger | None:
    """The logger for one stage of the pipeline.

    W&B: the same run, with metrics named `stage/metric`.
    CSV and TensorBoard: a folder of that name.
    """
    if isinstance(logger, StagedWandb):
        return StagedWandb(logger.shared, stage)
    if isinstance(logger, _FileLogger):
        return _file_logger(logger.kind, Path(str(logger.save_dir)), stage, logger.config)
    return logger


Plots = Callable[[], Mapping[str, str]]
"""Draws plots: SVG by name. Seconds of work that only one of the trackers wants."""


def log_report(logger: Logger | None, report: Mapping[str, Any], figures: Plots | None = None) -> None:
    """Records the final numbers: summary values, the report's tables, and (W&B) the plots that ``figures`` draws."""
    tables = {key: _table(rows) for key in ("drafts", "paired", "decoding") if (rows := report.get(key))}
    if isinstance(logger, StagedWandb):
        logger.shared.log_tables(tables, figures() if figures is not None else {})
        logger.shared.summarise(_summary(report))
        return
    if isinstance(logger, TensorBoardLogger):
        for key, (columns, rows) in tables.items():
            cells = [["" if value is None else str(value) for value in row] for row in rows]
            logger.experiment.add_text(key, markdown_table(columns, cells))
    if logger is not None:
        logger.log_metrics(_summary(report), step=0)
        logger.save()


def log_draft(logger: Logger | None, folder: str | Path) -> None:
    """Records the exported draft as a W&B model artifact; the other trackers have no such thing."""
    if isinstance(logger, StagedWandb) and logger.shared.settings.log_draft:
        logger.shared.log_artifact(Path(folder))


def finish(logger: Logger | None) -> None:
    """Closes the record (W&B online: uploads what is left). Safe to call twice, or if nothing was logged."""
    if isinstance(logger, StagedWandb):
        logger.shared.finish()
    elif isinstance(logger, _FileLogger) and logger.settings_logged:
        logger.finalize("success")


def where(logger: Logger | None) -> str:
    """One line for the user: where the record is, and how to upload it if it is offline. Starts nothing."""
    if isinstance(logger, StagedWandb):
        return logger.shared.where()
    return f"tracked in {Path(str(logger.save_dir), logger.kind)}" if isinstance(logger, _FileLogger) else "not tracked"


def _has_tensorboard() -> bool:
    return bool(RequirementCache("tensorboard")) or bool(RequirementCache("tensorboardX"))


class _FileLogger(Logger):
    """Writes the run's settings before the first metric, so that nothing is written when nothing is logged."""

    kind: str
    config: dict[str, Any]
    settings_logged = False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        if not self.settings_logged:
            self.settings_logged = True
            self.log_hyperparams(self.config)
        super().log_metrics(dict(metrics), step)  # type: ignore[safe-super]


class _Csv(_FileLogger, CSVLogger):
    kind = "csv"


class _TensorBoard(_FileLogger, TensorBoardLogger):
    kind = "tensorboard"


def _file_logger(kind: str, run_dir: Path, stage: str, config: dict[str, Any]) -> Logger:
    logger: _FileLogger
    if kind == "csv":
        # A new version_N per start: Lightning's writer deletes the metrics of a folder that it finds in use.
        logger = _Csv(run_dir, name=f"csv/{stage}", flush_logs_every_n_steps=20)
    else:
        logger = _TensorBoard(run_dir, name="tensorboard", version=stage, default_hp_metric=False)
    logger.config = config
    return logger


def _table(rows: Iterable[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Rows with possibly different keys as columns and cells; lists become text."""
    rows = list(rows)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return columns, [[_cell(row.get(key)) for key in columns] for row in rows]


def _cell(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers by which runs are compared: α of each draft, target accuracy, fastest lossless decoding."""
    values = {f"offline_alpha/{row['name']}": row.get("offline_alpha") for row in report.get("drafts", [])}
    values["target/accuracy"] = report.get("target", {}).get("accuracy")
    rows = [r for r in report.get("decoding", []) if r.get("speedup") and r.get("identical_to_target", True)]
    if rows:
        best = max(rows, key=lambda row: row["speedup"])
        keys = ("speedup", "speedup_vs_generate", "block_efficiency", "tokens_per_second", "draft_length")
        values |= {f"best/{key}": best.get(key) for key in keys}
    return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
