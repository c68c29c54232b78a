"""Experiment tracking by Lightning's loggers: one record for a run, in which metrics are named ``stage/metric``.

W&B is offline unless a key is known and the server accepts it, so a run never waits for input or for a network. No
tracker is started before the first number is logged. Further options of W&B are its own environment variables.
"""

import base64
import json
import netrc
import os
import secrets
import sys
import threading
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from decode.errors import UserError, read_json
from distill.config.run import TrackerSettings
from distill.export.model_card import fastest_row
from distill.files import fingerprint, write_json
from distill.report import exported

ENVIRONMENT = {
    "SILENT": "true", "CONSOLE": "off", "DISABLE_GIT": "true", "DISABLE_CODE": "true", "INIT_TIMEOUT": "10",
    "ERROR_REPORTING": "false", "PROJECT": "draftsmith",
}  # fmt: skip
"""Variables of W&B that are set here, without WANDB_. Its redirection of stdout would break the progress bars."""
WAIT = 3.0  # seconds for the server's answer


class StageLogger(WandbLogger):
    """The W&B run of another logger, with the name of a stage before every metric."""

    LOGGER_JOIN_CHAR = "/"

    def __init__(self, run: WandbLogger, stage: str) -> None:
        super().__init__(save_dir=run.save_dir or ".", version=run.version, prefix=stage)
        self.run = run

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, which starts at its first use."""
        return self.run.experiment


def make_logger(settings: TrackerSettings, run_dir: Path, name: str, config: Mapping[str, Any]) -> Logger | None:
    """Return the logger of a whole run, from which `for_stage` makes those of its stages.

    Args:
        settings: Tracker and its mode.
        run_dir: Folder of the run; records are in ``wandb/``, ``csv/`` or ``tensorboard/`` below it.
        name: Displayed name.
        config: All settings of the run. A W&B run that was killed is continued while they stay the same.

    Returns:
        A Lightning logger. None for kind ``none``.

    Raises:
        UserError: W&B should be online and has no key, or TensorBoard is not installed.
    """
    if settings.kind == "none":
        return None
    if settings.kind == "csv":
        return CSVLogger(run_dir, name="csv/run", flush_logs_every_n_steps=20)
    if settings.kind == "tensorboard":
        try:
            return TensorBoardLogger(run_dir, name="tensorboard", version="run", default_hp_metric=False)
        except ModuleNotFoundError as error:
            raise UserError(f"tracker.kind is tensorboard: {error} Or use --tracker csv.") from error
    for variable, value in ENVIRONMENT.items():
        os.environ.setdefault(f"WANDB_{variable}", value)
    os.environ["WANDB_MODE"] = wandb_mode(settings.mode)
    note, key = run_dir / "wandb" / "run.json", fingerprint(dict(config))
    if (kept := read_json(note)).get("config") != key:
        write_json(note, kept := {"config": key, "id": secrets.token_hex(4)})
    run_id = os.environ.get("WANDB_RUN_ID") or kept["id"]  # the agent of a sweep has chosen one
    logger = WandbLogger(name=name, save_dir=run_dir, version=run_id, config=dict(config))
    vars(logger)["_wandb_init"].pop("anonymous", None)  # Lightning always passes it, and W&B warns that it does nothing
    return logger


def wandb_mode(wanted: str) -> str:
    """Return W&B's mode: as set, else as WANDB_MODE says, else online if the server accepts the user's key."""
    mode = wanted if wanted != "auto" else os.environ.get("WANDB_MODE", "auto")
    if mode not in ("auto", "online"):
        return mode
    url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    key = os.environ.get("WANDB_API_KEY")
    if not key:
        try:
            found = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
            key = (found.authenticators(urlsplit(url).netloc) or ("", "", ""))[2]
        except (OSError, netrc.NetrcParseError):
            key = None
    if not key and mode == "online":
        raise UserError(
            f"tracker.mode is online, and there is no key for {url} in WANDB_API_KEY or ~/.netrc: run `wandb login` "
            "once, or set tracker.mode: offline"
        )
    return "online" if key and accepted(url, key) else "offline"


def accepted(url: str, key: str) -> bool:
    """Return whether a W&B server answers within some seconds, and knows the key."""
    known = threading.Event()

    def ask() -> None:
        question = json.dumps({"query": "query { viewer { id } }"}).encode()
        user = base64.b64encode(f"api:{key}".encode()).decode()
        headers = {"Content-Type": "application/json", "Authorization": f"Basic {user}"}
        try:
            request = urllib.request.Request(f"{url}/graphql", question, headers)
            with urllib.request.urlopen(request, timeout=WAIT) as reply:
                if json.load(reply)["data"]["viewer"]:
                    known.set()
        except (OSError, ValueError, KeyError, TypeError):
            return

    thread = threading.Thread(target=ask, daemon=True)  # a name look-up without a network may block for long
    thread.start()
    thread.join(WAIT)
    return known.is_set()


def for_stage(logger: Logger | None, stage: str) -> Logger | None:
    """Return the logger of one stage of the run."""
    if isinstance(logger, WandbLogger):
        return StageLogger(logger, stage)
    if isinstance(logger, CSVLogger):  # a new version for each start: the writer deletes an older one's metrics
        return CSVLogger(logger.save_dir, name=f"csv/{stage}", flush_logs_every_n_steps=20)
    if isinstance(logger, TensorBoardLogger):
        return TensorBoardLogger(logger.save_dir or ".", name="tensorboard", version=stage, default_hp_metric=False)
    return logger


def log_report(logger: Logger | None, report: Mapping[str, Any], figures: Callable[[], Mapping[str, str]]) -> None:
    """Log a run's final numbers; to W&B also the report's tables, and the plots that ``figures`` draws, as SVG.

    Numbers have report.json's names: ``speedup`` and the like are of the exported draft, ``offline_alpha/NAME`` of any.
    """
    measured = ("offline_alpha", "offline_accepted_length", "validation_accepted_length")
    values = {f"{key}/{row['name']}": row.get(key) for row in report.get("drafts", []) for key in measured}
    values["target/accuracy"] = report.get("target", {}).get("accuracy")
    best = fastest_row(report, exported(report), f"{exported(report)}-tree")  # which the report's page begins with
    for name in ("speedup", "speedup_vs_generate", "accepted_length", "alpha", "tokens_per_second", "draft_length"):
        values[name] = best.get(name)
    summary = {name: float(value) for name, value in values.items() if value is not None}
    if isinstance(logger, WandbLogger):
        import wandb

        for table in ("drafts", "paired", "decoding"):
            rows = report.get(table) or []
            columns = list(dict.fromkeys(name for row in rows for name in row))
            cells = [[row.get(name) for name in columns] for row in rows]
            texts = [[json.dumps(cell) if isinstance(cell, list | dict) else cell for cell in row] for row in cells]
            logger.log_table(f"tables/{table}", columns, texts)
        logger.log_metrics({f"plots/{name}": wandb.Html(svg, inject=False) for name, svg in figures().items()})  # type: ignore[misc]
        logger.experiment.summary.update(summary)
    elif logger is not None:
        logger.log_metrics(summary, step=0)
        logger.save()


def log_draft(logger: Logger | None, folder: Path) -> None:
    """Upload an exported draft as a model artifact of W&B, read in place; other trackers have no such thing."""
    if isinstance(logger, WandbLogger):
        import wandb

        artifact = wandb.Artifact(f"draft-{logger.version}", type="model")
        artifact.add_dir(str(folder), policy="immutable", skip_cache=True)
        logger.experiment.log_artifact(artifact)


def finish(logger: Logger | None) -> None:
    """Close the record; W&B online uploads what is left. It may be called twice, or when nothing was logged."""
    wandb = sys.modules.get("wandb")  # a run that was never started needs no import
    if isinstance(logger, WandbLogger) and wandb is not None and wandb.run is not None:
        wandb.run.finish()
    elif logger is not None:
        logger.finalize("success")


def where(logger: Logger | None) -> str:
    """Return a line that says where the record is, and how to upload it if it is offline. Starts nothing."""
    if not isinstance(logger, WandbLogger):
        return "not tracked" if logger is None else f"tracked in {logger.save_dir}/{str(logger.name).partition('/')[0]}"
    folder, mode = Path(logger.save_dir or ".", "wandb"), os.environ["WANDB_MODE"]
    if mode in ("online", "disabled"):
        return f"W&B {mode}, run {logger.version}"
    return f"W&B offline in {folder}; to upload: wandb sync {folder}/offline-run-*-{logger.version}"
