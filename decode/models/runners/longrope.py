"""Models with longrope scaling: one rotation for short texts, another for long ones.

transformers rotates every forward by its largest position: below ``original_max_position_embeddings`` with the short
factors, from there on with the long ones. Keys that were cached under the other rotation would be wrong, so at the
boundary the text is read again, as `generate` does for Phi-3.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from decode.core.proposal import Draft
from decode.core.runner_protocol import Runner, WrappedRunner


def longrope_boundary(config: PreTrainedConfig) -> int | None:
    """Tokens up to which the short factors serve, or None for models without longrope or without longer texts."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if one.get("rope_type") == "longrope":
            boundary = one.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            return int(boundary) if boundary and boundary < config.max_position_embeddings else None
    return None


class LongRopeRunner(WrappedRunner):
    """A runner whose cache always holds keys of one rotation, that of the text's length."""

    def __init__(self, inner: Runner, boundary: int) -> None:
        super().__init__(inner, f"its rotation changes at {boundary} tokens (longrope)")
        self.boundary = boundary
        self._ids = torch.empty(0, dtype=torch.long, device=inner.device)  # with room to grow
        self._long = False

    def fork(self, count: int) -> list[Runner]:
        """See `Runner.fork`."""
        return [LongRopeRunner(inner, self.boundary) for inner in self.inner.fork(count)]

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `Runner.read`; rows on both sides of the boundary each get the logits of their own rotation."""
        assert tree is None, self.tree_refusal
        n, short = len(tokens), max(0, self.boundary - self.length)  # so many more tokens fit below the boundary
        if 0 < short < n and (head is None or head > n - short):
            first = self._read(tokens[:short], None if head is None else head - (n - short))
            hidden, features = self.hidden, self.features
            logits = torch.cat([first, self._read(tokens[short:], None)])
            self.hidden = torch.cat([hidden[-len(first) :], self.hidden])
            self.features = torch.cat([features, self.features]) if self.captured_layers else features
            return logits
        return self._read(tokens, head)

    def _read(self, tokens: Tensor, head: int | None) -> Tensor:
        start, n, inner = self.length, len(tokens), self.inner
        if start + n > len(self._ids):
            self._ids = torch.cat([self._ids[:start], self._ids.new_empty(start + 2 * n + 256)])
        self._ids[start : start + n] = tokens
        inner.captured_layers = self.captured_layers
        long = start + n > self.boundary
        if start and long != self._long:
            inner.truncate(0)
            logits = inner.read(self._ids[: start + n], head=n if head is None else head)
        else:
            logits = inner.read(tokens, head=head)
        self._long, self.hidden = long, inner.hidden
        self.features = inner.features[-n:] if self.captured_layers else inner.features
        return logits
