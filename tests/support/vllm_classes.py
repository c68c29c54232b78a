"""vLLM's own classes of block heads' scorers and convolutions on a CPU: a script for its environment.

``python vllm_classes.py HEAD INPUTS OUTPUTS``: an export, and safetensors files of what the classes read and give.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.config import CompilationConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.linear import LinearBase


def filled(module: Any, state: dict[str, Tensor], part: str) -> Any:
    """The module with the tensors of one part of an export, every one of which has its place."""
    mine = {key.removeprefix(f"{part}."): value for key, value in state.items() if key.startswith(f"{part}.")}
    parameters = dict(module.named_parameters())
    assert parameters.keys() == mine.keys(), parameters.keys() ^ mine.keys()
    for name, parameter in parameters.items():
        assert parameter.shape == mine[name].shape, name
        parameter.data.copy_(mine[name])
    if hasattr(module, "materialize_inference_buffers"):
        module.materialize_inference_buffers(torch.device("cpu"), torch.float32)
    for linear in module.modules():
        if isinstance(linear, LinearBase):
            linear.quant_method.process_weights_after_loading(linear)
    return module


@torch.inference_mode()
def main(folder: Path, inputs: Path, outputs: Path) -> None:
    """Writes the scores of all pairs of neighbouring candidates; and what each layer's convolutions make of rows."""
    fields, state, given = (
        json.loads((folder / "config.json").read_text()),
        load_file(folder / "model.safetensors"),
        load_file(inputs),
    )
    slots, width, made = fields["dflash_config"], fields["hidden_size"], dict[str, Tensor]()
    from vllm.model_executor.models.qwen3_dflash2 import CandidateSelector, DFlashGroupedConv

    sizes = slots["selector_rank"], slots["selector_top_k"]
    selector = filled(
        CandidateSelector(width, fields["vocab_size"], *sizes, params_dtype=torch.float32, prefix=""),
        state,
        "candidate_selector",
    )
    names = "candidate_ids", "unary_logits", "hidden_states", "anchor_token_ids"
    made["scores"] = selector(*(given[name] for name in names))
    taps = slots["conv_kernel_size"], slots["conv_group_size"], given["rows"].shape[1]
    for part in sorted({key.rpartition("_conv.")[0] + "_conv" for key in state if "_conv." in key}):
        conv = filled(DFlashGroupedConv(width, *taps, params_dtype=torch.float32, prefix=""), state, part)
        blocks, coefficients = conv.prepare(given["rows"].flatten(0, 1))
        made[part] = conv.finish(blocks, coefficients).view_as(given["rows"])
    save_file(made, outputs)


if __name__ == "__main__":
    with set_current_vllm_config(VllmConfig(compilation_config=CompilationConfig(mode=0))):
        init_distributed_environment(1, 0, f"file://{sys.argv[3]}.store", 0, "gloo")
        initialize_model_parallel()
        main(*map(Path, sys.argv[1:4]))
