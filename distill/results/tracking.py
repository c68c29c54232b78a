"""Experiment tracking by Lightning's loggers: one record for a run, in which metrics are named ``stage/metric``.

W&B is offline where it knows no key, so a run never waits for input. No tracker is started before the first number is
logged. Further options are W&B's environment variables; those that are set are never changed.
"""

import json
import netrc
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, WandbLogger

from decode.errors import UserError, first_line
from decode.files import read_json, write_json
from decode.measure.machine import doubt
from distill.config.base import Values
from distill.export.card import fastest_row
from distill.files import fingerprint
from distill.results.report import exported

ENVIRONMENT = {
    "SILENT": "true", "CONSOLE": "off", "DISABLE_GIT": "true", "DISABLE_CODE": "true", "INIT_TIMEOUT": "10",
    "ERROR_REPORTING": "false", "PROJECT": "draftsmith",
}  # fmt: skip
"""Variables of W&B that are set here, without WANDB_. Its redirection of stdout would break the progress bars."""
OF_EXPORT = "speedup", "speedup_vs_generate", "accepted_length", "alpha", "tokens_per_second", "draft_length"
OF_DRAFTS = "offline_alpha", "offline_accepted_length", "validation_accepted_length"
"""Numbers of a report that are logged: of the exported draft's fastest decoding, and of every draft."""
NEXT = "set WANDB_MODE=offline and upload later, renew the key by `wandb login`, or choose --tracker csv"


class RunLogger(WandbLogger):
    """The W&B run that ``wandb.init`` makes of ``options``, with the name of a stage before every metric."""

    LOGGER_JOIN_CHAR = "/"

    def __init__(self, options: Values, stage: str = "") -> None:
        super().__init__(save_dir=options["dir"], version=options["id"], prefix=stage)
        self.options = options

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, which starts at its first use."""
        import wandb

        if wandb.run is None:
            try:
                run = wandb.init(**self.options)
            except wandb.Error as error:
                raise UserError(f"W&B does not start ({error}): {NEXT}") from error
            run.define_metric("trainer/global_step")  # as Lightning's logger does
            run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return wandb.run


def make_logger(tracker: str, run_dir: Path, name: str, config: Values) -> Logger | None:
    """Return the logger of a whole run, from which `for_stage` makes those of its stages.

    A W&B run that was killed is continued while ``config``, all settings, stays the same.
    """
    if tracker != "wandb":
        return CSVLogger(run_dir, name="csv/run", flush_logs_every_n_steps=20) if tracker == "csv" else None
    # tables and plots are staged beside the run: a user may have no home that can be written
    folders = dict.fromkeys(("DATA_DIR", "CACHE_DIR"), str(run_dir / "wandb"))
    for variable, value in (ENVIRONMENT | folders).items():
        os.environ.setdefault(f"WANDB_{variable}", value)
    note, key = run_dir / "wandb" / "run.json", fingerprint(dict(config))
    if (kept := read_json(note)).get("config") != key:
        write_json(note, kept := {"config": key, "id": secrets.token_hex(4)})
    run_id = os.environ.get("WANDB_RUN_ID") or kept["id"]  # the agent of a sweep has chosen one
    options = {"name": name, "dir": str(run_dir), "id": run_id, "config": dict(config), "resume": "allow"}
    return RunLogger(options | ({"mode": "offline"} if is_offline() else {}))


def is_offline() -> bool:
    """Return whether W&B is to be offline: as WANDB_MODE says, else where neither WANDB_API_KEY nor netrc has a key.

    Raises:
        UserError: WANDB_MODE is online, and W&B would ask for a key.
    """
    mode, key = os.environ.get("WANDB_MODE"), bool(os.environ.get("WANDB_API_KEY"))
    if mode and mode != "online":
        return mode in ("offline", "dryrun")
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    with suppress(OSError, netrc.NetrcParseError):
        keys = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # a user may have no home
        key = key or bool(keys.authenticators(server))
    if mode and not key:
        raise UserError(f"WANDB_MODE is online, and there is no key for {server}: {NEXT}")
    return not key


def tried(logger: Logger | None, say: Callable[[str], None]) -> Logger | None:
    """Return the logger once its record has begun, before anything is trained for it; None where W&B cannot begin one.

    Raises:
        UserError: W&B is to be online and does not start.
    """
    if isinstance(logger, RunLogger):
        try:
            _ = logger.experiment
        except Exception as error:  # of W&B, its service, or the system
            if "mode" not in logger.options:
                raise
            say(
                f"this run is not tracked ({first_line(error) or type(error).__name__}): set tracker to csv for records"
            )
            return None
    return logger


def for_stage(logger: Logger | None, stage: str) -> Logger | None:
    """Return the logger of one stage of the run."""
    if isinstance(logger, RunLogger):
        return RunLogger(logger.options, stage)
    if isinstance(logger, CSVLogger):  # a new version for each start: the writer deletes an older one's metrics
        return CSVLogger(logger.save_dir, name=f"csv/{stage}", flush_logs_every_n_steps=20)
    return logger


def log_report(logger: Logger | None, report: Values, figures: Callable[[], Mapping[str, str]]) -> None:
    """Log a run's final numbers; to W&B also the report's tables, and the plots that ``figures`` draws, as SVG.

    Numbers have report.json's names: ``speedup`` and the like are of the exported draft, ``offline_alpha/NAME`` of any.
    """
    best = fastest_row(report, exported(report), f"{exported(report)}-tree")  # which the report's page begins with
    best = {key: value for key, value in best.items() if not (doubt(best) and "speedup" in key)}
    values = {key: best.get(key) for key in OF_EXPORT} | {"target/accuracy": report["target"]["accuracy"]}
    values |= {f"{key}/{row['name']}": row.get(key) for row in report["drafts"] for key in OF_DRAFTS}
    summary = {name: float(value) for name, value in values.items() if value is not None}
    if isinstance(logger, RunLogger):
        import wandb

        for table in ("drafts", "paired", "decoding"):
            rows = report[table]
            columns = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[_shown(row.get(name)) for name in columns] for row in rows]
            logger.log_table(f"tables/{table}", columns, cells)
        logger.log_metrics({f"plots/{name}": wandb.Html(svg, inject=False) for name, svg in figures().items()})  # type: ignore[misc]
        logger.experiment.summary.update(summary)
    elif logger is not None:
        logger.log_metrics(summary, step=0)
        logger.save()


def _shown(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def finish(logger: Logger | None) -> None:
    """Close the record; W&B online uploads what is left. It may be called twice, or when nothing was logged."""
    wandb = sys.modules.get("wandb")  # a run that was never started needs no import
    if isinstance(logger, RunLogger) and wandb is not None and wandb.run is not None:
        wandb.run.finish()
    elif logger is not None:
        logger.finalize("success")


def where(logger: Logger | None) -> str:
    """Return a line that says where the record is, and how to upload it if it is offline. Starts nothing."""
    if not isinstance(logger, RunLogger):
        return f"csv files in {logger.save_dir}/csv" if logger else "not tracked"
    if "mode" not in logger.options:
        return f"W&B {os.environ.get('WANDB_MODE', 'online')}, run {logger.version}"
    return f"W&B offline; to upload: wandb sync {logger.save_dir}/wandb/offline-run-*-{logger.version}"
