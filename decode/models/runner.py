"""The interface between a model and decoding: caches of sequences, and one forward over one or several of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from typing import Any

import torch
from torch import Tensor

from decode.draft import Draft


@dataclass
class Output:
    """The result of one forward; rows of several sequences are concatenated in the order of the sequences."""

    logits: Tensor  # ``[rows, vocab]``
    hidden: Tensor  # ``[rows, width]``, the last hidden states that the output head reads
    captured: Tensor | None = None  # ``[tokens, captured layers · width]`` of all tokens read, if any

    @classmethod
    def join(cls, outputs: Sequence[Output]) -> Output:
        """Concatenate the outputs of sequences."""
        if len(outputs) == 1:
            return outputs[0]
        captured = None if outputs[0].captured is None else torch.cat([o.captured for o in outputs])  # type: ignore[misc]
        return cls(torch.cat([o.logits for o in outputs]), torch.cat([o.hidden for o in outputs]), captured)

    def split(self, counts: Sequence[int]) -> list[Output]:
        """The inverse of `join`, for outputs with logits of all tokens or of one token of each sequence."""
        if len(counts) == 1:
            return [self]
        captured: Any = repeat(None) if self.captured is None else self.captured.split(list(counts))
        rows = list(counts) if len(self.logits) == sum(counts) else [1] * len(counts)
        return [Output(*parts) for parts in zip(self.logits.split(rows), self.hidden.split(rows), captured)]


def joined(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate tensors; a single one is returned without a copy."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


class Cache(ABC):
    """The key-value cache of one sequence.

    Attributes:
        length: positions held.
        row: place among the sequences that share memory; sequences in this order are read together fastest.
    """

    length: int = 0
    row: int = 0

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Hold the first `length` positions only (no effect if fewer are held)."""

    def keep(self, base: int, slots: list[int]) -> None:
        """Keep the first `base` positions and those at `slots` (ascending), drop the rest."""
        if slots != list(range(base, base + len(slots))):
            self.gather(base, slots)
        self.truncate(base + len(slots))

    def gather(self, base: int, slots: list[int]) -> None:
        """Move the entries at `slots` (ascending) to the slots from `base` on; only trees need it."""
        raise NotImplementedError("this cache holds chains only")

    def close(self) -> None:  # noqa: B027 (most caches share no memory)
        """Free the memory of a cache that shares memory with others."""


@dataclass(eq=False, repr=False)
class Runner(ABC):
    """A causal language model that reads tokens of one or several sequences into their caches."""

    name: str  # class and architecture of the model, for messages
    device: torch.device
    dtype: torch.dtype  # of its weights and hidden states
    vocab_size: int  # ids that it reads, and columns of its logits
    limit: int  # positions of its context
    model: Any = None  # the Hugging Face model, or None
    weight_bytes: int = 0  # of weights that reading one token takes; 0 where that is unknown
    cache_bytes_per_token: int = 0  # of cache that a position takes; 0 where that is unknown
    packing: str = ""  # how the weights were laid out for the processor; empty where there was nothing to choose
    tree_refusal: str = ""  # why it cannot read token trees; empty where it can
    recurrent: bool = False  # it keeps a state: after a rejection it reads the accepted tokens again

    @abstractmethod
    def new_cache(self) -> Any:
        """An empty cache of a sequence; `Cache.close` frees it."""

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:  # noqa: B027 (a cache may grow as needed)
        """Allocate memory for `rows` sequences of `capacity` positions in advance."""

    def forward(
        self,
        caches: Sequence[Any],
        tokens: Sequence[Tensor],
        trees: Sequence[Draft | None] | None = None,
        *,
        capture: tuple[int, ...] = (),
        last: int | None = None,
    ) -> Output:
        """Append tokens to sequences.

        Args:
            caches: one of each sequence, each once.
            tokens: token ids of each sequence, long ``[n]``, n at least 1; with a tree, the pending token followed by
                the tree's nodes.
            trees: give positions (by depth) and mask (by ancestry) of tokens that are no chain.
            capture: hidden states to return of all tokens, ascending; i is the state that enters layer i, the number
                of layers is the state after the final norm.
            last: compute logits of the last `last` tokens of each sequence (0 or 1 for several sequences); None: all.
        """
        return Output.join(
            [self._read(c, t, tree, capture, last) for c, t, tree in zip(caches, tokens, trees or repeat(None))]
        )

    def _read(
        self, cache: Any, tokens: Tensor, tree: Draft | None, capture: tuple[int, ...], last: int | None
    ) -> Output:
        """`forward` of one sequence, for runners that read one at a time."""
        raise NotImplementedError

    def remaining(self, cache: Any, ids: Sequence[int]) -> int:
        """How many tokens fit after `ids`, of which the cache holds the first; negative if `ids` do not fit."""
        return self.limit - len(ids)

    @property
    def supports_trees(self) -> bool:
        """Whether `forward` takes token trees."""
        return not self.tree_refusal


class WrappedRunner(Runner):
    """A runner that reads chains through another one.

    Args:
        inner: the other one.
        tree_refusal: why it reads no trees.
        vocab_size: columns of its logits; None: those of the other one.
    """

    def __init__(self, inner: Runner, tree_refusal: str, vocab_size: int | None = None) -> None:
        other = {"tree_refusal": tree_refusal, "vocab_size": vocab_size or inner.vocab_size}
        super().__init__(**{field.name: getattr(inner, field.name) for field in fields(inner)} | other)
        self.inner = inner

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:
        """See `Runner.reserve`."""
        self.inner.reserve(rows=rows, capacity=capacity)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read on the host is meaningful."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
