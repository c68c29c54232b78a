"""The target's hidden states at every token of a text, which feature heads read, and values kept for each token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.eagle.head import FeatureHead
from distill.data.batch_schedule import EvalBatches
from distill.data.token_dataset import Batch, Ints, TokenDataset
from distill.models.lm_head import LMHead
from distill.teacher.signal_cache import Array, cached

STATES, REFERENCE = "states", "reference"
"""Names of the values: the target's states ``[tokens, width]``, the reference's losses ``[tokens, steps]``."""


class FeatureSource:
    """The frozen target as a source of features and logits, from cached states or by a forward pass.

    Not an ``nn.Module`` on purpose: the target is in no checkpoint and no optimiser.

    Args:
        model: the target. With cached states only its embedding and its head stay referenced.
        head: tells which states are its feature.
        cached: whether batches carry the states.

    Attributes:
        captured_layers: hidden states that are kept: the feature's, then the last one (for EAGLE-1 they are one).
    """

    def __init__(self, model: PreTrainedModel, head: FeatureHead, *, cached: bool) -> None:
        model.eval().requires_grad_(False)
        self.embedding, self.head = model.get_input_embeddings(), LMHead(model)
        last = int(model.config.get_text_config().num_hidden_layers)
        feature = head.captured_layers
        self.captured_layers = tuple(dict.fromkeys([*feature, last])) if head.version == 1 else (*feature, last)
        self.feature_width, self.width = head.feature_width, int(head.config.hidden_size)
        self.model = None if cached else model

    @property
    def state_width(self) -> int:
        """Values kept a token."""
        return len(self.captured_layers) * self.width

    def to(self, device: torch.device) -> None:
        """Moves the weights there."""
        self.embedding.to(device)
        self.head.to(device)
        if self.model is not None:
            self.model.to(device)

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Features ``[batch, time, feature width]`` and last hidden states ``[batch, time, hidden]``."""
        if self.model is None:
            states = batch[STATES]
        else:
            with torch.autocast(batch["input_ids"].device.type, enabled=False):  # the target's own format
                states = self.compute(self.model, batch["input_ids"])
        return states[..., : self.feature_width], states[..., -self.width :]

    def logits(self, states: Tensor) -> Tensor:
        """Logits ``[..., vocab]`` of last hidden states, the target's or a head's, in the target's precision."""
        return cast(Tensor, self.head(states.to(self.head.linear.weight.dtype)))

    def compute(self, model: PreTrainedModel, ids: Tensor) -> Tensor:
        """The states ``[batch, time, state width]`` by a forward pass."""
        found = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        return torch.cat([found[layer] for layer in self.captured_layers], -1)


def keep_states(
    source: FeatureSource, model: PreTrainedModel, rows: TokenDataset, path: Path, fingerprint: str
) -> Array:
    """The target's states of every token, ``[tokens, state width]`` in float32, on disk."""
    return cached(path, fingerprint, (len(rows.ids), source.state_width), _state_parts(source, model, rows))


@torch.inference_mode()
def _state_parts(source: FeatureSource, model: PreTrainedModel, rows: TokenDataset) -> Iterator[tuple[slice, Array]]:
    for examples in EvalBatches(rows, 16, pad_id=0).indices():
        ids = rows.batch(examples, 0)["input_ids"].to(model.device)
        states = source.compute(model, ids).float().cpu().numpy()
        yield from per_example(rows, examples, states)


def per_example(rows: TokenDataset, examples: Ints, values: Array) -> Iterator[tuple[slice, Array]]:
    """Values ``[batch, time, ...]`` of a batch, example by example, with the places where they belong."""
    for row, example in enumerate(examples):
        start, end = int(rows.offsets[example]), int(rows.offsets[example + 1])
        yield slice(start, end), values[row, : end - start]
