"""PARD (arXiv 2504.18583): a language model that learns to draft several tokens in one forward with mask tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.models.huggingface import RECURRENT, RollbackCache, arguments_of, mask_of, masked, slots_of, tree_refusal
from distill.data.dataset import PLACES, Batch, Chance, Ints, label_mask, on_device
from distill.kinds.base import GROUPS, Draft, head_rows
from distill.kinds.block import lengths_of
from distill.losses.chunked import Rows
from distill.losses.divergences import TargetRows
from distill.networks.lm_head import LMHead, last_hidden
from distill.signal.target import Signal

KEPT, LEAST = 0.7, 0.2  # share of the slots that are trained against those one place before, and the least of all


class ParallelDraft(Draft):
    """A row for each label token, and for each further slot of drafts that begin before label tokens.

    Slot i is drawn with the probability max(0.7^i, 0.2), and only where the slots before it are (PARD's conditional
    drop), so that a step reads about three times the tokens. A draft ends before the first token that is no label.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, steps: int) -> None:
        config = model.config.get_text_config()
        if why := RECURRENT if RollbackCache(config).recurrent else tree_refusal(config, arguments_of(model)):
            raise UserError(f"{type(model).__name__} cannot learn masked slots: {why}; set student.unroll to null")
        super().__init__(model, steps, steps)
        self.shares = np.maximum(KEPT ** np.arange(1, steps), LEAST)

    def lengths(self, labels: NDArray[Any], chance: np.random.Generator) -> Ints:
        """How many slots of the draft after each token of a text are rows, ``[time]``."""
        most = 1 + (chance.random(len(labels))[:, None] < self.shares).sum(1)
        return np.minimum(lengths_of(labels, self.steps), most)

    @override
    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        """In validation the same slots are drawn each time."""
        labels = batch["labels"].numpy()
        chance = chance or [np.random.default_rng(0) for _ in labels]
        return self.slots(labels, np.stack(list(map(self.lengths, labels, chance))))

    def slots(self, labels: NDArray[Any], lengths: Ints) -> Batch:
        """The index of so many slots of the draft after each token of texts, both ``[texts, time]``."""
        begin, place, kept = slots_of(torch.from_numpy(lengths))
        number = label_mask(torch.from_numpy(labels)).flatten().cumsum(0) - 1  # of each label token in the batch
        step, time = place.flatten()[kept], labels.shape[1]
        at = number[kept // begin.shape[1] * time + begin.flatten()[kept] + step]
        index = {"begin": begin, "place": place, "kept": kept, "step": step, "at": at}
        return index | {GROUPS: step.bincount(minlength=self.steps).tolist()}

    @override
    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        return self._rows(batch, signal.rows(batch)[0], signal.ids)

    @override
    def every_row(self, batch: Batch, signal: Signal) -> Iterator[Rows]:
        """All slots of the drafts before every label token, in parts of about twice the tokens."""
        labels, target = batch["labels"].cpu().numpy(), signal.rows(batch)[0]
        lengths = np.stack([lengths_of(row, self.steps) for row in labels])
        for part in range(self.steps):
            index = self.slots(labels, lengths * (np.arange(labels.shape[1]) % self.steps == part))
            yield self._rows(batch | on_device(index, batch["labels"].device), target, signal.ids)

    def _rows(self, batch: Batch, target: TargetRows, ids: Tensor | None) -> Rows:
        at, step = batch["at"], batch["step"]
        with masked(batch["input_ids"], batch["begin"], batch["place"], mask_of(self.model)) as inputs:
            hidden = last_hidden(self.model, places=batch["kept"], **inputs)
        weight = torch.ones_like(step, dtype=torch.float32)
        return head_rows(hidden, LMHead(self.model).only(ids), target, batch, len(batch[PLACES]), at, step, weight)
