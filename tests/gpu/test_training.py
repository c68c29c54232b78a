"""Trainings on a GPU: every kind of draft with every signal learns what it learns on a CPU; settings for large runs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import build_tiny
from gpu_tests import CUDA, DEVICE, GPU, REAL, there, with_ci
from heads import check_chain_attention, draft_of
from rich.console import Console
from some_rows import add_losses, attached, everything, scratch, some_rows

from distill.config import DraftSettings, TrainerSettings
from distill.config.models import TrainingSettings
from distill.data.dataset import REFERENCE, DistillDataModule, Examples, Schedule, TrainingBatches
from distill.losses.divergences import Divergence
from distill.networks.lm_head import last_hidden
from distill.networks.models import use_attention
from distill.signal.kept import keep_columns
from distill.signal.target import Signal
from distill.training.modules import CausalLMModule, DistillModule
from distill.training.trainer import fit

pytestmark = GPU
SGD = TrainingSettings(steps=3, batch_size=4, lr=0.05, optimizer={"class_path": "torch.optim.SGD"})
CLOSE = 1e-5 if REAL else 1e-6
"""Relative difference of losses."""
BATCH = Schedule(some_rows(16).lengths, 4, seed=1)
KINDS = ["language model", "eagle", "eagle3", "dflash", "dspark", "dflash2"]


def fitted(module: Any, examples: Any, held: Any, device: str, folder: Path) -> tuple[list[Any], dict[str, Any]]:
    """The learning curve and the weights of a module that the device trains for a few steps."""
    accelerator: Any = "cpu" if device == "cpu" else "gpu"
    trainer = TrainerSettings(accelerator=accelerator, devices=1, validate_every=2)
    data = DistillDataModule(TrainingBatches(examples, BATCH, 3), held)
    history = fit(module, data, trainer, folder / device, name=device, console=Console(quiet=True))[0]
    return history, module.model.cpu().state_dict()


def distillation(kind: str, source: Any, device: str, *, selects: bool = False) -> tuple[DistillModule, list[Examples]]:
    """A module on a device, and examples for training and validation with the columns that the device made."""
    model = build_tiny("llama", num_hidden_layers=4, seed=4)
    draft, _ = draft_of(kind, model)
    draft.model.float()
    signal = Signal(there(model, device), source, None if kind == "language model" else draft.model, k=16)
    signal.to(torch.device(device))
    examples = [some_rows(16, empty=[3]), some_rows(5, seed=3, empty=[1])]
    settings = DraftSettings(divergence="dspark" if kind == "dspark" else "kl_tv")
    for each in examples if source != "online" else []:
        keep_columns(scratch(signal.columns), [each], signal.kept)
    if selects:
        settings.reference, settings.k = "y", 0.4
        other, _ = draft_of(kind, model)
        with torch.no_grad():
            for weight in other.model.float().to(device).parameters():
                weight.mul_(0.9)
        add_losses(other, signal, examples[0], Divergence("kl_tv"), "32-true")
    return DistillModule(draft, signal, SGD, 3, settings=settings, seed=1), examples


def moved(module: DistillModule, examples: Examples, device: str) -> dict[str, Any]:
    """A batch of all examples with its rows, on the device."""
    batch = module.on_before_batch_transfer(everything(examples), 0)
    return {name: values.to(device) if torch.is_tensor(values) else values for name, values in batch.items()}


SOURCES = "online", "hidden", "topk"
STEPS = [(kind, source) for kind in KINDS for source in SOURCES]


@pytest.mark.parametrize("step", with_ci(STEPS, *STEPS[2::4]), ids="-".join)
def test_a_step_of_every_kind_with_every_signal_is_the_cpus(step: tuple[str, str]) -> None:
    """Its loss, its gradients, and what validation measures."""
    (kind, source), found = step, []
    for device in (DEVICE, "cpu"):
        module, (examples, _) = distillation(kind, source, device)
        attached(module).to(device)
        loss = module.train().training_step(moved(module, examples, device), 0)
        loss.backward()
        with torch.no_grad():
            _, _, measured = module.eval()(moved(module, examples, device), training=False)
        gradients = {n: p.grad.cpu() for n, p in module.model.named_parameters() if p.grad is not None}
        found.append((loss.item(), measured.alpha.mean().item(), gradients))
    (loss, alpha, gradients), (plain, other, wanted) = found
    assert (loss, alpha) == pytest.approx((plain, other), rel=CLOSE)
    assert gradients.keys() == wanted.keys()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=10 * CLOSE * largest)


def check_alike(found: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    """Compares learning curves and weights."""
    for mine, other in zip(found[0], wanted[0], strict=True):
        assert mine == pytest.approx(other, rel=10 * CLOSE)
    assert found[0][0]["loss"] != pytest.approx(found[0][-1]["loss"], rel=1e-4)  # it learned
    for name, weight in wanted[1].items():
        torch.testing.assert_close(found[1][name], weight, rtol=1e-4, atol=10 * CLOSE)


@pytest.mark.parametrize("kind", with_ci(["language model", "eagle3", "dspark"], "language model"))
def test_a_training_that_selects_tokens_is_the_cpus(kind: str, tmp_path: Path) -> None:
    """By the losses of the reference, which the device computes too; in steps proportional to the gradients."""
    curves, losses = [], []
    for device in (DEVICE, "cpu"):
        module, (examples, held) = distillation(kind, "hidden", device, selects=True)
        losses.append(np.concatenate([examples.values(REFERENCE, n).ravel() for n in range(len(examples))]))
        curves.append(fitted(module, examples, held, device, tmp_path))
        assert module.selected > 0
    np.testing.assert_allclose(*losses, rtol=1e-4, atol=1e-6)
    check_alike(*curves)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_next_tokens_are_learned_as_on_a_cpu(attention: Any, tmp_path: Path) -> None:
    curves = []
    for device in (DEVICE, "cpu"):
        model = build_tiny("llama", seed=4).train()
        use_attention(model, attention)
        module = CausalLMModule(model, SGD, 3, seed=1)
        curves.append(fitted(module, some_rows(16, empty=[3]), some_rows(5, seed=3), device, tmp_path))
    check_alike(*curves)


LENGTHS = [9, 3, 14, 5]


@pytest.mark.parametrize("attention", ["sdpa", "flex_attention", "flash_attention_2"])
def test_padded_texts_are_the_texts_by_themselves(attention: str) -> None:
    if attention != "sdpa" and not CUDA:
        pytest.skip("for GPUs")
    flash = attention.startswith("flash")
    if flash and find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn")
    model = build_tiny("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=2)
    model = model.to(DEVICE, torch.bfloat16 if flash else torch.float32)
    ids = [torch.randint(2, 40, (1, n), device=DEVICE) for n in LENGTHS]
    wanted = torch.cat([last_hidden(model, part, torch.arange(part.numel(), device=part.device)) for part in ids])
    use_attention(model, attention)  # type: ignore[arg-type]
    padded = torch.nn.utils.rnn.pad_sequence([part[0] for part in ids], batch_first=True)
    mask = torch.arange(max(LENGTHS), device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]
    states = last_hidden(model, padded, mask.flatten().nonzero()[:, 0])
    assert torch.allclose(states.float(), wanted.float(), atol=5e-2 if flash else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_to_a_text_and_a_chain_is_one_softmax_over_both(dtype: torch.dtype) -> None:
    check_chain_attention(device=DEVICE, dtype=dtype)
