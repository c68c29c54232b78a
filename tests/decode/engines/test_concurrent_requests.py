"""Several requests at a time: which prompts are taken, and what is predicted of them."""

from __future__ import annotations

import pytest

from decode.engines.acceptance import Acceptance, Drafts, Rounds
from decode.engines.serve_check import Together, places, together_row
from decode.stopping import RoundCosts


def test_a_batch_is_filled_for_most_of_the_time() -> None:
    assert places(3, 1) == [0, 1, 2]
    assert places(3, 4) == [0, 1, 2, 0, 1, 2, 0, 1]


def test_a_draft_that_is_always_accepted_and_costs_nothing_saves_all_but_every_fourth_forward() -> None:
    told = Acceptance([[[1.0] * 16]], [13], 1.0, 0.0)  # a token from the prompt and three rounds of four
    costs = RoundCosts({4: 1.0}, {4: 0.0}, {4: {4: 1.0}})
    plain, served = Together([[7] * 13] * 8, 8.0, Drafts()), Together([[7] * 13] * 8, 2.0, Drafts(24, 72, [24.0] * 3))
    row = together_row(4, 3, served, plain, told, 13, Rounds(), costs)
    assert row["predicted_speedup"] == row["speedup"] == pytest.approx(4)
    assert row["served_length"] == row["predicted_length"] == 4
    assert (row["identical_share"], row["texts"]) == (1, 8)
