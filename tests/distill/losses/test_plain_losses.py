"""Losses per token, on hand-made rows whose values are known in closed form."""

import pytest
import torch
from plain_losses import token_loss

from distill.data.batches import label_mask
from distill.losses.divergences import Divergence


def rows(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_token_loss_gives_alpha_and_agreement_per_row() -> None:
    tokens = token_loss(rows([0.5, 0.5, 1e-9], [0.8, 0.2, 1e-9]), rows([0.7, 0.2, 0.1], [0.3, 0.6, 0.1]))
    assert tokens.alpha.tolist() == pytest.approx([0.7, 0.5], abs=1e-5)
    assert tokens.agreement.tolist() == [1.0, 0.0]


def test_a_draft_that_equals_the_target_has_zero_loss_and_alpha_one() -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    tokens = token_loss(logits, logits.clone())
    assert torch.allclose(tokens.divergence, torch.zeros(5), atol=1e-6)
    assert torch.allclose(tokens.alpha, torch.ones(5))


def test_temperature_divides_the_logits_of_both_models() -> None:
    p, q = torch.randn(2, 6, 11, generator=torch.Generator().manual_seed(1)).unbind(0)
    warm = token_loss(p, q, Divergence("jsd", temperature=1.7))
    assert torch.allclose(warm.divergence, token_loss(p / 1.7, q / 1.7, Divergence("jsd")).divergence, atol=1e-6)
    assert torch.allclose(warm.alpha, token_loss(p / 1.7, q / 1.7).alpha, atol=1e-6)


def test_gradient_of_the_divergence_is_q_minus_p_and_none_reaches_the_target() -> None:
    p = torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).requires_grad_()
    q = torch.randn(3, 7, generator=torch.Generator().manual_seed(3)).requires_grad_()
    token_loss(p, q).divergence.sum().backward()
    assert p.grad is None
    assert q.grad is not None
    assert torch.allclose(q.grad, q.detach().softmax(-1) - p.detach().softmax(-1), atol=1e-6)


def test_half_precision_logits_are_compared_in_float32() -> None:
    p = torch.randn(4, 50, generator=torch.Generator().manual_seed(4)).bfloat16()
    q = (p.float() + 0.01).bfloat16()
    tokens = token_loss(p, q)
    assert tokens.divergence.dtype == torch.float32
    assert torch.equal(tokens.divergence, token_loss(p.float(), q.float()).divergence)


def test_a_vocabulary_padded_in_one_model_is_cut_to_the_shared_ids() -> None:
    p = torch.randn(4, 10, generator=torch.Generator().manual_seed(5))
    q = torch.randn(4, 8, generator=torch.Generator().manual_seed(6))
    assert torch.equal(token_loss(p, q).alpha, token_loss(p[:, :8], q).alpha)


def test_label_mask_marks_the_positions_that_predict_labels() -> None:
    labels = torch.tensor([[-100, -100, 5, 6, -100], [7, 8, -100, -100, -100]])
    assert label_mask(labels).int().tolist() == [[0, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
