"""Every divergence by hand. That gradients in closed form are those of autograd is tested with the chunked loss."""

import math
from typing import Any

import pytest
import torch

from distill.losses.divergences import Divergence, TokenDistributions

KL, ALPHA = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75), 0.75
HAND = {
    "forward_kl": KL,
    "reverse_kl": 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5),
    "jsd": 0.25 * (math.log(0.5 / 0.375) + math.log(0.5 / 0.625))
    + 0.125 * (math.log(0.25 / 0.375) + 3 * math.log(0.75 / 0.625)),
    "tv": 1 - ALPHA,
    "neg_log_alpha": -math.log(ALPHA),
    "lk_hybrid": math.exp(-3 * ALPHA) * KL + (1 - math.exp(-3 * ALPHA)) * (1 - ALPHA),
    "kl_tv": KL + 2 * (1 - ALPHA),
    "cross_entropy": -math.log(0.75),
    "dspark": -0.1 * math.log(0.75) + 1.8 * (1 - ALPHA),
}


@pytest.mark.parametrize("name", HAND)
def test_a_divergence_agrees_with_its_formula_by_hand(name: Any) -> None:
    """Of different and of equal distributions, of which the text's token is the second, then unknown to the draft."""
    rows = TokenDistributions(*(torch.tensor([row, [0.9, 0.1]]).log() for row in ([0.5, 0.5], [0.25, 0.75])))
    rows.labels = torch.tensor([1, -1])
    assert Divergence(name).loss(rows).tolist() == pytest.approx([HAND[name], 0.0], abs=1e-6)
    if name not in ("cross_entropy", "dspark"):
        assert Divergence(name).gradient(rows)[1].tolist() == pytest.approx([0.0, 0.0], abs=1e-7)
    assert rows.alpha.tolist() == pytest.approx([ALPHA, 1.0])


def test_alpha_and_agreement_by_hand() -> None:
    p, q = ([0.7, 0.2, 0.1], [0.3, 0.6, 0.1]), ([0.5, 0.5, 1e-9], [0.8, 0.2, 1e-9])
    rows = TokenDistributions(torch.tensor(q).log(), torch.tensor(p).log())
    assert rows.accepted().tolist() == pytest.approx([0.7, 0.5], abs=1e-5)
    assert rows.agreement().tolist() == [1.0, 0.0]
    rows.mass, rows.learnable = torch.tensor([0.5, 1.0]), torch.tensor([0.0, 1.0])  # the head drafts a part of the ids
    assert rows.accepted().tolist() == pytest.approx([0.45, 0.5], abs=1e-5)
    assert rows.agreement().tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", HAND)
def test_rows_that_do_not_overlap_in_float32_stay_finite(name: Any) -> None:
    rows = TokenDistributions(*(torch.tensor([[x, 0.0, -x]]).log_softmax(-1) for x in (300.0, -300.0)))
    rows.labels = torch.tensor([0])
    gradient = Divergence(name).gradient(rows)
    assert Divergence(name).loss(rows).isfinite().all()
    assert gradient.isfinite().all()
    if name in ("forward_kl", "kl_tv", "lk_hybrid"):
        assert gradient[0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)  # the pull of a cold start
