"""Which drafted nodes are kept, and the token that follows them: one function for chains, one for trees."""

import torch
from torch import Tensor

from decode.core.acceptance_rules import AcceptanceRule, Raw, js_distance, pick
from decode.core.proposal import Draft
from decode.core.rng import Rng
from decode.core.sampling import Rows
from decode.core.trace_metrics import Values

Measured = tuple[Values | None, Values | None, Values | None]
"""Overlap, total variation spent and Jensen–Shannon distance at the tested positions."""


def verify(draft: Draft, p: Rows, logits: Tensor, rule: AcceptanceRule, rng: Rng) -> tuple[list[int], int, Measured]:
    """Accepted path, following token, and (overlap, tv spent, js distance) at the tested positions."""
    k = len(draft)
    if draft.probs is None:
        spent = None
        if rule.neutral or not k:
            path, token = verify_tree(draft, p, rng)
        else:
            path, token, spent = verify_tree_relaxed(draft, p, logits, rule, rng)
        overlap = _overlap_of_tree(draft, p, path)
        if overlap is not None and spent is None and not rule.exact:
            spent = torch.zeros_like(overlap)
        return path, token, (overlap, spent, None)
    assert isinstance(p, Tensor)
    q, x = draft.probs, draft.tokens
    raw = None
    if rule.needs_raw and draft.logits is not None:
        raw = (logits[:k], draft.logits)
    accept = rule.accept_prob(p[:k], q, x, raw)
    path, token = verify_chain(draft, p, accept, rule, rng)
    t = min(len(path) + 1, k)
    overlap = torch.minimum(p[:t], q[:t]).sum(-1)
    if rule.exact:
        return path, token, (overlap, None, None)
    spent = rule.tv_spent(p[:t], q[:t], x[:t], accept[:t])
    return path, token, (overlap, spent, js_distance(p[:t], q[:t]))


def _overlap_of_tree(draft: Draft, p: Rows, path: list[int]) -> Tensor | None:
    """Σ min(p, q) at the tested nodes: under a one-hot q the target's probability of the tokens drafted below each."""
    rows = [0, *(node + 1 for node in path)]
    if draft.is_chain and isinstance(p, Tensor):
        return pick(p, draft.tokens[: len(rows)].to(p.device)) if len(draft) else None
    children = draft.children
    masses = [p[r][list(children[r])].sum() for r in rows if children[r]]
    return torch.stack(masses) if masses else None


def verify_greedy(draft: Draft, top: Tensor) -> tuple[list[int], int, list[float]]:
    """Exact verification of a chain or tree where all distributions are one-hot: the host compares tokens.

    Args:
        draft: of n tokens.
        top: the target's token after the pending one and after each drafted one, ``[n + 1]``.

    Returns:
        The accepted nodes, the token after them, and Σ min(p, q) at the tested positions.
    """
    expected, row = top.tolist(), 0
    path: list[int] = []
    agreed: list[float] = []
    while children := draft.children[row]:
        node = children.get(expected[row])
        agreed.append(float(node is not None))
        if node is None:
            break
        path.append(node)
        row = node + 1
    return path, expected[row], agreed


def verify_chain(draft: Draft, p: Tensor, accept: Tensor, rule: AcceptanceRule, rng: Rng) -> tuple[list[int], int]:
    """Modified rejection sampling on a chain drawn from `draft.probs`; the host waits twice a round, never per token.

    Args:
        draft: a chain of k tokens with the probabilities they were drawn from.
        p: warped target rows ``[k + 1, vocab]``.
        accept: acceptance probabilities ``[k]``.
        rule: gives the residual of the first rejected position.
        rng: draws.

    Returns:
        The accepted nodes and the token after them: a correction from the residual, or the bonus token from p.
    """
    assert draft.probs is not None
    m = int(rng.first_reject(accept))
    if m == len(draft):
        return list(range(m)), int(rng.draw(p[m]))
    return list(range(m)), int(rng.draw(rule.residual(p[m], draft.probs[m])))


def verify_tree(draft: Draft, p: Rows, rng: Rng) -> tuple[list[int], int]:
    """Exact verification of a deterministic tree: one draw a node; the draw that leaves the tree is emitted.

    Each emitted token is a draw from its own row of p, so the distribution is the target's whatever the tree.

    Args:
        draft: tokens and parents; no probabilities.
        p: warped target rows ``[n + 1, vocab]``.
        rng: draws.

    Returns:
        The accepted path and the token after it.
    """
    children = draft.children
    draws = rng.draw_rows(p)
    path: list[int] = []
    row = 0
    while True:
        token = int(draws[row])
        node = children[row].get(token)
        if node is None:
            return path, token
        path.append(node)
        row = node + 1


def verify_tree_relaxed(
    draft: Draft, p: Rows, raw: Tensor, rule: AcceptanceRule, rng: Rng
) -> tuple[list[int], int, Tensor]:
    """A relaxed rule on a deterministic tree: the children of a node are tried in turn as one-hot drafts.

    After a rejected child the distribution becomes the rule's residual, so that the exact rule would stay exact.

    Returns:
        The accepted path, the token after it, and the total variation spent at each tried child.
    """
    children = draft.children
    path: list[int] = []
    spent: list[Tensor] = []
    row = 0
    while True:
        weights = p[row]
        taken = None
        for token, node in children[row].items():
            x = torch.tensor([token], device=raw.device)
            weights = weights / weights.sum()
            delta = torch.zeros_like(weights).scatter_(0, x, 1.0)
            pair: Raw | None = (raw[row : row + 1], torch.where(delta > 0, 0.0, -torch.inf)[None])
            a = rule.accept_prob(weights[None], delta[None], x, pair)
            spent.append(rule.tv_spent(weights[None], delta[None], x, a))
            if int(rng.first_reject(a)) == 1:
                taken = node
                break
            weights = rule.residual(weights, delta)
        if taken is None:
            return path, int(rng.draw(weights)), torch.cat(spent) if spent else torch.empty(0)
        path.append(taken)
        row = taken + 1
