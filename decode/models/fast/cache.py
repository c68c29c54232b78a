"""The key-value cache of a hand-written forward, and the placement of new tokens in it: slots, masks, attention.

The new tokens of all texts are the rows of one matrix ``[tokens, hidden]`` without padding, so every product with a
weight serves all of them. Each text has a row of the cache; neighbouring rows attend in one call, padded to the longest
of them.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.core.draft import upload, upload_all
from decode.models.api import GROWTH, Cache, free_memory, joined

PADDED = 32
"""Most new tokens of a text that is padded with its neighbours, and whose queries of one key head become rows of it; a
text with more attends alone, with one mask for all heads."""
LEAST = 256  # positions that a cache has at first
KEPT = 1 << 26  # most bytes of a cache that are kept when its last text is closed
SPARE = 128  # slots that the nodes of a tree take behind the end of a text
ALIGNED = 8  # elements that rows of a mask begin at multiples of

Views = tuple[Tensor, Tensor, Tensor]
Windows = Sequence[int | None]  # positions that attention sees, by kind of layers; None: all


def zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros, of which a CPU takes memory once they are written to."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    return torch.frombuffer(mmap.mmap(-1, math.prod(shape) * like.itemsize), dtype=like.dtype).view(shape)


class KVCache:
    """Keys and values of texts in one tensor, keys before values.

    Attributes:
        tensor: the memory  # [layers, rows, 2 kv_heads, capacity, width]
        capacity: positions of a row.
        views: of each layer the whole cache, its keys and its values  # [rows, 2 kv_heads or kv_heads, capacity, width]
        rows: the text of each row; None where it was closed.
    """

    def __init__(self, layers: int, kv_heads: int, width: int, like: Tensor) -> None:
        self.kv_heads, self.capacity, self.tensor = kv_heads, 0, like.new_zeros(layers, 1, 2 * kv_heads, 0, width)
        self.rows: list[Row | None] = []
        self.reserved = 1
        self._allocate(1, LEAST)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a position of a row."""
        return self.tensor.nbytes // self.tensor.shape[1] // self.capacity

    def reserve(self, rows: int, length: int = 0) -> None:
        """Keep memory for so many texts, even while fewer are open, of this length if that much is free.

        So texts whose end is known are never copied, which would take their memory twice.
        """
        self.reserved = rows
        if rows == 1:
            self.compact()
        count, held = self.tensor.shape[1], self.capacity
        if length + SPARE > held >= LEAST and length > LEAST:
            room = int(free_memory(self.tensor.device) / (GROWTH * rows * self.bytes_per_token))
            held = max(held, min(length + SPARE, room))
        if rows > count or held > self.capacity:
            self._allocate(max(rows, count), held)

    def grow(self, rows: int, capacity: int) -> None:
        """Allocate at least as many rows and positions, keeping what is held."""
        count, held = self.tensor.shape[1], self.capacity
        if capacity > held:  # by doubling while it is small, then in smaller steps
            capacity = max(capacity, held + (held if self.tensor.nbytes <= KEPT else held // 4))
        if capacity > held or rows > count:
            self._allocate(max(rows, count), max(capacity, held))

    def _allocate(self, rows: int, capacity: int) -> None:
        old, heads, self.capacity = self.tensor, self.kv_heads, capacity
        self.tensor = zeros(old, old.shape[0], rows, 2 * heads, capacity, old.shape[4])
        for row in self.rows[: min(rows, old.shape[1])]:
            if row is not None:
                self.tensor[:, row.row, :, : row.known] = old[:, row.row, :, : row.known]
        self.views: list[Views] = [(layer, layer[:, :heads], layer[:, heads:]) for layer in self.tensor.unbind(0)]

    def new_row(self, kind: Callable[..., Any]) -> Any:
        """The cache of a new text in the first free row, a `Row` or a subclass."""
        at = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[at : at + 1] = [kind(self, at)]
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
            rows, old, new = upload_all(list(zip(*moves)), self.tensor.device)
            self.tensor[:, rows, :, new] = self.tensor[:, rows, :, old]

    def compact(self) -> None:
        """Move the last rows into closed ones, so that neighbours attend together; free memory that is not reserved."""
        while None in self.rows:
            last = self.rows.pop()
            if last is not None:
                to = self.rows.index(None)
                if last.known:  # the row of a text of which nothing was read may not be allocated yet
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
    depths: Sequence[int] | None = None  # of a tree: position of each token, less `start`
    # of a tree: which of the last m slots each token sees, bool; it sees all slots before these  # [count, m]
    seen: Tensor | None = None
    block: bool = False  # whether the tokens see each other; otherwise, without `seen`, they are a chain

    @property
    def end(self) -> int:
        """The slot after the last token."""
        return self.start + self.count

    def positions(self) -> Sequence[int]:
        """Positions of the tokens in their text."""
        return range(self.start, self.end) if self.depths is None else [self.start + depth for depth in self.depths]


def queries(new: Sequence[NewTokens], width: int) -> list[list[int]]:
    """Of `width` queries of each text, its tokens and copies of the last one, what a forward needs to know.

    Returns:
        The numbers of the tokens among those of all texts, their slots, the last slots that they see, their positions.
    """
    lists: list[list[int]] = [[], [], [], []]
    first = 0
    for text in new:
        positions, chain_like = text.positions(), not text.block and text.seen is None
        for i in [*range(text.count), *[text.count - 1] * (width - text.count)]:
            slot = text.start + i
            for values, value in zip(lists, (first + i, slot, slot if chain_like else text.end - 1, positions[i])):
                values.append(value)
        first += text.count
    return lists


Masks = list[tuple[int, Tensor | None]]
"""Of each kind of layers the first slot that any query sees, and the mask from it on, which `attention` adds; None:
every query sees every slot."""


def attention_masks(
    new: Sequence[NewTokens], groups: int, windows: Windows, like: Tensor, places: Sequence[Tensor] = ()
) -> Masks:
    """The masks of texts that attend in one call, made on the device by comparing slots.

    Texts with fewer tokens than the widest are padded with copies of their last query. A single text whose windows
    reach its start takes a shorter way, with fewer operations.

    Args:
        new: the new tokens.
        groups: query heads of a key head.
        windows: positions that attention sees, by kind of layers; None: all.
        like: a tensor of the model's device and number format.
        places: slots, last slots and positions of the `queries`, if they were uploaded  # [batch · width] each
    """
    width, end = max(text.count for text in new), max(text.end for text in new)
    groups = groups if width <= PADDED else 1
    firsts = [0 if window is None else max(0, min(text.start for text in new) + 1 - window) for window in windows]
    cut = [window is not None and end - first > window for window, first in zip(windows, firsts)]
    open_ = all(text.end == end and (text.block or (width == 1 and text.seen is None)) for text in new)
    if open_ and not any(cut):
        return [(first, None) for first in firsts]
    if len(new) == 1 and not any(cut):
        (text,) = new
        mask = empty_mask(like, 1, 1, groups, width, end)
        if text.seen is None:
            mask[..., end - width :] = like.new_full((width, width), -torch.inf).triu_(1)
        else:
            mask[..., end - text.seen.shape[1] :].masked_fill_(upload(~text.seen, like.device, torch.bool), -torch.inf)
        return [(first, mask[..., first:].view(1, 1, groups * width, end - first)) for first in firsts]
    places = places or upload_all(queries(new, width)[1:], like.device)
    slot, last, at = (index.view(len(new), width) for index in places)
    slots = torch.arange(end, device=like.device)
    hidden, positions = slots > last[..., None], slots  # [batch, width, end], [end]
    if any(text.seen is not None for text in new):
        seen = [text.seen for text in new if text.seen is not None]
        most, where = max(x.shape[1] for x in seen), seen[0].device
        # its first column stands for earlier slots
        among = torch.zeros(len(new), width, most + 1, dtype=torch.bool, device=where)
        for rows, text in zip(among, new):
            if text.seen is not None:
                rows[: text.count, most + 1 - text.seen.shape[1] :] = ~text.seen
                rows[text.count :] = rows[text.count - 1]
        back = (slots - last[:, -1:] + most).clamp_(0, most)  # [batch, end]
        hidden |= upload(among, like.device, torch.bool).gather(2, back[:, None].expand(-1, width, -1))
        moved = F.pad(at - slot, (1, 0))  # positions of new tokens, less their slots
        positions = slots + moved.gather(1, (slots - slot[:, :1] + 1).clamp_(0, width))[:, None]  # [batch, 1, end]
    masks: Masks = []
    for first, window, far in zip(firsts, windows, cut):
        if open_ and not far:
            masks.append((first, None))
            continue
        unseen = hidden | (positions <= at[..., None] - window) if far and window is not None else hidden
        mask = empty_mask(like, len(new), groups, width, end - first)
        mask.masked_fill_(unseen[:, None, :, first:], -torch.inf)
        masks.append((first, mask.view(len(new), 1, groups * width, end - first)))
    return masks


def empty_mask(like: Tensor, *shape: int) -> Tensor:
    """A mask of zeros whose rows begin where kernels of GPUs want them, so that they are not copied in every layer."""
    return like.new_zeros(*shape[:-1], -(-shape[-1] // ALIGNED) * ALIGNED)[..., : shape[-1]]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, real: Any = None) -> Tensor:
    """Attention before its projection.

    Args:
        q: queries  # [batch, heads, n, width]
        k: keys  # [batch, kv_heads, slots, width]
        v: values, as keys.
        mask: added to the scores, ``[1, 1, n, slots]`` for more than `PADDED` tokens  # [batch, 1, groups · n, slots]
        scale: of the scores; None is 1/√width.
        real: the text and the query of each token, where texts were padded; None: all queries are tokens.

    Returns:
        The sums of values  # [tokens, heads · width]
    """
    batch, heads, n, d = q.shape
    kv_heads = k.shape[1]
    grouped, few = heads > kv_heads, n <= PADDED
    if grouped and few:  # the group becomes rows of its key head, so that keys are read once
        q = q.reshape(batch, kv_heads, -1, d)
    elif grouped:  # a key head stands for a text, so that all heads share one mask
        q = q[0].unflatten(0, (kv_heads, -1))
        k, v = (x.transpose(0, 1).expand(-1, q.shape[1], -1, -1) for x in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    if not grouped:
        out = out.transpose(1, 2)
    elif few:
        out = out.unflatten(2, (-1, n)).permute(0, 3, 1, 2, 4)
    else:
        out = out.permute(2, 0, 1, 3)[None]
    return out.reshape(batch * n, -1) if real is None else out[real].flatten(1)


class OneText:
    """Where the tokens of a forward over one text belong.

    `windows` and `rotary` are of each kind of layers. Rotary factors are of all positions; the attribute `rotary` keeps
    those of the tokens.
    """

    def __init__(
        self, new: Sequence[NewTokens], heads: int, groups: int, windows: Windows, rotary: Sequence[Tensor],
        like: Tensor,
    ) -> None:  # fmt: skip
        self.new = text = new[0]
        self.masks = attention_masks(new, groups, windows, like)
        at: Any = text.positions()
        if text.depths is None:
            self.rotary = [table.narrow(0, text.start, text.count) for table in rotary]
        elif len({*at}) == 1:  # a level of a tree
            self.rotary = [table[at[0]].expand(text.count, *table.shape[1:]) for table in rotary]
        else:
            at = upload(at, like.device)
            self.rotary = [table.index_select(0, at) for table in rotary]

    def views(self, cache: KVCache, first: int, last: int) -> list[Views]:
        """Of layers ``[first, last)`` the slots of the new keys and values, and all keys and values in use."""
        start, n, end = self.new.start, self.new.count, self.new.end
        some = cache.views[first:last]
        return [(x.narrow(2, start, n), k.narrow(2, 0, end), v.narrow(2, 0, end)) for x, k, v in some]

    def attend(self, q: Tensor, new: Tensor, views: Views, kind: int, scale: float | None) -> Tensor:
        """Store keys and values of the tokens in a layer's slots; `attention`.

        Args:
            q: queries  # [1, heads, tokens, width]
            new: keys, then values  # [1, 2 kv_heads, tokens, width]
            views: of the layer.
            kind: of the layer.
            scale: see `attention`.
        """
        slots, k, v = views
        first, mask = self.masks[kind]
        slots.copy_(new)
        if first:
            k, v = k[:, :, first:], v[:, :, first:]
        return attention(q, k, v, mask, scale)


class RaggedBatch:
    """Where the tokens of a forward over several texts belong; methods as of `OneText`.

    Texts in neighbouring rows, ascending, attend in one call unless they have many new tokens. `last` is the index of
    the last token of each text  # [batch]
    """

    def __init__(
        self, new: Sequence[NewTokens], heads: int, groups: int, windows: Windows, rotary: Sequence[Tensor],
        like: Tensor,
    ) -> None:  # fmt: skip
        runs = [[new[0]]]
        for before, text in pairwise(new):
            if text.cache.row == before.cache.row + 1 and max(text.count, before.count) <= PADDED:
                runs[-1].append(text)
            else:
                runs.append([text])
        tokens = [(text, slot) for text in new for slot in range(text.start, text.end)]
        # all indices of the forward are one copy to the device
        lists = [[at for text in new for at in text.positions()], [text.cache.row for text, _ in tokens]]
        lists += [[slot for _, slot in tokens], [end - 1 for end in accumulate(text.count for text in new)]]
        for run in runs:
            lists += queries(run, max(text.count for text in run))
            lists += map(list, zip(*((row, i) for row, text in enumerate(run) for i in range(text.count))))
        positions, self.rows, self.slots, self.last, *indices = upload_all(lists, like.device)
        self.rotary = [table.index_select(0, positions) for table in rotary]
        self.heads = torch.arange(heads, device=like.device)[:, None]
        # of each run: rows of the cache, slots in use, its tokens, where texts are padded the token of each query and
        # the text and query of each token, masks by kind
        self.calls: list[tuple[Any, ...]] = []
        first = 0
        for i, run in enumerate(runs):
            token, *places, row, query = indices[6 * i : 6 * i + 6]
            span, end = slice(first, first + len(row)), max(text.end for text in run)
            padded = len(token) > len(row)  # a text's last token stands in for those that it lacks
            tokens_of, real = token.view(len(run), -1), (row, query) if padded else None
            rows = slice(run[0].cache.row, run[-1].cache.row + 1)
            masks = attention_masks(run, groups, windows, like, places)
            self.calls.append((rows, end, span, tokens_of, real, masks))
            first = span.stop

    def views(self, cache: KVCache, first: int, last: int) -> list[Views]:
        """Of layers ``[first, last)`` the whole cache, its keys and its values."""
        return cache.views[first:last]

    def attend(self, q: Tensor, new: Tensor, views: Views, kind: int, scale: float | None) -> Tensor:
        """See `OneText.attend`."""
        cache, k, v = views
        cache[self.rows, :, self.slots] = new[0].transpose(0, 1)
        results = []
        for rows, end, span, tokens, real, masks in self.calls:
            first, mask = masks[kind]
            of_run = q[0, :, span]
            if real is None:
                of_run = of_run.unflatten(1, tokens.shape).transpose(0, 1)
            else:
                of_run = of_run[self.heads, tokens[:, None]]
            results.append(attention(of_run, k[rows, :, first:end], v[rows, :, first:end], mask, scale, real))
        return joined(results)
