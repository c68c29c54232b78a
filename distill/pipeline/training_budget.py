"""What two trainings hold equal, and what each of them used.

The reference (DistillSpec) takes S steps of B examples. AdaSPEC learns from the share k of the tokens it sees, so
"the same training" can mean three things; papers and scripts differ in it silently.
"""

from dataclasses import dataclass

from distill.config.drafts import Iso
from distill.config.language_models import TrainingSettings
from distill.core.run_dir import Account
from distill.data.batches.batch_schedule import Schedule
from distill.data.batches.token_dataset import TokenDataset


@dataclass(frozen=True)
class Plan:
    """Optimiser steps and examples per step of a training."""

    steps: int
    batch_size: int


def plan_reference(training: TrainingSettings, examples: int) -> Plan:
    """Steps and batch of a training on so many examples."""
    steps = training.steps
    if steps is None:
        assert training.epochs is not None
        steps = max(1, round(training.epochs * examples / training.batch_size))
    return Plan(steps, training.batch_size)


def plan_draft(reference: Plan, k: float, iso: Iso) -> Plan:
    """AdaSPEC's steps and batch relative to the reference's.

    - ``steps``: S steps of B/k examples. The same number of selected tokens a step, but 1/k times the examples and
      teacher tokens. The official scripts do this (batch 40 for 16 at k = 0.4, 7.5 epochs for 3).
    - ``epochs``: S steps of B examples. The same passes over the data, steps and teacher tokens; k times the selected
      tokens a step.
    - ``teacher_tokens``: k·S steps of B/k examples. The same data and teacher tokens, the same number of selected
      tokens a step, fewer steps.
    """
    if iso == "epochs":
        return reference
    batch_size = max(1, round(reference.batch_size / k))
    if iso == "steps":
        return Plan(reference.steps, batch_size)
    return Plan(max(1, round(reference.steps * reference.batch_size / batch_size)), batch_size)


def label_tokens(plan: Plan, rows: TokenDataset, schedule: Schedule) -> int:
    """Label tokens of a training whose examples are known beforehand."""
    return sum(rows.labels_of(schedule.batch(step)) for step in range(plan.steps))


def account(plan: Plan, tokens: int, selected: int | None = None, reference: Account | None = None) -> Account:
    """The account of a finished training.

    Args:
        plan: Its steps and batch.
        tokens: Its label tokens.
        selected: Tokens selected in all; None: every label token.
        reference: Account of the reference that the selection needed.
    """
    return Account(
        optimiser_steps=plan.steps,
        examples=plan.steps * plan.batch_size,
        teacher_tokens=tokens,
        selected_tokens=tokens if selected is None else selected,
        cumulative_teacher_tokens=tokens + (reference.teacher_tokens if reference else 0),
    )
