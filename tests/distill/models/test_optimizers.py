"""Muon: orthogonal updates of every matrix, whatever its shape and its neighbours, against the gradient."""

import pytest
import torch
from torch import nn

from distill.config.training import TrainingSettings
from distill.models.optimizers import MuonAdamW, make_optimizer, orthogonalise

LR = 0.1


def stepped(*gradients: torch.Tensor) -> list[torch.Tensor]:
    """How matrices of zeros change in one step, the gradients given."""
    weights = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for weight, gradient in zip(weights, gradients):
        weight.grad = gradient.clone()
    MuonAdamW([{"params": weights, "muon": True, "weight_decay": 0.0}], lr=LR).step()
    return [weight.detach() for weight in weights]


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_orthogonalising_brings_all_singular_values_near_one_and_keeps_the_directions() -> None:
    matrix = some(3, 12, 30)
    u, _, v = torch.linalg.svd(orthogonalise(matrix), full_matrices=False)
    assert torch.linalg.svdvals(orthogonalise(matrix)).min() > 0.6
    assert torch.linalg.svdvals(orthogonalise(matrix)).max() < 1.3
    polar = torch.linalg.svd(matrix, full_matrices=False)
    assert ((orthogonalise(matrix) * (polar.U @ polar.Vh)).sum((1, 2)) / 12 > 0.8).all()
    assert torch.allclose((u @ v).norm(dim=(1, 2)), torch.tensor(12.0).sqrt(), atol=1e-3)


@pytest.mark.parametrize("shape", [(8, 8), (8, 24), (24, 8)])
def test_a_step_goes_against_the_gradient_at_the_size_of_an_adamw_step(shape: tuple[int, int]) -> None:
    gradient = some(*shape)
    (change,) = stepped(gradient)
    polar = torch.linalg.svd(gradient, full_matrices=False)
    assert float((change * (polar.U @ polar.Vh)).sum()) < -0.8 * 8 * LR * 0.2 * max(shape) ** 0.5
    assert float(change.square().mean().sqrt()) == pytest.approx(0.2 * LR, rel=0.3)


def test_matrices_that_are_worked_on_together_change_as_each_alone() -> None:
    gradients = [some(8, 24, seed=1), some(24, 8, seed=2), some(8, 8, seed=3), some(8, 24, seed=4)]
    for together, gradient in zip(stepped(*gradients), gradients):
        assert torch.allclose(together, stepped(gradient)[0], atol=1e-6)
    wide, tall = stepped(gradients[0])[0], stepped(gradients[0].T.contiguous())[0]
    assert torch.allclose(wide, tall.T, atol=1e-6)


def test_only_matrices_inside_the_layers_are_updated_by_muon() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.LayerNorm(6))
    optimizer = make_optimizer(model, TrainingSettings(steps=1, optimizer="muon"))
    by_muon = [p.shape for group in optimizer.param_groups if group["muon"] for p in group["params"]]
    assert by_muon == [model[1].weight.shape]
