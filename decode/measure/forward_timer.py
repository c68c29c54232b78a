"""How much of a round is spent inside the models' forwards; the rest is bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from decode.core.runner import Runner
from decode.core.synchronize import synchronize


class ForwardTimer:
    """Seconds spent inside the forwards of some runners."""

    seconds = 0.0


@contextmanager
def time_forwards(*runners: Runner) -> Iterator[ForwardTimer]:
    """Add up the time of all forwards, those of early layers among them; what is left of a round is bookkeeping."""
    timer = ForwardTimer()
    different = list({id(r): r for r in runners}.values())

    def timed(read: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **extra: Any) -> torch.Tensor:
            synchronize(device)
            began = time.perf_counter()
            logits = read(*args, **extra)
            synchronize(device)
            timer.seconds += time.perf_counter() - began
            return logits

        return call

    ways = ("read", "read_subset", "read_level")
    reads = [(runner, name) for runner in different for name in ways if hasattr(runner, name)]
    for runner, name in reads:
        vars(runner)[name] = timed(getattr(runner, name), runner.device)
    try:
        yield timer
    finally:
        for runner, name in reads:
            del vars(runner)[name]
