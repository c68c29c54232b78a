"""Weights of the rows by what their acceptance does to the number of rounds: exact, against the replay of decoding."""

from __future__ import annotations

import pytest
import torch

from decode.measure.predicted_speedup import replay
from distill.losses.position_weights import BlockWeights

ALPHA = [0.9, 0.2, 0.7, 0.5, 0.95, 0.6]


def rounds(alpha: list[float], length: int) -> float:
    """Expected rounds of a text, by the replay that predicted speedups are made of."""
    return replay(alpha, length)[0]


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_expected_rounds_are_those_of_the_replay(length: int) -> None:
    texts = torch.tensor([ALPHA], dtype=torch.float64)
    found = BlockWeights("rounds", length).rounds(texts, torch.ones(1, len(ALPHA), dtype=torch.bool))
    assert float(found[0, 0, 0]) == pytest.approx(rounds(ALPHA, length))


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_weight_is_how_many_rounds_the_acceptance_saves(length: int) -> None:
    """The number of rounds is linear in each acceptance, so a difference quotient is exact."""
    texts = torch.tensor([ALPHA], dtype=torch.float64)
    saved = BlockWeights("rounds", length).saved(texts, torch.ones(1, len(ALPHA), dtype=torch.bool))[0]
    for t in range(len(ALPHA)):
        never, always = ([*ALPHA[:t], a, *ALPHA[t + 1 :]] for a in (0.0, 1.0))
        assert float(saved[t]) == pytest.approx(rounds(never, length) - rounds(always, length), abs=1e-9)


def test_by_hand_with_one_drafted_token_a_round() -> None:
    """Position 0 is always tested; position 1 unless it is the bonus token behind an accepted one."""
    weights = BlockWeights("tested", 1).tested(torch.tensor([[0.75, 0.5, 0.5]], dtype=torch.float64))[0]
    assert weights.tolist() == pytest.approx([1.0, 0.25, 1 - 0.25 * 0.5])


def test_texts_are_weighted_apart_and_the_mean_is_one() -> None:
    alpha, sequence = torch.tensor([*ALPHA, 0.3, 0.8, 0.4]), torch.tensor([0] * 6 + [2] * 3)
    together = BlockWeights("rounds", 3)(alpha, sequence)
    assert float(together.mean()) == pytest.approx(1)
    alone = BlockWeights("rounds", 3)(alpha[6:], sequence[6:])
    assert torch.allclose(together[6:] / together[6], alone / alone[0], atol=1e-5)
    assert BlockWeights("rounds", 3)(alpha[:0], sequence[:0]).shape == (0,)


def test_total_variation_with_these_weights_has_the_gradient_of_the_expected_rounds() -> None:
    alpha = torch.tensor(ALPHA, dtype=torch.float64, requires_grad=True)
    inside = torch.ones(1, len(ALPHA), dtype=torch.bool)
    weigh = BlockWeights("rounds", 3)
    weigh.rounds(alpha[None], inside)[0, 0, 0].backward()
    saved = weigh.saved(alpha.detach()[None], inside)[0]
    assert alpha.grad is not None
    assert torch.allclose(alpha.grad, -saved)
