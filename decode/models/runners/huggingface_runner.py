"""Any Hugging Face causal language model through its own forward, over a cache that rolls back."""

import inspect
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.core.proposal import Draft
from decode.core.runner_protocol import Runner
from decode.models.runners.kv_cache import RollbackCache
from decode.models.runners.tree_masks import masks_of_tree, tree_refusal


class HuggingFaceRunner(Runner):
    """Calls the model as it is; `decode.models.runners.fast_runner.FastRunner` does the same with less overhead.

    The weights are the model's own, so changes to them are seen.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.config: Any = model.config.get_text_config()
        super().__init__(**facts_of(model))
        self._length = 0
        self._cache = RollbackCache(self.config.num_hidden_layers)
        self._implementation: str = getattr(self.config, "_attn_implementation", "eager")
        arguments = arguments_of(model)
        self._optional = arguments & {"position_ids", "logits_to_keep"}
        self.tree_refusal = tree_refusal(self.config, arguments)
        self._head_input = torch.empty(0)

    @property
    def length(self) -> int:
        """See `Runner.length`."""
        return self._length

    @property
    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return weight_bytes(self.model)

    @property
    def cache_bytes_per_token(self) -> int:
        """See `Runner.cache_bytes_per_token`; as far as the configuration says."""
        heads = getattr(self.config, "num_attention_heads", 0)
        groups = getattr(self.config, "num_key_value_heads", None) or heads
        width = getattr(self.config, "head_dim", None) or self.config.hidden_size // max(1, heads)
        return 2 * int(self.config.num_hidden_layers * groups * width) * self.dtype.itemsize

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`."""
        n, past = len(tokens), self._length
        extra: dict[str, Any] = {}
        if "position_ids" in self._optional:
            if tree is None:
                positions = torch.arange(past, past + n, device=self.device)
            else:
                positions = past + torch.tensor([0, *tree.depths()], device=self.device)
            extra["position_ids"] = positions[None]
        if "logits_to_keep" in self._optional:
            extra["logits_to_keep"] = 0 if head is None else max(1, head)
        if tree is None:
            masks: Any = nullcontext()
        else:
            masks = masks_of_tree(tree, past, self._implementation, self.device)
        # the states the head reads, without asking the model to keep those of every layer
        hook = self.model.get_output_embeddings().register_forward_pre_hook(self._keep_head_input)
        try:
            with masks:
                out = self.model(
                    input_ids=tokens[None],
                    past_key_values=self._cache,
                    use_cache=True,
                    output_hidden_states=bool(self.captured_layers),
                    **extra,
                )
        finally:
            hook.remove()
        if self.captured_layers:
            self.features = torch.cat([out.hidden_states[layer][0] for layer in self.captured_layers], -1)
        self.hidden = self._head_input[0] if head is None else self._head_input[0][-max(1, head) :]
        self._length = past + n
        logits: Tensor = out.logits[0]
        return logits if head is None else logits[max(0, len(logits) - head) :]

    def truncate(self, length: int) -> None:
        """See `Runner.truncate`."""
        if length <= self._length:  # an interrupted forward may have left more in some layers
            self._cache.truncate(length)
            self._length = length

    def fork(self, count: int) -> list[Runner]:
        """See `Runner.fork`: with caches of their own; each text is a call of the model."""
        forks: list[Runner] = [HuggingFaceRunner(self.model) for _ in range(count)]
        for fork in forks:
            fork.tree_refusal = self.tree_refusal
        return forks

    def gather(self, base: int, slots: list[int]) -> None:
        """See `Runner.gather`."""
        self._cache.keep(base, torch.tensor(slots, device=self.device))

    def reserve(self, capacity: int) -> None:
        """See `Runner.reserve`."""
        self._cache.reserve(capacity)

    def _keep_head_input(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._head_input = inputs[0]


def facts_of(model: PreTrainedModel) -> dict[str, Any]:
    """What every `Runner` of a model is constructed with."""
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    return {
        "model": model,
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


def arguments_of(model: PreTrainedModel) -> set[str]:
    """The named arguments that a model's forward takes; of an adapted model (peft), the adapted one's."""
    adapted: Any = model if isinstance(model, PreTrainedModel) else model.get_base_model()
    return set(inspect.signature(adapted.forward).parameters)
