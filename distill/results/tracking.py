"""Experiment tracking by Lightning's loggers: a W&B run for each stage in one group, so that their curves overlay.

A further W&B run of the group has the report. W&B is offline where it knows no key or does not answer, so a run never
waits for input. Further options are W&B's environment variables; those that are set are never changed.
"""

import netrc
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import Logger, WandbLogger

from decode.errors import first_line
from decode.files import read_json, write_json
from decode.measure.machine import doubt
from distill import ranks
from distill.config.base import Values
from distill.export.card import recommended_row
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


class RunLogger(WandbLogger):
    """The W&B run that ``wandb.init`` makes of ``options``; of several, the one that is used last is active."""

    def __init__(self, options: Values) -> None:
        super().__init__(save_dir=options["dir"], version=options["id"])
        self.options = options

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, which starts at its first use: offline, where W&B is to be online and does not answer."""
        import wandb

        if wandb.run is None or wandb.run.id != self.options["id"]:
            if wandb.run is not None:
                wandb.run.finish()
            try:
                run = wandb.init(**self.options)
            except wandb.Error:
                if "mode" in self.options:
                    raise
                self.options["mode"] = "offline"
                wandb.teardown()  # whose service holds the id of the run that did not begin
                run = wandb.init(**self.options)
            run.define_metric("trainer/global_step")  # as Lightning's logger does
            run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return wandb.run


def make_logger(tracker: str, run_dir: Path, name: str, config: Values) -> Logger | None:
    """Return the logger of a whole run, from which `for_stage` makes those of its stages.

    A W&B run that was killed is continued while ``config``, all settings, stays the same.
    """
    if tracker != "wandb":
        return None
    # tables and plots are staged beside the run: a user may have no home that can be written
    folders = dict.fromkeys(("DATA_DIR", "CACHE_DIR"), str(run_dir / "wandb"))
    for variable, value in (ENVIRONMENT | folders).items():
        os.environ.setdefault(f"WANDB_{variable}", value)
    note, key = run_dir / "wandb" / "run.json", fingerprint(dict(config))
    if (kept := read_json(note)).get("config") != key:
        kept = {"config": key, "id": secrets.token_hex(4)}
        if ranks.is_first():
            write_json(note, kept)
    options = {"name": name, "dir": str(run_dir), "id": kept["id"], "config": dict(config), "resume": "allow"}
    options |= {"group": os.environ.get("WANDB_RUN_GROUP") or name, "job_type": "report"}
    return RunLogger(options | ({"mode": "offline"} if is_offline() else {}))


def is_offline() -> bool:
    """Return whether W&B is to be offline: as WANDB_MODE says, and where neither WANDB_API_KEY nor netrc has a key."""
    mode = os.environ.get("WANDB_MODE") or "online"
    if mode != "online":
        return mode in ("offline", "dryrun")
    server = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    with suppress(OSError, netrc.NetrcParseError):
        keys = netrc.netrc(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))  # a user may have no home
        if keys.authenticators(server):
            return False
    return not os.environ.get("WANDB_API_KEY")


def tried(logger: Logger | None, say: Callable[[str], None]) -> Logger | None:
    """Return the logger once its record has begun, before anything is trained for it; None where none can begin."""
    if isinstance(logger, RunLogger):
        online = "mode" not in logger.options
        try:
            _ = logger.experiment
        except Exception as error:  # of W&B, its service, or the system
            say(f"this run is not tracked ({first_line(error) or type(error).__name__}); its folder holds the losses")
            return None
        if online and "mode" in logger.options:
            say(f"W&B does not answer, so that the record is offline: {where(logger)}")
    return logger


def for_stage(logger: Logger | None, stage: str) -> Logger | None:
    """Return the logger of one stage of the run."""
    if isinstance(logger, RunLogger):
        options = logger.options
        config = options["config"] | {"stage": stage, "draft": options["config"].get("drafts", {}).get(stage)}
        of_stage = {"id": f"{options['id']}-{stage}", "name": f"{options['name']}: {stage}", "job_type": stage}
        return RunLogger(options | of_stage | {"config": config})
    return logger


def numbers_of(report: Values) -> dict[str, float]:
    """A report's final numbers: ``speedup`` and the like are of the exported draft, ``offline_alpha/NAME`` of any."""
    best = recommended_row(report, exported(report))  # which the report's page begins with
    best = {key: value for key, value in best.items() if not (doubt(best) and "speedup" in key)}
    values = {key: best.get(key) for key in OF_EXPORT} | {"target/accuracy": report["target"]["accuracy"]}
    values |= {f"{key}/{row['name']}": row.get(key) for row in report["drafts"] for key in OF_DRAFTS}
    return {name: float(value) for name, value in values.items() if value is not None}


def log_report(logger: Logger | None, report: Values, run_dir: Path, *, upload: bool = False) -> None:
    """Log a run's final numbers and the report's page to W&B, and if asked for the export, as an artifact."""
    if isinstance(logger, RunLogger):
        import wandb

        page = (run_dir / "report.html").read_text(encoding="utf-8")
        logger.experiment.log({"report": wandb.Html(page, inject=False)})
        if upload:
            artifact = wandb.Artifact(f"{logger.options['name']}-export", type="model")
            artifact.add_dir(str(run_dir / "export"))
            logger.experiment.log_artifact(artifact)
        logger.experiment.summary.update(numbers_of(report))


def finish(logger: Logger | None) -> None:
    """Close the record; W&B online uploads what is left. It may be called twice, or when nothing was logged."""
    wandb = sys.modules.get("wandb")  # a run that was never started needs no import
    if isinstance(logger, RunLogger) and wandb is not None and wandb.run is not None:
        wandb.run.finish()


def where(logger: Logger | None) -> str:
    """Return a line that says where the record is, and how to upload it if it is offline. Starts nothing."""
    if not isinstance(logger, RunLogger):
        return "not tracked"
    if "mode" not in logger.options:
        return f"W&B {os.environ.get('WANDB_MODE', 'online')}, group {logger.options['group']}, run {logger.version}"
    return f"W&B offline; to upload: wandb sync {logger.save_dir}/wandb/offline-run-*"
