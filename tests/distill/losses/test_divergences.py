"""Every divergence: its value by hand, its gradient in closed form, and its limits."""

import math
from typing import get_args

import pytest
import torch

from distill.config import DivergenceName
from distill.losses.divergences import WEIGHTS, Divergence, TokenDistributions

NAMES = get_args(DivergenceName)
OF_DISTRIBUTIONS = [
    name for name in NAMES if not WEIGHTS.get(name, (0, 0, 0))[2]
]  # the others read the text's own tokens
HAND = {
    "forward_kl": 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75),
    "reverse_kl": 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5),
    "jsd": 0.5 * (0.5 * math.log(0.5 / 0.375) + 0.5 * math.log(0.5 / 0.625))
    + 0.5 * (0.25 * math.log(0.25 / 0.375) + 0.75 * math.log(0.75 / 0.625)),
    "tv": 0.25,
    "neg_log_alpha": -math.log(0.75),
}
KL, SHARE = HAND["forward_kl"], math.exp(-3 * 0.75)
HAND["lk_hybrid"] = SHARE * KL + (1 - SHARE) * 0.25
HAND["kl_tv"] = KL + 2 * 0.25


def logits(rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


@pytest.mark.parametrize("name", OF_DISTRIBUTIONS)
def test_a_divergence_agrees_with_its_formula_by_hand(name: DivergenceName) -> None:
    rows = TokenDistributions(
        torch.tensor([[0.5, 0.5], [0.9, 0.1]]).log(), torch.tensor([[0.25, 0.75], [0.9, 0.1]]).log()
    )
    assert Divergence(name).loss(rows).tolist() == pytest.approx([HAND[name], 0.0], abs=1e-6)


def test_alpha_and_agreement_by_hand() -> None:
    p, q = ([0.7, 0.2, 0.1], [0.3, 0.6, 0.1]), ([0.5, 0.5, 1e-9], [0.8, 0.2, 1e-9])
    rows = TokenDistributions(torch.tensor(q).log(), torch.tensor(p).log())
    assert rows.alpha.tolist() == pytest.approx([0.7, 0.5], abs=1e-5)
    assert rows.agreement().tolist() == [1.0, 0.0]


@pytest.mark.parametrize("name", NAMES)
def test_the_closed_form_gradient_is_that_of_autograd(name: DivergenceName) -> None:
    log_p, z = logits(5, 13, 0).log_softmax(-1), logits(5, 13, 1).requires_grad_()
    kind, pairs = Divergence(name), [TokenDistributions(log_p, logits.log_softmax(-1)) for logits in (z, z.detach())]
    for pair in pairs:
        pair.labels = torch.tensor([3, 0, -1, 12, 5])
    (wanted,) = torch.autograd.grad(kind.loss(pairs[0]).sum(), z)
    got = kind.gradient(pairs[1])
    assert torch.allclose(got, wanted, rtol=1e-9, atol=1e-12)
    assert torch.allclose(got.sum(-1), torch.zeros(5, dtype=torch.float64), atol=1e-12)  # logits have a free constant


@pytest.mark.parametrize("name", OF_DISTRIBUTIONS)
def test_equal_distributions_have_no_loss_and_no_gradient(name: DivergenceName) -> None:
    log_p = logits(4, 9, 2, dtype=torch.float32).log_softmax(-1)
    rows = TokenDistributions(log_p, log_p.clone())
    assert torch.allclose(Divergence(name).loss(rows), torch.zeros(4), atol=1e-6)
    assert torch.allclose(Divergence(name).gradient(rows), torch.zeros(4, 9), atol=1e-7)


@pytest.mark.parametrize("name", OF_DISTRIBUTIONS)
def test_rows_that_do_not_overlap_in_float32_stay_finite(name: DivergenceName) -> None:
    log_p = torch.tensor([[300.0, 0.0, -300.0]]).log_softmax(-1)
    rows = TokenDistributions(log_p, torch.tensor([[-300.0, 0.0, 300.0]]).log_softmax(-1))
    assert Divergence(name).loss(rows).isfinite().all()
    gradient = Divergence(name).gradient(rows)
    assert gradient.isfinite().all()
    if name in ("forward_kl", "kl_tv", "lk_hybrid"):
        assert gradient[0].tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)  # the pull of a cold start
