"""Texts that a feature head writes: drafts on the target's features, all of whose tokens are taken."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.acceptance_rules import AcceptanceRule
from decode.core.method_options import MethodOptions
from decode.core.rng import TorchRng
from decode.core.sampling import Warp
from decode.core.target import Target
from decode.loop import decode
from decode.method_parts import MethodInputs
from decode.methods import build
from decode.models.batched_generation import Draws
from decode.models.eagle.head import FeatureHead
from decode.models.eagle.head_runner import HeadRunner
from decode.models.loading.choose_runner import open_runner


@dataclass
class TakeAll(AcceptanceRule):
    """Every drafted token is kept, whatever the target says."""

    def accept_prob(self, p: Tensor, q: Tensor, x: Tensor, raw: Any = None) -> Tensor:
        """1 of every token."""
        return torch.ones_like(x, dtype=p.dtype)


@dataclass
class HeadTexts:
    """Writes with a head in training: ``depth`` drafted tokens, the target's next one, and so on.

    These are the texts that decoding visits while the head is drafting. The target reads them for its features.
    """

    head: FeatureHead  # with the weights of the moment
    target: PreTrainedModel  # the model whose features it reads
    depth: int  # tokens of a draft

    @torch.inference_mode()
    def __call__(
        self,
        prompts: Sequence[Sequence[int]],
        warp: Warp,
        *,
        budgets: int | Sequence[int],
        stop_ids: Collection[int],
        draws: Draws,
        batch_size: int | None = None,
    ) -> list[list[int]]:
        """See `distill.generation.on_policy.Writer`; one text at a time."""
        limits = [budgets] * len(prompts) if isinstance(budgets, int) else list(budgets)
        runner, drafter = open_runner(self.target), HeadRunner(self.head, self.target)
        options = MethodOptions(draft_length=self.depth)
        texts: list[list[int]] = []
        for number, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            if limit < 1:
                texts.append([])
                continue
            system = build("eagle", MethodInputs(runner, warp, drafter, options=options))
            system.rule = TakeAll()
            rng = TorchRng(int(draws(number, 1)[0] * 2**53))
            made = decode(Target(runner), system, warp, list(prompt), max_new_tokens=limit, stop_ids=stop_ids, rng=rng)
            texts.append(made.ids[len(prompt) :] if made.ids[: len(prompt)] == list(prompt) else made.ids)
        return texts
