"""The key-value cache of a hand-written forward, and the placement of new tokens in it: slots, masks, attention.

The new tokens of all texts are the rows of one matrix ``[tokens, hidden]`` without padding, so every product with a
weight serves all of them. Each text has a row of the cache; neighbouring rows attend in one call, padded to the longest
of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from decode.core.draft import upload
from decode.models.api import Cache, joined

PADDED = 32
"""Most new tokens of a text that is padded with its neighbours, and whose queries of one key head become rows of it; a
text with more attends alone, with one mask for all heads."""
LEAST = 256  # positions that a cache has at first
KEPT = 1 << 26  # most bytes of a cache that are kept when its last text is closed


Views = tuple[Tensor, Tensor, Tensor]
Windows = Sequence[int | None]  # positions that attention sees, by kind of layers; None: all


class KVCache:
    """Keys and values of texts, ``[layers, rows, 2 kv_heads, capacity, width]``, keys before values.

    Attributes:
        tensor: the memory.
        capacity: positions of a row.
        views: of each layer the whole cache ``[rows, 2 kv_heads, capacity, width]``, its keys and its values.
        rows: the text of each row; None where it was closed.
    """

    def __init__(self, layers: int, kv_heads: int, width: int, like: Tensor) -> None:
        self.kv_heads, self.tensor = kv_heads, like.new_zeros(layers, 1, 2 * kv_heads, 0, width)
        self.rows: list[Row | None] = []
        self.reserved = 1
        self._allocate(1, LEAST)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position of a row."""
        return self.tensor.nbytes // self.tensor.shape[1] // self.capacity

    def reserve(self, rows: int) -> None:
        """Keep memory for so many texts, even while fewer are open."""
        self.reserved = rows
        if rows > 1:
            self.grow(rows, 0)
        else:
            self.compact()

    def grow(self, rows: int, capacity: int) -> None:
        """Allocate at least as many rows and positions, keeping what is held."""
        count, held = self.tensor.shape[1], self.capacity
        if capacity > held:
            # the cache of one text doubles; that of many grows in smaller steps, since memory bounds their number
            capacity = max(capacity, 2 * held if count == 1 else held + held // 4)
        if capacity > held or rows > count:
            self._allocate(max(rows, count), max(capacity, held))

    def _allocate(self, rows: int, capacity: int) -> None:
        old, heads, self.capacity = self.tensor, self.kv_heads, capacity
        self.tensor = old.new_zeros(old.shape[0], rows, 2 * heads, capacity, old.shape[4])
        self.tensor[:, : old.shape[1], :, : old.shape[3]] = old[:, :rows, :, :capacity]
        self.views: list[Views] = [(layer, layer[:, :heads], layer[:, heads:]) for layer in self.tensor.unbind(0)]

    def new_row(self, kind: Callable[..., Any], *given: Any) -> Any:
        """The cache of a new text in the first free row, a `Row` or a subclass, which takes `given`."""
        at = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[at : at + 1] = [kind(self, at, *given)]
        return self.rows[at]

    def gather(self, texts: Sequence[Any], bases: Sequence[int], paths: Sequence[list[int]]) -> None:
        """Move the entries at the slots of `paths` (ascending) to those from `bases` on, of all texts at once."""
        moves = [
            (text.row, slot, base + i)
            for text, base, slots in zip(texts, bases, paths)
            for i, slot in enumerate(slots)
            if slot != base + i
        ]
        if moves:
            rows, old, new = upload(list(zip(*moves)), self.tensor.device)
            self.tensor[:, rows, :, new] = self.tensor[:, rows, :, old]

    def compact(self) -> None:
        """Move the last rows into closed ones, so that neighbours attend together; free memory that is not reserved."""
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                to = self.rows.index(None)
                self.tensor[:, to, :, : last.known] = self.tensor[:, last.row, :, : last.known]
                last.row, self.rows[to] = to, last
        if self.reserved > 1 or len(self.rows) > 1:
            return
        large = not self.rows and self.capacity * self.bytes_per_token > KEPT
        if large or self.tensor.shape[1] > 1:
            self._allocate(1, LEAST if large else self.capacity)


class Row(Cache):
    """The cache of one text in a row of a `KVCache`.

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
        self.memory.gather([self], [base], [slots])

    def close(self) -> None:
        """Free the row; memory of several rows, or of a long text, is given back when no other text needs it."""
        rows = self.memory.rows
        if self in rows:  # it may have been closed before
            rows[self.row] = None
            if len(rows) - rows.count(None) <= 1 >= self.memory.reserved:
                self.memory.compact()


@dataclass
class NewTokens:
    """The new tokens of one text."""

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
        """Positions of the tokens in their text."""
        return range(self.start, self.end) if self.depths is None else [self.start + depth for depth in self.depths]

    def among(self) -> Tensor:
        """`seen`, also of a chain."""
        return torch.ones(self.count, self.count, dtype=torch.bool).tril_() if self.seen is None else self.seen


def attention_mask(
    new: Sequence[NewTokens], groups: int, window: int | None, like: Tensor
) -> tuple[int, Tensor | None]:
    """The first slot that any query sees, and the mask from it on (see `attention`), for texts that attend in one call.

    Texts with fewer tokens than the widest are padded with copies of their last query. A single text without a window
    takes a shorter way, with half as many operations. `groups` are query heads of a key head.
    """
    width, end = max(text.count for text in new), max(text.end for text in new)
    groups = groups if width <= PADDED else 1
    first = 0 if window is None else max(0, min(text.start for text in new) + 1 - window)
    slots = end - first
    cut = window is not None and slots > window
    if width == 1 and not cut and all(text.end == end and text.seen is None for text in new):
        return first, None
    if len(new) == 1 and not cut:
        among = new[0].among()
        if bool(among.all()):  # a block, whose tokens see each other
            return first, None
        mask = like.new_zeros(1, 1, groups, width, slots)
        mask[..., slots - among.shape[1] :].masked_fill_(~among.to(like.device), -torch.inf)
        return first, mask.view(1, 1, groups * width, slots)
    allowed = np.zeros((len(new), width, end), dtype=bool)
    for rows, text in zip(allowed, new):
        among = text.among()
        rows[: text.count, : text.end] = True
        rows[: text.count, text.end - among.shape[1] : text.end] = among.cpu().numpy()
        if window is not None:
            at = np.array(text.positions())
            places = np.append(np.arange(text.start), at)
            rows[: text.count, : text.end] &= at[:, None] - places < window
        rows[text.count :] = rows[text.count - 1]
    hidden = ~torch.from_numpy(allowed[..., first:]).to(like.device)
    mask = like.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return first, mask.repeat(1, groups, 1)[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention before its projection, ``[texts · n, heads · width]``, of ``q [texts, heads, n, width]``.

    Keys and values are ``[texts, kv_heads, slots, width]``. The mask is additive, ``[texts, 1, groups · n, slots]``, or
    ``[1, 1, n, slots]`` for more than `PADDED` tokens; None: every query sees every key. Scale None is 1/√width.
    """
    texts, heads, n, d = q.shape
    kv_heads = k.shape[1]
    grouped, few = heads > kv_heads, n <= PADDED
    if grouped and few:  # the group becomes rows of its key head, so that keys are read once
        q = q.reshape(texts, kv_heads, -1, d)
    elif grouped:  # a key head stands for a text, so that all heads share one mask
        q = q[0].unflatten(0, (kv_heads, -1))
        k, v = (x.transpose(0, 1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if not grouped:
        return out.transpose(1, 2).reshape(texts * n, -1)
    if few:
        return out.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4).reshape(texts * n, -1)
    return out.permute(2, 0, 1, 3).reshape(n, -1)


class OneText:
    """Where the tokens of a forward over one text belong.

    `windows` and `rotary` are given for each kind of layers. Rotary factors are given of all positions; the attribute
    `rotary` keeps those of the tokens.
    """

    def __init__(
        self, new: Sequence[NewTokens], groups: int, windows: Windows, rotary: Sequence[Tensor], like: Tensor
    ) -> None:
        self.new = text = new[0]
        self.masks = [attention_mask(new, groups, window, like) for window in windows]
        if text.depths is None:
            self.rotary = [table.narrow(0, text.start, text.count) for table in rotary]
        else:
            at = torch.tensor(text.positions(), device=like.device)
            self.rotary = [table.index_select(0, at) for table in rotary]

    def views(self, cache: KVCache, first: int, last: int) -> list[Views]:
        """Of layers ``[first, last)`` the slots of the new keys and values, and all keys and values in use."""
        start, n, end, heads = self.new.start, self.new.count, self.new.end, cache.kv_heads
        if last - first < 4:  # one by one, or all at once: whichever are fewer operations
            some = cache.views[first:last]
            return [(x.narrow(2, start, n), k.narrow(2, 0, end), v.narrow(2, 0, end)) for x, k, v in some]
        layers = cache.tensor[first:last]
        added, seen = layers.narrow(3, start, n), layers.narrow(3, 0, end)
        return list(zip(added.unbind(0), seen.narrow(2, 0, heads).unbind(0), seen.narrow(2, heads, heads).unbind(0)))

    def attend(self, q: Tensor, new: Tensor, views: Views, kind: int, scale: float | None) -> Tensor:
        """Store keys and values ``new [1, 2 kv_heads, tokens, width]`` in a layer's slots; return `attention`."""
        slots, k, v = views
        first, mask = self.masks[kind]
        slots.copy_(new)
        if first:
            k, v = k[:, :, first:], v[:, :, first:]
        return attention(q, k, v, mask, scale)


class RaggedBatch:
    """Where the tokens of a forward over several texts belong; methods as of `OneText`.

    Texts in neighbouring rows, ascending, attend in one call unless they have many new tokens. `last` is the index of
    the last token of each text, long ``[texts]``.
    """

    def __init__(
        self, new: Sequence[NewTokens], groups: int, windows: Windows, rotary: Sequence[Tensor], like: Tensor
    ) -> None:
        def index(values: Iterable[int]) -> Tensor:
            return torch.tensor(list(values), device=like.device)

        positions = index(at for text in new for at in text.positions())
        self.rotary = [table.index_select(0, positions) for table in rotary]
        self.rows = index(text.cache.row for text in new for _ in range(text.count))
        self.places = index(slot for text in new for slot in range(text.start, text.end))
        self.last = index(text.count for text in new).cumsum(0) - 1
        runs = [[new[0]]]
        for before, text in pairwise(new):
            if text.cache.row == before.cache.row + 1 and max(text.count, before.count) <= PADDED:
                runs[-1].append(text)
            else:
                runs.append([text])
        # of each run: rows of the cache, slots in use, width, tokens, queries padded, results not padded, masks by kind
        self.calls: list[tuple[Any, ...]] = []
        token = 0
        for run in runs:
            counts, padded, real = [text.count for text in run], None, None
            tokens, width = slice(token, token + sum(counts)), max(counts)
            if min(counts) < width:  # a text's last token stands in for those that it lacks
                firsts = zip(accumulate(counts, initial=token), counts)
                padded = index(first + min(i, n - 1) for first, n in firsts for i in range(width))
                real = index(row * width + i for row, n in enumerate(counts) for i in range(n))
            rows = slice(run[0].cache.row, run[-1].cache.row + 1)
            masks = [attention_mask(run, groups, window, like) for window in windows]
            self.calls.append((rows, max(text.end for text in run), width, tokens, padded, real, masks))
            token = tokens.stop

    def views(self, cache: KVCache, first: int, last: int) -> list[Views]:
        """Of layers ``[first, last)`` the whole cache, its keys and its values."""
        return cache.views[first:last]

    def attend(self, q: Tensor, new: Tensor, views: Views, kind: int, scale: float | None) -> Tensor:
        """See `OneText.attend`."""
        cache, k, v = views
        cache[self.rows, :, self.places] = new[0].transpose(0, 1)
        results = []
        for rows, end, width, tokens, padded, real, masks in self.calls:
            first, mask = masks[kind]
            queries = q[0, :, tokens] if padded is None else q[0].index_select(1, padded)
            queries = queries.unflatten(1, (-1, width)).transpose(0, 1)
            out = attention(queries, k[rows, :, first:end], v[rows, :, first:end], mask, scale)
            results.append(out if real is None else out.index_select(0, real))
        return joined(results)
