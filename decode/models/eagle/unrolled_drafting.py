"""Drafting steps of a feature head from many positions of texts at once, for training and for teacher forcing.

Step s at position t continues the text's true pairs up to t by s states of the head's own. Only the positions that are
asked for are computed, packed one after the other; of the text before them the head reads keys and values alone.
"""

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor

from decode.models.eagle.chain_attention import attend


def unroll(
    head: Any, embeds: Tensor, features: Tensor, steps: int, rows: Tensor
) -> Generator[Tensor, Tensor | None, None]:
    """States of ``steps`` drafting steps from the positions ``rows`` (EAGLE-3's training-time test).

    Step s at position t predicts token t + 2 + s. It attends to the text's pairs up to t, and to its own chain.

    Args:
        head: a `FeatureHead`.
        embeds: embedding of token t + 1, ``[batch, time, width]``.
        features: of token t, ``[batch, time, feature width]``.
        steps: 1 is teacher forcing with true features.
        rows: which positions, bool ``[batch, time]``.

    Yields:
        ``[rows, hidden]`` for each step; what position t would need from beyond the end is garbage there. Indices that
        are sent back, ascending, name the rows that go on: the following steps compute no others.
    """
    time = embeds.shape[1]
    read = rows.flip(1).cummax(1).values.flip(1)  # positions after a text's last row are not read
    text, wanted = (mask.flatten().nonzero()[:, 0] for mask in (read, rows))
    factors = head.rotary(embeds, position_ids=torch.arange(time + steps, device=embeds.device)[None])
    cos, sin = (values[0] for values in factors)
    embeds = embeds.flatten(0, 1)
    attend = _Attention(rows, text, wanted)
    width = head.config.head_dim
    hidden = head.fuse(features.flatten(0, 1).index_select(0, text))
    for step in range(steps):
        if step:
            following = (wanted + step).clamp_max(len(embeds) - 1)
            x, y = head.enter(embeds.index_select(0, following), hidden)
        else:
            x, y = head.enter(embeds.index_select(0, text), hidden)
        at = (wanted if step else text) % time + step
        self_attention = head.layer.self_attn
        k, v = (p(y).unflatten(-1, (-1, width)) for p in (self_attention.k_proj, self_attention.v_proj))
        k = rotate(k, cos[at], sin[at])
        if not step:
            place = torch.searchsorted(text, wanted)
            x, y, at = (values.index_select(0, place) for values in (x, y, at))
        q = rotate(self_attention.q_proj(y).unflatten(-1, (-1, width)), cos[at], sin[at])
        hidden = head.leave(x, attend(q, k, v).flatten(1))
        kept = yield hidden
        if kept is not None:
            wanted, hidden = wanted[kept], hidden[kept]
            attend.keep(kept)


class _Attention:
    """Each row sees the first call's keys, the text's, up to its own position; of later calls those of its own row."""

    def __init__(self, rows: Tensor, text: Tensor, wanted: Tensor) -> None:
        batch, self.time = rows.shape
        position = wanted % max(1, self.time)
        self.start = int(position.min()) if len(wanted) else 0
        self.grid = batch, self.time - self.start  # of queries: all positions from the first one that is asked for
        self.place = wanted // max(1, self.time) * self.grid[1] + position - self.start
        self.text = text
        self.keys: list[Tensor] = []

    def keep(self, kept: Tensor) -> None:
        """These rows go on; the others' places in the grid are computed with zeros and not read."""
        self.place = self.place[kept]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [rows, heads, d]``, ``k, v [rows or tokens, kv heads, d]`` to ``[rows, heads, d]``."""
        if not len(q):
            return q
        batch, queries = self.grid
        place, shape = (self.place, self.grid) if self.keys else (self.text, (batch, self.time))
        self.keys += [_spread(k, place, shape), _spread(v, place, shape)]
        found = attend(_spread(q, self.place, self.grid), self.start, *self.keys)
        return found.transpose(1, 2).reshape(batch * queries, *q.shape[1:]).index_select(0, self.place)


def _spread(values: Tensor, place: Tensor, grid: tuple[int, int]) -> Tensor:
    """``[rows, heads, d]`` as ``[batch, heads, time, d]``, zeros elsewhere."""
    batch, time = grid
    if len(values) < batch * time:
        values = values.new_zeros(batch * time, *values.shape[1:]).index_copy(0, place, values)
    return values.unflatten(0, grid).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``x [rows, heads, d]`` turned by the factors ``[rows, d]`` of each row."""
    a, b = x.chunk(2, -1)
    return (x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]).to(x.dtype)
