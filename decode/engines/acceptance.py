"""Texts and drafts as an engine counts them, and the acceptance that is predicted for the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.bench.baselines import using_config
from decode.models.other_tokenizer import DraftModel
from decode.models.teacher_forcing import teacher_forced
from decode.trace import clustered_ratio

Text = tuple[Sequence[int], Sequence[int]]  # ids of a prompt, and of the tokens that follow it


@dataclass
class Drafts:
    """Counts of verified drafts."""

    rounds: float = 0  # target forwards that verified a draft
    accepted: list[float] = field(default_factory=list)  # [i]: rounds that accepted at least i + 1 tokens

    def __sub__(self, earlier: Drafts) -> Drafts:
        before = earlier.accepted + [0] * (len(self.accepted) - len(earlier.accepted))
        return Drafts(self.rounds - earlier.rounds, [now - then for now, then in zip(self.accepted, before)])


@dataclass
class ServedText:
    """One text that an engine wrote."""

    ids: list[int]  # new tokens, including the stop token
    seconds: float  # wall time of the request
    decode_seconds: float = 0.0  # time after the first token by the engine's clock; 0 if it reports none
    drafts: Drafts = field(default_factory=Drafts)

    @property
    def tokens_per_second(self) -> float:
        """After the first token, if the engine reports that time."""
        if self.decode_seconds and len(self.ids) > 1:
            return (len(self.ids) - 1) / self.decode_seconds
        return len(self.ids) / (self.seconds or math.nan)


def marginal_rates(texts: Sequence[Drafts], length: int) -> list[float]:
    """Share of rounds that accept at least 1, 2, … `length` tokens."""
    rounds = sum(text.rounds for text in texts) or math.nan
    return [sum(sum(text.accepted[i : i + 1]) for text in texts) / rounds for i in range(length)]


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


@dataclass
class Acceptance:
    """Teacher-forced acceptance of a draft."""

    # [text][depth][position]: whether a drafted token is accepted. The last depth holds for all deeper ones; feature
    # heads have several, since their first token is drafted from the target's states, others from their own.
    texts: list[list[list[bool]]]
    lengths: list[int]  # tokens of each text
    agreement: float  # share of the texts' tokens that are the target's argmax; 1 for greedy texts of this target


@torch.inference_mode()
def acceptance(target: PreTrainedModel, draft: DraftModel, texts: Sequence[Text], depth: int) -> Acceptance:
    """Which tokens of texts that the target wrote a draft proposes, by teacher forcing.

    vLLM and llama.cpp draft the most probable token at every temperature. Exact verification accepts it with
    probability p(argmax q), so given the text exactly where the text has that token.

    Args:
        target: p.
        draft: q.
        texts: prompt and new tokens of each text.
        depth: longest draft; as many greedy tokens of the target are appended to each text, since drafts reach
            beyond its end.
    """
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or math.inf
    read = []
    for prompt, new in texts:
        ids = [*prompt, *new]
        if new and len(ids) + depth <= limit:
            given = torch.tensor([ids], device=target.device)
            with using_config(target, GenerationConfig(max_new_tokens=depth, do_sample=False, pad_token_id=0)):
                ids = target.generate(given, attention_mask=torch.ones_like(given))[0].tolist()
        read.append((ids, len(prompt)))
    rows: list[list[list[bool]]] = [[[]] for _ in texts]
    right = 0
    for forced in teacher_forced(target, {"": draft}, read, depth=depth):
        ids, start = read[forced.number]
        y = torch.tensor(ids[start:], device=forced.p.device)
        rows[forced.number] = [(logits.argmax(-1) == y).tolist() for logits in forced.q[""]]
        n = len(texts[forced.number][1])
        right += int((forced.p.argmax(-1) == y)[:n].sum())
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
    accept: Sequence[Sequence[bool]], length: int, draft_length: int, *, budget: int | None = None
) -> Drafts:
    """Counts of drafts in one text whose first token came from the prompt, as every token after a draft does.

    Args:
        accept: acceptance by depth and position (see `Acceptance.texts`).
        length: tokens of the text.
        draft_length: tokens drafted per round; tokens accepted after the end of the text count too.
        budget: most tokens that the text could have had, if the engine limits drafts to what is left of it, less one.
    """
    counted, start = Drafts(0, [0] * draft_length), 1
    while start < length:
        k = min(draft_length, len(accept[0]) - start, math.inf if budget is None else budget - start - 1)
        n = 0
        while n < k and accept[min(n, len(accept) - 1)][start + n]:
            counted.accepted[n] += 1
            n += 1
        counted.rounds += k > 0
        start += n + 1
    return counted
