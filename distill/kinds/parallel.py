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
from decode.models.huggingface import RECURRENT, RollbackCache, arguments_of, tree_refusal
from decode.models.parallel import mask_of, masked
from distill.data.dataset import Batch, Chance, Ints, label_mask, on_device
from distill.kinds.base import GROUPS, Draft, head_rows
from distill.kinds.block import anchors_of, lengths_of
from distill.losses.chunked import Rows
from distill.losses.divergences import TargetRows
from distill.networks.lm_head import LMHead, last_hidden
from distill.networks.models import room
from distill.signal.target import Signal

KEPT, LEAST = 0.7, 0.2  # share of the slots of each place that are trained against the one before, and the least of all
DRAFTS = 512  # drafts of a text that are continued behind their first slot, so that memory is bounded


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
    drop), so that a step costs about three times the tokens. A draft ends before the first token that is no label.
    """

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel, steps: int) -> None:
        check_slots(model)
        super().__init__(model, steps, steps)
        self.mask, self.shares = mask_of(model), np.maximum(KEPT ** np.arange(1, steps), LEAST)

    def drawn(self, labels: NDArray[Any], chance: np.random.Generator | None) -> tuple[Ints, Ints]:
        """The last token before each draft of a text, ascending, and how many slots of the draft are rows."""
        starts = anchors_of(labels, None, None)
        lengths = np.minimum(lengths_of(labels, self.steps)[starts], 1)
        some = np.searchsorted(starts, anchors_of(labels, DRAFTS, chance))
        most = np.full(len(some), self.steps)
        if chance is not None:
            most = 1 + (chance.random(len(some))[:, None] < self.shares).sum(1)
        lengths[some] = np.minimum(lengths_of(labels, self.steps)[starts[some]], most)
        return starts, lengths

    @override
    def index(self, batch: Batch, chance: Chance | None) -> Batch:
        labels = batch["labels"].numpy()
        return self.slots(labels, [self.drawn(row, chance[i] if chance else None) for i, row in enumerate(labels)])

    @override
    def share(self, labels: NDArray[Any], chance: np.random.Generator) -> float:
        return float(self.drawn(labels, chance)[1].sum())

    def slots(self, labels: NDArray[Any], drafts: list[tuple[Ints, Ints]]) -> Batch:
        """The index of rows of some drafts of each of the texts ``labels [texts, time]``.

        Returns:
            ``start`` and ``slot`` of all masked slots as `masked` takes them; of each row the place of its state in
            ``kept``, its label token ``at`` and its ``step``.
        """
        texts, time = labels.shape
        count = [int((lengths - 1).sum()) for _, lengths in drafts]
        start, slot = np.full((texts, max(count)), -1), np.ones((texts, max(count)), np.int64)
        found = [np.empty((4, 0), np.int64)]
        for text, (starts, lengths) in enumerate(drafts):
            draft, step = np.nonzero(np.arange(self.steps) < lengths[:, None])
            begin, further = starts[draft], step > 0
            start[text, : count[text]], slot[text, : count[text]] = begin[further], step[further]
            place = np.where(further, time + further.cumsum() - 1, begin)
            found.append(np.stack([np.full_like(step, text), begin + step, step, place]))
        text, position, step, place = np.concatenate(found, 1)
        order = np.argsort(step, kind="stable")
        mask = label_mask(torch.from_numpy(labels)).numpy()
        number = mask.cumsum().reshape(mask.shape) - 1  # of each label token in the batch
        rows = {"kept": text * (time + max(count)) + place, "at": number[text, position], "step": step}
        index = {name: torch.from_numpy(values[order]) for name, values in rows.items()}
        groups = np.bincount(step, minlength=self.steps).tolist()
        return index | {"start": torch.from_numpy(start), "slot": torch.from_numpy(slot), GROUPS: groups}

    @override
    def rows(self, batch: Batch, signal: Signal, *, training: bool = False) -> Rows:
        return self._rows(batch, signal.rows(batch)[0], signal.ids)

    @override
    def every_row(self, batch: Batch, signal: Signal) -> Iterator[Rows]:
        """The slots of drafts before every label token, in parts whose attention masks stay small."""
        labels, device = batch["labels"].cpu().numpy(), batch["labels"].device
        every, most = [anchors_of(row, None, None) for row in labels], 1
        while len(labels) * (labels.shape[1] + 2 * most * self.steps) ** 2 * 4 <= room(device):
            most *= 2
        target = signal.rows(batch)[0]
        for first in range(0, max(1, *map(len, every)), most):
            some = [starts[first : first + most] for starts in every]
            drafts = [(starts, lengths_of(row, self.steps)[starts]) for row, starts in zip(labels, some)]
            yield self._rows(batch | on_device(self.slots(labels, drafts), device), target, signal.ids)

    def _rows(self, batch: Batch, target: TargetRows, ids: Tensor | None) -> Rows:
        assert self.mask is not None
        at, step = batch["at"], batch["step"]
        with masked(batch["input_ids"], batch["start"], batch["slot"], self.mask) as inputs:
            hidden = last_hidden(self.model, places=batch["kept"], **inputs)
        weight = torch.ones_like(step, dtype=torch.float32)
        return head_rows(hidden, LMHead(self.model).only(ids), target, batch, len(step), at, step, weight)
