"""Measured costs, in one-token target forwards: c of a draft forward, v(n) of an n-token target forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from decode.models.other_tokenizer import ForeignRunner
from decode.models.runner import Runner, synchronize
from decode.stopping import RoundCosts, between

LONGEST = 15  # v(n) is measured for n up to LONGEST + 1
BURST = 5  # most draft forwards in a row before a target forward is timed
SETTLE, STEADY = 0.03, 8
"""Seconds of one-token target forwards before timing starts, and the number of those that are timed."""


@dataclass
class CostModel:
    """Costs of one pair on one machine, in forwards of the target over one token of each sequence."""

    cost_ratio: float  # c; 0 without a draft model
    verify_cost: dict[int, float]  # v(n) at the measured n, v(1) = 1
    overhead: float = 0.0  # o, bookkeeping of a speculative round beyond that of a plain step
    draft_overhead: float = 0.0  # bookkeeping of a drafted token
    target_seconds: float = 0.0  # median time of a one-token target forward
    draft_seconds: float = 0.0  # median time of a one-token draft forward
    context: int = 0  # tokens in the caches during the measurement
    batch: int = 1  # sequences in every forward
    step_overhead: float = 0.0  # bookkeeping of a plain step

    def v(self, n: float) -> float:
        """Cost of an n-token target forward: linear between measured points, and along the upper half beyond them."""
        widths = sorted(self.verify_cost)
        if n in self.verify_cost:
            return self.verify_cost[int(n)]
        if n <= widths[-1] or len(widths) == 1:
            return between(self.verify_cost, n)
        middle, last = widths[len(widths) // 2 - 1], widths[-1]
        return between({middle: self.verify_cost[middle], last: self.verify_cost[last]}, n)

    @property
    def plain(self) -> float:
        """Cost of a plain step, bookkeeping included."""
        return 1 + self.step_overhead

    def of_round(self, drafted: float) -> float:
        """Cost of a round with this number of drafted tokens, bookkeeping included."""
        drafting = drafted * (self.cost_ratio + self.draft_overhead)
        return drafting + self.v(drafted + 1) + self.overhead + self.step_overhead

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostModel:
        """The inverse of `to_dict`."""
        return cls(**{**content, "verify_cost": {int(n): float(v) for n, v in content["verify_cost"]}})

    def to_dict(self) -> dict[str, Any]:
        """For reports; v as a list of ``[n, v(n)]``."""
        return asdict(self) | {"verify_cost": [[n, v] for n, v in sorted(self.verify_cost.items())]}


def round_costs(costs: Iterable[CostModel]) -> RoundCosts:
    """Seconds of the parts of a round by batch size, bookkeeping included."""
    step, draft, verify = {}, {}, {}
    for cost in costs:
        unit, b = cost.target_seconds, cost.batch
        step[b] = unit * cost.plain
        draft[b] = unit * (cost.cost_ratio + cost.draft_overhead)
        verify[b] = {n: unit * (v + cost.overhead + cost.step_overhead) for n, v in cost.verify_cost.items()}
    return RoundCosts(step, draft, verify)


Texts = Any  # a runner with the caches of several sequences


class CostMeter:
    """Times the forwards of a pair in the order in which decoding runs them.

    A one-token target forward follows several others, as without a draft; draft forwards follow each other, and an
    n-token target forward follows n − 1 of them (at most `BURST`). In isolation the same forwards take between half and
    twice the time, depending on what the processor's caches hold. Turns may be spread over a benchmark, so that costs
    and speeds are measured under the same load of the machine.

    Args:
        target: the target.
        draft: the draft model, if there is one.
        widths: the n of v(n).
        context: tokens before the measured ones; fewer if a model's context is shorter.
        batch: sequences in every forward.
    """

    def __init__(
        self,
        target: Runner,
        draft: Runner | None = None,
        *,
        widths: Iterable[int] = range(1, LONGEST + 2),
        context: int = 128,
        batch: int = 1,
    ) -> None:
        self.target, self.draft, self.batch = target, draft, batch
        self.runners = [target] if draft is None or draft is target else [target, draft]
        room = min(runner.limit for runner in self.runners)
        self.widths = sorted({n for n in widths if 1 < n < room})
        longest = max([min(STEADY, room - 1), *self.widths])
        self.context = max(1, min(context, room - longest))
        generator = torch.Generator().manual_seed(0)
        if isinstance(draft, ForeignRunner):  # it drafts common tokens only, each of which is one of its own
            known = draft.vocabulary.target_ids.cpu()
        else:
            known = torch.arange(min(runner.vocab_size for runner in self.runners))
        self.tokens = known[torch.randint(len(known), (self.context + longest,), generator=generator)]
        self.plain: list[float] = []
        self.drafting: list[float] = []
        self.verifying: dict[int, list[float]] = {n: [] for n in self.widths}
        self.turns = 0

    @contextmanager
    def _filled(self) -> Iterator[tuple[Texts, Texts]]:
        """Sequences of `context` tokens in caches of target and draft (the same ones if the target drafts)."""
        opened: dict[int, Texts] = {}
        with torch.inference_mode():
            try:
                for runner in self.runners:
                    runner.reserve(rows=self.batch, capacity=len(self.tokens))
                    caches = [runner.new_cache() for _ in range(self.batch)]
                    opened[id(runner)] = runner, caches
                    for cache in caches:
                        runner.forward([cache], [self.tokens[: self.context].to(runner.device)], last=0)
                yield opened[id(self.target)], opened.get(id(self.draft))
            finally:
                for runner, caches in opened.values():
                    for cache in caches:
                        cache.close()
                    runner.reserve(rows=1)

    @torch.inference_mode()
    def _turn(self, target: Texts, draft: Texts) -> None:
        steps, settled = min(STEADY, len(self.tokens) - self.context), 0.0
        while settled < SETTLE:
            settled += sum(self._steps(target, steps))
        self.plain += self._steps(target, steps)
        for i in range(len(self.widths)):
            n = self.widths[(i + self.turns) % len(self.widths)]
            if draft:
                self.drafting += self._steps(draft, min(n - 1, BURST))
            if not draft or not self.turns:
                self._time(target, n)
                self._back(target)
            self.verifying[n].append(self._time(target, n))
            self._back(target)
        self.turns += 1

    def _steps(self, texts: Texts, count: int) -> list[float]:
        times = [self._time(texts, 1) for _ in range(count)]
        self._back(texts)
        return times

    def _back(self, texts: Texts) -> None:
        for cache in texts[1]:
            cache.truncate(self.context)

    def _time(self, texts: Texts, n: int) -> float:
        runner, caches = texts
        feed = self.tokens[caches[0].length : caches[0].length + n].to(runner.device)
        synchronize(runner.device)
        began = time.perf_counter()
        runner.forward(caches, [feed] * len(caches), last=1 if n == 1 else None)
        synchronize(runner.device)
        return time.perf_counter() - began

    def cost(self) -> CostModel:
        """Costs from the medians of all times so far."""
        one = float(np.median(self.plain))
        spent = float(np.median(self.drafting)) if self.drafting else 0.0
        verify = {1: 1.0} | {n: float(np.median(times)) / one for n, times in self.verifying.items()}
        seconds = {"target_seconds": one, "draft_seconds": spent}
        return CostModel(spent / one, verify, **seconds, context=self.context, batch=self.batch)

    def run(self, repeats: int = 21, seconds: float = 5.0, least: int | None = None) -> CostModel:
        """Up to `repeats` turns; after `least` in all (None: five, of a batch two), none begins after `seconds`."""
        began, least = time.perf_counter(), least or (5 if self.batch == 1 else 2)
        with self._filled() as texts:
            for turn in range(repeats):
                if self.turns >= least and turn and time.perf_counter() - began > seconds:
                    break
                self._turn(*texts)
        return self.cost()


class ForwardTimer:
    """Seconds inside the forwards of some runners.

    Attributes:
        seconds: of all forwards.
        prompt_seconds: of the forwards that gave no logits.
        forwards: number of forwards of the first runner that gave logits; one over several sequences counts once.
        inside: whether a forward is running.
    """

    seconds = prompt_seconds = 0.0
    forwards = 0
    inside = False


@contextmanager
def time_forwards(*runners: Runner) -> Iterator[ForwardTimer]:
    """Add up the time of all forwards, including those of early layers; the rest of a round is bookkeeping."""
    timer = ForwardTimer()
    different = list({id(r): r for r in runners}.values())

    def timed(read: Callable[..., Any], device: torch.device, first: bool) -> Callable[..., Any]:
        def call(*args: Any, **extra: Any) -> Any:
            if timer.inside:  # a forward that calls another one
                return read(*args, **extra)
            synchronize(device)
            began, timer.inside = time.perf_counter(), True
            try:
                logits = read(*args, **extra)
            finally:
                timer.inside = False
            synchronize(device)
            spent, prompt = time.perf_counter() - began, extra.get("last") == 0
            timer.seconds += spent
            timer.prompt_seconds += spent * prompt
            timer.forwards += first and not prompt
            return logits

        return call

    for runner in different:
        for name in WAYS:
            if hasattr(runner, name):
                vars(runner)[name] = timed(getattr(runner, name), runner.device, runner is different[0])
    try:
        yield timer
    finally:
        for runner in different:
            for name in WAYS:
                vars(runner).pop(name, None)


WAYS = ("forward", "forward_pairs", "forward_level")
"""Methods that are forwards."""
