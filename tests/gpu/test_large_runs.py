"""What large runs switch on, on a CUDA device: every attention, attention to chains, mixed precision, 8-bit AdamW.

``--device cpu`` runs those tests that a CPU can on one.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from devices import DEVICE
from families import build_tiny
from heads import check_chain_attention
from tiny_run import run_tiny, tiny_settings

from distill.config import Settings
from distill.networks.lm_head import last_hidden
from distill.networks.models import use_attention

CUDA = DEVICE.startswith("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [9, 3, 14, 5]


def settings_in(folder: Path) -> Settings:
    settings = tiny_settings(folder)
    settings.trainer.accelerator, settings.trainer.devices = ("gpu" if CUDA else "cpu"), 1
    return settings


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
    wanted = torch.cat([last_hidden(model, part, torch.ones_like(part, dtype=torch.bool)) for part in ids])
    use_attention(model, attention)  # type: ignore[arg-type]
    padded = torch.nn.utils.rnn.pad_sequence([part[0] for part in ids], batch_first=True)
    mask = torch.arange(max(LENGTHS), device=DEVICE) < torch.tensor(LENGTHS, device=DEVICE)[:, None]
    states = last_hidden(model, padded, mask)
    assert torch.allclose(states.float(), wanted.float(), atol=5e-2 if flash else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_to_a_text_and_a_chain_is_one_softmax_over_both(dtype: torch.dtype) -> None:
    check_chain_attention(device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("change", ["bf16", "accumulate"])
def test_a_run_with_each_of_the_settings_for_speed(tmp_path: Path, change: str) -> None:
    settings = settings_in(tmp_path)
    if change == "bf16":
        settings.trainer.precision = "bf16-mixed"
    else:
        settings.trainer.accumulate = 2
    ran, run, _ = run_tiny(settings)
    assert ran == ["target", "initial", "distillspec", "adaspec"]
    history = run.record("adaspec").history  # type: ignore[union-attr]
    assert history[-1]["alpha"] > history[0]["alpha"] - 0.05


def test_a_run_with_adamw_in_8_bits(tmp_path: Path) -> None:
    if not CUDA or find_spec("bitsandbytes") is None:
        pytest.skip("needs a GPU and bitsandbytes")
    settings = settings_in(tmp_path)
    settings.training.optimizer = {"class_path": "bitsandbytes.optim.AdamW8bit"}
    _, run, _ = run_tiny(settings)
    assert run.record("adaspec") is not None
