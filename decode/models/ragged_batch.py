"""Several texts in one forward: their tokens stand side by side without padding, and only attention tells them apart.

The tokens of text after text are the rows of one matrix ``[tokens, hidden]``, so every product with a weight serves all
of them. Each text has a row of the cache; neighbouring rows attend in one call, padded to the longest of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from decode.draft import Draft
from decode.models.huggingface_runner import tree_mask

PADDED = 32  # most tokens that a text may have in a forward to be padded with its neighbours; one of more attends alone


@dataclass
class NewTokens:
    """The new tokens of one text."""

    row: int  # of the cache
    start: int  # the cache slot of the first
    count: int  # how many they are
    depths: Sequence[int] | None = None  # where they are no chain: position of each in the text, less `start`
    seen: Tensor | None = None  # where they are no chain: bool ``[count, end]``, the slots that each sees

    @classmethod
    def of(cls, row: int, start: int, count: int, tree: Draft | None) -> NewTokens:
        """A chain, or a pending token and the tree below it."""
        shape = () if tree is None else ([0, *tree.depths()], tree_mask(tree, start))
        return cls(row, start, count, *shape)

    @property
    def end(self) -> int:
        """The slot behind the last."""
        return self.start + self.count

    def positions(self) -> Sequence[int]:
        """Of its tokens in the text."""
        return range(self.start, self.end) if self.depths is None else [self.start + depth for depth in self.depths]


class TextsTogether:
    """Where the tokens of a forward over several texts belong.

    Args:
        texts: in the order of their tokens; those in neighbouring rows, ascending, attend in one call.
        groups: query heads of a key head.
        window: tokens that attention sees, or None for all.
        like: gives dtype and device of the masks.

    Attributes:
        positions: of all tokens in their texts, long ``[tokens]``.
    """

    def __init__(self, texts: Sequence[NewTokens], groups: int, window: int | None, like: Tensor) -> None:
        device = like.device
        self.positions = torch.tensor([at for text in texts for at in text.positions()], device=device)
        rows = [text.row for text in texts for _ in range(text.count)]
        slots = [slot for text in texts for slot in range(text.start, text.end)]
        self._rows, self._slots = torch.tensor(rows, device=device), torch.tensor(slots, device=device)
        self._runs: list[_Run] = []
        token = 0
        for run in _runs_of(texts):
            self._runs.append(_Run(run, token, groups, window, like))
            token += self._runs[-1].count
        counts = torch.tensor([text.count for text in texts], device=device)
        self.last = counts.cumsum(0) - 1  # the place of each text's last token

    def slots(self, views: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[_Slots, Tensor, Tensor]]:
        """Of each layer, given its whole cache ``[rows, 2 kv_heads, capacity, width]``, all keys and all values."""
        return [(_Slots(cache, self._rows, self._slots), k, v) for cache, k, v in views]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention before its projection, ``[tokens, heads · width]``.

        Args:
            q: ``[1, heads, tokens, width]``.
            k: all keys of the layer, ``[rows, kv_heads, capacity, width]``.
            v: all values.
        """
        found = [run.attend(q[0], k, v) for run in self._runs]
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


def _runs_of(texts: Sequence[NewTokens]) -> list[list[NewTokens]]:
    """Texts in neighbouring rows, but for those of many tokens."""
    runs = [[texts[0]]]
    for before, text in pairwise(texts):
        if text.row == before.row + 1 and max(text.count, before.count) <= PADDED:
            runs[-1].append(text)
        else:
            runs.append([text])
    return runs


class _Run:
    """Texts in neighbouring rows of the cache that attend in one call."""

    def __init__(self, texts: Sequence[NewTokens], token: int, groups: int, window: int | None, like: Tensor) -> None:
        counts = [text.count for text in texts]
        self.rows, self.row, self.token, self.count = len(texts), texts[0].row, token, sum(counts)
        self.width, self.slots = max(counts), max(text.end for text in texts)
        self.mask = self._mask(texts, groups, window, like)
        self.padded: Tensor | None = None
        if min(counts) < self.width:  # a text's last token stands in for those that it lacks
            firsts = [sum(counts[:i]) for i in range(len(counts))]
            spread = [first + min(i, n - 1) for first, n in zip(firsts, counts) for i in range(self.width)]
            real = [row * self.width + i for row, n in enumerate(counts) for i in range(n)]
            self.padded, self.real = torch.tensor(spread, device=like.device), torch.tensor(real, device=like.device)

    def _mask(self, texts: Sequence[NewTokens], groups: int, window: int | None, like: Tensor) -> Tensor | None:
        """Additive mask ``[rows, 1, groups · width, slots]``; None where every query may see every slot."""
        n, device = self.width, like.device
        outside = window is not None and self.slots > window
        if n == 1 and not outside and all(text.end == self.slots for text in texts):
            return None
        start = torch.tensor([text.start for text in texts], device=device)
        count = torch.tensor([text.count for text in texts], device=device)
        query = start[:, None] + torch.minimum(torch.arange(n, device=device), count[:, None] - 1)  # [rows, n]
        slot = torch.arange(self.slots, device=device)
        allowed = slot <= query[..., None]
        if window is not None and outside:
            allowed &= query[..., None] - slot < window
        for row, text in enumerate(texts):
            if text.seen is not None:
                self._of_tree(allowed[row], text, window)
        mask = torch.zeros(allowed.shape, dtype=like.dtype, device=device).masked_fill_(~allowed, -torch.inf)
        return mask.repeat(1, groups, 1)[:, None]

    def _of_tree(self, allowed: Tensor, text: NewTokens, window: int | None) -> None:
        """The rows of a text whose new tokens are a tree, ``[width, slots]``, in place."""
        assert text.seen is not None
        n, start = text.count, text.start
        seen = text.seen.to(allowed.device)
        if window is not None:
            at = torch.tensor(text.positions(), device=allowed.device)
            before = torch.cat([torch.arange(start, device=allowed.device), at])
            seen = seen & (at[:, None] - before < window)
        allowed[:n, : text.end], allowed[:n, text.end :] = seen, False
        allowed[n:] = allowed[n - 1]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of these texts ``[tokens, heads · width]``, given all queries ``[heads, tokens, width]``."""
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
