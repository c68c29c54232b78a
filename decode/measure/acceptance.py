"""Acceptance at every response position of texts that the target generated, by teacher forcing; rounds over them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from decode.core.round import clustered_ratio
from decode.core.sampling import LogitsWarper, Prefixes, argmax, one_hot
from decode.core.verify import overlap
from decode.measure.statistics import equal_weights, p_value
from decode.models.heads.eagle import DraftHead
from decode.models.open import DraftModel
from decode.models.texts import ForcedText, TeacherForcedLogits, teacher_forced

DEPTH = 5  # drafted tokens of the accepted lengths by which drafts are compared; a block head drafts its block


@dataclass
class OfflineAlpha:
    """Acceptance at every response position."""

    texts: list[list[float]]  # Σₓ min(p(x), q(x)) at each response position, one list for each text
    # the number of each text's prompt: texts of one prompt are one observation; empty: all prompts differ
    prompts: list[int] = field(default_factory=list)
    # min(1, q(x) / p(x)) of the token x that stands there: the probability that a draft which led to it was accepted,
    # so that products of it are unbiased where α varies with the token; empty: as `texts`, the same if greedy
    kept: list[list[float]] = field(default_factory=list)
    # of a block head's first token: acceptance by depth at each smaller draft length, whose tokens are others
    shorter: dict[int, list[OfflineAlpha]] = field(default_factory=dict)

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
        return clustered_ratio(self.sums, self.counts, self.prompts)[1]


ByDraft = dict[str, list[OfflineAlpha]]
"""Acceptance by the name of a draft and by depth: as first, second, … drafted token."""
LIKELIEST = ", likeliest"
"""Behind the name of a draft whose likeliest tokens are drafted at any temperature; else they are drawn from q."""


def as_drafted(measured: ByDraft, name: str, draft: DraftModel) -> list[OfflineAlpha]:
    """The acceptance of a draft as its method drafts above temperature 0: a block head the likeliest tokens."""
    block = isinstance(draft, DraftHead) and draft.kind == "block"
    return measured.get(name + LIKELIEST * block, measured[name])


def paired(a: OfflineAlpha, b: OfflineAlpha) -> dict[str, float]:
    """Difference b − a over the same texts, its standard error and two-sided p-value, with prompts as observations."""
    if a.counts != b.counts:
        raise ValueError("the two measurements are not over the same texts")
    sums, numbers = [y - x for x, y in zip(a.sums, b.sums)], a.prompts or range(len(a.texts))
    difference, se = clustered_ratio(sums, a.counts, numbers)
    prompts = equal_weights(np.bincount(numbers, a.counts))
    return {"difference": difference, "se": se, "p_value": p_value(difference, se, prompts), "n": len(sums)}


def offline_alphas(
    target: PreTrainedModel,
    drafts: Mapping[str, DraftModel],
    texts: Iterable[ForcedText],
    warp: LogitsWarper,
    *,
    depth: int = 1,
    likeliest: bool = False,
    seen: Callable[[TeacherForcedLogits], None] | None = None,
) -> ByDraft:
    """Measure drafts on texts that the target generated, with one forward of the target for all drafts.

    Drafted tokens are drawn from q, and accepted with probability Σ min(p, q); with `likeliest` every draft is also
    measured as one that drafts the argmax of q, which is accepted with its p, as its name and `LIKELIEST`. Texts
    without a response are left out. `seen` is called once for every text, with its last logits.

    Returns:
        For each draft the acceptance as first drafted token; of feature heads then as second, third, … up to `depth`,
        and of block heads all, and those of all shorter drafts too.
    """
    texts = [(ids, prompt_length) for ids, prompt_length in texts if len(ids) > prompt_length]
    blocks = [draft for draft in drafts.values() if isinstance(draft, DraftHead) and draft.kind == "block"]
    longest = max((draft.drafts or 0 for draft in blocks), default=0)
    whole, numbers, found = max(depth, longest), prompt_numbers(texts), defaultdict[int, ByDraft](dict)
    for forced in teacher_forced(target, drafts, texts, depth=whole, shorter=range(1, longest)):
        place, ids, at = forced.number, texts[forced.number][0], forced.at
        before = Prefixes.of(ids[:i] for i in range(at.start, at.stop)) if warp.needs_prefix else None
        p, written = warp(forced.p, before), torch.tensor([*ids[at]], device=forced.p.device)[:, None]
        for (draft, logits), rule in product(forced.q.items(), ["", LIKELIEST][: 1 + likeliest]):
            known, name = found[forced.length], draft + rule
            if name not in known:
                known[name] = [OfflineAlpha([[] for _ in texts], numbers, [[] for _ in texts]) for _ in logits]
            for alpha, row in zip(known[name], logits):
                q = warp(row, before)
                q = one_hot(argmax(q), q) if rule else q
                kept = (q.gather(-1, written) / p.gather(-1, written)).nan_to_num_(0.0).clamp_(max=1.0)[:, 0]
                alpha.texts[place] += overlap(p, q).double().tolist()
                alpha.kept[place] += kept.double().tolist()
        if seen is not None and forced.length == whole and forced.last:
            seen(forced)
    for length in range(1, longest):
        for name, alphas in found[length].items():
            found[whole][name][0].shorter[length] = alphas
    return {name: [OfflineAlpha([])] for name in drafts} | found[whole]


def prompt_numbers(texts: Iterable[tuple[Sequence[int], int]]) -> list[int]:
    """The number of the distinct prompt of each text (token ids, prompt length)."""
    seen: dict[tuple[int, ...], int] = {}
    return [seen.setdefault(tuple(ids[:prompt_length]), len(seen)) for ids, prompt_length in texts]


def replay(accept: Sequence[Sequence[float]], draft_length: int) -> tuple[dict[int, float], float]:
    """Expected rounds over a text, and the expected number of tokens that they test.

    The rounds are by the number of drafted tokens: fewer than `draft_length` only where the text ends. As the d-th
    token of a draft, position i is accepted with probability ``accept[d - 1][i]`` once it is reached; a language model
    has one row for all d. Greedy acceptances are 0 or 1, and the result is then exactly the rounds that decode this
    text.
    """
    n, lengths, tested = len(accept[0]), defaultdict[int, float](float), 0.0
    reach = [1.0] + [0.0] * n  # probability that a round starts at this position
    for s, alive in zip(range(n), reach):
        if not alive:
            continue
        k = min(draft_length, n - s - 1)
        lengths[k] += alive
        for depth in range(k):
            i, chance = s + depth, accept[depth if accept[1:] else 0]
            tested += alive
            reach[i + 1] += alive * (1 - chance[i])  # the correction is token i
            alive *= chance[i]
        reach[s + k + 1] += alive  # the bonus is token s + k
    return lengths, tested


def rounds_of_texts(alphas: Sequence[OfflineAlpha], draft_length: int) -> list[dict[int, float]]:
    """Rounds by drafted tokens of each text; `alphas` by depth in the draft (see `replay`)."""
    return [lengths for lengths, _ in _replays(alphas, draft_length)]


def _replays(alphas: Sequence[OfflineAlpha], draft_length: int) -> list[tuple[dict[int, float], float]]:
    by_depth = (alpha.kept or alpha.texts for alpha in alphas[0].shorter.get(draft_length, alphas))
    return [replay(text, draft_length) for text in zip(*by_depth)]


def offline_accepted_per_tested(alphas: Sequence[OfflineAlpha], draft_length: int) -> float:
    """Σm / Σt of texts that are `replayed`; greedy, of 4 drafted tokens, what AdaSPEC's authors call α.

    A round tests its accepted tokens and one that is rejected, unless all are accepted.
    """
    texts = _replays(alphas, draft_length)
    accepted = sum(alphas[0].counts) - sum(sum(lengths.values()) for lengths, _ in texts)
    return accepted / max(1, sum(tested for _, tested in texts))


def replayed(alphas: Sequence[OfflineAlpha], draft_length: int) -> tuple[int, dict[int, float]]:
    """Tokens of all texts and their rounds by drafted tokens."""
    rounds: Any = Counter()  # of expected counts, which are no integers
    for text in rounds_of_texts(alphas, draft_length):
        rounds.update(text)
    return sum(alphas[0].counts), dict(rounds)


def offline_accepted_length(alphas: Sequence[OfflineAlpha], draft_length: int) -> float:
    """Tokens per round of texts that are `replayed`, the target's own token included."""
    tokens, rounds = replayed(alphas, draft_length)
    return tokens / max(1, sum(rounds.values()))
