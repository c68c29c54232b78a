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
from decode.stopping import RoundCosts

LONGEST = 15  # draft lengths are compared up to here: v is measured for 1 to 16 tokens
BURST = 5  # most draft forwards in a row before a target forward is timed
SETTLE, STEADY = 0.03, 8
"""Seconds of one-token target forwards until the processor has settled, and how many are timed then."""


@dataclass
class CostModel:
    """Costs of one pair on one machine."""

    cost_ratio: float  # c; 0 without a draft model
    verify_cost: dict[int, float]  # v(n) at the measured n, v(1) = 1
    overhead: float = 0.0  # o, bookkeeping of a round beyond that of a plain step, in one-token target forwards
    draft_overhead: float = 0.0  # bookkeeping of a drafted token, in the same unit; it adds to c
    target_seconds: float = 0.0  # median time of a one-token target forward
    draft_seconds: float = 0.0  # median time of a one-token draft forward
    context: int = 0  # tokens in the caches while measuring
    batch: int = 1  # texts in every forward, each with n tokens in the target's; a forward of this many is the unit
    step_overhead: float = 0.0  # bookkeeping of a plain step, in the same unit

    def v(self, n: float) -> float:
        """The cost of an n-token target forward; linear between measured points, and beyond the last one."""
        widths = sorted(self.verify_cost)
        if n in self.verify_cost:
            return self.verify_cost[int(n)]
        if len(widths) == 1:
            return self.verify_cost[widths[0]]
        high = next((i for i, w in enumerate(widths) if w > n), None)
        left, right = (widths[len(widths) // 2 - 1], widths[-1]) if high is None else (widths[high - 1], widths[high])
        a, b = self.verify_cost[left], self.verify_cost[right]
        return a + (b - a) * (n - left) / (right - left)

    def of_round(self, drafted: float) -> float:
        """The cost of a round that drafts so many tokens, bookkeeping included."""
        return drafted * (self.cost_ratio + self.draft_overhead) + self.v(drafted + 1) + self.overhead

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostModel:
        """From a report's `to_dict`."""
        return cls(**{**content, "verify_cost": {int(n): float(v) for n, v in content["verify_cost"]}})

    def to_dict(self) -> dict[str, Any]:
        """For reports; v as a list of ``[n, v(n)]``."""
        return asdict(self) | {"verify_cost": [[n, v] for n, v in sorted(self.verify_cost.items())]}


def round_costs(costs: Iterable[CostModel]) -> RoundCosts:
    """Seconds of the parts of a round by batch size, bookkeeping included."""
    step, draft, verify = {}, {}, {}
    for cost in costs:
        unit, b = cost.target_seconds, cost.batch
        step[b] = unit * (1 + cost.step_overhead)
        draft[b] = unit * (cost.cost_ratio + cost.draft_overhead)
        verify[b] = {n: unit * (v + cost.overhead + cost.step_overhead) for n, v in cost.verify_cost.items()}
    return RoundCosts(step, draft, verify)


class CostMeter:
    """Forwards of a pair, timed in the order in which decoding runs them.

    A one-token target forward follows several others, as without a draft; the draft's follow each other, and an n-token
    target forward follows n − 1 of them (at most `BURST`). Timed apart from each other the same forwards take up to
    twice as long or half as long, for what the caches of the processor hold. Turns may be spread over a benchmark, so
    that costs and speeds are measured under the same load of the machine.

    Args:
        target: the target.
        draft: the draft model, if there is one.
        widths: the n of v(n).
        context: tokens before the measured ones; less where a model's context is shorter.
        batch: texts in every forward; more than one are read for a whole `run`, not for a `turn`.
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

    def turn(self) -> None:
        """Time every forward once more; the caches are empty afterwards."""
        with self._filled() as (target, draft):
            self._turn(target, draft)

    @contextmanager
    def _filled(self) -> Iterator[tuple[Texts, Texts]]:
        """Texts of `context` tokens on caches of target and draft; the same ones where the target drafts."""
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

    def _back(self, texts: Texts) -> None:
        for text in texts:
            text.truncate(self.context)

    def _steps(self, texts: Texts, count: int) -> list[float]:
        times = [self._time(texts, 1) for _ in range(count)]
        self._back(texts)
        return times

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

    def cost(self, share: float = 0.5) -> CostModel:
        """Costs from the median of all times so far, or from another quantile of them.

        Other work on the machine makes single forwards slower, the long ones most; a lower quantile sees less of it.
        """
        one = float(np.quantile(self.plain, share))
        spent = float(np.quantile(self.drafting, share)) if self.drafting else 0.0
        verify = {1: 1.0} | {n: float(np.quantile(times, share)) / one for n, times in self.verifying.items()}
        seconds = {"target_seconds": one, "draft_seconds": spent}
        return CostModel(spent / one, verify, **seconds, context=self.context, batch=self.batch)

    def run(self, repeats: int = 21, seconds: float = 5.0, least: int | None = None) -> CostModel:
        """Up to `repeats` turns; after `least` in all (None: five, of a batch two), none begins after `seconds`."""
        began, least = time.perf_counter(), least or (5 if self.batch == 1 else 2)
        with ExitStack() as stack:
            texts = stack.enter_context(self._filled()) if self.batch > 1 else None
            for turn in range(repeats):
                if self.turns >= least and turn and time.perf_counter() - began > seconds:
                    break
                self.turn() if texts is None else self._turn(*texts)
        return self.cost()


Texts = Sequence[Runner]  # a runner of each text


@contextmanager
def _texts(runner: Runner, count: int) -> Iterator[Texts]:
    """Texts that the runner reads together; a single one on its own cache."""
    forks: list[Runner] = [] if count == 1 else runner.fork(count)
    try:
        yield forks or [runner]
    finally:
        for fork in reversed(forks):
            fork.close()


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
