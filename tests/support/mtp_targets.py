"""Tiny random targets whose files hold next-token layers (MTP)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import ARCHITECTURES, build_architecture
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from decode.models.loading import load_model
from decode.models.mtp import MtpHead

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
