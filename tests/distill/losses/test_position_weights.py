"""Weights of the rows by what their acceptance does to the number of rounds: exact, against the replay of decoding."""

from __future__ import annotations

import pytest
import torch

from decode.bench.prediction import replay
from distill.losses.objective import BlockWeights

ALPHA = [0.9, 0.2, 0.7, 0.5, 0.95, 0.6]


def rounds(alpha: list[float], length: int) -> float:
    """Expected rounds of a text, by the replay that predicted speedups are made of."""
    return replay(alpha, length)[0]


def by_depth(alpha: list[float], length: int) -> torch.Tensor:
    """A draft model's acceptances, the same at all depths, ``[1, time, depth]``."""
    return torch.tensor(alpha, dtype=torch.float64)[None, :, None].expand(1, -1, length)


def all_inside(alpha: torch.Tensor) -> torch.Tensor:
    return torch.ones(alpha.shape[:2], dtype=torch.bool)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_expected_rounds_are_those_of_the_replay(length: int) -> None:
    texts = by_depth(ALPHA, length)
    found = BlockWeights("rounds", length).rounds(texts, all_inside(texts))
    assert float(found[0, 0, 0]) == pytest.approx(rounds(ALPHA, length))


def test_expected_rounds_of_a_head_are_those_of_the_replay_by_drafting_step() -> None:
    """Two trained steps and blocks of four: the third and fourth token are accepted as the second."""
    second = [0.5, 0.1, 0.9, 0.3, 0.6, 0.2]
    texts = torch.tensor([ALPHA, second, second, second], dtype=torch.float64).T[None]
    found = BlockWeights("rounds", 4).rounds(texts, all_inside(texts))
    assert float(found[0, 0, 0]) == pytest.approx(replay(ALPHA, 4, [second])[0])


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_a_weight_is_how_many_rounds_the_acceptance_saves(length: int) -> None:
    """The number of rounds is linear in each acceptance, so a difference quotient is exact."""
    texts = by_depth(ALPHA, length)
    saved = BlockWeights("rounds", length).saved(texts, all_inside(texts))[0].sum(-1)
    for t in range(len(ALPHA)):
        never, always = ([*ALPHA[:t], a, *ALPHA[t + 1 :]] for a in (0.0, 1.0))
        assert float(saved[t]) == pytest.approx(rounds(never, length) - rounds(always, length), abs=1e-9)


def test_by_hand_with_one_drafted_token_a_round() -> None:
    """Position 0 is always tested; position 1 unless it is the bonus token behind an accepted one."""
    weights = BlockWeights("tested", 1).tested(by_depth([0.75, 0.5, 0.5], 1))[0, :, 0]
    assert weights.tolist() == pytest.approx([1.0, 0.25, 1 - 0.25 * 0.5])


def test_by_hand_with_two_drafting_steps() -> None:
    """Token 1 is a draft's second with chance 0.5, else its first; token 2 is a bonus with 0.5 · 0.25."""
    alpha = torch.tensor([[0.5, 0.9], [0.4, 0.25], [0.1, 0.2]], dtype=torch.float64)
    found = BlockWeights("tested", 2)(alpha, torch.zeros(3, dtype=torch.long))
    first, second = [1, 0.5, 0.5 * 0.75 + 0.5 * 0.6], [0, 0.5, 0.5 * 0.4]
    wanted = torch.tensor([first, second], dtype=torch.float64).T
    assert torch.allclose(found, wanted / wanted.mean())


def test_steps_deeper_than_the_block_have_no_weight_and_deeper_tokens_weigh_on_the_last_step() -> None:
    alpha, sequence = torch.rand(6, 3, dtype=torch.float64), torch.zeros(6, dtype=torch.long)
    assert BlockWeights("tested", 2)(alpha, sequence)[:, 2].tolist() == [0.0] * 6
    wide = alpha[:, [0, 1, 2, 2, 2]]
    apart = BlockWeights("rounds", 5)(wide, sequence)
    folded = torch.cat([apart[:, :2], apart[:, 2:].sum(1, keepdim=True)], 1)
    assert torch.allclose(BlockWeights("rounds", 5)(alpha, sequence), folded / folded.mean())


def test_texts_are_weighted_apart_and_the_mean_is_one() -> None:
    alpha, sequence = torch.tensor([*ALPHA, 0.3, 0.8, 0.4])[:, None], torch.tensor([0] * 6 + [2] * 3)
    together = BlockWeights("rounds", 3)(alpha, sequence)
    assert float(together.mean()) == pytest.approx(1)
    alone = BlockWeights("rounds", 3)(alpha[6:], sequence[6:])
    assert torch.allclose(together[6:] / together[6], alone / alone[0], atol=1e-5)
    assert BlockWeights("rounds", 3)(alpha[:0], sequence[:0]).shape == (0, 1)


def test_total_variation_with_these_weights_has_the_gradient_of_the_expected_rounds() -> None:
    alpha = torch.rand(1, 6, 3, dtype=torch.float64, requires_grad=True)
    weigh = BlockWeights("rounds", 3)
    weigh.rounds(alpha, all_inside(alpha))[0, 0, 0].backward()
    saved = weigh.saved(alpha.detach(), all_inside(alpha))
    assert alpha.grad is not None
    assert torch.allclose(alpha.grad, -saved)
