"""Stages beside each other on a CPU, each in a process of a pool with its share of the threads.

How many threads a stage has follows from the settings alone, so the same command yields the same figures.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

import torch
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
from distill.losses.objective import Objective
from distill.run_stages import run_stages
from distill.stages import run_of, stage_fingerprints
from distill.teacher.store import prepare
from distill.tracking import for_stage

SIGNAL = "signal of the target"


def may_run_beside(context: StageContext) -> bool:
    """Return whether stages run beside each other: the settings say so, and this is one process on a CPU."""
    trainer = context.settings.trainer
    processes = ranks.process_count(trainer)
    return context.settings.stages_at_once > 1 and context.device.type == "cpu" and max(processes, ranks.started()) == 1


def run_beside(context: StageContext) -> None:
    """Run all stages that are not up to date.

    The target and the references, which others wait for, have all threads. The student is trained while the target's
    signal is made, and the remaining drafts are trained beside each other.
    """
    settings, keys = context.settings, stage_fingerprints(context.settings)
    unfinished = [stage for stage, (key, _) in keys.items() if context.run.record(stage, key) is None]
    if unfinished:
        with working(context.console, "checking data and models", bars=False):
            check_inputs(context)
    student, references = settings.student, [d.reference for d in settings.drafts if d.reference and d.selects]
    both_ask = settings.data.from_target and student.trained  # for the same responses
    may = "initial" in unfinished and student.kind in ("scratch", "cut") and not both_ask  # whose ids are the target's
    first = ["initial", SIGNAL] if may else []
    last = [stage for stage in unfinished if stage not in ("target", "initial", *references)]
    last = last if len(last) > 1 else []
    with _pool(settings, starts=bool(first or last)) as pool:
        run_stages(context, ("target",), check=False)
        _make_all(context, pool, first)
        run_stages(context, {"initial", *references} - {*first}, check=False)
        _make_all(context, pool, last)
    run_stages(context, {draft.name for draft in settings.drafts} - {*references, *last}, check=False)


@contextmanager
def _pool(settings: Settings, *, starts: bool) -> Iterator[ProcessPoolExecutor]:
    """Start the processes, which import everything while the target is trained; end them if the run is stopped.

    All are copies of one that has done the imports, but on macOS, whose libraries may not be copied so.
    """
    count = settings.stages_at_once
    how = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    how.set_forkserver_preload([__name__])
    threads = max(1, torch.get_num_threads() // count)
    with ProcessPoolExecutor(count, how, initializer=_begin, initargs=(threads,)) as pool:
        for _ in range(count if starts else 0):
            pool.submit(os.getpid)
        try:
            yield pool
        except BrokenProcessPool as error:
            raise UserError("a process of the pool has ended: it was killed, perhaps for want of memory") from error
        except BaseException:
            for process in multiprocessing.active_children():  # those at work would otherwise finish their stages
                process.terminate()
            raise


def _make_all(context: StageContext, pool: ProcessPoolExecutor, stages: list[str]) -> None:
    made = {
        stage: pool.submit(_make, context.settings, stage, context.console.quiet, context.started) for stage in stages
    }
    for stage, future in made.items():
        logged, logger = future.result(), for_stage(context.logger, stage)
        if logger is not None:
            for metrics, step in logged:
                logger.log_metrics(metrics, step)
            logger.save()


def _begin(threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the run ends its processes itself
    torch.set_num_threads(threads)
    hf_logging.disable_progress_bar()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed run may be started again, and must not meet the stages of the first one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(settings: Settings, stage: str, quiet: bool, started: float) -> list[tuple[dict[str, Any], int | None]]:
    """Make a stage in a process of the pool; return the metrics that it logged, with their steps."""
    logger, console = _Collector(), Console(quiet=quiet, width=120)
    context = StageContext(settings, run_of(settings), console, logger, started=started)
    if stage == SIGNAL:
        trust = settings.target.trust_remote_code
        config = AutoConfig.from_pretrained(context.run.target, trust_remote_code=trust)
        prepare(context, Objective(), draft_vocab=int(config.get_text_config().vocab_size))
    else:
        run_stages(context, (stage,), check=False)
    return logger.logged


class _Collector(DummyLogger):
    """Keeps metrics, for the logger of the process that tracks the run."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.logged.append((dict(metrics), step))
