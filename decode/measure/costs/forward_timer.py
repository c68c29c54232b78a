"""How much of a round is spent inside the models' forwards; the rest is bookkeeping."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decode.core.runner_protocol import Runner, synchronize


class ForwardTimer:
    """Seconds spent inside the forwards of some runners, their forks included.

    Attributes:
        seconds: of all forwards.
        prompt_seconds: of those of them that gave no logits.
    """

    seconds = prompt_seconds = 0.0
    forwards = 0  # of the first runner that gave logits; one over several texts counts once
    inside = False


@contextmanager
def time_forwards(*runners: Runner) -> Iterator[ForwardTimer]:
    """Add up the time of all forwards, those of early layers among them; what is left of a round is bookkeeping."""
    timer = ForwardTimer()
    different = list({id(r): r for r in runners}.values())

    def timed(read: Callable[..., torch.Tensor], device: torch.device, first: bool) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **extra: Any) -> torch.Tensor:
            if timer.inside:  # a forward over several texts that is made of theirs
                return read(*args, **extra)
            synchronize(device)
            began, timer.inside = time.perf_counter(), True
            try:
                logits = read(*args, **extra)
            finally:
                timer.inside = False
            synchronize(device)
            spent, prompt = time.perf_counter() - began, extra.get("head") == 0
            timer.seconds += spent
            timer.prompt_seconds += spent * prompt
            timer.forwards += first and not prompt
            return logits

        return call

    def watch(runner: Runner, first: bool) -> None:
        def forked(count: int) -> list[Runner]:
            forks = fork(count)
            for one in forks:
                watch(one, first)
            return forks

        fork = runner.fork
        for name in WAYS:
            if hasattr(runner, name):
                vars(runner)[name] = timed(getattr(runner, name), runner.device, first)
        vars(runner)["fork"] = forked

    for runner in different:
        watch(runner, runner is different[0])
    try:
        yield timer
    finally:
        for runner in different:
            for name in (*WAYS, "fork"):
                vars(runner).pop(name, None)


WAYS = ("read", "read_texts", "read_subset", "read_subset_of_texts", "read_own", "read_level", "read_levels")
"""Methods that are forwards."""
