"""offline_alpha: acceptance at every response position of texts that the target generated, by teacher forcing."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from decode.models.other_tokenizer import DraftModel
from decode.models.teacher_forcing import TeacherForcedLogits, Text, teacher_forced
from decode.sampling import LogitsWarper
from decode.trace import clustered_ratio
from decode.verify import overlap

DEPTH = 5  # drafted tokens of a feature head whose acceptance is measured; deeper ones are assumed to equal the last


@dataclass
class OfflineAlpha:
    """Acceptance at every response position."""

    texts: list[list[float]]  # Σₓ min(p(x), q(x)) at each response position, one list for each text
    # the number of each text's prompt: texts of one prompt are one observation; empty: all prompts differ
    prompts: list[int] = field(default_factory=list)
    # min(1, q(x) / p(x)) of the token x that stands there: the probability that a draft which led to it was accepted,
    # so that products of it are unbiased where α varies with the token; None: as `texts`, which is the same if greedy
    kept: list[list[float]] | None = None

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


def offline_alpha(
    target: PreTrainedModel, draft: DraftModel, texts: Iterable[Text], warp: LogitsWarper
) -> OfflineAlpha:
    """`offline_alphas` of one draft, as first drafted token."""
    return offline_alphas(target, {"": draft}, texts, warp)[""][0]


def offline_alphas(
    target: PreTrainedModel,
    drafts: Mapping[str, DraftModel],
    texts: Iterable[Text],
    warp: LogitsWarper,
    *,
    depth: int = 1,
    seen: Callable[[TeacherForcedLogits], None] | None = None,
) -> dict[str, list[OfflineAlpha]]:
    """Measure drafts on texts that the target generated, with one forward of the target for all drafts.

    Args:
        target: p.
        drafts: q, by name.
        texts: (token ids, prompt length) of each text; those without a response are left out.
        warp: logits to probabilities.
        depth: number of drafted tokens of feature heads.
        seen: called with the logits of every text.

    Returns:
        For each draft the acceptance as first drafted token; of feature heads then as second, third, ….
    """
    texts = [(ids, prompt_length) for ids, prompt_length in texts if len(ids) > prompt_length]
    found: dict[str, list[dict[int, tuple[list[float], list[float]]]]] = {}  # by draft, depth and text
    for forced in teacher_forced(target, drafts, texts, depth=depth):
        (ids, start), before = texts[forced.number], prefixes(warp, *texts[forced.number])
        p, written = warp(forced.p, before), torch.tensor([*ids[start:]], device=forced.p.device)[:, None]
        for draft, logits in forced.q.items():
            for values, row in zip(found.setdefault(draft, [{} for _ in logits]), logits):
                q = warp(row, before)
                kept = (q.gather(-1, written) / p.gather(-1, written)).nan_to_num_(0.0).clamp_(max=1.0)[:, 0]
                values[forced.number] = overlap(p, q).double().tolist(), kept.double().tolist()
        if seen is not None:
            seen(forced)
    numbers, order = prompt_numbers(texts), range(len(texts))
    return {
        draft: [
            OfflineAlpha([values[i][0] for i in order], numbers, [values[i][1] for i in order])
            for values in found.get(draft, [{}])
        ]
        for draft in drafts
    }


def prefixes(warp: LogitsWarper, ids: Sequence[int], prompt_length: int) -> list[Sequence[int]] | None:
    """The tokens before each response token, for a warp that reads them; otherwise None."""
    return [ids[:i] for i in range(prompt_length, len(ids))] if warp.needs_prefix else None


def prompt_numbers(texts: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """The number of the distinct prompt of each text (token ids, prompt length)."""
    seen: dict[tuple[int, ...], int] = {}
    return [seen.setdefault(tuple(ids[:prompt_length]), len(seen)) for ids, prompt_length in texts]
