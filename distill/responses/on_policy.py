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
from decode.models.choose_runner import open_runner
from decode.models.head_runner import HeadRunner
from decode.models.heads import FeatureHead
from decode.models.writing import Draws, uniform_draws
from decode.sampling import LogitsWarper, TorchRng
from decode.verify import AcceptanceRule
from distill import ranks
from distill.config.drafts import ResponseSettings
from distill.data.batches import Picks, TokenDataset
from distill.data.loader import Schedule
from distill.responses.store import response_rows

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
        add_signals: Puts the signals of frozen models into the rows of the texts.
        label_tokens: Labels of the steps so far, over all ranks.
    """

    write: Writer
    prompts: TokenDataset
    schedule: Schedule
    steps: int
    settings: ResponseSettings
    share: float
    seed: int
    limit: int
    stop_ids: Collection[int]
    add_signals: Callable[[TokenDataset], None]
    label_tokens: int = 0
    _window: int = -1
    _texts: list[list[list[int]]] = field(default_factory=list)  # by rank
    _rows: list[TokenDataset] = field(default_factory=list)  # by rank, made from the texts

    def __call__(self, step: int, picks: Picks) -> Picks:
        """The examples of a step, those that are the draft's replaced by what it wrote for their prompts."""
        window = step // self.settings.refresh_every
        places = self._places(window)
        if window != self._window or not self._rows:
            prompts = [[self.prompts.prompt(int(self.schedule.batch(s)[at])) for s, at in own] for own in places]
            if window != self._window:
                self._texts = self._write(places[ranks.rank()], prompts[ranks.rank()])
                self._window = window
            self._rows = [response_rows(asked, texts, self.stop_ids) for asked, texts in zip(prompts, self._texts)]
            self.add_signals(self._rows[ranks.rank()])
        found = list(picks)
        for rank, own in enumerate(places):
            for number, (its_step, at) in enumerate(own):
                if its_step == step:
                    found[at] = self._rows[rank], number
        self.label_tokens += sum(rows.labels_of(np.array([i])) for rows, i in found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        return {"window": self._window, "texts": self._texts, "label_tokens": self.label_tokens}

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
        self._window, self._texts, self._rows = state["window"], state["texts"], []
        self.label_tokens = state["label_tokens"]

    def _places(self, window: int) -> list[list[Place]]:
        """The places of the draft's texts until the next rewriting, by the rank that trains on them."""
        every, world = self.settings.refresh_every, ranks.world()
        found: list[list[Place]] = [[] for _ in range(world)]
        for step in range(window * every, min(self.steps, (window + 1) * every)):
            coins = np.random.default_rng([self.seed, 3, step]).random(self.schedule.batch_size)
            for at in np.flatnonzero(coins < self.share).tolist():
                found[at % world].append((step, at))
        return found

    def _write(self, places: list[Place], prompts: list[list[int]]) -> list[list[list[int]]]:
        """This rank's texts, exchanged with those of the others."""
        with torch.random.fork_rng(devices=[]):
            texts = self.write(
                prompts,
                LogitsWarper(self.settings.temperature, top_p=self.settings.top_p),
                budgets=[min(self.settings.max_new_tokens, self.limit - len(prompt)) for prompt in prompts],
                stop_ids=self.stop_ids,
                draws=lambda i, count: uniform_draws(self.seed, 4, *places[i], count=count),
                batch_size=self.settings.batch_size,
            )
        return ranks.exchange(texts)


@dataclass
class TakeAll(AcceptanceRule):
    """Accepts every drafted token."""

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, raw: Any = None) -> Tensor:
        """1 for every token."""
        return torch.ones_like(x, dtype=p.dtype)


@torch.inference_mode()
def head_texts(
    head: FeatureHead,
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

    Args:
        head: With the weights of the moment.
        target: The model whose features it reads.
        depth: Tokens of a draft.
        prompts: Token ids.
        warp: Logits to probabilities.
        budgets: Longest continuation of each prompt.
        stop_ids: End-of-text tokens.
        draws: Seeds of the texts.
        batch_size: Not used: texts are written one at a time.
    """
    runner, drafter, texts = open_runner(target), HeadRunner(head, target), list[list[int]]()
    for number, (prompt, limit) in enumerate(zip(prompts, budgets, strict=True)):
        if limit < 1:
            texts.append([])
            continue
        method = build("eagle", MethodInputs(runner, warp, drafter, options=MethodOptions(draft_length=depth)))
        method.rule = TakeAll()
        rng = TorchRng(int(draws(number, 1)[0] * 2**53))
        made = decode(runner, method, warp, list(prompt), max_new_tokens=limit, stop_ids=stop_ids, rng=rng)
        texts.append(made.ids[len(prompt) :] if made.ids[: len(prompt)] == list(prompt) else made.ids)
    return texts
