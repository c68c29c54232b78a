"""Next-token training as a Lightning module: targets, with LayerSkip's recipe if wanted, and initial drafts."""

from contextlib import nullcontext

import torch
from torch import Tensor

from distill.data.batches.token_dataset import Batch
from distill.losses.next_token import next_token_hits, next_token_loss
from distill.models.layerskip import LayerSkip
from distill.models.progressive_stacking import ProgressiveStacking
from distill.training.lightning_module import TrainingModule


class CausalLMModule(TrainingModule):
    """Next-token training; the best checkpoint has the smallest validation loss.

    Under LayerSkip that is the recipe's, over some exits and the last layer: of a model that is trained already, the
    last layer's own loss is the smallest where the exits have learned least.
    """

    stacking: ProgressiveStacking | None = None  # where the first layers are trained alone for a while
    _layerskip: LayerSkip | None = None

    @property
    def layerskip(self) -> LayerSkip | None:
        """LayerSkip's recipe, where the model is trained with it."""
        return self._layerskip

    @layerskip.setter
    def layerskip(self, recipe: LayerSkip) -> None:
        self._layerskip, self.monitor = recipe, "validation_recipe_loss"

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The loss to train on, that of the last layer alone, and how many labels are the most probable token.

        The first is the mean cross-entropy over the batch's labels; under LayerSkip together with that of the early
        exits. The last is counted in evaluation only.
        """
        hidden, mask = self.hidden(batch)
        head, labels = self._head[0], batch["labels"].roll(-1, 1)[mask]
        loss = next_token_loss(hidden, head, labels)
        total, hits = loss, labels.new_zeros(()) if self.training else next_token_hits(hidden, head, labels)
        if self.layerskip is not None:
            total = self.layerskip.combine(loss, lambda rows: next_token_loss(rows, head, labels), mask)
        return total, loss, hits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The batch's loss, weighted by its share of the step's labels."""
        step = self.global_step
        with nullcontext() if self.stacking is None else self.stacking.training(step) as layers:
            if self.layerskip is not None:
                self.layerskip.begin(step, layers)
            total, last, _ = self(batch)
        self.log_step(total, **({} if self.layerskip is None else {"last_layer_loss": last.detach()}))
        weighted: Tensor = total * batch["step"].weight if "step" in batch else total
        return weighted

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up losses and top-1 hits."""
        if self.layerskip is not None:
            self.layerskip.watch()
        total, loss, hits = self(batch)
        count = torch.tensor(float((batch["labels"][:, 1:] != -100).sum()), device=self.device)
        recipe = [total * count] * (self.layerskip is not None)
        self.add_sums(loss * count, hits, *recipe, count)

    def on_validation_epoch_end(self) -> None:
        """Logs loss and next-token accuracy, under LayerSkip the recipe's loss too."""
        self.log_means("loss", "accuracy", *["recipe_loss"] * (self.layerskip is not None))
