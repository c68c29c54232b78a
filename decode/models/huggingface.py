"""Any Hugging Face causal language model through its own forward, over a cache that rolls back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.core.proposal import Draft
from decode.core.runner import Runner
from decode.models.cache import RollbackCache


class HuggingFaceRunner(Runner):
    """Calls the model as it is; `decode.models.fast.FastRunner` does the same with less overhead.

    The weights are the model's own, so changes to them are seen.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config()
        super().__init__(**facts_of(model))
        self.model: Any = model  # transformers types its attributes as Tensor | Module
        self._length = 0
        self._cache = RollbackCache(self.config.num_hidden_layers)
        self._eager = getattr(self.config, "_attn_implementation", "eager") == "eager"
        kinds = set(getattr(self.config, "layer_types", None) or ())
        self._kinds = kinds if len(kinds) > 1 else set()
        self._window = getattr(self.config, "sliding_window", None)
        self._head_input = torch.empty(0)

    @property
    def length(self) -> int:
        """See `Runner.length`."""
        return self._length

    @property
    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return weight_bytes(self.model)

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`."""
        n, past = len(tokens), self._length
        extra: dict[str, Any] = {}
        if tree is None:
            positions = torch.arange(past, past + n, device=self.device)
        else:
            positions = past + torch.tensor([0, *tree.depths()], device=self.device)
            extra["attention_mask"] = self._tree_mask(tree)
        # the states the head reads, without asking the model to keep those of every layer
        hook = self.model.get_output_embeddings().register_forward_pre_hook(self._keep_head_input)
        try:
            out = self.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=0 if head is None else max(1, head),
                output_hidden_states=bool(self.captured_layers),
                **extra,
            )
        finally:
            hook.remove()
        if self.captured_layers:
            self.features = torch.cat([out.hidden_states[layer][0] for layer in self.captured_layers], -1)
        self.hidden = self._head_input[0]
        self._length = past + n
        logits: Tensor = out.logits[0] if head != 0 else out.logits[0, :0]
        return logits

    def truncate(self, length: int) -> None:
        """See `Runner.truncate`."""
        if length <= self._length:  # an interrupted forward may have left more in some layers
            self._cache.truncate(length)
            self._length = length

    def gather(self, base: int, slots: list[int]) -> None:
        """See `Runner.gather`."""
        self._cache.keep(base, torch.tensor(slots, device=self.device))

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`."""
        self._cache.reserve(capacity)

    def _keep_head_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._head_input = inputs[0]

    def _tree_mask(self, tree: Draft) -> Any:
        allowed = tree_mask(tree, self._length)
        full = self._as_mask(allowed)
        if self._window is None or not (self._kinds or getattr(self.config, "sliding_window", None)):
            return full
        position = torch.cat([torch.arange(self._length), self._length + torch.tensor([0, *tree.depths()])])
        near = position[self._length :, None] - position[None] < self._window
        sliding = self._as_mask(allowed & near)
        if self._kinds:
            return {kind: sliding if "sliding" in kind else full for kind in self._kinds}
        return sliding if self._slides else full

    @property
    def _slides(self) -> bool:
        kinds = getattr(self.config, "layer_types", None)
        return "sliding_attention" in kinds if kinds else self.config.model_type == "mistral"

    def _as_mask(self, allowed: Tensor) -> Tensor:
        allowed = allowed.to(self.device)[None, None]
        if not self._eager:
            return allowed
        return torch.zeros(allowed.shape, dtype=self.dtype, device=self.device).masked_fill_(
            ~allowed, torch.finfo(self.dtype).min
        )


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """What every `Runner` of a model is constructed with."""
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return {
        "name": f"{type(model).__name__} ({model.config.model_type})",
        "device": embedding.weight.device,
        "dtype": model.dtype,
        "vocab_size": int(head.weight.shape[0]),
        "limit": int(getattr(config, "max_position_embeddings", 0) or 1 << 30),
    }


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that reading one token takes: all but the embedding, of which a row is read."""
    weights = {id(p): p for p in model.parameters()}
    table: Any = model.get_input_embeddings()
    if table.weight is not model.get_output_embeddings().weight:
        weights.pop(id(table.weight), None)
    return sum(p.numel() * p.element_size() for p in weights.values())


def tree_mask(tree: Draft, past: int) -> Tensor:
    """bool ``[n + 1, past + n + 1]`` for the pending token and the tree: the past, itself, its ancestors."""
    n = len(tree) + 1
    mask = torch.ones(n, past + n, dtype=torch.bool)
    mask[0, past + 1 :] = False
    mask[1:, past + 1 :] = tree.ancestry()
    return mask
