"""Training of a feature head as a Lightning module: a distillation of several drafting steps."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from decode.models.eagle.head import FeatureHead
from distill.config.eagle_heads import EagleSettings
from distill.config.training import TrainingSettings
from distill.data.batches.gradient_accumulation import OptimizerStep
from distill.data.batches.token_dataset import Batch
from distill.eagle.drafting_steps import drafting_steps
from distill.eagle.target_features import FeatureSource
from distill.losses.chunked_kl import LossRows
from distill.losses.draft_outputs import Drafted
from distill.losses.token_selection import Selection
from distill.training.distillation import DistillModule


class HeadModule(DistillModule):
    """EAGLE; with a selection, EAGLE + AdaSPEC: Σ decayⁱ · loss over the drafting steps i.

    EAGLE-1 adds the feature regression, on all label tokens. The other losses are of those whose most probable token
    of the target the head can draft, and a selection ranks them by ΔL at each drafting step.
    """

    model: FeatureHead
    target: FeatureSource

    def __init__(
        self, model: FeatureHead, training: TrainingSettings, steps: int, *, settings: EagleSettings, **options: Any
    ) -> None:
        super().__init__(model, training, steps, **options)
        self.settings = settings

    def drafted(self, batch: Batch, *, training: bool) -> Iterator[Drafted]:
        """See `distill.eagle.drafting_steps`."""
        settings, divergence = self.settings, self.objective.divergence
        noisy = training and self.model.version == 1 and self.model.training
        yield from drafting_steps(
            self.model,
            self.target,
            batch,
            settings.steps if training else 1,
            temperature=divergence.temperature,
            noise=settings.noise if noisy else 0.0,
            learnable_only=training,
        )

    def weight(self, number: int) -> float:
        """decayⁱ; 1 where acceptances tell how much each drafting step counts."""
        by_acceptance = self.objective.accepted_only or self.objective.weigh is not None
        return 1.0 if by_acceptance else self.settings.decay**number

    def _step_loss(
        self, drafted: Drafted, found: LossRows, step: OptimizerStep | None, selection: Selection | None
    ) -> Tensor:
        loss = super()._step_loss(drafted, found, step, selection)
        if drafted.regression is None:
            return loss
        share = 1.0 if step is None else step.weight
        return self.settings.ce_weight * loss + self.settings.feature_weight * share * drafted.regression
