"""Losses per token between the target's distribution p and the draft's q.

Every function takes gathered rows, one a label token, and returns one float32 value a row, so that selection,
normalisation and metrics can be put on top. Rows are cast to float32: log-probabilities in half precision lose the
differences that selection ranks by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

IGNORE = -100


@dataclass
class TokenLoss:
    """What one pass over the rows yields, each ``[rows]`` in float32.

    Attributes:
        divergence: The loss per token; carries the gradient.
        cross_entropy: -Σ p log q, detached. KL(p‖q) - KL(p‖r) is the difference of two of these.
        alpha: Σ min(p, q), the chance that the target accepts a token drawn from q, detached.
        agreement: 1 where both have the same most probable token, detached.
    """

    divergence: Tensor
    cross_entropy: Tensor
    alpha: Tensor
    agreement: Tensor


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p‖q) = Σ p (log p - log q): covers every token that the target may choose. ``[rows, vocab] -> [rows]``."""
    return functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"forward_kl": forward_kl}
"""Loss per token from log p and log q, by name."""


def token_loss(target_logits: Tensor, draft_logits: Tensor, divergence: str = "forward_kl") -> TokenLoss:
    """Divergence of every row, with what else the two distributions tell.

    Args:
        target_logits: ``[rows, vocab]`` of the target; no gradient is taken.
        draft_logits: ``[rows, vocab]`` of the draft. A vocabulary larger than the other's by padding is cut: ids
            that only one model has are never drafted or never accepted.
        divergence: A key of `DIVERGENCES`.
    """
    shared = min(target_logits.shape[-1], draft_logits.shape[-1])
    log_p = target_logits.detach()[:, :shared].float().log_softmax(-1)
    log_q = draft_logits[:, :shared].float().log_softmax(-1)
    loss = DIVERGENCES[divergence](log_p, log_q)
    with torch.no_grad():
        p = log_p.exp()
        return TokenLoss(
            divergence=loss,
            cross_entropy=-(p * log_q).sum(-1),
            alpha=torch.minimum(p, log_q.exp()).sum(-1),
            agreement=(log_p.argmax(-1) == log_q.argmax(-1)).float(),
        )


def delta(draft_cross_entropy: Tensor, reference_cross_entropy: Tensor) -> Tensor:
    """ΔL = KL(p‖q) - KL(p‖r) per token: how far the draft is behind the reference.

    The target's entropy is in both terms and cancels, so two cross-entropies suffice, and the reference's one is a
    constant of the data that can be computed once.
    """
    return draft_cross_entropy - reference_cross_entropy


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of gathered rows ``[rows, vocab]`` against ``labels [rows]``; 0 if there are no rows."""
    if not len(labels):
        return logits.sum() * 0.0  # keeps the graph, so that backward and DDP see every parameter
    return functional.cross_entropy(logits.float(), labels)


def label_mask(labels: Tensor) -> Tensor:
    """Positions ``[batch, time]`` (bool) whose next token is a label: where predictions are gathered."""
    mask = torch.zeros_like(labels, dtype=torch.bool)
    mask[:, :-1] = labels[:, 1:] != IGNORE
    return mask
