"""Experiment tracking: one record per pipeline run, with its stages; it never asks for input or waits for a server.

W&B is the default, offline unless credentials are found and the server answers (`wandb_run`). No tracker is imported
or started before the first number is logged.
"""

import contextlib
import json
import netrc
import os
import secrets
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning_utilities.core.imports import RequirementCache

from decode.bench.report import markdown_table
from decode.errors import UserError, read_json
from distill.config.run import TrackerSettings
from distill.files import fingerprint, write_json

Mode = Literal["online", "offline", "disabled"]
REACH_SECONDS = 2.0
INIT_SECONDS = 10.0


class WandbRun:
    """A W&B run that starts when first needed and goes on under the same id after a kill.

    Args:
        settings: project, mode, tags.
        run_dir: folder of the pipeline run; W&B's files go to `run_dir/wandb`.
        name: display name.
        config: all settings of the pipeline; the id is kept as long as they stay the same.

    Raises:
        UserError: online was asked for and there is no key.
    """

    def __init__(self, settings: TrackerSettings, run_dir: Path, name: str, config: Mapping[str, Any]) -> None:
        self.settings, self.run_dir, self.name, self.config = settings, run_dir, name, dict(config)
        self.mode = wandb_mode(settings.mode)
        agent = os.environ.get("WANDB_SWEEP_ID") and os.environ.get("WANDB_RUN_ID")  # it has started a run already
        self.run_id = agent or _run_id(run_dir / "wandb" / "run.json", self.config)
        self.run: Any = None
        self._starting = threading.Lock()  # the metrics of stages beside this process's own arrive in threads

    def start(self) -> Any:
        """The `wandb.Run`, started on the first call; offline if the server does not answer."""
        with self._starting:
            if self.run is None:
                if self.mode == "online" and not reachable(wandb_host()):
                    self.mode = "offline"
                self.run = self._init()
                self.run.define_metric("trainer/global_step", hidden=True)
                self.run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return self.run

    def _init(self) -> Any:
        os.environ.setdefault("WANDB_SILENT", "true")  # the settings below come too late for the login message
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        (self.run_dir / "wandb").mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(
            silent=True,
            console="off",  # W&B's redirection of stdout would break the progress bars
            disable_git=True,
            disable_code=True,
            x_disable_stats=self.mode != "online",
            init_timeout=INIT_SECONDS,
        )
        options: dict[str, Any] = {
            "project": self.settings.project,
            "name": self.name,
            "dir": str(self.run_dir),
            "id": self.run_id,
            "resume": "allow",
            "config": self.config,
            "settings": settings,
        }
        try:
            return wandb.init(mode=self.mode, **options)
        except wandb.errors.Error:
            # A refused key or a server that does not answer: keep the record here, do not stop the pipeline.
            if self.mode != "online":
                raise
            wandb.teardown()  # the service still holds the run id
            self.mode = "offline"
            return wandb.init(mode=self.mode, **options)

    @rank_zero_only
    def log_tables(self, tables: Mapping[str, tuple[list[str], list[list[Any]]]], figures: Mapping[str, str]) -> None:
        """Logs tables (columns, rows) as `tables/key` and SVG figures as `plots/key`."""
        run = self.start()
        import wandb

        row: dict[str, Any] = {
            f"tables/{key}": wandb.Table(columns=cast(list[str | int], columns), data=data)
            for key, (columns, data) in tables.items()
        }
        row |= {f"plots/{key}": wandb.Html(svg, inject=False) for key, svg in figures.items()}
        if row:
            run.log(row)

    @rank_zero_only
    def summarise(self, values: Mapping[str, Any]) -> None:
        """Sets the run's summary values, by which W&B sorts and compares runs."""
        self.start().summary.update(dict(values))

    @rank_zero_only
    def log_artifact(self, folder: Path) -> None:
        """Records `folder` as a model artifact, read in place at upload time (no second copy)."""
        run = self.start()
        import wandb

        artifact = wandb.Artifact(f"draft-{self.run_id}", type="model")
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            artifact.add_file(str(path.resolve()), name=name, policy="immutable", skip_cache=True)
        run.log_artifact(artifact)

    @rank_zero_only
    def finish(self) -> None:
        """Ends the run; online this uploads what is left."""
        if self.run is not None:
            self.run.finish()
            self.run = None

    def where(self) -> str:
        """One line that says where the record is."""
        if self.mode == "disabled":
            return "W&B is disabled (WANDB_MODE)"
        if self.mode == "online":
            return f"W&B run {self.run_id}" + (f": {self.run.url}" if self.run is not None else "")
        folder = self.run_dir / "wandb"
        return f"W&B offline in {folder}; to upload: wandb sync {folder}/offline-run-*-{self.run_id}"


class StagedWandb(WandbLogger):
    """Lightning's W&B logger on a run that all stages share; metrics are named ``stage/metric``."""

    LOGGER_JOIN_CHAR = "/"

    def __init__(self, shared: WandbRun, stage: str = "") -> None:
        super().__init__(
            name=shared.name, save_dir=shared.run_dir, project=shared.settings.project, id=shared.run_id, prefix=stage
        )
        self.shared, self.stage = shared, stage

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """The W&B run, started on first use."""
        return self.shared.start()

    @rank_zero_only
    def log_hyperparams(self, params: Any) -> None:
        """Records a module's hyper-parameters under the stage's name, beside the settings of the run."""
        values = dict(params) if isinstance(params, Mapping) else dict(vars(params))
        super().log_hyperparams({self.stage: values} if self.stage else values)


def wandb_mode(asked: Literal["auto", "online", "offline"]) -> Mode:
    """Settings win over WANDB_MODE, which wins over what the credentials suggest. Makes no request."""
    wanted = asked if asked != "auto" else os.environ.get("WANDB_MODE", "auto")
    wanted = {"dryrun": "offline", "run": "online"}.get(wanted, wanted)
    if wanted in ("offline", "disabled"):
        return cast(Mode, wanted)
    if logged_in():
        return "online"
    if wanted == "online":
        raise UserError(
            f"W&B is set to 'online', but there is no key for {urlsplit(wandb_host()).hostname} in the "
            "environment or in ~/.netrc. Run `wandb login` once, or set tracker.mode: offline."
        )
    return "offline"


def wandb_host() -> str:
    """The W&B server, as wandb itself chooses it."""
    return os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"


def logged_in() -> bool:
    """Whether credentials for the server are in the environment or in netrc."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    path = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(str(path)).authenticators(urlsplit(wandb_host()).netloc) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def reachable(url: str, seconds: float = REACH_SECONDS) -> bool:
    """Whether a TCP connection to `url` (or to the proxy for it) opens within `seconds`, look-up included."""
    parts = urlsplit(urllib.request.getproxies().get(urlsplit(url).scheme, "") or url)
    address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
    answered = threading.Event()

    def connect() -> None:
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=seconds):
            answered.set()

    # A name look-up without a network can block for long and takes no timeout: leave it behind in a thread.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(seconds)
    return answered.is_set()


def _run_id(path: Path, config: Mapping[str, Any]) -> str:
    """The id kept in `wandb/run.json`: the same as long as the settings are, so a killed run is continued."""
    known, kept = fingerprint(dict(config)), read_json(path)
    if kept.get("config") == known and "id" in kept:
        return str(kept["id"])
    run_id = secrets.token_hex(4)
    if (getattr(rank_zero_only, "rank", 0) or 0) == 0:
        write_json(path, {"id": run_id, "config": known})
    return run_id


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
