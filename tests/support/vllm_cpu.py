"""vLLM's CPU build without its faults, as a plugin of vLLM, so that its own classes draft what they draft on a GPU.

vLLM 0.32 runs here as it is but for three functions: keys of a block head's context are normed by the first layer's
weights (model_executor/models/qwen3_dflash.py:639), DSpark is refused (config/vllm.py:2978), and temperatures are
filled into a copy (utils/cpu_triton_utils.py:398).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

ENTRY = "[vllm.general_plugins]\nvllm_cpu = vllm_cpu:register\n"


def plugin(folder: Path) -> dict[str, str]:
    """The variables with which every process of vLLM calls `register`; what they name is written into the folder."""
    facts = folder / "vllm_cpu-1.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu-mended\nVersion: 1\n")
    (facts / "entry_points.txt").write_text(ENTRY)
    shutil.copy(__file__, folder)  # alone, since names of modules beside it may be those of others
    return {"PYTHONPATH": str(folder)}


def register() -> None:
    """Replace the three functions."""
    import torch
    import torch.nn.functional as F
    import vllm.v1.sample.rejection_sampler as sampler
    import vllm.v1.worker.gpu_model_runner as runner
    from torch import Tensor
    from vllm.config import VllmConfig
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.v1.spec_decode.dflash import DFlashProposer

    def normed(self: Any, keys: Tensor) -> Tensor:
        """``keys [layers, context, heads, head_dim]``, each layer's by its own weights."""
        scale = self._k_norm_weights.view(len(keys), 1, 1, -1)
        return F.rms_norm(keys, keys.shape[-1:], eps=self._rms_norm_eps) * scale

    def spread(values: Tensor, ends: Tensor, count: int, replace_from: float = 0, replace_to: float = 0) -> Tensor:
        """A value for each token of each text, of any number format."""
        text = torch.searchsorted(ends.long(), torch.arange(count), right=True)
        found = values[text]
        return found.masked_fill(found == replace_from, replace_to) if replace_from != replace_to else found

    refused = VllmConfig._get_v1_model_runner_unsupported_features

    def unsupported(self: Any) -> Any:
        drafting = self.speculative_config
        if drafting and drafting.method == "dspark":
            drafting.method = "dflash"  # which the runner of a CPU has; `Proposer` tells them apart
        return refused(self)

    class Proposer(DFlashProposer):  # type: ignore[misc]
        """DFlash's; for DSpark a block has a slot less, and all of its slots draft, each after the token before it."""

        @property
        def spark(self) -> bool:
            return "DSpark" in self.draft_model_config.hf_config.architectures[0]

        def set_inputs_first_pass(self, **given: Any) -> Any:
            if not self.spark:
                return super().set_inputs_first_pass(**given)
            self.anchors = given["next_token_ids"]
            self.num_speculative_tokens -= 1
            try:
                count, _, attention = super().set_inputs_first_pass(**given)
            finally:
                self.num_speculative_tokens += 1
            return count, torch.arange(count), attention

        def _sample_draft_tokens(self, states: Tensor, *more: Any) -> Any:
            if not self.spark:
                return super()._sample_draft_tokens(states, *more)
            model, tokens = self.model, [self.anchors]
            for logits in model.compute_draft_logits(states).unflatten(0, (len(self.anchors), -1)).unbind(1):
                best = (logits + model.markov_bias(model.markov_embed(tokens[-1]))).argmax(-1)
                tokens.append(model.map_draft_to_target(best))
            return torch.stack(tokens[1:], 1).flatten(), None

    DFlashQwen3Model._normalize_context_k = normed
    sampler.expand_batch_to_tokens = spread
    VllmConfig._get_v1_model_runner_unsupported_features = unsupported
    runner.DFlashProposer = Proposer
