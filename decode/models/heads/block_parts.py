"""Parts of block heads beside their layers: what scores a slot's tokens, convolutions, the confidence head.

A scorer turns the logits U that the target's output head makes of a block's slots into those that tokens are drafted
by, given the tokens before:

| scorer | of | reads | adds to U |
| --- | --- | --- | --- |
| `MarkovHead` | DSpark | the token before | W2·W1[x], for all ids |
| `MarkovHead` with candidates | DFlash 2 | the state and the token before | the same, for the likeliest ids alone |
| `LatticeHead` | LiLiCorr (arXiv 2608.20530) | all states and likeliest ids | is the score of a pair of neighbours |

Tensors are named as in the engines' files.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decode.models.fast.weights import Function

# -- scorers -----------------------------------------------------------------------------------------------------------


class MarkovHead(nn.Module):
    """A bias of the logits by the token before: W2·m, with m = W1[x] (DSpark, section 3), of a selector P h ⊙ W1[x]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        nn.init.zeros_(self.markov_w2.weight)
        selects = getattr(config, "candidates", 0)
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False) if selects else None

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        """m ``[.., rank]`` from states ``[.., width]`` and W1's rows ``[.., rank]`` of the tokens before."""
        return before if self.hidden_projection is None else self.hidden_projection(hidden) * before


