"""The key-value cache of a hand-written forward, and the placement of new tokens in it: slots, masks, attention.

The new tokens of all sequences are the rows of one matrix ``[tokens, hidden]`` without padding, so every product with a
weight serves all of them. Each sequence has a row of the cache; neighbouring rows attend in one call, padded to the
longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.models.runner import Cache

PADDED = 32  # most new tokens of a sequence that is padded with its neighbours; one with more attends alone


class KVCache:
    """Keys and values of sequences, ``[layers, rows, 2 kv_heads, capacity, width]``, keys before values.

    Attributes:
        tensor: the memory.
        views: of each layer the whole cache ``[rows, 2 kv_heads, capacity, width]``, its keys and its values.
        rows: the sequence of each row; None where it was closed.
    """

    def __init__(self, layers: int, kv_heads: int, width: int, like: Tensor) -> None:
        self.kv_heads, self.tensor = kv_heads, like.new_zeros(layers, 1, 2 * kv_heads, 0, width)
        self.rows: list[Row | None] = []
        self.reserved = 1
        self.reserve(capacity=256)

    @property
    def capacity(self) -> int:
        """Positions of a row."""
        return self.tensor.shape[3]

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:
        """Allocate at least as many positions; keep memory for `rows` sequences, even while fewer are open."""
        self.reserved = rows or self.reserved
        self.grow(rows, capacity)
        if rows == 1:
            self.compact()

    def grow(self, rows: int, capacity: int) -> None:
        """Allocate at least as many rows and positions, keeping what is held."""
        count = self.tensor.shape[1]
        if capacity > self.capacity:
            # the cache of one sequence doubles; that of many grows in smaller steps, since memory bounds their number
            capacity = max(capacity, 2 * self.capacity if count == 1 else self.capacity + self.capacity // 4)
        elif rows <= count:
            return
        self._allocate(max(rows, count), max(capacity, self.capacity))

    def _allocate(self, rows: int, capacity: int) -> None:
        old, heads = self.tensor, self.kv_heads
        grown = old.new_zeros(old.shape[0], rows, 2 * heads, capacity, old.shape[4])
        kept = min(rows, old.shape[1])
        grown[:, :kept, :, : old.shape[3]] = old[:, :kept]
        self.tensor = grown
        self.views = [(layer, layer[:, :heads], layer[:, heads:]) for layer in grown.unbind(0)]

    def new_row(self, make: Callable[[int], Any] | None = None) -> Any:
        """The cache of a new sequence in the first free row; `make` constructs another class than `Row`."""
        at = self.rows.index(None) if None in self.rows else len(self.rows)
        row = Row(self, at) if make is None else make(at)
        self.rows[at : at + 1] = [row]
        return row

    def compact(self) -> None:
        """Move the last rows into closed ones, so that neighbours attend together; free the memory of all but one."""
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                to = self.rows.index(None)
                self.tensor[:, to, :, : last.known] = self.tensor[:, last.row, :, : last.known]
                last.row, self.rows[to] = to, last
        if len(self.rows) <= 1 < self.tensor.shape[1] and self.reserved <= 1:
            self._allocate(1, self.capacity)


class Row(Cache):
    """The cache of one sequence in a row of a `KVCache`.

    Attributes:
        ahead: states after the first `shared` layers of tokens that a draft by these layers has read ahead.
    """

    def __init__(self, memory: KVCache, row: int) -> None:
        self.memory, self.row, self.length = memory, row, 0
        self.ahead: list[Tensor] = []
        self.shared = 0

    @property
    def known(self) -> int:
        """Positions in use, those read ahead included."""
        return self.length + sum(map(len, self.ahead))

    def truncate(self, length: int) -> None:
        """See `Cache.truncate`; what was read ahead is dropped too. Slots past `length` are written before read."""
        self.ahead = []
        self.length = min(length, self.length)

    def gather(self, base: int, slots: list[int]) -> None:
        """See `Cache.gather`."""
        held = self.memory.tensor[:, self.row]
        held[:, :, base : base + len(slots)] = held.index_select(2, torch.tensor(slots, device=held.device))

    def close(self) -> None:
        """Free the row; the memory of several rows is given back when at most one is left."""
        rows = self.memory.rows
        if self in rows:  # it may have been closed before
            rows[self.row] = None
            if len(rows) - rows.count(None) <= 1 >= self.memory.reserved:
                self.memory.compact()


@dataclass
class NewTokens:
    """The new tokens of one sequence."""

    cache: Any  # its `Row`
    start: int  # cache slot of the first token
    count: int
    depths: Sequence[int] | None = None  # where they are no chain: position of each, less `start`
    # where they are no chain: bool ``[count, m]``, which of the last m slots each token sees; it sees all before these
    seen: Tensor | None = None

    @property
    def end(self) -> int:
        """The slot after the last token."""
        return self.start + self.count

    def positions(self) -> Sequence[int]:
        """Positions of the tokens in their sequence."""
        return range(self.start, self.end) if self.depths is None else [self.start + depth for depth in self.depths]


def attention_mask(new: Sequence[NewTokens], groups: int, window: int | None, like: Tensor) -> Tensor | None:
    """Additive mask ``[sequences, 1, groups · width, slots]``, or None where every query may see every key.

    Sequences with fewer tokens than the widest are padded with copies of their last query. A single sequence takes a
    shorter way, with half as many operations.

    Args:
        new: the new tokens of sequences that attend in one call.
        groups: query heads of a key head; queries of a group are consecutive rows.
        window: positions that attention sees, or None for all.
        like: gives dtype and device.
    """
    if len(new) == 1 and new[0].count == 1 and (window is None or new[0].end <= window):
        return None
    device, width, slots = like.device, max(one.count for one in new), max(one.end for one in new)
    cut = window is not None and slots > window
    if width == 1 and not cut and all(one.end == slots and one.seen is None for one in new):
        return None
    if len(new) == 1 and not cut:
        seen = new[0].seen
        own = torch.ones(width, width, dtype=torch.bool, device=device).tril_() if seen is None else seen.to(device)
        mask = like.new_zeros(1, 1, groups, width, slots)
        mask[..., slots - own.shape[1] :].masked_fill_(~own, -torch.inf)
        return mask.view(1, 1, groups * width, slots)
    start = torch.tensor([one.start for one in new], device=device)
    count = torch.tensor([one.count for one in new], device=device)
    query = start[:, None] + torch.minimum(torch.arange(width, device=device), count[:, None] - 1)  # [sequences, width]
    slot = torch.arange(slots, device=device)
    allowed = slot <= query[..., None]
    if window is not None:
        allowed &= query[..., None] - slot < window
    for row, one in zip(allowed, new):
        if one.seen is None:
            continue
        own, past = one.seen.to(device), one.end - one.seen.shape[1]
        row[: one.count, :past], row[: one.count, past : one.end], row[: one.count, one.end :] = True, own, False
        if window is not None:
            at = torch.tensor(one.positions(), device=device)
            before = torch.cat([slot[: one.start], at])
            row[: one.count, : one.end] &= at[:, None] - before < window
        row[one.count :] = row[one.count - 1]
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=device).masked_fill_(~allowed, -torch.inf)
    return mask.repeat(1, groups, 1)[:, None]


class RaggedBatch:
    """Where the tokens of a forward over several sequences belong.

    Args:
        new: the new tokens of each sequence; those in neighbouring rows, ascending, attend in one call.
        groups: query heads of a key head.
        window: positions that attention sees, or None for all.
        like: gives dtype and device of the masks.

    Attributes:
        positions: position of each token in its sequence, long ``[tokens]``.
        last: index of the last token of each sequence, long ``[sequences]``.
    """

    def __init__(self, new: Sequence[NewTokens], groups: int, window: int | None, like: Tensor) -> None:
        device = like.device
        self.positions = torch.tensor([at for one in new for at in one.positions()], device=device)
        self._rows = torch.tensor([one.cache.row for one in new for _ in range(one.count)], device=device)
        self._slots = torch.tensor([slot for one in new for slot in range(one.start, one.end)], device=device)
        self.last = torch.tensor([one.count for one in new], device=device).cumsum(0) - 1
        self._calls: list[_Call] = []
        token = 0
        for run in neighbours(new):
            self._calls.append(_Call(run, token, attention_mask(run, groups, window, like), device))
            token += self._calls[-1].count

    def slots(self, views: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[_Slots, Tensor, Tensor]]:
        """Of each layer what its new keys and values are copied to, and all keys and all values."""
        return [(_Slots(cache, self._rows, self._slots), k, v) for cache, k, v in views]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention before its projection, ``[tokens, heads · width]``.

        Args:
            q: ``[1, heads, tokens, width]``.
            k: all keys of the layer, ``[rows, kv_heads, capacity, width]``.
            v: all values.
        """
        found = [call.attend(q[0], k, v) for call in self._calls]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass
