"""What a distillation minimises at each step: the divergence, and which tokens count."""

from dataclasses import dataclass, field, replace

from distill.config.distillation import DistillSettings, DivergenceName
from distill.config.drafts import AdaSpecSettings
from distill.losses.chunked_kl import LossRequest
from distill.losses.divergences import Divergence
from distill.losses.draft_outputs import Drafted
from distill.losses.position_weights import BlockWeights
from distill.losses.token_selection import Selection, delta_loss


@dataclass(frozen=True)
class Objective:
    """DistillSpec; with a selection AdaSPEC; with the other fields variations of them."""

    divergence: Divergence = field(default_factory=Divergence)  # The loss per token
    selection: Selection | None = None  # Which tokens count; None: all
    # The divergence D in which ΔL = D(p, draft) - D(p, reference) is measured; None: the loss. With ``tv`` it is
    # α_reference - α_draft, the acceptance that the reference shows can be gained.
    criterion: Divergence | None = None
    warmup: int = 0  # Steps of forward KL before the divergence takes over
    # The selection's share at the first step, from where it moves linearly to k; None: k throughout
    k_start: float | None = None
    steps: int = 1  # Steps over which it moves
    weigh: BlockWeights | None = None  # Weights of the rows from their acceptances; None: all alike
    accepted_only: bool = False  # Whether a chain of drafting steps ends at the first token that is rejected

    @property
    def ranking(self) -> Divergence:
        """In which ΔL is measured; the same at all steps, since the reference's side of it is computed once."""
        return self.criterion or self.divergence

    def divergence_at(self, step: int) -> Divergence:
        """The loss of a step."""
        return replace(self.divergence, name="forward_kl") if step < self.warmup else self.divergence

    def selection_at(self, step: int) -> Selection | None:
        """The selection of a step."""
        if self.selection is None or self.k_start is None:
            return self.selection
        share = min(1.0, step / max(1, self.steps - 1))
        return replace(self.selection, k=self.k_start + share * (self.selection.k - self.k_start))

    def request(self, step: int, drafted: Drafted, responses: int | None = None, *, metrics: bool) -> LossRequest:
        """What to compute of the rows of a drafting step.

        Args:
            step: Which optimiser step.
            drafted: The rows, with the reference's losses where there is a selection.
            responses: Examples with labels in the whole optimiser step; None: those of the batch.
            metrics: Whether alpha and agreement are wanted.
        """
        loss, selection = self.divergence_at(step), self.selection_at(step)
        if selection is None:
            return LossRequest(loss, metrics=metrics, mass=drafted.mass)
        sequence = drafted.sequence
        return LossRequest(
            loss,
            lambda values: selection.choose(delta_loss(values, drafted.reference), sequence),
            None if self.ranking == loss else self.ranking,
            metrics,
            selection.weights(sequence, responses),
            drafted.mass,
        )


def divergence_of(settings: DistillSettings, name: DivergenceName | None = None) -> Divergence:
    """The divergence of this name (None: the one set) with the parameters set."""
    return Divergence(name or settings.divergence, settings.jsd_beta, settings.tv_weight, settings.temperature)


def objective_of(draft: AdaSpecSettings, reference: DistillSettings, steps: int) -> Objective:
    """The objective that a draft's settings describe.

    Args:
        draft: Its settings.
        reference: Those of DistillSpec, whose divergence it has unless it names another.
        steps: Optimiser steps in all.
    """
    loss, warmup = divergence_of(reference, draft.divergence), round(draft.kl_first * steps)
    accepted = draft.weigh_by == "accepted"
    weigh = None if draft.weigh_by in ("none", "accepted") else BlockWeights(draft.weigh_by, draft.block)
    if draft.selects_all:
        return Objective(loss, warmup=warmup, weigh=weigh, accepted_only=accepted)
    return Objective(
        loss,
        Selection(draft.k, draft.scope, draft.normalisation),
        divergence_of(reference, "tv") if draft.select_by == "acceptance_gain" else None,
        warmup,
        draft.k_start,
        round(draft.k_ramp * steps),
        weigh,
    )
