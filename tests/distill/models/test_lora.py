"""Adapters on frozen weights in fewer bits: what is trained, and what it is merged into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import build_tiny
from safetensors.torch import load_file
from tiny_run import begun, run_tiny, tiny_settings

from distill.config.training import LoraSettings
from distill.models.loading import Adapter

CPU = torch.device("cpu")


def no_load(**options: object) -> None:
    raise AssertionError(options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_what_was_learned_on_bfloat16_weights_is_added_to_the_float32_ones(family: str) -> None:
    whole = build_tiny(family, seed=3)
    before = {name: weight.clone() for name, weight in whole.state_dict().items()}
    adapter = Adapter(whole, LoraSettings(rank=2, base="bfloat16"), 0, "bf16-mixed", CPU, no_load)
    trained = {name: p for name, p in adapter.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert all("lora" in name for name in trained)
    half = [p for p in adapter.model.parameters() if p.dtype == torch.bfloat16 and p.ndim == 2]
    assert len(half) == len(trained) // 2  # an adapter has two matrices
    ids = torch.randint(2, whole.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(trained.values(), lr=8.0)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            adapter.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        learned = adapter.model(input_ids=ids).logits.float()
    merged = adapter.merged()
    with torch.no_grad():
        found = merged(input_ids=ids).logits
        merged.load_state_dict(before)
        unlearned = merged(input_ids=ids).logits
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert (found - learned).abs().mean() < 0.05 * (unlearned - learned).abs().mean()


def test_a_draft_and_a_target_are_trained_on_bfloat16_weights(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    _, run, _ = run_tiny(begun(settings))
    settings.name, lora = "adapted", LoraSettings(rank=2, base="bfloat16")
    settings.target.kind, settings.target.model, settings.target.lora = "lora", str(run.target), lora
    settings.trainer.precision = "bf16-mixed"
    _, adapted, _ = run_tiny(settings)
    for stage in ("target",):
        start = load_file(run.target / "model.safetensors")
        ended = load_file(adapted.path(stage) / "model.safetensors")
        assert {w.dtype for w in ended.values()} == {torch.float32}
        changed = {name for name, w in ended.items() if not torch.equal(w, start[name])}
        assert changed == {name for name in ended if "proj" in name}
    losses = [row["loss"] for row in adapted.record("target").history]  # type: ignore[union-attr]
    assert losses[-1] < losses[0]
