"""The accountings: what AdaSPEC and DistillSpec hold equal."""

import numpy as np
import pytest

from distill.checks import Account, Plan, account, label_tokens, plan_draft, plan_reference
from distill.config.training import TrainingSettings
from distill.data.batches import Schedule, TokenDataset


def test_the_official_scripts_numbers_come_out() -> None:
    reference = plan_reference(TrainingSettings(epochs=3, batch_size=16), 7488)
    assert reference == Plan(1404, 16)
    draft = plan_draft(reference, 0.4, "steps")
    assert draft == Plan(1404, 40)
    assert draft.steps * draft.batch_size / 7488 == 7.5  # the scripts' 7.5 epochs for 3


@pytest.mark.parametrize(("iso", "wanted"), [("steps", (100, 20)), ("epochs", (100, 8)), ("teacher_tokens", (40, 20))])
def test_each_accounting_holds_what_it_names(iso: str, wanted: tuple[int, int]) -> None:
    plan = plan_draft(Plan(100, 8), 0.4, iso)  # type: ignore[arg-type]
    assert (plan.steps, plan.batch_size) == wanted


@pytest.mark.parametrize("iso", ["steps", "epochs", "teacher_tokens"])
def test_selecting_everything_is_the_reference_in_every_accounting(iso: str) -> None:
    assert plan_draft(Plan(77, 5), 1.0, iso) == Plan(77, 5)  # type: ignore[arg-type]


def test_steps_win_over_epochs_that_are_not_given() -> None:
    assert plan_reference(TrainingSettings(steps=9, batch_size=4), 1000) == Plan(9, 4)
    assert plan_reference(TrainingSettings(epochs=0.001, batch_size=4), 10) == Plan(1, 4)


def test_an_account_counts_what_the_schedule_shows() -> None:
    labels = np.array([2, 3, 4, 5])
    rows = TokenDataset(
        np.zeros(18, np.int32), np.zeros(18, np.int32), np.concatenate([[0], (labels + 1).cumsum()]),
        np.concatenate([[0], labels.cumsum()]),
    )  # fmt: skip
    plan = Plan(steps=6, batch_size=2)  # three epochs
    tokens = label_tokens(plan, rows, Schedule(rows.lengths, 2, seed=1))
    reference = account(plan, tokens)
    assert reference == Account(6, 12, 3 * 14, 3 * 14, 3 * 14)
    draft = account(plan, tokens, selected=20, reference=reference)
    assert draft == Account(6, 12, 42, 20, 84)
