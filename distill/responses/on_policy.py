"""Texts that the draft writes itself: every ``refresh_every`` steps it answers the prompts of the coming ones.

Which examples of a step are the draft's own, the chance of each text and when it is written are functions of (seed,
step). The texts themselves depend on the weights of the moment they were written, so they are part of the checkpoints:
a continued run trains on the same ones.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from decode.core.draft import until_end
from decode.core.sampling import LogitsWarper
from decode.options import in_turn
from decode.writing import uniform_draws
from distill import ranks
from distill.config.base import Values
from distill.config.teacher import ResponseSettings
from distill.data.chat import Ids
from distill.data.dataset import Batch, Examples, Picks, Schedule
from distill.responses.target import examples_of

Writer = Callable[..., list[Ids]]
"""Continues prompts with the draft's weights of the moment; called as `decode.writing.write_texts`."""
Place = tuple[int, int]  # a step, and the place of an example in it


@dataclass
class OnPolicy:
    """The draft's own texts for the steps that need them."""

    write: Writer  # writes texts with the draft in training
    prompts: Examples  # the examples whose prompts are answered
    schedule: Schedule  # which of them make a step
    steps: int  # optimiser steps in all
    settings: ResponseSettings  # sampling, and the steps between two rewritings
    share: float  # probability of each example to be the draft's own
    seed: int  # of the choice and of the texts
    limit: int  # longest prompt and response together
    stop_ids: Collection[int]  # end-of-text tokens
    complete: Callable[[Batch], Batch]  # adds what frozen models say of a batch
    label_tokens: int = 0  # labels of the steps so far, over all ranks
    counted: int = -1  # the last step whose labels were counted
    window: int = -1  # number of the rewriting that the texts are of
    texts: list[Ids] = field(default_factory=list)  # the draft's texts, by step and place in it
    # The examples made of the texts, by their places; None: not made yet
    rows: dict[Place, tuple[Examples, int]] | None = None

    def __call__(self, step: int, picks: Picks) -> Picks:
        """The examples of a step, those that are the draft's replaced by what it wrote for their prompts."""
        if self.rows is None or step // self.settings.refresh_every != self.window:
            self.rows = self._made(step // self.settings.refresh_every)
        replaced = [self.rows.get((step, at), pick) for at, pick in enumerate(picks)]
        if step != self.counted:  # it is asked for once for each of its micro-batches
            self.label_tokens += sum(examples.labels_of(number) for examples, number in replaced)
            self.counted = step
        return replaced

    def _made(self, window: int) -> dict[Place, tuple[Examples, int]]:
        """The examples of all steps until the next rewriting; each rank writes a part of the texts."""
        settings, places = self.settings, list[Place]()
        for step in range(window * settings.refresh_every, min(self.steps, (window + 1) * settings.refresh_every)):
            coins = np.random.default_rng([self.seed, 3, step]).random(self.schedule.batch_size)
            places += [(step, at) for at in np.flatnonzero(coins < self.share).tolist()]
        prompts = [self.prompts.prompt(int(self.schedule.batch(step)[at])) for step, at in places]
        if window != self.window:
            here, world = range(ranks.rank(), len(places), ranks.world()), ranks.world()
            with torch.random.fork_rng(devices=[]):
                texts = self.write(
                    [prompts[i] for i in here],
                    LogitsWarper(in_turn(settings.temperature, window), top_p=settings.top_p),
                    budgets=[min(settings.max_new_tokens, self.limit - len(prompts[i])) for i in here],
                    stop_ids=self.stop_ids,
                    draws=lambda i, count: uniform_draws(self.seed, 4, *places[here[i]], count=count),
                    batch_size=settings.batch_size,
                )
            parts = ranks.exchange(texts)
            self.window, self.texts = window, [parts[i % world][i // world] for i in range(len(places))]
        # one that was cut by its budget has no end-of-text token, and so none is learned
        examples = examples_of([*zip(prompts, (until_end(text, self.stop_ids) for text in self.texts))])
        return {place: (examples, number) for number, place in enumerate(places)}

    def state_dict(self) -> Values:
        """What a checkpoint holds of this."""
        return {"window": self.window, "texts": self.texts, "label_tokens": self.label_tokens}

    def load_state_dict(self, state: Values) -> None:
        """Restores it."""
        self.window, self.texts, self.label_tokens = state["window"], state["texts"], state["label_tokens"]
        self.rows = None
