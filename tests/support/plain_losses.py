"""Losses of gathered rows as one writes them down first; what the chunked ones are tested against."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distill.losses.chunked import LossRequest, LossRows
from distill.losses.divergences import Divergence, TargetRows, TokenDistributions, log_probs
from distill.models.lm_head import LMHead
from distill.models.loading import loss_precision


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
    log_p = log_probs(target_logits.detach(), vocab)
    log_q = log_probs(draft_logits, vocab)
    apart = TokenDistributions(log_p, log_q.detach())
    return TokenLoss(divergence.loss(TokenDistributions(log_p, log_q)), apart.alpha, apart.agreement())


def plain_loss(hidden: Tensor, head: LMHead, target: TargetRows, request: LossRequest) -> LossRows:
    """The twin of `fused_loss` by autograd, with the logits of all rows in memory."""
    divergence = request.divergence
    with loss_precision(hidden.device):
        vocab = min(head.vocab, target.vocab)
        logits = head.first(hidden.to(head.linear.weight.dtype), vocab)
        log_q = log_probs(logits, vocab)
        with torch.no_grad():
            log_p = target.log_probs(log_q.detach())
        pair, detached = TokenDistributions(log_p, log_q), TokenDistributions(log_p, log_q.detach())
        pair.labels = detached.labels = target.labels
        losses, chosen = divergence.loss(pair), None
        alpha = detached.accepted(request.mass) if request.metrics else None
        agreement = detached.agreement() if request.metrics else None
        if request.choose is not None:
            chosen = request.choose((request.criterion or divergence).loss(detached), alpha)
        total = losses if request.factors is None else losses * request.factors
        total = (total if chosen is None else total[chosen]).sum()
        return LossRows(total, losses.detach(), chosen, alpha, agreement)
