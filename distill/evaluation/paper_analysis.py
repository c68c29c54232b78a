"""The AdaSPEC paper's analysis of two drafts: logit margins, divergence per token, selected tokens."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def margins(p: Tensor, q: Tensor) -> Tensor:
    """Logit margin ``[n]``: the draft's logit of the target's most probable token minus its largest other logit."""
    best = p.argmax(-1, keepdim=True)
    own = q.gather(-1, best)
    others = q.scatter(-1, best, -torch.inf).amax(-1, keepdim=True)
    return (own - others).squeeze(-1)


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats ``[n]`` from logits ``[n, vocab]``."""
    log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


class Histograms:
    """Histograms of margins and divergences of each draft, on common edges."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, list[Tensor]]] = {"margins": {}, "kl": {}}

    def add(self, p: Tensor, drafts: Mapping[str, Tensor]) -> None:
        """One more text: the target's logits ``[n, vocab]``, and each draft's."""
        for name, q in drafts.items():
            shared = min(p.shape[-1], q.shape[-1])
            self._values["margins"].setdefault(name, []).append(margins(p[:, :shared].float(), q[:, :shared].float()))
            self._values["kl"].setdefault(name, []).append(divergence(p[:, :shared], q[:, :shared]))

    def report(self, bins: int = 40) -> dict[str, Any]:
        """``{"margins": {draft: {"edges", "counts"}}, "kl": {…}}``."""
        found: dict[str, Any] = {}
        for kind, series in self._values.items():
            flat = {name: torch.cat(parts).double().cpu().numpy() for name, parts in series.items()}
            if not flat:
                continue
            pooled = np.concatenate(list(flat.values()))
            low, high = (0.0, np.quantile(pooled, 0.999)) if kind == "kl" else np.quantile(pooled, [0.001, 0.999])
            edges = np.linspace(low, max(high, low + 1e-6), bins + 1)
            found[kind] = {
                name: {"edges": edges.tolist(), "counts": np.histogram(v.clip(edges[0], edges[-1]), edges)[0].tolist()}
                for name, v in flat.items()
            }
        return found


def lifts(
    selected: Iterable[tuple[str, int]], label_shares: Iterable[float], chosen: int, limit: int = 20
) -> list[dict[str, Any]]:
    """The tokens that AdaSPEC's selection prefers.

    Args:
        selected: token texts, and how often each was selected during training.
        label_shares: of each of them, its share of all label tokens trained on.
        chosen: tokens selected in all.
        limit: how many are listed.

    Returns:
        ``{token, count, share, lift}`` each, by falling lift: times selected, share of the selection, and that share
        over the token's share of all labels. Tokens below 1/1000 of the labels are left out: their lift is noise.
    """
    rows: list[dict[str, Any]] = [
        {"token": text, "count": count, "share": count / chosen, "lift": count / chosen / share}
        for (text, count), share in zip(selected, label_shares)
        if share >= 1e-3
    ]
    return sorted(rows, key=lambda row: -row["lift"])[:limit]
