"""One sequence of a runner, read step by step, or of a drafter."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Drafts
from decode.core.round import Round
from decode.core.sampling import History, LogitsWarper, TorchRng
from decode.core.stop import StopRule
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.loop import Method, Text, run
from decode.models import api
from decode.models.api import Model, Out, Read
from decode.models.heads.runner import in_target
from decode.writing import Draws, uniform_draws


class Reader:
    """A runner with the cache of one sequence."""

    def __init__(self, runner: Model) -> None:
        self.runner, self.cache = runner, runner.new_cache()
        self.out = Out(torch.empty(0), torch.empty(0))

    @property
    def length(self) -> int:
        return self.cache.length

    def read(self, tokens: Tensor | list[int], tree: Draft | None = None, head: int | None = None, **how) -> Tensor:  # type: ignore[no-untyped-def]
        with torch.inference_mode():
            self.out = self.runner.forward([Read(self.cache, torch.as_tensor(tokens), tree)], last=head, **how)
        ids = self.runner.columns
        return self.out.logits if ids is None else in_target(self.out.logits, ids, self.runner.vocab_size)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)


class Drafting:
    """A drafter with its state of one sequence."""

    def __init__(self, drafter: Drafter, ids: list[int], captured: Tensor | None = None, **prompt) -> None:  # type: ignore[no-untyped-def]
        begun = Prompt(ids, **prompt)
        self.drafter, self.state = drafter, drafter.start(begun)
        for piece in () if captured is None else captured.split(api.PIECE):
            drafter.feed(self.state, begun, piece)

    def request(self, ids: list[int], stop: StopRule | None = None, max_depth: int = 100) -> DraftRequest:
        return DraftRequest(self.state, ids, stop or StopRule(100), max_depth, TorchRng(0), History(ids))

    def propose(self, ids: list[int], stop: StopRule | None = None, max_depth: int = 100) -> Draft:
        return on_host(self.drafter.propose([self.request(ids, stop, max_depth)], torch.device("cpu")))[0]

    def update(self, ids: list[int], round: Round, out: Out) -> None:
        rows = [0, *(node + 1 for node in round.path)]
        self.drafter.update([self.request(ids)], [round], out, [rows])


def watched(drafter: Any, look: Callable[[Sequence[DraftRequest], Drafts], object]) -> Any:
    """The drafter, which shows, or hands out for a change, the drafts of every round with what they were asked for."""
    propose = drafter.propose

    def shown(requests: Sequence[DraftRequest], device: torch.device) -> Drafts:
        drafts = propose(requests, device)
        look(requests, drafts)
        return drafts

    drafter.propose = shown
    return drafter


def on_host(drafts: Drafts) -> list[Draft]:
    """The drafts of all texts."""
    return drafts.on_host(drafts.tokens.tolist())


def draws_named(seed: int) -> Draws:
    """Draws of text i named by (seed, i)."""
    return lambda text, count: uniform_draws(seed, text, count=count)


def rounds_of(target: Model, method: Method, warp: LogitsWarper, prompt: list[int], **options) -> Iterator[Round]:  # type: ignore[no-untyped-def]
    """The rounds of a text, one by one."""
    return (r for _, r in run(target, method, [Text(target, method, warp, prompt, **options)]))


def paths(draft: Draft) -> list[tuple[int, ...]]:
    """The tokens down to each node."""
    return [tuple(text_before(draft, [], node)) for node in range(len(draft))]


def text_before(draft: Draft, ids: list[int], node: int) -> list[int]:
    """The text that ends with a node of a tree (-1: with the pending token)."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, draft.ids[node])
        node = draft.parents[node]
    return ids + path
