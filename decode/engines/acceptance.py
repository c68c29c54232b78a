"""Texts and drafts as an engine counts them, and the acceptance that is predicted for the same texts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.bench.baselines import using_config
from decode.bench.offline_acceptance import prefixes
from decode.models.other_tokenizer import DraftModel
from decode.models.teacher_forcing import teacher_forced
from decode.sampling import LogitsWarper
from decode.trace import clustered_ratio

Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, and of the tokens that follow it


@dataclass
class Drafts:
    """Counts of verified drafts; expected values where they are predicted."""

    rounds: float = 0  # target forwards that verified a draft
    drafted: float = 0  # drafted tokens
    accepted: list[float] = field(default_factory=list)  # [i]: rounds that accepted at least i + 1 tokens

    def __sub__(self, earlier: Drafts) -> Drafts:
        before = earlier.accepted + [0] * (len(self.accepted) - len(earlier.accepted))
        accepted = [now - then for now, then in zip(self.accepted, before)]
        return Drafts(self.rounds - earlier.rounds, self.drafted - earlier.drafted, accepted)


@dataclass
class ServedText:
    """One text that an engine wrote."""

    ids: list[int]  # new tokens, including the stop token
    seconds: float  # wall time of the request
    decode_seconds: float | None = None  # time after the first token by the engine's clock, if it reports one
    drafts: Drafts = field(default_factory=Drafts)


def marginal_rates(texts: Sequence[Drafts], length: int) -> list[tuple[float, float]]:
    """Share of rounds that accept at least 1, 2, … `length` tokens, with standard errors clustered by text."""
    rounds = [text.rounds for text in texts]
    accepted = [text.accepted + [0.0] * (length - len(text.accepted)) for text in texts]
    return [clustered_ratio([counts[i] for counts in accepted], rounds) for i in range(length)]


def mean_length(texts: Sequence[Drafts]) -> tuple[float, float]:
    """Accepted length 1 + Σ accepted / Σ rounds, which includes the target's own token, and its standard error."""
    mean, se = clustered_ratio([sum(text.accepted) for text in texts], [text.rounds for text in texts])
    return 1 + mean, se


def difference_error(served: Sequence[Drafts], predicted: Sequence[Drafts]) -> float:
    """Standard error of served minus predicted accepted length, paired by text."""
    gaps = []
    for texts in (served, predicted):
        mean, rounds = mean_length(texts)[0], sum(text.rounds for text in texts) or math.nan
        gaps.append([(sum(text.accepted) - (mean - 1) * text.rounds) / rounds for text in texts])
    n = len(served)
    return math.sqrt(n / (n - 1) * sum((a - b) ** 2 for a, b in zip(*gaps))) if n > 1 else math.nan


def tokens_per_second(texts: Sequence[ServedText]) -> float:
    """Σ tokens / Σ seconds, including the time for prompts."""
    return sum(len(text.ids) for text in texts) / (sum(text.seconds for text in texts) or math.nan)


def speedups(texts: Sequence[ServedText], plain: Sequence[ServedText]) -> list[float]:
    """Tokens/s with a draft over tokens/s without, by prompt; after the first token if the engine reports that time."""
    ratios = []
    for pair in zip(texts, plain):
        if all(text.decode_seconds and len(text.ids) > 1 for text in pair):
            ours, theirs = ((len(text.ids) - 1) / (text.decode_seconds or math.nan) for text in pair)
        else:
            ours, theirs = (len(text.ids) / (text.seconds or math.nan) for text in pair)
        if ours > 0 and theirs > 0:
            ratios.append(ours / theirs)
    return ratios


def round_cost(text: ServedText, plain: ServedText) -> float:
    """Time of a round with a draft, in decoding steps without one; the first token belongs to neither."""
    ours, theirs = (one.decode_seconds or one.seconds for one in (text, plain))
    return ours / max(1, text.drafts.rounds) / (theirs / max(1, len(plain.ids) - 1))