class Mlp(nn.Module):
    """Two linear layers with SiLU between."""

    def __init__(self, width: int, inner: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        """``[.., width]`` to ``[.., out]``."""
        return cast(Tensor, self.down_proj(F.silu(self.up_proj(x))))


COSINES, LEAST_NORM = 8.0, 1e-4  # of a lattice: by what cosines are scaled, and what norms of vectors are at least


class LatticeLayer(nn.Module):
    """A layer in which all candidates of a block see each other."""

    def __init__(self, width: int, heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)  # of which the weights are read
        self.mlp = Mlp(width, int(width * ratio), width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """``[blocks, elements, width]``, with what is added to the scores, ``[heads, elements, elements]``."""
        attn = self.attn
        made = F.linear(self.attn_norm(x), attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = made.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q))
        x = x + attn.out_proj(mixed.transpose(1, 2).flatten(-2))
        return x + cast(Tensor, self.mlp(self.mlp_norm(x)))


class LatticeHead(nn.Module):
    """Scores of all pairs of candidates in neighbouring slots, which see all candidates of the block (LiLiCorr)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, slots, eps = config.hidden_size, config.block_size - 1, config.rms_norm_eps
        k = min(config.candidates, config.draft_vocab_size)
        inner, heads = config.lilicorr_hidden_size or width, config.lilicorr_num_heads
        factors = config.lilicorr_factor_dim
        self.token_proj = nn.Identity() if inner == width else nn.Linear(width, inner)
        self.pass_hidden_proj, self.context_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.feature_norm, self.feature_mlp = nn.LayerNorm(5), Mlp(5, inner, inner)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, inner))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, k, inner))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * slots + 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        ratio = config.lilicorr_mlp_ratio
        self.layers = nn.ModuleList(LatticeLayer(inner, heads, ratio, eps) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = nn.RMSNorm(inner, eps=eps), nn.RMSNorm(inner, eps=eps)
        self.factor_input_proj = nn.Linear(3 * inner, inner)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(inner, factors) for _ in range(3))
        for linear in (self.out_head, self.in_head, self.anchor_out_head):
            nn.init.normal_(linear.weight, std=0.02)  # no score would have a gradient at 0

    def forward(self, embeds: Tensor, log_probs: Tensor, states: Tensor, context: Tensor, there: Tensor) -> Tensor:
        """Scores of each candidate given each one of the slot before, ``[blocks, slots, k, k]``; of the first, alike.

        Args:
            embeds: the target's, of the candidates, ``[blocks, slots, k, width]``.
            log_probs: of the candidates by U, the likeliest first, ``[blocks, slots, k]``.
            states: of the slots, ``[blocks, slots, width]``.
            context: the normed features of the token before the anchor, ``[blocks, width]``.
            there: whether there is such a token, ``[blocks]``.
        """
        (slots, k), rank = log_probs.shape[1:], torch.arange(log_probs.shape[-1], device=log_probs.device)
        told = [log_probs, log_probs.exp(), log_probs - log_probs[..., :1], rank / max(1, k - 1), (rank == 0).float()]
        features = torch.stack([each.expand_as(log_probs) for each in told], -1).to(states.dtype)
        x = self.token_proj(embeds) + self.pass_hidden_proj(states)[..., None, :]
        x = x + self.feature_mlp(self.feature_norm(features))
        x = (x + self.slot_embedding[0, :, :slots] + self.rank_embedding[0]).flatten(1, 2)
        slot = torch.arange(slots, device=x.device).repeat_interleave(k)
        apart = slot[:, None] - slot
        bias = self.relative_slot_bias[:, apart + self.relative_slot_bias.shape[1] // 2]
        bias = bias + (apart == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        z = self.output_norm(x).unflatten(1, (slots, k))
        anchor = self.anchor_norm(self.context_proj(context) * there[:, None])
        a = anchor[:, None, None].expand_as(z)
        f = F.silu(self.factor_input_proj(torch.cat([z, a, z * a], -1)))
        first, left, entered = (
            F.normalize(vectors, dim=-1, eps=LEAST_NORM)
            for vectors in (self.anchor_out_head(anchor), self.out_head(f), self.in_head(f))
        )
        before = torch.cat([first[:, None, None].expand_as(left[:, :1]), left[:, :-1]], 1)
        return COSINES * (before @ entered.mT)


def top_log_probs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The log-probabilities of the k likeliest ids and these ids, ``[.., k]``, of logits ``[.., vocab]``."""
    best, ids = logits.topk(k, -1)
    return best.float() - logits.logsumexp(-1, keepdim=True), ids


# -- beside them -------------------------------------------------------------------------------------------------------


class ConfidenceHead(nn.Module):
    """The log-odds that a drafted token is accepted, from h or [h; W1[x]] of its slot and the token before."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """``[.., width]``, or more elements of which only these are read, to ``[..]``."""
        return self.proj(states[..., : self.proj.in_features]).squeeze(-1)


class BlockConv(nn.Module):
    """Convolutions over the slots of a block, before and after a sublayer; new ones change nothing (DFlash 2).

    In slot k, channel c of the slot i before it is weighed by base[side, i, c] + (W x_k)[side, i, ⌊c / group⌋], with x
    what the sublayer would read.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        taps, width, self.group = config.conv_kernel_size, config.hidden_size, config.conv_group_size
        base = torch.zeros(2, taps, width)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)
        nn.init.zeros_(self.kernel_projection.weight)


def convolved(conv: Any, x: Tensor, slots: Tensor | None, sublayer: Function) -> Tensor:
    """A sublayer (attention or MLP, without the residual) of ``x [.., n, width]`` between its convolutions, if any.

    ``slots [n]`` is the place of each row in its block; None: the rows are one block.
    """
    if conv is None:
        return sublayer(x)
    made = conv.kernel_projection(x).unflatten(-1, (*conv.base_kernel.shape[:2], -1, 1))
    before, after = (conv.base_kernel.unflatten(-1, (-1, conv.group)) + made).flatten(-2).unbind(-3)
    return _convolve(sublayer(_convolve(x, before, slots)), after, slots)


def _convolve(x: Tensor, kernel: Tensor, slots: Tensor | None) -> Tensor:
    """The sum of the slots before each of ``x [.., n, width]``, weighed by a kernel ``[.., n, taps, width]``."""
    first, *rest = kernel.unbind(-2)
    total = first * x
    for i, weight in enumerate(rest[: x.shape[-2] - 1], 1):
        before, weight = x[..., :-i, :], weight[..., i:, :]
        total[..., i:, :].addcmul_(weight if slots is None else weight * (slots[i:] >= i)[:, None], before)
    return total
