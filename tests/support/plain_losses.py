"""Losses of rows as one writes them down first, with all logits and autograd: what the chunked ones must equal."""

import torch
from torch import Tensor
from torch.nn import functional

from distill.losses.chunked import Compared, Rows
from distill.losses.divergences import LEAST_TAIL, Divergence, TargetRows, TokenDistributions


def distributions(target: TargetRows, logits: Tensor) -> TokenDistributions:
    """Both distributions; of a top-k signal those of the k ids and of one outcome for all others."""
    log_q = logits.log_softmax(-1)
    if target.values is None or target.ids is None:
        with torch.no_grad():
            log_p = log_q if target.values is None else target.log_probs(log_q.shape[1]).to(log_q.dtype)
        return TokenDistributions(log_p, log_q, target, log_q)
    ids = target.ids.long()
    others = log_q.masked_fill(torch.zeros_like(log_q, dtype=torch.bool).scatter(1, ids, True), -torch.inf)
    log_p = target.values.to(logits.dtype)
    tail = (1 - log_p.exp().sum(-1, keepdim=True)).clamp_min(LEAST_TAIL).log()
    folded = torch.cat([log_q.gather(1, ids), others.logsumexp(-1, keepdim=True)], -1)
    return TokenDistributions(torch.cat([log_p, tail], -1), folded, target, log_q)


def plain_loss(rows: Rows, divergence: Divergence, chosen: Tensor | None = None) -> tuple[Tensor, Compared]:
    """The twin of `chunked_loss`."""
    head, target = rows.head, rows.target.at(rows.at)
    weight = head.linear.weight
    if head.markov is not None:
        weight = torch.cat([weight.detach(), head.markov], 1)
    products = functional.linear(rows.hidden.to(weight.dtype), weight, head.linear.bias)[:, : rows.vocab]
    logits = head.finish(products)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    pair = distributions(target, logits)
    losses = divergence.loss(pair)
    best = pair.log_p.argmax(-1) if target.ids is None else target.ids[:, 0]
    best = target.labels if target.values is None else best
    agreement = (best == logits.argmax(-1)).to(losses.dtype)
    with torch.no_grad():
        mass = 1.0 if target.mass is None else target.mass[:, None]
        alpha = torch.minimum(pair.p * mass, pair.q).sum(-1)
        p = torch.zeros_like(logits).scatter(1, target.ids.long(), pair.p[:, :-1]) if target.ids is not None else pair.p
        likeliest = (p * mass * functional.one_hot(logits.argmax(-1), logits.shape[1])).sum(-1)
    picked = slice(None) if chosen is None else chosen
    total = (losses if rows.weight is None else losses * rows.weight)[picked].sum()
    return total, Compared(losses.detach()[picked], alpha[picked], likeliest[picked], agreement[picked])
