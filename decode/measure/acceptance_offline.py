"""offline_alpha: acceptance at every response position of texts that the target generated, by teacher forcing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.acceptance import overlap
from decode.core.sampling import Warp
from decode.core.standard_error import clustered_ratio
from decode.models.eagle.head import FeatureHead, head_logits
from decode.models.other_vocabulary import DraftModel, ForeignDraft, foreign_logits


@dataclass
class OfflineAlpha:
    """Acceptance at every response position.

    Attributes:
        texts: Σₓ min(p(x), q(x)) at each response position, one list a text.
        prompts: the number of each text's prompt: texts of one prompt are one observation; each has its own if empty.
    """

    texts: list[list[float]]
    prompts: list[int] = field(default_factory=list)

    @property
    def sums(self) -> list[float]:
        """Summed acceptance of each text."""
        return [sum(text) for text in self.texts]

    @property
    def counts(self) -> list[int]:
        """Response positions of each text."""
        return [len(text) for text in self.texts]

    @property
    def mean(self) -> float:
        """offline_alpha: the mean over all positions."""
        return sum(self.sums) / max(1, sum(self.counts))

    @property
    def se(self) -> float:
        """Standard error with prompts as the unit of sampling (positions of one text are not independent)."""
        return clustered_ratio(self.sums, self.counts, self.prompts or None)[1]


def paired(a: OfflineAlpha, b: OfflineAlpha) -> dict[str, float]:
    """Difference b − a over the same texts, its standard error and two-sided p-value (normal approximation)."""
    if a.counts != b.counts:
        raise ValueError("the two measurements are not over the same texts")
    sums = [y - x for x, y in zip(a.sums, b.sums)]
    difference, se = clustered_ratio(sums, a.counts, a.prompts or None)
    p_value = math.erfc(abs(difference) / se / math.sqrt(2)) if se > 0 else (1.0 if difference == 0 else 0.0)
    return {"difference": difference, "se": se, "p_value": p_value, "n": len(sums)}


@torch.inference_mode()
def response_logits(model: PreTrainedModel, ids: Sequence[int], prompt_length: int) -> Tensor:
    """Logits ``[response, vocab]`` that predict each response token of one text."""
    known = model.get_input_embeddings().weight.shape[0]  # a draft of a shorter padded vocabulary reads its last id
    tokens = torch.tensor([list(ids)], device=model.device).clamp_(max=known - 1)
    keep = len(ids) - prompt_length + 1
    return model(input_ids=tokens, use_cache=False, logits_to_keep=keep).logits[0, :-1]


def draft_logits(target: PreTrainedModel, draft: DraftModel, ids: Sequence[int], prompt_length: int) -> Tensor:
    """`response_logits` of a draft; a feature head reads the target's true features."""
    if isinstance(draft, ForeignDraft):
        return foreign_logits(draft, ids, prompt_length)
    if isinstance(draft, FeatureHead):
        return head_logits(draft, target, ids, prompt_length)
    return response_logits(draft, ids, prompt_length)


def offline_alpha(
    target: PreTrainedModel,
    draft: DraftModel,
    texts: Iterable[tuple[Sequence[int], int]],
    warp: Warp,
) -> OfflineAlpha:
    """Measure a draft on texts the target generated.

    Args:
        target: p.
        draft: q.
        texts: (token ids, prompt length) of each text.
        warp: the decoding mode.

    Returns:
        Acceptance by text and position, for means, errors, paired comparisons and replays.
    """
    texts = [(ids, prompt_length) for ids, prompt_length in texts if len(ids) > prompt_length]
    measured = []
    for ids, prompt_length in texts:
        before = prefixes(warp, ids, prompt_length)
        p = warp(response_logits(target, ids, prompt_length), before)
        q = warp(draft_logits(target, draft, ids, prompt_length), before)
        measured.append(overlap(p, q).double().tolist())
    return OfflineAlpha(measured, prompt_numbers(texts))


def prefixes(warp: Warp, ids: Sequence[int], prompt_length: int) -> list[Sequence[int]] | None:
    """What stands before each response token, for a warp that looks at it."""
    return [ids[:i] for i in range(prompt_length, len(ids))] if warp.needs_prefix else None


def prompt_numbers(texts: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """For (token ids, prompt length) of each text: which distinct prompt it has."""
    seen: dict[tuple[int, ...], int] = {}
    return [seen.setdefault(tuple(ids[:prompt_length]), len(seen)) for ids, prompt_length in texts]
