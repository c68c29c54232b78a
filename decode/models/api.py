"""The interface between a model and decoding: caches of sequences, and one forward over one or several of them."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import psutil
import torch
from torch import Tensor

from decode.core.draft import Draft, Ids, upload

Capture = tuple[int, ...]
"""Hidden states of all tokens to return, ascending: i is the state that enters layer i, the number of layers is the
state after the final norm."""


@dataclass
class Read:
    """Tokens to append to a text."""

    cache: Any
    tokens: Tensor  # long ``[n]``, n at least 1; with a tree, the pending token followed by the tree's nodes
    tree: Draft | None = None  # gives positions (by depth) and mask (by ancestry) of tokens that are no chain


@dataclass
class Out:
    """What a forward gives for the tokens of texts, one text after the other."""

    logits: Tensor  # ``[rows, vocab]``
    hidden: Tensor  # ``[rows, width]``, the last hidden states that the output head reads
    captured: Tensor | None = None  # ``[tokens, captured layers · width]`` of all tokens read, if any

    @classmethod
    def of(cls, outs: Sequence[Out]) -> Out:
        """The output of several texts, from one of each."""
        if len(outs) == 1:
            return outs[0]
        captured = [out.captured for out in outs if out.captured is not None]
        logits, hidden = (joined(parts) for parts in zip(*((out.logits, out.hidden) for out in outs)))
        return cls(logits, hidden, joined(captured) if captured else None)


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
class Model(ABC):
    """A causal language model that reads tokens of one or several sequences into their caches."""

    name: str  # class and architecture of the model, for messages
    device: torch.device
    dtype: torch.dtype  # of its weights and hidden states
    vocab_size: int  # ids that it reads, and columns of its logits unless it has `columns`
    limit: int  # positions of its context
    boundary: int = 0  # positions of a text whose prompt is no longer: LongRoPE rotates longer ones by other factors
    model: Any = None  # the Hugging Face model, or None
    weight_bytes: int = 0  # of weights that reading one token takes; 0 where that is unknown
    cache_bytes_per_token: int = 0  # of cache that a position takes; 0 where that is unknown
    packing: str = ""  # how the weights were laid out for the processor; empty where there was nothing to choose
    columns: Tensor | None = None  # the ids of its logits, long ``[columns]``, of a draft model that drafts some alone
    tree_refusal: str = ""  # why it cannot read token trees; empty where it can
    outgrown: bool = False  # a text that it drafts for was longer than its context, which has been said
    lock: Any = field(default_factory=RLock)  # held while its caches change
    recurrent: bool = False  # it keeps a state: after a rejection it reads the accepted tokens again

    @abstractmethod
    def new_cache(self) -> Any:
        """An empty cache of a sequence; `Cache.close` frees it."""

    def reserve(self, rows: int, length: int = 0) -> None:  # noqa: B027 (most models share no memory between texts)
        """Keep memory for so many texts of this length until other numbers are asked for; 1 and 0 give it back."""

    def forward(self, reads: Sequence[Read], *, capture: Capture = (), last: int | None = None) -> Out:
        """Append tokens to texts, each of which occurs once.

        Args:
            reads: the tokens of each text.
            capture: see `Capture`.
            last: compute logits of the last `last` tokens of each text (0 or 1 for several texts); None: of all.
        """
        return Out.of([self._read(read, capture, last) for read in reads])

    def _read(self, read: Read, capture: Capture, last: int | None) -> Out:
        """`forward` of one text, for models that read one at a time."""
        raise NotImplementedError

    def keep(self, caches: Sequence[Any], bases: Sequence[int], paths: Sequence[list[int]]) -> None:
        """Of each text keep the first `bases` positions and those at the slots of its path: see `Cache.keep`."""
        for cache, base, slots in zip(caches, bases, paths):
            cache.keep(base, slots)

    def remaining(self, ids: Ids) -> int:
        """How many tokens fit after `ids`; negative if `ids` do not fit."""
        return self.limit - len(ids)

    @property
    def tree_error(self) -> str:
        """What is wrong with a method that drafts trees for this target; empty where it reads them."""
        if not self.tree_refusal:
            return ""
        return (
            f"{self.name} cannot verify token trees: {self.tree_refusal}; use a method that drafts chains (vanilla, "
            "eagle, prompt-lookup, layerskip)"
        )


PIECE = 512  # most tokens of a prompt that are read in one forward


def read_prompt(
    model: Model, cache: Any, ids: Ids, *, capture: Capture = (), each: Callable[[Tensor], None] | None = None
) -> None:
    """Read the start of a text in pieces, so that memory does not grow with the square of its length.

    `each` is given the captured states ``[tokens, captured layers · width]`` of every piece, if any.
    """
    # a forward's last position decides how LongRoPE rotates it: where a longer text begins, one behind the boundary
    end = cache.length + len(ids)
    piece, more = max(PIECE, model.boundary + 1), ids[:1] * (end == model.boundary)
    for at in range(0, len(ids), piece):
        tokens = upload(ids[at : at + piece] + more, model.device)
        out = model.forward([Read(cache, tokens)], capture=capture, last=0)
        if each is not None and out.captured is not None:
            each(out.captured[: len(ids)])
    if more:
        cache.truncate(end)


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock read on the host is meaningful."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


GROWTH = 1.3  # memory that caches take at most, in caches: what is allocated ahead, and a layer that is copied


def rows_that_fit(
    device: torch.device, bytes_per_token: int, lengths: Sequence[int], batch_size: int | None = None
) -> int:
    """How many texts of these lengths to have at once: as many as asked for (None: all), or fewer, with a warning.

    They are fewer where the device has no memory for their caches, whose bytes a token may be unknown, 0.
    """
    longest, wanted = max(lengths, default=1), max(1, min(batch_size or len(lengths), len(lengths)))
    most = free_memory(device) / (GROWTH * longest * max(1, bytes_per_token))
    if most >= wanted:
        return wanted
    rows = max(1, int(most))
    warnings.warn(
        f"memory holds {rows} texts of {longest} tokens; writing {rows} instead of {wanted} at once", stacklevel=3
    )
    return rows


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return float(psutil.virtual_memory().available)
