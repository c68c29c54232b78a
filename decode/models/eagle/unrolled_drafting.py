"""Drafting steps of a feature head from many positions of texts at once, for training and for teacher forcing.

Step s at position t continues the text's true pairs up to t by s states of the head's own. Only the positions that are
asked for are computed, packed one after the other; of the text before them the head reads keys and values alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def unroll(head: Any, embeds: Tensor, features: Tensor, steps: int, rows: Tensor) -> Iterator[Tensor]:
    """States of ``steps`` drafting steps from the positions ``rows`` (EAGLE-3's training-time test).

    Step s at position t predicts token t + 2 + s. It attends to the text's pairs up to t, and to its own chain.

    Args:
        head: a `FeatureHead`.
        embeds: embedding of token t + 1, ``[batch, time, width]``.
        features: of token t, ``[batch, time, feature width]``.
        steps: 1 is teacher forcing with true features.
        rows: which positions, bool ``[batch, time]``.

    Yields:
        ``[rows, hidden]`` for each step; what position t would need from beyond the end is garbage there.
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
        yield hidden


class _Attention:
    """Each row sees the first call's keys, the text's, up to its own position; of later calls those of its own row."""

    def __init__(self, rows: Tensor, text: Tensor, wanted: Tensor) -> None:
        batch, time = rows.shape
        counts = rows.sum(1)
        longest = max(1, int(counts.max())) if batch else 1
        of, position = wanted // max(1, time), wanted % max(1, time)
        starts = counts.cumsum(0) - counts
        self.slots = of * longest + torch.arange(len(wanted), device=rows.device) - starts[of]
        self.text, self.shape = text, (batch, time, longest)
        last = position.new_zeros(batch * longest).index_copy(0, self.slots, position).view(batch, 1, longest, 1)
        self.seen = torch.arange(time, device=rows.device) <= last  # [batch, 1, longest, time]
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q [rows, heads, d]``, ``k, v [rows or tokens, kv heads, d]`` to ``[rows, heads, d]``."""
        batch, _, longest = self.shape
        heads, kv, d = q.shape[1], k.shape[1], q.shape[2]
        if not self.keys:
            k, v = self._spread(k), self._spread(v)
        self.keys.append(k)
        self.values.append(v)
        # the query heads that share a key head become rows of its product
        padded = q.new_zeros(batch * longest, heads, d).index_copy(0, self.slots, q)
        grouped = padded.view(batch, longest, kv, heads // kv, d).permute(0, 2, 3, 1, 4).flatten(2, 3)
        if len(self.keys) == 1:
            seen = self.seen.repeat(1, 1, heads // kv, 1)
            return self._rows(F.scaled_dot_product_attention(grouped, k, v, attn_mask=seen), heads)
        scores = (grouped @ self.keys[0].transpose(-1, -2)).unflatten(2, (-1, longest))
        text = scores.masked_fill(~self.seen[:, None], -torch.inf)
        q = q.unflatten(1, (kv, -1))
        chain = torch.stack([(q * key[:, :, None]).sum(-1) for key in self.keys[1:]], -1)  # [rows, kv, group, steps]
        own = chain.new_zeros(batch * longest, *chain.shape[1:]).index_copy(0, self.slots, chain)
        own = own.unflatten(0, (batch, longest)).permute(0, 2, 3, 1, 4)
        weights = (torch.cat([text, own.to(text.dtype)], -1) * d**-0.5).softmax(-1)
        split = len(self.keys) - 1
        found = self._rows(weights[..., :-split].flatten(2, 3).to(v.dtype) @ self.values[0], heads)
        share = weights[..., -split:].permute(0, 3, 1, 2, 4).flatten(0, 1).index_select(0, self.slots).flatten(1, 2)
        for i, value in enumerate(self.values[1:]):
            found = found + share[..., i, None] * value.repeat_interleave(heads // kv, 1)
        return found

    def _spread(self, values: Tensor) -> Tensor:
        """The text's values ``[tokens, kv heads, d]`` as ``[batch, kv heads, time, d]``, zeros elsewhere."""
        batch, time, _ = self.shape
        if len(values) < batch * time:
            values = values.new_zeros(batch * time, *values.shape[1:]).index_copy(0, self.text, values)
        return values.unflatten(0, (batch, time)).transpose(1, 2)

    def _rows(self, grouped: Tensor, heads: int) -> Tensor:
        """``[batch, kv heads, group · longest, d]`` as ``[rows, heads, d]``."""
        batch, _, longest = self.shape
        found = grouped.unflatten(2, (-1, longest)).permute(0, 3, 1, 2, 4).reshape(batch * longest, heads, -1)
        return found.index_select(0, self.slots)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions: ``x [rows, heads, d]`` turned by the factors ``[rows, d]`` of each row."""
    a, b = x.chunk(2, -1)
    return (x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]).to(x.dtype)
