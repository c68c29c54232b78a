"""PARD (arXiv 2504.18583): a language model that learns to draft several tokens in one forward with mask tokens."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from typing_extensions import override

from decode.errors import UserError
from decode.models.huggingface import RECURRENT, RollbackCache, arguments_of, tree_refusal
from decode.models.parallel import mask_of, masked
from distill.data.dataset import Batch, Chance, Ints, label_mask, on_device
from distill.kinds.base import GROUPS, Draft, head_rows
from distill.kinds.block import lengths_of
from distill.losses.chunked import Rows
from distill.losses.divergences import TargetRows
from distill.networks.lm_head import LMHead, last_hidden
from distill.signal.target import Signal

KEPT, LEAST = 0.7, 0.2  # share of the slots that are trained against those one place before, and the least of all


def check_slots(model: PreTrainedModel) -> None:
    """Refuses a model, perhaps without weights, that cannot read the slots of many drafts behind a text.

    Raises:
        UserError: With the reason.
    """
    config = model.config.get_text_config()
    if why := RECURRENT if RollbackCache(config).recurrent else tree_refusal(config, arguments_of(model)):
        raise UserError(f"{type(model).__name__} cannot learn masked slots: {why}; set student.unroll to null")


class ParallelDraft(Draft):
    """A row for each label token, and for each further slot of drafts that begin before label tokens.

    Slot i is drawn with the probability max(0.7^i, 0.2), and only where the slots before it are (PARD's conditional
    drop), so that a step reads about three times the tokens. A draft ends before the first token that is no label.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, steps: int) -> None:
        check_slots(model)
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
        chance = chance or [np.random.default_rng(text) for text in range(len(labels))]
        return self.slots(labels, np.stack(list(map(self.lengths, labels, chance))))

    @override
    def share(self, labels: NDArray[Any], chance: np.random.Generator) -> float:
        return float(self.lengths(labels, chance).sum())

    def slots(self, labels: NDArray[Any], lengths: Ints) -> Batch:
        """The index of so many slots of the draft after each token of texts, both ``[texts, time]``.

        Returns:
            ``start`` and ``slot`` of all masked slots as `masked` takes them; of each row the place of its state in
            ``kept``, its label token ``at`` and its ``step``.
        """
        texts, time = labels.shape
        step, text, begin = np.nonzero(np.arange(self.steps)[:, None, None] < lengths)  # in the order of the steps
        behind, place = step > 0, begin.copy()  # place of each row's state in its text
        for each in range(texts):
            mine = behind & (text == each)
            place[mine] = np.arange(time, time + mine.sum())
        width = max(time, place.max(initial=0) + 1)
        start, slot = np.full((2, texts, width - time), [[[-1]], [[1]]])
        start[text[behind], place[behind] - time], slot[text[behind], place[behind] - time] = (
            begin[behind],
            step[behind],
        )
        number = (
            label_mask(torch.from_numpy(labels)).flatten().cumsum(0).numpy() - 1
        )  # of each label token in the batch
        values = {"start": start, "slot": slot, "kept": text * width + place, "step": step}
        values["at"] = number[text * time + begin + step]
        groups = np.bincount(step, minlength=self.steps).tolist()
        return {GROUPS: groups} | {name: torch.from_numpy(value) for name, value in values.items()}

    @override
    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        return self._rows(batch, signal.rows(batch)[0])

    @override
    def every_row(self, batch: Batch, signal: Signal) -> Iterator[Rows]:
        """All slots of the drafts before every label token, in parts of about twice the tokens."""
        labels, target = batch["labels"].cpu().numpy(), signal.rows(batch)[0]
        lengths = np.stack([lengths_of(row, self.steps) for row in labels])
        for part in range(self.steps):
            some = np.where(np.arange(labels.shape[1]) % self.steps == part, lengths, 0)
            yield self._rows(batch | on_device(self.slots(labels, some), batch["labels"].device), target)

    def _rows(self, batch: Batch, target: TargetRows) -> Rows:
        at, step = batch["at"], batch["step"]
        with masked(batch["input_ids"], batch["start"], batch["slot"], mask_of(self.model)) as inputs:
            hidden = last_hidden(self.model, places=batch["kept"], **inputs)
        weight = torch.ones_like(step, dtype=torch.float32)
        return head_rows(hidden, LMHead(self.model), target, batch, len(step), at, step, weight)
