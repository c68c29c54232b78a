"""Many prompts decoded together by the loop: each has parts of its own, and a finished text makes room for another."""

import copy
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from decode.core.drafter_base import Drafter
from decode.core.errors import UserError
from decode.core.rng import Rng
from decode.core.runner_protocol import Runner
from decode.core.sampling import Warp
from decode.core.system import System
from decode.core.target import Target
from decode.core.trace_metrics import Trace
from decode.loop import Output, Text, check_prompt, round_of
from decode.models.free_memory import rows_that_fit

Place = tuple[Runner, Drafter]  # caches and drafter of one text at a time


@torch.inference_mode()
def decode_texts(
    target: Target,
    system: System,
    warp: Warp,
    prompts: Sequence[list[int]],
    *,
    rngs: Sequence[Rng],
    batch_size: int | None = None,
    max_new_tokens: int = 128,
    finished: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Output]:
    """Decode many prompts, at most `batch_size` at once.

    Every text begins with what the system has learned so far and keeps what it learns to itself, so that it depends on
    its prompt and its `Rng` alone, not on its neighbours (in exact arithmetic; rounding may decide ties otherwise).
    With `System.lengths` all texts share what was learned of acceptances: exact rules stay exact, but a sampled text
    then depends on its neighbours.

    Args:
        target: the model to decode from.
        system: the method; it learns nothing.
        warp: logits to probabilities.
        prompts: token ids.
        rngs: of each text.
        batch_size: texts at once; None: all. Where memory does not hold so many, fewer are taken, with a warning.
        max_new_tokens: see `Text`.
        finished: called with the number of each text that has ended.
        options: see `Text`.

    Returns:
        The texts in the order of the prompts; one that cannot be decoded has an `error` and no new token.

    Raises:
        UserError: a model or method that serves one text at a time, or logits of NaN or +inf.
    """
    outputs = [Output(list(prompt), len(prompt), Trace()) for prompt in prompts]
    waiting: deque[int] = deque()
    for i, output in enumerate(outputs):
        try:
            check_prompt(target, prompts[i], max_new_tokens)
            waiting.append(i)
        except UserError as error:
            output.error = error
    rows = _rows(target, system, [len(prompts[i]) + max_new_tokens for i in waiting], batch_size)
    live: list[tuple[int, Text, Place]] = []
    with places(target, system, rows) as free:
        while waiting or live:
            while free and waiting:
                i, place = waiting.popleft(), free.pop()
                own, trace = system_for_one_text(system, place[1]), outputs[i].trace
                text = Text(
                    Target(place[0]), own, warp, prompts[i],
                    max_new_tokens=max_new_tokens, rng=rngs[i], trace=trace, **options,
                )  # fmt: skip
                began = time.perf_counter()
                text.start()
                trace.total_seconds += time.perf_counter() - began
                live.append((i, text, place))
            while free:  # nobody waits for them, and neighbouring rows attend together
                for part in free.pop():
                    part.close()
            live.sort(key=lambda one: one[2][0].row)
            going = []
            for (i, text, place), (_, new) in zip(live, round_of([text for _, text, _ in live])):
                outputs[i].ids += new
                if not text.done:
                    going.append((i, text, place))
                    continue
                free.append(place)
                if finished is not None:
                    finished(i)
            live = going
    return outputs


@contextmanager
def places(target: Target, system: System, count: int) -> Iterator[list[Place]]:
    """Caches and drafters for `count` texts; a single one uses the caches that are there."""
    runners: Sequence[Runner] = [target.runner] if count == 1 else target.runner.fork(count)
    drafters: Sequence[Drafter] = []
    try:
        drafters = system.drafter.fork(runners)
        yield list(zip(runners, drafters))
    finally:
        parts: list[Runner | Drafter] = [*runners, *drafters] if count > 1 else []
        for part in reversed(parts):
            part.close()


def _rows(target: Target, system: System, lengths: Sequence[int], batch_size: int | None) -> int:
    """How many texts of these lengths to decode at once."""
    runner = target.runner
    bytes_per_token = runner.cache_bytes_per_token + system.drafter.cache_bytes_per_token
    return rows_that_fit(runner.device, bytes_per_token, [min(n, runner.limit) for n in lengths], batch_size)


def system_for_one_text(system: System, drafter: Drafter) -> System:
    """The method with parts that a text may change: copies of what they have learned."""
    stop = copy.copy(system.stop)
    stop.threshold = copy.deepcopy(stop.threshold)
    return replace(system, drafter=drafter, stop=stop, rule=copy.deepcopy(system.rule))
