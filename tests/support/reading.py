"""One sequence of a runner, read step by step, or of a drafter."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.runner import Output, Runner
from decode.models.writing import Draws, uniform_draws
from decode.sampling import Rng, TorchRng
from decode.stopping import StopRule


class Reader:
    """A runner with the cache of one sequence."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.cache = runner, runner.new_cache()
        self.out = Output(torch.empty(0), torch.empty(0))

    @property
    def length(self) -> int:
        return self.cache.length

    def read(self, tokens: Tensor | list[int], tree: Draft | None = None, head: int | None = None, **how) -> Tensor:  # type: ignore[no-untyped-def]
        with torch.inference_mode():
            self.out = self.runner.forward([self.cache], [torch.as_tensor(tokens)], [tree], last=head, **how)
        return self.out.logits

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)


class Drafting:
    """A drafter with its state of one sequence."""

    def __init__(self, drafter: Drafter, ids: list[int], **prompt) -> None:  # type: ignore[no-untyped-def]
        self.drafter, self.state = drafter, drafter.start(Prompt(ids, **prompt))

    def propose(
        self, ids: list[int], stop: StopRule | None = None, max_depth: int = 100, rng: Rng | None = None
    ) -> Draft:
        stop = stop or StopRule(100)
        stop.begin()
        return self.drafter.propose([DraftRequest(self.state, ids, stop, max_depth, rng or TorchRng(0))])[0]


def draws_named(seed: int) -> Draws:
    """Draws of text i named by (seed, i)."""
    return lambda text, count: uniform_draws(seed, text, count=count)
