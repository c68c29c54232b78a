"""Tiny random targets whose files hold next-token layers (MTP), and a run that tunes them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, build_architecture
from pairs import make_tokenizer
from safetensors.torch import load_file, save_file
from tiny_run import tiny_settings
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from decode.models.loading import load_model
from decode.models.mtp import MtpHead
from distill.config.drafts import ResponseSettings
from distill.config.run import Settings
from distill.config.training import StudentSettings, TargetSettings

_MOE = {"n_routed_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
_GLM = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}
_WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OTHERS = {
    "GLM-4.5": ("glm4_moe", ARCHITECTURES["Llama"][1] | _MOE | _GLM),
    "Mellum": ("mellum", ARCHITECTURES["Llama"][1] | _MOE | _WINDOW),
}
NEEDED = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="this transformers runs all next-token layers together"
)
LAYERED = "DeepSeek-V3", "GLM-4.5"  # their files number next-token layers behind the others


def written(head: MtpHead) -> dict[str, Tensor]:
    """The layers' tensors as a file takes them."""
    return {name: tensor.clone() for name, tensor in head.tensors().items()}


def with_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layers: int = 1, dtype: str = "float32", **changes: int
) -> PreTrainedModel:
    """A random target whose file holds next-token layers, opened from it."""
    if kind in OTHERS:
        monkeypatch.setitem(ARCHITECTURES, kind, OTHERS[kind])
    own = {"num_mtp_layers": layers, "mtp_layer_types": ["full_attention"] if kind == "Qwen3-Next" else None}
    main = build_architecture(kind, **own, **changes)
    main.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(4)
        mtp = MtpModel(main, layers)
        for name, weight in mtp.layers.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.4 + ("norm" in name and kind != "Qwen3-Next"))
    file = folder / "model.safetensors"
    depth = main.config.num_hidden_layers
    save_file(load_file(file) | written(MtpHead(mtp, main.config)), file, metadata={"format": "pt"})
    if kind in LAYERED:  # its class names the layer of the published depth
        patterns = [rf"model\.layers\.{depth + i}\..*" for i in range(layers)]
        monkeypatch.setattr(type(main), "_keys_to_ignore_on_load_unexpected", patterns)
    return load_model(folder, device="cpu", dtype=dtype)


def mtp_settings(folder: Path, kind: str = "Mellum", layers: int = 1) -> Settings:
    """A run that tunes the layers of a target made below the folder."""
    tokenizer = make_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        with_layers(folder / "given", patch, kind, layers, vocab_size=len(tokenizer), max_position_embeddings=256)
    tokenizer.save_pretrained(folder / "given")
    target = TargetSettings(kind="as_is", model=str(folder / "given"))
    settings = tiny_settings(folder, target=target, student=StudentSettings(kind="mtp"))
    settings.data.max_length, settings.data.overlong = 96, "cut"
    settings.teacher.responses = ResponseSettings(source="target", max_new_tokens=16)
    settings.training.steps, settings.training.lr, settings.trainer.validate_every = 40, 1e-2, 20
    measured = settings.evaluation
    measured.prompts = measured.accuracy_prompts = 8
    measured.decode_prompts, measured.max_new_tokens, measured.repeats, measured.draft_lengths = 1, 12, 1, [2]
    return settings
