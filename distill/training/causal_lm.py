"""Next-token training as a Lightning module: targets, with LayerSkip's recipe if wanted, and initial drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from distill.data.token_dataset import Batch
from distill.losses.rows import next_token_loss
from distill.models.layerskip import LayerSkip
from distill.training.base_module import TrainingModule


class CausalLMModule(TrainingModule):
    """Next-token training of targets and initial drafts; the best checkpoint has the smallest validation loss.

    Attributes:
        layerskip: LayerSkip's recipe, where the model is trained with it.
    """

    layerskip: LayerSkip | None = None

    def learn(self, batch: Batch) -> Tensor:
        """Mean cross-entropy over the batch's labels, under LayerSkip together with that of the early exits."""
        skip = self.layerskip
        if skip is not None:
            skip.begin(self.global_step)
        logits, mask = self.rows(batch)
        labels = batch["labels"].roll(-1, 1)[mask]
        loss = next_token_loss(logits, labels)
        weight = batch["step"].weight if "step" in batch else 1.0
        if skip is None:
            self.report(loss)
            return loss * weight
        total = skip.combine(loss, lambda rows: next_token_loss(self._head[0](rows), labels), mask)
        self.report(total, last_layer_loss=loss.detach())
        return total * weight

    def judge(self, batch: Batch) -> None:
        """Adds up loss and top-1 hits."""
        logits, mask = self.rows(batch)
        labels = batch["labels"].roll(-1, 1)[mask]
        count = torch.tensor(float(len(labels)), device=self.device)
        self.add(next_token_loss(logits, labels) * count, (logits.argmax(-1) == labels).sum(), count)

    def on_validation_epoch_end(self) -> None:
        """Publishes loss and next-token accuracy."""
        loss, accuracy = self.totals()
        self.publish(loss=loss, accuracy=accuracy)