@dataclass
class Acceptance:
    """Teacher-forced acceptance of a draft."""

    # [text][depth][position]: probability that a drafted token is accepted. The last depth holds for all deeper ones;
    # feature heads have several, since their first token is drafted from the target's states, others from their own.
    texts: list[list[list[float]]]
    lengths: list[int]  # tokens of each text
    agreement: float  # share of the texts' tokens that are the target's argmax; 1 for greedy texts of this target


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel,
    draft: DraftModel,
    texts: Sequence[Text],
    warp: LogitsWarper,
    depth: int,
    *,
    greedy_draft: bool = True,
) -> Acceptance:
    """Teacher-forced acceptance min(1, q(y) / p(y)) of a draft on texts that the target wrote.

    Args:
        target: p.
        draft: q.
        texts: prompt and new tokens of each text.
        warp: sampling settings of the target.
        depth: longest draft; as many greedy tokens of the target are appended to each text, since drafts reach
            beyond its end.
        greedy_draft: the draft proposes its most probable token, which is the default of vLLM and llama.cpp.
    """
    drafting = dataclasses.replace(warp, temperature=0.0) if greedy_draft else warp
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or math.inf
    read = []
    for prompt, new in texts:
        ids = [*prompt, *new]
        if new and len(ids) + depth <= limit:
            given = torch.tensor([ids], device=target.device)
            with using_config(target, GenerationConfig(max_new_tokens=depth, do_sample=False, pad_token_id=0)):
                ids = target.generate(given, attention_mask=torch.ones_like(given))[0].tolist()
        read.append((ids, len(prompt)))
    rows: list[list[list[float]]] = [[[]] for _ in texts]
    right = 0
    for forced in teacher_forced(target, {"": draft}, read, depth=depth):
        ids, start = read[forced.number]
        before = prefixes(warp, ids, start)
        y = torch.tensor(ids[start:], device=forced.p.device)[:, None]
        p = warp(forced.p, before).gather(1, y)[:, 0].clamp_min(1e-30)
        if warp.greedy:  # the engine's target chose y, whichever token rounding prefers here
            p = torch.ones_like(p)
        kept = [(drafting(logits, before).gather(1, y)[:, 0] / p).clamp(max=1) for logits in forced.q[""]]
        rows[forced.number] = [values.double().tolist() for values in kept]
        n = len(texts[forced.number][1])
        right += int((forced.p.argmax(-1)[:n] == y[:n, 0]).sum())
    lengths = [len(new) for _, new in texts]
    return Acceptance(rows, lengths, right / max(1, sum(lengths)))


@torch.inference_mode()
def target_logprob(target: PreTrainedModel, texts: Sequence[Text], temperature: float) -> tuple[float, float]:
    """Mean log p(y) of the texts' tokens, with its standard error over texts; an exact method does not change it."""
    sums = [0.0] * len(texts)
    for forced in teacher_forced(target, {}, [([*prompt, *new], len(prompt)) for prompt, new in texts]):
        y = torch.tensor(list(texts[forced.number][1]), device=forced.p.device)[:, None]
        sums[forced.number] = float((forced.p.float() / temperature).log_softmax(-1).gather(1, y).sum())
    return clustered_ratio(sums, [len(new) for _, new in texts])


def predicted_drafts(
    accept: Sequence[Sequence[float]], length: int, draft_length: int, *, budget: int | None = None
) -> Drafts:
    """Expected counts of drafts in one text whose first token came from the prompt, as every token after a draft does.

    Args:
        accept: acceptance by depth and position (see `Acceptance.texts`).
        length: tokens of the text.
        draft_length: tokens drafted per round; tokens accepted after the end of the text count too.
        budget: most tokens that the text could have had, if the engine limits drafts to what is left of it, less one.
    """
    counted = Drafts(accepted=[0.0] * draft_length)
    reach = [0.0] * (length + draft_length + 2)  # probability that a round starts at each position
    reach[1] = 1.0
    for start in range(1, length):
        k = min(draft_length, len(accept[0]) - start)
        if budget is not None:
            k = max(0, min(k, budget - start - 1))
        alive = reach[start]
        for i in range(k):
            kept = accept[min(i, len(accept) - 1)][start + i]
            reach[start + i + 1] += alive * (1 - kept)
            alive *= kept
            counted.accepted[i] += alive
        reach[start + k + 1] += alive
        counted.rounds += reach[start] if k else 0.0
        counted.drafted += reach[start] * k
    return counted
