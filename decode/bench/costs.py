"""Measured costs, in one-token target forwards: c of a draft forward, v(n) of an n-token target forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
        """Sequences of `context` tokens in the caches of target and draft (the same ones if the target drafts)."""
        with ExitStack() as stack, torch.inference_mode():
            opened = {id(runner): stack.enter_context(_texts(runner, self.batch)) for runner in self.runners}
            for text in (text for texts in opened.values() for text in texts):
                text.truncate(0)
                text.reserve(len(self.tokens))
                text.read(self.tokens[: self.context].to(text.device), head=0)
                stack.callback(text.truncate, 0)
            yield opened[id(self.target)], opened.get(id(self.draft), [])

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
        for text in texts:
            text.truncate(self.context)

    def _time(self, texts: Texts, n: int) -> float:
        first = texts[0]
        feed = self.tokens[first.length : first.length + n].to(first.device).repeat(len(texts))
        synchronize(first.device)
        began = time.perf_counter()
        if len(texts) == 1:
            first.read(feed, head=1 if n == 1 else None)
        else:
            first.read_texts(texts, feed, [n] * len(texts), last_only=n == 1)
        synchronize(first.device)
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


Texts = Sequence[Runner]  # one runner for each sequence


@contextmanager
def _texts(runner: Runner, count: int) -> Iterator[Texts]:
    """Sequences that the runner reads together; a single one uses the runner's own cache."""
    forks: list[Runner] = [] if count == 1 else runner.fork(count)
    try:
        yield forks or [runner]
    finally:
        for fork in reversed(forks):
            fork.close()


class ForwardTimer:
    """Seconds inside the forwards of some runners and their forks.

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

    def timed(read: Callable[..., torch.Tensor], device: torch.device, first: bool) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **extra: Any) -> torch.Tensor:
            if timer.inside:  # a forward over several sequences that calls those of each
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
