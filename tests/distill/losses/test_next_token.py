"""Cross-entropy from hidden states: whole logits and chunks of them give the same loss and gradients."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from distill.losses import chunked
from distill.losses.chunked import next_token_hits, next_token_loss
from distill.models.lm_head import LMHead


def case(rows: int, *, bias: bool, cap: float | None) -> tuple[torch.Tensor, LMHead, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    linear = nn.Linear(6, 50, bias=bias, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(rows, 6, generator=generator, dtype=torch.float64).requires_grad_(True)
    return hidden, LMHead.of(linear, 1.3, cap), torch.randint(50, (rows,), generator=generator)


@pytest.mark.parametrize(("bias", "cap"), [(False, None), (True, 4.0)])
def test_chunks_give_the_loss_and_the_gradients_of_whole_logits(
    monkeypatch: pytest.MonkeyPatch, bias: bool, cap: float | None
) -> None:
    hidden, head, labels = case(150, bias=bias, cap=cap)

    def found() -> list[torch.Tensor]:
        hidden.grad = None
        head.zero_grad()
        loss = next_token_loss(hidden, head, labels)
        (3 * loss).backward()
        return [loss.detach(), hidden.grad, *(p.grad for p in head.parameters()), next_token_hits(hidden, head, labels)]

    whole = found()
    monkeypatch.setattr(chunked, "WHOLE_CPU", 0)
    monkeypatch.setattr(chunked, "CPU_CHUNK", 64 * 4 * 50)
    widest: list[int] = []
    with head.linear.register_forward_hook(lambda module, given, made: widest.append(len(made))):
        for got, expected in zip(found(), whole, strict=True):
            assert torch.allclose(got.double(), expected.double(), rtol=1e-9, atol=1e-9)
    assert max(widest) == 64  # logits of all rows are never made


def test_without_rows_the_loss_is_zero_and_connected_to_every_parameter() -> None:
    hidden, head, _ = case(0, bias=True, cap=None)
    loss = next_token_loss(hidden, head, torch.zeros(0, dtype=torch.long))
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad is not None
    assert all(p.grad is not None for p in head.parameters())


def test_chunks_under_bfloat16_autocast_round_the_gradients_factors_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, head, labels = case(300, bias=False, cap=None)
    hidden, head = hidden.detach().float().requires_grad_(True), LMHead.of(head.linear.float(), 1.0)
    exact = functional.cross_entropy(head.linear(hidden), labels)
    monkeypatch.setattr(chunked, "WHOLE_CPU", 0)
    with torch.autocast("cpu", torch.bfloat16):
        loss = next_token_loss(hidden, head, labels)
    assert loss.dtype == torch.float32
    gradient, rounded = (torch.autograd.grad(one, hidden)[0] for one in (exact, loss))
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - gradient).norm() < 0.01 * gradient.norm()