class _Slots:
    """The cache slots of the new tokens of a layer, written as a view of them would be."""

    cache: Tensor
    rows: Tensor
    slots: Tensor

    def copy_(self, states: Tensor) -> None:
        """Write states ``[1, heads, tokens, width]``."""
        self.cache[self.rows, :, self.slots] = states[0].transpose(0, 1)


def neighbours(new: Sequence[NewTokens]) -> list[list[NewTokens]]:
    """Sequences in neighbouring rows, except those with many tokens."""
    runs = [[new[0]]]
    for before, one in pairwise(new):
        if one.cache.row == before.cache.row + 1 and max(one.count, before.count) <= PADDED:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


class _Call:
    """Sequences in neighbouring rows of the cache that attend in one call."""

    def __init__(self, new: Sequence[NewTokens], token: int, mask: Tensor | None, device: torch.device) -> None:
        counts = [one.count for one in new]
        self.rows, self.row, self.token, self.count = len(new), new[0].cache.row, token, sum(counts)
        self.width, self.slots, self.mask = max(counts), max(one.end for one in new), mask
        self.padded: Tensor | None = None
        if min(counts) < self.width:  # a sequence's last token stands in for those that it lacks
            firsts = [sum(counts[:i]) for i in range(len(counts))]
            spread = [first + min(i, n - 1) for first, n in zip(firsts, counts) for i in range(self.width)]
            real = [row * self.width + i for row, n in enumerate(counts) for i in range(n)]
            self.padded, self.real = torch.tensor(spread, device=device), torch.tensor(real, device=device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of these sequences ``[tokens, heads · width]``, given all queries ``[heads, tokens, width]``."""
        heads, kv_heads, d = q.shape[0], k.shape[1], q.shape[2]
        q = q.narrow(1, self.token, self.count)
        if self.padded is not None:
            q = q.index_select(1, self.padded)
        # the group becomes rows of its key head, so that keys are never repeated
        q = q.unflatten(1, (self.rows, self.width)).transpose(0, 1).reshape(self.rows, kv_heads, -1, d)
        k, v = (x.narrow(0, self.row, self.rows).narrow(2, 0, self.slots) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        out = out.unflatten(2, (-1, self.width)).permute(0, 3, 1, 2, 4).reshape(-1, heads * d)
        return out if self.padded is None else out.index_select(0, self.real)
