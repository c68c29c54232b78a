"""The target's own first layers draft, on its own cache: LayerSkip, AdaSPEED, Draft & Verify."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import Drafter
from decode.drafters.draft_model import ModelDrafter
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner, self_speculating
from decode.models.runner import Runner
from decode.sampling import LogitsWarper
from decode.verify import overlap


class LayerSubsetRunner(Runner):
    """A subset of a model's layers in the role of a draft model, on the model's own cache.

    The cache is the target's to roll back: what is read here lies ahead of the target's text until the target reads.
    """

    def __init__(self, whole: FastRunner, subset: LayerSubset) -> None:
        super().__init__(
            whole.name,
            device=whole.device,
            dtype=whole.dtype,
            vocab_size=whole.vocab_size,
            limit=whole.limit,
            model=whole.model,
        )
        self.whole, self.subset = whole, subset

    @property
    def length(self) -> int:
        """Positions read, those read ahead among them."""
        return self.whole.length + self.whole.length_ahead

    def read(self, tokens: Tensor, tree: Draft | None = None, head: int | None = None) -> Tensor:
        """See `FastRunner.read_subset`; logits of all rows whatever `head` is."""
        logits = self.whole.read_subset(tokens, self.subset)
        self.hidden = self.whole.hidden
        return logits

    def read_texts(
        self,
        texts: Sequence[LayerSubsetRunner],
        tokens: Tensor,
        counts: Sequence[int],
        trees: Sequence[Draft | None] | None = None,
        *,
        last_only: bool = False,
    ) -> Tensor:
        """See `FastRunner.read_subset_of_texts`."""
        assert last_only, "drafting takes the last token's logits"
        logits = self.whole.read_subset_of_texts([text.whole for text in texts], tokens, counts, self.subset)
        for text in texts:
            text.hidden = text.whole.hidden
        return logits

    def truncate(self, length: int) -> None:
        """The target does."""


class EarlyExitDrafter(ModelDrafter):
    """Drafts with a subset of the target's layers and the model's own final norm and head.

    The target has to use the same runner: what the draft computed in the shared layers is taken up by verification,
    and the target's own rollback is the draft's. Stop rules see the hidden state that the head saw at the exit.
    """

    def __init__(self, runner: FastRunner, warp: LogitsWarper, subset: LayerSubset) -> None:
        super().__init__(LayerSubsetRunner(runner, subset), warp, runner.vocab_size)
        self.subset = subset  # the sub-layers that run; `LayerSubset(E)` exits after layer E

    def fork(self, targets: Sequence[Runner]) -> list[Drafter]:
        """See `Drafter.fork`: each on its own text's target."""
        forks = [copy.copy(self) for _ in targets]
        for fork, target in zip(forks, targets):
            fork.runner = LayerSubsetRunner(self_speculating(target), self.subset)
        return list(forks)

    def start(self, ids: list[int]) -> None:
        """The target has read the prompt for both."""

    def commit(self, ids: list[int]) -> None:
        """The target has dropped what was rejected for both."""


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
def target_rows(runner: FastRunner, texts: Sequence[Text], warp: LogitsWarper) -> list[Tensor]:
    """The target's probabilities ``[response, vocab]`` at every response position of each text."""
    rows = []
    for ids, start in texts:
        runner.truncate(0)
        logits = runner.read(torch.tensor(ids, device=runner.device), head=len(ids) - start + 1)[:-1]
        rows.append(warp(logits, [ids[:i] for i in range(start, len(ids))] if warp.needs_prefix else None))
    runner.truncate(0)
    return rows


@torch.inference_mode()
def acceptance(
    runner: FastRunner, subset: LayerSubset, texts: Sequence[Text], rows: Sequence[Tensor], warp: LogitsWarper
) -> list[list[float]]:
    """Σ min(p, q) at every response position of each text, for a draft that runs `subset`.

    A text is read whole by the subset, so behind the first skipped sub-layer the draft attends to its own states of
    the text; in decoding it attends to the target's, which are better.
    """
    found = []
    for (ids, start), p in zip(texts, rows):
        runner.truncate(0)
        logits = runner.read_subset(torch.tensor(ids, device=runner.device), subset)[start - 1 : -1]
        q = warp(logits, [ids[:i] for i in range(start, len(ids))] if warp.needs_prefix else None)
        found.append(overlap(p, q).tolist())
    runner.truncate(0)
    return found


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
        speedup: predicts it from acceptances, draft length, c and v (`predicted_speedup.replayed_speedup`).
        verify_cost: v(n), an n-token target forward in one-token ones.
        fixed: share of a one-token forward that does not depend on the layers.
        longest: longest draft considered.
    """
    total = 2 * runner.depth
    rows = target_rows(runner, texts, warp)

    def predicted(skip: frozenset[Sublayer]) -> Subset:
        no_attention, no_mlp = ([layer for kind, layer in skip if kind == what] for what in ("attention", "mlp"))
        subset = LayerSubset.skipping(runner.depth, no_attention, no_mlp)
        accept = acceptance(runner, subset, texts, rows, warp)
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
    while len(current.skip) < total - 1 and since < PATIENCE + total // 2:
        current = max(
            (predicted(current.skip | {s}) for s in everything if s not in current.skip),
            key=lambda s: (s.speedup, s.alpha),
        )
        since = 0 if current.speedup > best.speedup else since + 1
        best = max(best, current, key=lambda s: s.speedup)
        if best.skip and since >= PATIENCE:
            break
    return best
