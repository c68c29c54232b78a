"""Texts that the draft writes itself: every ``refresh_every`` steps it answers the prompts of the coming ones.

Which examples of a step are the draft's own, the chance of each text and when it is written are functions of (seed,
step). The texts themselves depend on the weights of the moment they were written, so they are part of the checkpoints:
a continued run trains on the same ones.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.loop import decode
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.heads import DraftHead
from decode.models.writing import Draws, uniform_draws
from decode.sampling import LogitsWarper, TorchRng
from decode.verify import AcceptanceRule
from distill import ranks
from distill.config import ResponseSettings
from distill.data.dataset import Examples, Picks, Schedule
from distill.responses.target import response_rows

Writer = Callable[..., list[list[int]]]
"""Continues prompts with the draft's weights of the moment; called as `decode.models.writing.write_texts`."""
Place = tuple[int, int]  # a step, and the place of an example in it


@dataclass
class OnPolicy:
    """The draft's own texts for the steps that need them.

    Attributes:
        write: Writes texts with the draft in training.
        prompts: The examples whose prompts are answered.
        schedule: Which of them make a step.
        steps: Optimiser steps in all.
        settings: Sampling, and the steps between two rewritings.
        share: Probability of each example to be the draft's own.
        seed: Of the choice and of the texts.
        limit: Longest prompt and response together.
        stop_ids: End-of-text tokens.
        add_columns: Puts the columns of frozen models into the examples of the texts.
        label_tokens: Labels of the steps so far, over all ranks.
        counted: The last step whose labels were counted.
        window: Number of the rewriting that the texts are of.
        texts: The draft's texts, by rank.
        made: The window that ``rows`` are of.
        rows: The examples made of the texts, by their places.
    """

    write: Writer
    prompts: Examples
    schedule: Schedule
    steps: int
    settings: ResponseSettings
    share: float
    seed: int
    limit: int
    stop_ids: Collection[int]
    add_columns: Callable[[Examples], None]
    label_tokens: int = 0
    counted: int = -1
    window: int = -1
    texts: list[list[list[int]]] = field(default_factory=list)
    made: int = -1
    rows: dict[Place, tuple[Examples, int]] = field(default_factory=dict)

    def __call__(self, step: int, picks: Picks) -> Picks:
        """The examples of a step, those that are the draft's replaced by what it wrote for their prompts."""
        window = step // self.settings.refresh_every
        if window != self.made:
            self._make(window)
        replaced = [self.rows.get((step, at), pick) for at, pick in enumerate(picks)]
        if step != self.counted:  # it is asked for once for each of its micro-batches
            self.label_tokens += sum(examples.labels_of(number) for examples, number in replaced)
            self.counted = step
        return replaced

    def _make(self, window: int) -> None:
        """The examples of all steps until the next rewriting; each rank writes the texts that it trains on."""
        settings, every, here = self.settings, self.settings.refresh_every, ranks.rank()
        places: list[list[Place]] = [[] for _ in range(ranks.world())]
        for step in range(window * every, min(self.steps, (window + 1) * every)):
            coins = np.random.default_rng([self.seed, 3, step]).random(self.schedule.batch_size)
            for at in np.flatnonzero(coins < self.share).tolist():
                places[at % len(places)].append((step, at))
        prompts = [[self.prompts.prompt(int(self.schedule.batch(step)[at])) for step, at in part] for part in places]
        if window != self.window:
            with torch.random.fork_rng(devices=[]):
                texts = self.write(
                    prompts[here],
                    LogitsWarper(settings.temperature, top_p=settings.top_p),
                    budgets=[min(settings.max_new_tokens, self.limit - len(prompt)) for prompt in prompts[here]],
                    stop_ids=self.stop_ids,
                    draws=lambda i, count: uniform_draws(self.seed, 4, *places[here][i], count=count),
                    batch_size=settings.batch_size,
                )
            self.window, self.texts = window, ranks.exchange(texts)
        self.made, self.rows = window, {}
        for rank, part in enumerate(places):
            examples = Examples.of(response_rows(prompts[rank], self.texts[rank], self.stop_ids))
            if rank == here:
                self.add_columns(examples)
            self.rows |= {place: (examples, number) for number, place in enumerate(part)}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        return {"window": self.window, "texts": self.texts, "label_tokens": self.label_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it.

        Raises:
            UserError: It was written by another number of processes.
        """
        if state["texts"] and len(state["texts"]) != ranks.world():
            raise UserError(
                f"the checkpoint holds texts of {len(state['texts'])} processes and this run has {ranks.world()}: "
                "continue with as many, or remove the stage's folder under work/ to start the stage again"
            )
        self.window, self.texts, self.label_tokens = state["window"], state["texts"], state["label_tokens"]
        self.made = -1


@dataclass
class TakeAll(AcceptanceRule):
    """Accepts every drafted token."""

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, raw: Any = None) -> Tensor:
        """1 for every token."""
        return torch.ones_like(x, dtype=p.dtype)


@torch.inference_mode()
def head_texts(
    head: DraftHead,
    target: PreTrainedModel,
    depth: int,
    prompts: Sequence[Sequence[int]],
    warp: LogitsWarper,
    *,
    budgets: Sequence[int],
    stop_ids: Collection[int],
    draws: Draws,
    batch_size: int | None = None,
) -> list[list[int]]:
    """Writes with a head in training: ``depth`` drafted tokens, the target's next one, and so on.

    These are the texts that decoding visits while the head is drafting. The target reads them for its features.

    The arguments after ``depth``, the tokens of a draft, are those of `decode.models.writing.write_texts`; texts are
    written one at a time.
    """
    runner, drafter, texts = open_runner(target), open_draft_runner(head, target), list[list[int]]()
    for number, (prompt, limit) in enumerate(zip(prompts, budgets, strict=True)):
        if limit < 1:
            texts.append([])
            continue
        method = build(
            head.method,
            MethodInputs(runner, warp, drafter, options=MethodOptions(draft_length=depth)),
        )
        method.rule = TakeAll()
        rng = TorchRng(int(draws(number, 1)[0] * 2**53))
        made = decode(runner, method, warp, list(prompt), max_new_tokens=limit, stop_ids=stop_ids, rng=rng)
        texts.append(made.ids[len(prompt) :] if made.ids[: len(prompt)] == list(prompt) else made.ids)
    return texts
