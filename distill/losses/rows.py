"""Losses of gathered rows, one a label token: next tokens, and the plain form of the distillation loss.

`token_loss` builds every log-probability and leaves the gradient to autograd. `distill.losses.chunked_kl` computes the same
without keeping them; this is what it is tested against.
"""  # noqa: E501

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from distill.losses.divergences import Divergence, Pair


@dataclass
class TokenLoss:
    """What one pass over the rows yields, each ``[rows]`` in float32.

    Attributes:
        divergence: The loss per token; carries the gradient.
        alpha: Σ min(p, q), the chance that the target accepts a token drawn from q, detached.
        agreement: 1 where both have the same most probable token, detached.
    """

    divergence: Tensor
    alpha: Tensor
    agreement: Tensor


def log_probs(logits: Tensor, vocab: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of the first ``vocab`` ids ``[rows, vocab]``, in float32 (float64 stays).

    Log-probabilities in half precision lose the differences that selection ranks by.
    """
    wide = logits[:, :vocab].to(torch.promote_types(logits.dtype, torch.float32))
    return (wide if temperature == 1.0 else wide / temperature).log_softmax(-1)


def token_loss(target_logits: Tensor, draft_logits: Tensor, divergence: Divergence | None = None) -> TokenLoss:
    """Divergence of every row, with what else the two distributions tell.

    Args:
        target_logits: ``[rows, vocab]`` of the target; no gradient is taken.
        draft_logits: ``[rows, vocab]`` of the draft. A vocabulary larger than the other's by padding is cut: ids
            that only one model has are never drafted or never accepted.
        divergence: Which one; None: forward KL.
    """
    divergence = divergence or Divergence()
    vocab = min(target_logits.shape[-1], draft_logits.shape[-1])
    log_p = log_probs(target_logits.detach(), vocab, divergence.temperature)
    log_q = log_probs(draft_logits, vocab, divergence.temperature)
    apart = Pair(log_p, log_q.detach())
    return TokenLoss(divergence.loss(Pair(log_p, log_q)), apart.alpha, apart.agreement())


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of gathered rows ``[rows, vocab]`` against ``labels [rows]``; 0 if there are no rows."""
    if not len(labels):
        return logits.sum() * 0.0  # keeps the graph, so that backward and DDP see every parameter
    return functional.cross_entropy(logits.float(), labels)
