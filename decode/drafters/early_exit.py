"""The target's own first layers draft, on its own cache: LayerSkip, AdaSPEED, Draft & Verify."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from decode.drafters.base import Prompt
from decode.drafters.draft_model import ModelDrafter, ModelState
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner
from decode.models.runner import Output
from decode.sampling import LogitsWarper
from decode.trace import Step
from decode.verify import overlap


class EarlyExitDrafter(ModelDrafter):
    """Drafts with a subset of the target's layers and the model's own final norm and head, in the target's cache.

    What the draft computed in the shared layers is used by verification, and the target's rollback is the draft's.
    Stop rules read the hidden state that the head read at the exit.
    """

    runner: FastRunner

    def __init__(self, runner: FastRunner, warp: LogitsWarper, subset: LayerSubset) -> None:
        super().__init__(runner, warp, runner.vocab_size)
        self.subset = subset  # the sub-layers that run; `LayerSubset(E)` exits after layer E
        self.cache_bytes_per_token = 0  # the drafter has no cache

    def start(self, prompt: Prompt) -> ModelState:
        """The target has read the prompt for both."""
        return ModelState(prompt.cache, prompt.stop_ids)

    def _forward(self, caches: list[Any], feeds: list[Any]) -> list[Output]:
        return self.runner.forward(caches, feeds, last=1, layers=self.subset).split([1] * len(caches))

    def update(self, state: ModelState, ids: list[int], step: Step) -> None:
        """The target has dropped what was rejected for both."""

    def close(self, state: ModelState) -> None:
        """The target closes its cache."""


PATIENCE = 3  # steps without a better set before the search ends
Text = tuple[list[int], int]  # token ids, and how many of them are the prompt
Sublayer = tuple[str, int]  # ``("attention", layer)`` or ``("mlp", layer)``
Speedup = Callable[[Sequence[Sequence[float]], int, float, Callable[[int], float]], float]
"""Of texts with these acceptances, at a draft length, with draft cost c and verification cost v(n)."""


@dataclass
class Subset:
    """A skip set with what is expected of it."""

    skip: frozenset[Sublayer]  # skipped sub-layers
    alpha: float  # mean acceptance by teacher forcing
    draft_length: int  # the best one
    speedup: float  # predicted at that length

    def layers(self, kind: str) -> list[int]:
        """Layers whose attention (or mlp) is skipped."""
        return sorted(layer for what, layer in self.skip if what == kind)


@torch.inference_mode()
def response_rows(
    runner: FastRunner, texts: Sequence[Text], warp: LogitsWarper, subset: LayerSubset | None = None
) -> list[Tensor]:
    """Probabilities ``[response, vocab]`` at every response position of each text, of all layers or of a subset.

    A subset reads a text whole, so after the first skipped sub-layer it attends to its own states of the text; in
    decoding it attends to the target's, which are better.
    """
    rows = []
    for ids, start in texts:
        cache = runner.new_cache()
        logits = runner.forward([cache], [torch.tensor(ids, device=runner.device)], layers=subset).logits
        cache.close()
        prefixes = [ids[:i] for i in range(start, len(ids))] if warp.needs_prefix else None
        rows.append(warp(logits[start - 1 : -1], prefixes))
    return rows


def search(
    runner: FastRunner,
    texts: Sequence[Text],
    warp: LogitsWarper,
    *,
    speedup: Speedup,
    verify_cost: Callable[[int], float],
    fixed: float = 0.1,
    longest: int = 12,
) -> Subset:
    """Grow the skip set by the sub-layer whose loss hurts the predicted speedup least, and keep the best set seen.

    A draft forward costs `fixed` (embedding, norm, head, bookkeeping) plus the rest by share of sub-layers; adding
    goes on for `PATIENCE` steps past the best set, since skipping pays only once enough is skipped.

    Args:
        runner: the target.
        texts: what it wrote.
        warp: decoding mode.
        speedup: predicts it from acceptances, draft length, c and v (`decode.bench.prediction.replayed_speedup`).
        verify_cost: v(n), an n-token target forward in one-token ones.
        fixed: share of a one-token forward that does not depend on the layers.
        longest: longest draft considered.
    """
    total = 2 * runner.depth
    rows = response_rows(runner, texts, warp)

    def predicted(skip: frozenset[Sublayer]) -> Subset:
        no_attention, no_mlp = ([layer for kind, layer in skip if kind == what] for what in ("attention", "mlp"))
        subset = LayerSubset.skipping(runner.depth, no_attention, no_mlp)
        accept = [overlap(p, q).tolist() for p, q in zip(rows, response_rows(runner, texts, warp, subset))]
        c = fixed + (1 - fixed) * subset.sublayers / total
        # the shared layers are not run again for what the draft has read
        saved = (1 - fixed) * subset.shared / runner.depth
        speeds = {
            k: speedup(accept, k, c, lambda n: verify_cost(n) - saved * (verify_cost(n) - verify_cost(1)))
            for k in range(1, longest + 1)
        }
        best = max(speeds, key=lambda k: speeds[k])
        flat = [a for text in accept for a in text]
        return Subset(skip, sum(flat) / max(1, len(flat)), best, speeds[best])

    everything = [(what, layer) for layer in range(runner.depth) for what in ("attention", "mlp")]
    best = current = predicted(frozenset())
    since = 0
    while len(current.skip) < total - 1 and since < PATIENCE + (0 if best.skip else total // 2):
        current = max(
            (predicted(current.skip | {s}) for s in everything if s not in current.skip),
            key=lambda s: (s.speedup, s.alpha),
        )
        since = 0 if current.speedup > best.speedup else since + 1
        best = max(best, current, key=lambda s: s.speedup)
    return best
