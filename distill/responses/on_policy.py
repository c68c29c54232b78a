"""Texts that the draft writes itself, buffered: every so many steps it answers the prompts of the coming ones.

Which examples of a step are the draft's own, what chance each text has and when it is written are functions of (seed,
step). The texts themselves depend on the weights of the moment they were written, so they go into the checkpoints:
a continued run trains on the same ones.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.loop import Target, decode
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
from distill.data.batches import Picks, Schedule, TokenDataset
from distill.responses.store import response_rows


class Writer(Protocol):
    """Continues prompts with the draft's weights of the moment, as `decode.models.writing.write_texts`."""

    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        warp: LogitsWarper,
        *,
        budgets: int | Sequence[int],
        stop_ids: Collection[int],
        draws: Draws,
        batch_size: int | None = None,
    ) -> list[list[int]]:
        """The continuations, in the order of the prompts."""
        ...


Place = tuple[int, int]  # a step, and the place of an example in it


@dataclass
class OnPolicy:
    """The draft's own texts for the steps that want them."""

    write: Writer  # Writes texts with the draft in training
    prompts: TokenDataset  # The examples whose prompts are answered
    schedule: Schedule  # Which of them make a step
    steps: int  # Optimiser steps in all
    settings: ResponseSettings  # Sampling, share, and how often it is refreshed
    seed: int  # Chance of the choice and of the texts
    limit: int  # Longest prompt and response together
    stop_ids: Collection[int]  # End-of-text tokens
    add_signals: Callable[[TokenDataset], None]  # Puts what frozen models say of the texts into their rows
    label_tokens: int = 0  # Labels of the steps so far, over all ranks
    _window: int = -1
    _texts: list[list[list[int]]] = field(default_factory=list)  # by rank
    _rows: list[TokenDataset] = field(default_factory=list)  # by rank, made from the texts

    def __call__(self, step: int, picks: Picks) -> Picks:
        """The examples of a step, those that are the draft's replaced by what it wrote for their prompts."""
        window = step // self.settings.refresh_every
        places = self._places(window)
        if window != self._window:
            self._texts = self._write(places)
            self._window, self._rows = window, []
        if not self._rows:
            self._rows = self._make_rows(places)
        number = {place: i for own in places for i, place in enumerate(own)}
        found = list(picks)
        for at in range(len(found)):
            if (step, at) in number:
                rows = self._rows[at % ranks.world()]
                found[at] = rows, number[step, at] % len(rows)
        self.label_tokens += sum(rows.labels_of(np.array([i])) for rows, i in found)
        return found

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of this."""
        return {"window": self._window, "texts": self._texts, "label_tokens": self.label_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes it back.

        Raises:
            UserError: it was written by another number of processes.
        """
        if state["texts"] and len(state["texts"]) != ranks.world():
            raise UserError(
                f"the checkpoint holds texts of {len(state['texts'])} processes and this run has {ranks.world()}: "
                "continue with as many, or remove the stage's folder under work/ to start the stage again"
            )
        self._window, self._texts, self._rows = state["window"], state["texts"], []
        self.label_tokens = state["label_tokens"]

    def _places(self, window: int) -> list[list[Place]]:
        """The places that the draft's texts take until the next refresh, by the rank that trains on them."""
        every, world = self.settings.refresh_every, ranks.world()
        found: list[list[Place]] = [[] for _ in range(world)]
        for step in range(window * every, min(self.steps, (window + 1) * every)):
            coins = np.random.default_rng([self.seed, 3, step]).random(self.schedule.batch_size)
            for at in np.flatnonzero(coins < self.settings.from_draft).tolist():
                found[at % world].append((step, at))
        return found

    def _chosen(self, places: list[Place]) -> list[int]:
        """The examples whose prompts are answered for these places, `buffer` at most over all ranks."""
        room = self.settings.buffer
        count = len(places) if room is None else min(len(places), max(1, room // ranks.world()))
        return [int(self.schedule.batch(step)[at]) for step, at in places[:count]]

    def _write(self, places: list[list[Place]]) -> list[list[list[int]]]:
        """This rank's texts, exchanged with those of the others."""
        own = places[ranks.rank()]
        prompts = [self.prompts.prompt(example) for example in self._chosen(own)]
        budgets = [min(self.settings.max_new_tokens, self.limit - len(prompt)) for prompt in prompts]
        warp = LogitsWarper(self.settings.temperature, top_p=self.settings.top_p)
        with torch.random.fork_rng(devices=[]):
            texts = self.write(
                prompts,
                warp,
                budgets=budgets,
                stop_ids=self.stop_ids,
                draws=lambda i, count: uniform_draws(self.seed, 4, *own[i], count=count),
                batch_size=self.settings.batch_size,
            )
        return ranks.exchange(texts)

    def _make_rows(self, places: list[list[Place]]) -> list[TokenDataset]:
        """Rows of every rank's texts; signals for this one's."""
        made = []
        for own, texts in zip(places, self._texts):
            prompts = [self.prompts.prompt(example) for example in self._chosen(own)]
            rows = response_rows(prompts, texts, self.stop_ids)
            made.append(rows if self.prompts.prompt_lengths is None else rows.all_labelled())  # prompt_loss
        self.add_signals(made[ranks.rank()])
        return made


@dataclass
class TakeAll(AcceptanceRule):
    """Every drafted token is kept, whatever the target says."""

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, raw: Any = None) -> Tensor:
        """1 of every token."""
        return torch.ones_like(x, dtype=p.dtype)


@dataclass
class HeadTexts:
    """Writes with a head in training: ``depth`` drafted tokens, the target's next one, and so on.

    These are the texts that decoding visits while the head is drafting. The target reads them for its features.
    """

    head: FeatureHead  # with the weights of the moment
    target: PreTrainedModel  # the model whose features it reads
    depth: int  # tokens of a draft

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        warp: LogitsWarper,
        *,
        budgets: int | Sequence[int],
        stop_ids: Collection[int],
        draws: Draws,
        batch_size: int | None = None,
    ) -> list[list[int]]:
        """See `distill.responses.on_policy.Writer`; one text at a time."""
        limits = [budgets] * len(prompts) if isinstance(budgets, int) else list(budgets)
        runner, drafter = open_runner(self.target), HeadRunner(self.head, self.target)
        options = MethodOptions(draft_length=self.depth)
        texts: list[list[int]] = []
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if limit < 1:
                texts.append([])
                continue
            system = build("eagle", MethodInputs(runner, warp, drafter, options=options))
            system.rule = TakeAll()
            rng = TorchRng(int(draws(number, 1)[0] * 2**53))
            made = decode(Target(runner), system, warp, list(prompt), max_new_tokens=limit, stop_ids=stop_ids, rng=rng)
            texts.append(made.ids[len(prompt) :] if made.ids[: len(prompt)] == list(prompt) else made.ids)
        return texts
