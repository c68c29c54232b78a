"""Which GPUs of a machine the target's servers take, beside those that train."""

import math
import re
from collections.abc import Collection, Sequence

from decode.errors import UserError
from distill.config.teacher import EngineSettings


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
    arguments, urls = " ".join(engine.arguments), engine.local if engine.urls else [""]
    each = math.prod(map(int, re.findall(r"--(?:tensor|pipeline|data)-parallel-size[= ](\d+)", arguments)))
    part = re.search(r"--gpu-memory-utilization[= ]0?\.[0-8]", arguments)  # vLLM takes 0.92 unless it is told otherwise
    wanted, gpus = each * len(urls), [*free, *trained]
    if trained and wanted > len(free) and not part:
        devices = f"leave them {wanted} (trainer.devices '{sorted(gpus)[wanted:]}'), or " * (wanted < len(gpus))
        raise UserError(
            f"teacher.engine: the servers on this machine take {wanted} of its {len(gpus)} GPUs, and trainer.devices "
            f"takes {sorted(trained)}: {devices}put --gpu-memory-utilization=0.4 or another share into "
            "teacher.engine.arguments and start the servers with it. Where CUDA_VISIBLE_DEVICES names the GPUs of this "
            "command, nothing is refused"
        )
    places = gpus * wanted
    return {url: sorted({*places[number * each : (number + 1) * each]}) for number, url in enumerate(urls)}
