"""Training of a feature head as a Lightning module: feature regression and soft cross-entropy, over drafting steps."""

from __future__ import annotations

import torch
from torch import Tensor

from decode.models.eagle.head import FeatureHead
from distill.config.eagle import EagleSettings
from distill.config.trainer import TrainingSettings
from distill.data.token_dataset import Batch
from distill.eagle.drafting_steps import StepRows, drafting_steps
from distill.eagle.features import REFERENCE, FeatureSource
from distill.losses.token_selection import Selection
from distill.training.base_module import TrainingModule


class EagleModule(TrainingModule):
    """EAGLE; with a selection, EAGLE + AdaSPEC. The best checkpoint has the largest validation alpha.

    The selection ranks by ΔL = CE(p, q) − CE(p, r) at each drafting step, and applies to the cross-entropy; the
    feature regression stays on all label tokens.

    Args:
        model: the head.
        source: the target.
        settings: weights of the losses.
        selection: AdaSPEC's token selection, for which batches carry the reference's losses.

    """

    monitor = "validation_alpha"
    mode = "max"
    model: FeatureHead

    def __init__(
        self,
        model: FeatureHead,
        training: TrainingSettings,
        steps: int,
        *,
        source: FeatureSource,
        settings: EagleSettings,
        selection: Selection | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(model, training, steps, seed=seed)
        self.source, self.settings, self.selection = source, settings, selection
        if selection is not None:
            self.selected = torch.zeros(int(model.config.vocab_size), dtype=torch.long)

    def setup(self, stage: str) -> None:
        """Moves the frozen target to this rank's device: before the first validation."""
        self.source.to(self.trainer.strategy.root_device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Σ over drafting steps of decayⁱ · (feature weight · regression + cross-entropy weight · selected CE)."""
        settings = self.settings
        noise = settings.noise if self.model.version == 1 else 0.0
        total = alpha = torch.zeros((), device=self.device)
        for step, found in enumerate(drafting_steps(self.model, self.source, batch, settings.steps, noise)):
            loss = self._cross_entropy(found, batch, step)
            if found.regression is not None:
                regression = found.regression.sum() / max(1, len(found.regression))
                loss = settings.ce_weight * loss + settings.feature_weight * regression
            total = total + settings.decay**step * loss
            alpha = found.alpha.mean() if not step else alpha
        self.log_step(total, alpha=alpha)
        return total * batch["step"].weight if "step" in batch else total

    def _cross_entropy(self, found: StepRows, batch: Batch, step: int) -> Tensor:
        """The cross-entropy of a drafting step over the tokens that count."""
        rows = found.learnable.nonzero()[:, 0]
        losses = found.cross_entropy[rows]
        if self.selection is None:
            return losses.sum() / max(1, len(losses))
        reference = batch[REFERENCE][..., step][found.place][rows]
        sequence = found.place.nonzero()[:, 0][rows]
        chosen = self.selection.choose(losses.detach() - reference, sequence)
        if not step:
            labels = batch["labels"].roll(-1, 1)[found.place][rows][chosen]
            assert self.selected is not None
            self.selected += torch.bincount(labels, minlength=len(self.selected))
        weights = self.selection.weights(sequence)
        weighted = losses if weights is None else losses * weights
        return weighted[chosen].sum() / self.selection.divisor(len(chosen), len(losses))

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Adds up cross-entropy, alpha and top-1 agreement of the first drafted token over all label tokens."""
        found = next(drafting_steps(self.model, self.source, batch, 1))
        count = torch.tensor(float(len(found.alpha)), device=self.device)
        self.add_sums(found.cross_entropy.sum(), found.alpha.sum(), found.agreement.sum(), count)

    def on_validation_epoch_end(self) -> None:
        """Logs loss, alpha and agreement."""
        self.log_means("loss", "alpha", "agreement")
