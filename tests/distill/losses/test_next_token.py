"""Cross-entropy from hidden states: whole logits and chunks of them give the same loss and gradients."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from distill.lm_head import LMHead
from distill.losses import chunked
from distill.losses.chunked import next_token_hits, next_token_loss


def case(rows: int, cap: float | None) -> tuple[Tensor, LMHead, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    linear = nn.Linear(6, 50, bias=cap is not None, dtype=torch.float64)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    hidden = torch.randn(rows, 6, generator=generator).double().requires_grad_()
    return hidden, LMHead.of(linear, 1.3, cap), torch.randint(50, (rows,), generator=generator)


@pytest.mark.parametrize("cap", [None, 4.0])
def test_chunks_give_the_loss_and_the_gradients_of_all_logits(monkeypatch: pytest.MonkeyPatch, cap: Any) -> None:
    hidden, head, labels = case(150, cap)

    def computed() -> list[Tensor]:
        loss = next_token_loss(hidden, head, labels)
        hits = next_token_hits(hidden, head, labels)
        return [loss.detach(), hits, *torch.autograd.grad(3 * loss, [hidden, *head.parameters()])]

    plain, widest = computed(), list[int]()
    monkeypatch.setattr(chunked, "AUTOGRAD_CPU", 0)
    monkeypatch.setattr(chunked, "CPU_CHUNK", 64 * 4 * 50)
    with head.linear.register_forward_hook(lambda module, given, made: widest.append(len(made))):
        for ours, expected in zip(computed(), plain, strict=True):
            assert torch.allclose(ours.double(), expected.double(), rtol=1e-9, atol=1e-9)
    assert max(widest) == 64  # logits of all rows are never made


def test_without_rows_the_loss_is_zero_and_connected_to_every_parameter() -> None:
    hidden, head, labels = case(0, 4.0)
    loss = next_token_loss(hidden, head, labels)
    loss.backward()
    assert loss.item() == 0.0
    assert all(leaf.grad is not None for leaf in (hidden, *head.parameters()))


def test_a_head_with_an_adapter_is_left_to_autograd(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "AUTOGRAD_CPU", 0)
    model = copy.deepcopy(tiny("llama"))
    get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head"], task_type="CAUSAL_LM"))
    head = LMHead(model)
    next_token_loss(torch.ones(3, 32), head, torch.tensor([1, 2, 3])).backward()
    trained = [name for name, weight in head.named_parameters() if weight.grad is not None]
    assert trained
    assert all("lora" in name for name in trained)
