"""Which GPUs of a machine the target's servers take, beside those that train."""

import re
from collections.abc import Collection, Sequence

from decode.errors import UserError
from distill.config.teacher import SIZES, EngineSettings

WHOLE = 0.9
"""Part of a GPU's memory from which on nothing is left for a training; vLLM takes 0.92 unless it is told otherwise."""


def server_gpus(engine: EngineSettings, free: Sequence[int], trained: Collection[int]) -> dict[str, list[int]]:
    """The GPUs of each server on this machine by its address, those first that do not train.

    Without addresses it is one server, whose address is empty; without GPUs they take none.

    Args:
        engine: Addresses and arguments of the servers.
        free: GPUs of this machine that do not train.
        trained: Those that do.

    Raises:
        UserError: A server that takes all memory of its GPUs would be on one that trains.
    """
    urls = engine.local if engine.urls else [""]
    each, gpus = 1, [*free, *trained]
    for name in SIZES:
        each *= int(_number(engine, name, 1))
    wanted, count = each * len(urls), len(gpus)
    if wanted > len(free) and trained and _number(engine, "--gpu-memory-utilization", WHOLE) >= WHOLE:
        others = f"leave them {wanted} (trainer.devices '{sorted(gpus)[wanted:]}'), or " if wanted < count else ""
        raise UserError(
            f"teacher.engine: the servers on this machine take {wanted} of its {count} GPUs, and trainer.devices takes "
            f"{sorted(trained)}: {others}put --gpu-memory-utilization=0.4 or another share into "
            "teacher.engine.arguments and start the servers with it. Where CUDA_VISIBLE_DEVICES names the GPUs of this "
            "command, nothing is refused"
        )
    return {
        url: sorted({gpus[place % count] for place in range(number * each, (number + 1) * each) if count})
        for number, url in enumerate(urls)
    }


def _number(engine: EngineSettings, name: str, default: float) -> float:
    """The value of an argument of the servers."""
    found = re.search(rf"{name}[= ](\d*\.?\d+)", " ".join(engine.arguments))
    return float(found[1]) if found else default
