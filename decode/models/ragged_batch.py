"""The key-value cache of a hand-written forward, and the placement of new tokens in it: slots, masks, attention.

The new tokens of all sequences are the rows of one matrix ``[tokens, hidden]`` without padding, so every product with a
weight serves all of them. Each sequence has a row of the cache; neighbouring rows attend in one call, padded to the
longest of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decode.models.runner import Cache, joined

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

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position of a row."""
        layers, _, heads, _, width = self.tensor.shape
        return layers * heads * width * self.tensor.element_size()

    def reserve(self, *, rows: int = 0, capacity: int = 0) -> None:
        """Allocate at least as many positions; keep memory for `rows` sequences, even while fewer are open."""
        self.reserved = rows or self.reserved
        self.grow(rows, capacity)
        if rows == 1:
            self.compact()

    def grow(self, rows: int, capacity: int) -> None:
        """Allocate at least as many rows and positions, keeping what is held."""
        count, held = self.tensor.shape[1], self.capacity
        if capacity > held:
            # the cache of one sequence doubles; that of many grows in smaller steps, since memory bounds their number
            capacity = max(capacity, 2 * held if count == 1 else held + held // 4)
        if capacity > held or rows > count:
            self._allocate(max(rows, count), max(capacity, held))

    def _allocate(self, rows: int, capacity: int) -> None:
        old, heads = self.tensor, self.kv_heads
        self.tensor = old.new_zeros(old.shape[0], rows, 2 * heads, capacity, old.shape[4])
        self.tensor[:, : old.shape[1], :, : old.shape[3]] = old[:, :rows]
        self.views = [(layer, layer[:, :heads], layer[:, heads:]) for layer in self.tensor.unbind(0)]

    def new_row(self, kind: Callable[..., Any], *given: Any) -> Any:
        """The cache of a new sequence in the first free row, a `Row` or a subclass, which takes `given`."""
        at = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[at : at + 1] = [kind(self, at, *given)]
        return self.rows[at]

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


def attention_mask(
    new: Sequence[NewTokens], groups: int, window: int | None, like: Tensor
) -> tuple[int, Tensor | None]:
    """The first slot that any query sees, and the mask from it on.

    The mask is additive, ``[sequences, 1, groups · width, slots]``, or None where every query may see every key.

    Sequences with fewer tokens than the widest are padded with copies of their last query. A single sequence without a
    window takes a shorter way, with half as many operations.

    Args:
        new: the new tokens of sequences that attend in one call.
        groups: query heads of a key head; queries of a group are consecutive rows.
        window: positions that attention sees, or None for all.
        like: gives dtype and device.
    """
    width, end = max(one.count for one in new), max(one.end for one in new)
    first = 0 if window is None else max(0, min(one.start for one in new) + 1 - window)
    slots = end - first
    cut = window is not None and slots > window
    if width == 1 and not cut and all(one.end == end and one.seen is None for one in new):
        return first, None
    if len(new) == 1 and not cut:
        seen = new[0].seen
        if seen is not None and bool(seen.all()):  # a block, whose tokens see each other
            return first, None
        own = torch.ones(width, width, dtype=torch.bool).tril_() if seen is None else seen
        mask = like.new_zeros(1, 1, groups, width, slots)
        mask[..., slots - own.shape[1] :].masked_fill_(~own.to(like.device), -torch.inf)
        return first, mask.view(1, 1, groups * width, slots)
    allowed = np.zeros((len(new), width, end), dtype=bool)
    for rows, one in zip(allowed, new):
        past = one.end - (one.count if one.seen is None else one.seen.shape[1])
        rows[: one.count, :past] = True
        rows[: one.count, past : one.end] = np.tri(one.count) if one.seen is None else one.seen.numpy()
        if window is not None:
            at = np.array(one.positions())
            places = np.append(np.arange(one.start), at)
            rows[: one.count, : one.end] &= at[:, None] - places < window
        rows[one.count :] = rows[one.count - 1]
    hidden = ~torch.from_numpy(allowed[..., first:]).to(like.device)
    mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return first, mask.repeat(1, groups, 1)[:, None]


class RaggedBatch:
    """Where the tokens of a forward over several sequences belong.

    Args:
        new: the new tokens of each sequence; those in neighbouring rows, ascending, attend in one call unless they are
            many.
        groups: query heads of a key head.
        windows: by kind of layers, positions that attention sees, or None for all.
        like: gives dtype and device of the masks.

    Attributes:
        positions: position of each token in its sequence, long ``[tokens]``.
        last: index of the last token of each sequence, long ``[sequences]``.
    """

    def __init__(self, new: Sequence[NewTokens], groups: int, windows: Sequence[int | None], like: Tensor) -> None:
        def index(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=like.device)

        self.positions = index(at for one in new for at in one.positions())
        self.rows = index(one.cache.row for one in new for _ in range(one.count))
        self.slots = index(slot for one in new for slot in range(one.start, one.end))
        self.last = index(one.count for one in new).cumsum(0) - 1
        runs = [[new[0]]]
        for before, one in pairwise(new):
            together = one.cache.row == before.cache.row + 1 and max(one.count, before.count) <= PADDED
            if together:
                runs[-1].append(one)
            else:
                runs.append([one])
        # of each run: rows of the cache, slots in use, width, tokens, queries padded, results not padded, masks by kind
        self.calls: list[tuple[Any, ...]] = []
        token = 0
        for run in runs:
            counts, own, real = [one.count for one in run], slice(token, token + sum(one.count for one in run)), None
            width, padded = max(counts), None
            if min(counts) < width:  # a sequence's last token stands in for those that it lacks
                firsts = zip(accumulate(counts, initial=token), counts)
                padded = index(first + min(i, n - 1) for first, n in firsts for i in range(width))
                real = index(row * width + i for row, n in enumerate(counts) for i in range(n))
            rows = slice(run[0].cache.row, run[-1].cache.row + 1)
            masks = [attention_mask(run, groups, window, like) for window in windows]
            self.calls.append((rows, max(one.end for one in run), width, own, padded, real, masks))
            token = own.stop

    def attend(self, q: Tensor, new: Tensor, slot: tuple[Tensor, ...], kind: int, scale: float | None) -> Tensor:
        """Store the new keys and values; return attention before its projection, ``[tokens, heads · width]``.

        Args:
            q: ``[1, heads, tokens, width]``.
            new: keys and values of the tokens, ``[1, 2 kv_heads, tokens, width]``.
            slot: of the layer, see `KVCache.views`.
            kind: of the layer.
            scale: of scores; None: 1/√width.
        """
        cache, k, v = slot
        cache[self.rows, :, self.slots] = new[0].transpose(0, 1)
        kv_heads, found = k.shape[1], []
        for rows, end, width, own, padded, real, masks in self.calls:
            first, mask = masks[kind]
            queries = q[0, :, own] if padded is None else q[0].index_select(1, padded)
            # the group becomes rows of its key head, so that keys are never repeated
            queries = queries.unflatten(1, (-1, width)).transpose(0, 1)
            queries = queries.reshape(len(queries), kv_heads, -1, q.shape[3])
            keys, values = k[rows, :, first:end], v[rows, :, first:end]
            out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
            out = out.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).reshape(-1, q.shape[1] * q.shape[3])
            found.append(out if real is None else out.index_select(0, real))
        return joined(found)
