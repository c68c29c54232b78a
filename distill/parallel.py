"""Stages beside each other: those that do not need one another, each in a process with its share of the CPU threads.

How many threads a stage has follows from the settings alone, never from what happens to run beside it, so the same
command yields the same figures. The further processes print and log through this one, and end with it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import DummyLogger
from rich.console import Console
from transformers import AutoConfig
from transformers.utils import logging as hf_logging

from decode.errors import UserError
from decode.progress import working
from distill import ranks
from distill.checks import check_inputs
from distill.config.run import Settings
from distill.data.context import StageContext
from distill.files import RunDir
from distill.losses.objective import Objective, divergence_of
from distill.run_stages import run_stages
from distill.stages import stage_fingerprints
from distill.teacher.store import prepare
from distill.tracking import for_stage


def may_run_beside(context: StageContext) -> bool:
    """Whether stages are to run beside each other: the settings say so, and this is one process on a CPU."""
    settings, trainer = context.settings, context.settings.trainer
    processes = ranks.process_count(trainer.accelerator, trainer.devices, trainer.num_nodes)
    return settings.stages_at_once > 1 and context.device.type == "cpu" and max(processes, ranks.started()) == 1


def run_beside(context: StageContext) -> None:
    """Runs all stages that are not up to date.

    The target and the reference are waited for by others and have all threads; the initial draft is trained while the
    target's signal is made, and the drafts that follow the reference beside each other.
    """
    settings, keys = context.settings, stage_fingerprints(context.settings)
    unfinished = [stage for stage, (key, _) in keys.items() if context.run.finished(stage, key) is None]
    if unfinished:
        with working(context.console, "checking data and models", bars=False):
            check_inputs(context)
    with _workers(context, min(settings.stages_at_once, len(unfinished)) - 1) as workers:
        run_stages(context, ("target",), check=False)
        early = settings.initial.kind in ("scratch", "cut") and not settings.eagle.enabled  # it has the target's ids
        if early and workers and "initial" in unfinished:
            _share_out(context, ["initial"], workers, _make_signal)
        else:
            run_stages(context, ("initial",), check=False)
        run_stages(context, ("reference",), check=False)
        drafts = list(keys)[3:]
        run_stages(context, [stage for stage in drafts if stage not in unfinished], check=False)
        _share_out(context, [stage for stage in drafts if stage in unfinished], workers)


def _make_signal(context: StageContext) -> None:
    """Keeps the target's signal, which all drafts are trained on."""
    context.console.print("[bold]signal of the target[/bold], beside the initial draft", highlight=False)
    config = AutoConfig.from_pretrained(context.run.target, trust_remote_code=context.settings.target.trust_remote_code)
    ids = int(config.get_text_config().vocab_size)
    teacher = context.settings.reference
    prepare(context, Objective(divergence_of(teacher)), teacher.responses.from_draft, draft_vocab=ids)


def _share_out(
    context: StageContext,
    stages: Sequence[str],
    workers: Sequence[_Worker],
    first: Callable[[StageContext], None] | None = None,
) -> None:
    """Stages in turn to this process, unless it has something to do ``first``, and to the workers."""
    count = len(workers) + (first is None)
    parts = [list(stages[part::count]) for part in range(count)]
    own = parts.pop(0) if first is None else []
    busy = [worker for worker, part in zip(workers, parts) if part]
    for worker, part in zip(busy, parts):
        worker.begin(part)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // context.settings.stages_at_once))
    try:
        if first is not None:
            first(context)
        if own:
            run_stages(context, own, check=False)
    finally:
        torch.set_num_threads(threads)
    for worker in busy:
        worker.end()


@contextmanager
def _workers(context: StageContext, count: int) -> Iterator[list[_Worker]]:
    """Processes that wait for stages, and are gone afterwards."""
    workers: list[_Worker] = []
    try:
        workers += [_Worker(context) for _ in range(count)]
        yield workers
    finally:
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that makes stages, one list after another; what it prints and logs is passed on here."""

    def __init__(self, context: StageContext) -> None:
        self.context = context
        self.error: BaseException | None = None
        self._listener: threading.Thread | None = None
        self._pipe, other = multiprocessing.Pipe()
        threads = max(1, torch.get_num_threads() // context.settings.stages_at_once)
        given = (other, context.settings, context.run, threads, context.console.width, context.logger is not None)
        self._process = multiprocessing.get_context("spawn").Process(target=_work, args=given)
        self._process.start()
        other.close()

    def begin(self, stages: list[str]) -> None:
        """Has it make stages."""
        with suppress(OSError):  # it is gone, which the listener tells
            self._pipe.send(stages)
        self._listener = threading.Thread(target=self._listen, args=(stages,), daemon=True)
        self._listener.start()

    def end(self) -> None:
        """Waits until they are made.

        Raises:
            BaseException: What one of them failed with, or the process is gone.
        """
        assert self._listener is not None
        self._listener.join()
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Ends the process, at once if it is at work."""
        if self._listener is not None and self._listener.is_alive():
            self._process.terminate()
        else:
            self._pipe.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()

    def _listen(self, stages: list[str]) -> None:
        loggers: dict[str, Logger | None] = {}
        while True:
            try:
                stage, kind, *values = self._pipe.recv()
            except (EOFError, OSError):
                self._process.join()
                reason = f"the process that made {', '.join(stages)} has ended, status {self._process.exitcode}"
                self.error = UserError(f"{reason}: it was killed, perhaps for want of memory")
                return
            if kind == "said":
                self.context.console.print(f"  {stage} | {values[0]}", highlight=False, markup=False, soft_wrap=True)
            elif kind == "logged":
                logger = loggers.setdefault(stage, for_stage(self.context.logger, stage))
                if logger is not None:
                    logger.log_metrics(*values)
                    logger.save()
            elif kind == "took":
                self.context.seen |= values[0]
                for name, measured in values[1].items():
                    self.context.measured.setdefault(name, measured)
            else:
                self.error = values[0]
                return


def _work(pipe: Connection, settings: Settings, folder: RunDir, threads: int, width: int, tracked: bool) -> None:
    """Another process: makes the stages that it is told to, until the one that started it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the process that started this one, which ends it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # cleans up
    threading.Thread(target=_end_with_parent, daemon=True).start()
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    lock = threading.Lock()
    stage = ""

    def tell(*message: Any) -> None:
        with lock:
            pipe.send((stage, *message))

    while True:
        error: Exception | None = None
        try:
            for stage in pipe.recv():
                console = Console(file=_Lines(tell), width=width)  # type: ignore[arg-type]
                context = StageContext(settings, folder, console, _Relay(tell) if tracked else None)
                run_stages(context, (stage,), check=False)
                tell("took", context.seen, context.measured)
        except (EOFError, KeyboardInterrupt, SystemExit):  # there is nothing more to make, or it is ended
            return
        except UserError as known:
            error = known
        except Exception:
            error = RuntimeError(f"the stage {stage} failed in its process:\n{traceback.format_exc()}")
        tell("ended", error)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


class _Lines:
    """A file whose lines are told."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self.tell, self.rest = tell, ""

    def write(self, text: str) -> None:
        """Tells whole lines."""
        *lines, self.rest = (self.rest + text).split("\n")
        for line in lines:
            self.tell("said", line.strip())

    def flush(self) -> None:
        """Nothing is held back."""


class _Relay(DummyLogger):
    """Tells metrics, for the logger of the process that tracks the run."""

    def __init__(self, tell: Callable[..., None]) -> None:
        super().__init__()
        self.tell = tell

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Tells them."""
        self.tell("logged", dict(metrics), step)
