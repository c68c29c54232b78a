"""A causal language model with a cache that rolls back: what both the target and a draft model run on."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.models.cache import RollbackCache

LARGEST = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest `difference` of a forward that stands in for a model's own; 0.1 in 16 bits."""


class Runner:
    """Reads tokens through any Hugging Face causal LM; `fast.FastRunner` does the same with less overhead.

    Attributes:
        length: positions held in the cache.
        hidden: last hidden states ``[n, width]`` of the latest read, as the head sees them.
        taps: hidden states to keep of all rows read, for drafters that build on them: i is the state that enters layer
            i, the number of layers the last one, after the final norm. Usually none.
        features: those states of the latest read, side by side ``[n, taps · width]``.
    """

    taps: tuple[int, ...] = ()
    features: Tensor = torch.empty(0)

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model  # transformers types its attributes as Tensor | Module
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = self.model.get_input_embeddings().weight.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = int(self.model.get_output_embeddings().weight.shape[0])
        self.limit = int(getattr(self.config, "max_position_embeddings", 0) or 1 << 30)
        self.length = 0
        self.hidden = torch.empty(0)
        self._open()

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that reading one token takes: all but the embedding, of which a row is read."""
        weights = {id(p): p for p in self.model.parameters()}
        table = self.model.get_input_embeddings().weight
        if table is not self.model.get_output_embeddings().weight:
            weights.pop(id(table), None)
        return sum(p.numel() * p.element_size() for p in weights.values())

    # -- the part that a faster runner replaces ------------------------------------------------------------------

    def _open(self) -> None:
        self._cache = RollbackCache(self.config.num_hidden_layers)
        self._eager = getattr(self.config, "_attn_implementation", "eager") == "eager"
        kinds = set(getattr(self.config, "layer_types", None) or ())
        self._kinds = kinds if len(kinds) > 1 else set()
        self._window = getattr(self.config, "sliding_window", None)
        self._captured = torch.empty(0)

    def _capture(self, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._captured = inputs[0]

    def _forward(self, tokens: Tensor, tree: Draft | None, head: int | None) -> Tensor:
        extra: dict[str, Any] = {}
        if tree is not None:
            extra["attention_mask"] = self._tree_mask(tree)
            depth = torch.tensor([0, *tree.depths()], device=self.device)
            extra["position_ids"] = (self.length + depth)[None]
        else:
            positions = torch.arange(self.length, self.length + len(tokens), device=self.device)
            extra["position_ids"] = positions[None]
        # the states the head reads, without asking the model to keep those of every layer
        hook = self.model.get_output_embeddings().register_forward_pre_hook(self._capture)
        try:
            out = self.model(
                input_ids=tokens[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=0 if head is None else max(1, head),
                output_hidden_states=bool(self.taps),
                **extra,
            )
        finally:
            hook.remove()
        if self.taps:
            self.features = torch.cat([out.hidden_states[tap][0] for tap in self.taps], -1)
        self.hidden = self._captured[0]
        return out.logits[0] if head != 0 else out.logits[0, :0]

    def _tree_mask(self, tree: Draft) -> Any:
        allowed = tree_mask(tree, self.length)
        full = self._as_mask(allowed)
        if self._window is None or not (self._kinds or getattr(self.config, "sliding_window", None)):
            return full
        position = torch.cat([torch.arange(self.length), self.length + torch.tensor([0, *tree.depths()])])
        near = position[self.length :, None] - position[None] < self._window
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

    def _truncate(self, length: int) -> None:
        self._cache.truncate(length)

    def _keep(self, base: int, slots: Tensor) -> None:
        self._cache.keep(base, slots)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` positions up front, so that nothing grows on the way."""
        for layer in self._cache.layers:
            layer.capacity = max(layer.capacity, capacity)

    # -- what callers use ------------------------------------------------------------------------------------------

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """Append tokens to the cache.

        Args:
            tokens: long ``[n]``; with a tree, the pending token followed by the tree's nodes.
            tree: gives positions (by depth) and mask (by ancestry) where the tokens are no chain.
            head: for how many of the last rows logits are wanted; None for all, 0 for none.

        Returns:
            Logits ``[n or head, vocab]``.
        """
        logits = self._forward(tokens, tree, head)
        self.length += len(tokens)
        return logits

    def room(self, ids: Sequence[int]) -> int:
        """How many tokens fit behind this text, whose first `length` tokens are held; negative if it does not fit."""
        return self.limit - len(ids)

    def truncate(self, length: int) -> None:
        """Hold the first `length` positions only (no effect if fewer are held)."""
        if length <= self.length:  # an interrupted forward may have left more in some layers
            self._truncate(length)
            self.length = length

    def keep(self, base: int, slots: list[int]) -> None:
        """Keep the first `base` positions and then those at `slots` (ascending), dropping the rest."""
        if slots == list(range(base, base + len(slots))):
            self.truncate(base + len(slots))
        else:
            self._keep(base, torch.tensor(slots, device=self.device))
            self.length = base + len(slots)


def tree_mask(tree: Draft, past: int) -> Tensor:
    """bool ``[n + 1, past + n + 1]`` for the pending token and the tree: the past, itself, its ancestors."""
    n = len(tree) + 1
    mask = torch.ones(n, past + n, dtype=torch.bool)
    mask[0, past + 1 :] = False
    mask[1:, past + 1 :] = tree.ancestry()
    return mask


def open_runner(model: PreTrainedModel, *, fast: bool = True, compile: str = "none") -> Runner:
    """The fastest runner that gives this model's own results.

    A hand-written forward is used for the families it knows, after it has reproduced the model's logits on a few
    tokens; everything else (other families, quantised weights, models spread over devices) goes through the
    ordinary model call. Once the weights have changed, open the model anew.

    Args:
        model: a causal language model.
        fast: use the hand-written forward where it can be.
        compile: send it through torch.compile (a mode of `decode.models.compiled.MODES`).

    Raises:
        UserError: logits that are not finite, or a model that cannot be compiled.
    """
    from decode.models.fast import supports
    from decode.models.partial import PartialRunner

    if compile != "none":
        from decode.models.compiled import open_compiled

        return open_compiled(model, compile)
    if fast and supports(model):
        runner = PartialRunner(model)
        gap = difference(model, runner)
        if gap < LARGEST.get(model.dtype, 0.1):
            return runner
        warnings.warn(
            f"the fast forward differs from {type(model).__name__} by {gap:.2g} in its logits; "
            "using the ordinary model call",
            stacklevel=2,
        )
    return Runner(model)


@torch.inference_mode()
def difference(model: PreTrainedModel, runner: Runner) -> float:
    """Largest difference of the logits on a few tokens, relative to their spread."""
    vocab = runner.vocab_size
    tokens = (torch.arange(6, device=runner.device) * 7919 + 1) % vocab
    wanted = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    seen = torch.cat([runner.read(tokens[:4]), runner.read(tokens[4:5]), runner.read(tokens[5:])]).float()
    runner.truncate(0)
    if not torch.isfinite(wanted).all():
        raise UserError(
            f"{type(model).__name__} gives logits that are not finite; check the weights, or load it in float32"
        )
    return ((seen - wanted).abs().max() / wanted.std().clamp_min(1e-6)).item()
