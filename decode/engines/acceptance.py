"""What an engine did: texts, times and counted drafts, and the rates that follow from them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.bench.offline_acceptance import prefixes
from decode.models.other_tokenizer import DraftModel
from decode.models.teacher_forcing import teacher_forced
from decode.sampling import LogitsWarper
from decode.trace import clustered_ratio


@dataclass
class Drafts:
    """Drafts that were verified, as engines count them; expected numbers where they are predicted."""

    rounds: float = 0  # target forwards that checked a draft
    drafted: float = 0  # tokens drafted in all
    # for each draft position, how many rounds accepted at least so many tokens
    accepted: list[float] = field(default_factory=list)

    def __sub__(self, earlier: Drafts) -> Drafts:
        before = earlier.accepted + [0] * (len(self.accepted) - len(earlier.accepted))
        return Drafts(
            self.rounds - earlier.rounds,
            self.drafted - earlier.drafted,
            [now - then for now, then in zip(self.accepted, before)],
        )


@dataclass
class ServedText:
    """One text as an engine wrote it."""

    ids: list[int]  # the new tokens, the ending token among them where there is one
    seconds: float  # wall time of the request
    # time after the first token, by the engine's own clock; None where it does not tell
    decode_seconds: float | None = None
    drafts: Drafts = field(default_factory=Drafts)  # what was drafted for this text


def rates(texts: Sequence[Drafts], length: int) -> list[dict[str, Any]]:
    """Marginal and conditional acceptance at each draft position; texts are the unit of the errors.

    Marginal: Σ rounds that accepted i tokens or more / Σ rounds. Conditional: the same over those that accepted i − 1.
    """
    rows = []
    rounds = [text.rounds for text in texts]
    before: list[float] = rounds
    for i in range(length):
        accepted = [text.accepted[i] if i < len(text.accepted) else 0 for text in texts]
        marginal, marginal_se = clustered_ratio(accepted, rounds)
        conditional, conditional_se = clustered_ratio(accepted, before)
        rows.append(
            {
                "position": i + 1,
                "rounds": sum(rounds),
                "marginal": marginal,
                "marginal_se": marginal_se,
                "conditional": conditional,
                "conditional_se": conditional_se,
            }
        )
        before = accepted
    return rows


def mean_length(texts: Sequence[Drafts]) -> tuple[float, float]:
    """Mean accepted length 1 + Σ accepted / Σ rounds, the target's own token included, with its standard error."""
    mean, se = clustered_ratio([sum(text.accepted) for text in texts], [text.rounds for text in texts])
    return 1 + mean, se


def difference(served: Sequence[Drafts], predicted: Sequence[Drafts], *, paired: bool) -> tuple[float, float]:
    """Served minus predicted mean accepted length, and its standard error.

    Args:
        served: by text.
        predicted: by text.
        paired: both are over the same texts, so that the error is that of the differences.
    """
    (a, a_se), (b, b_se) = mean_length(served), mean_length(predicted)
    if not paired:
        return a - b, math.hypot(a_se, b_se)
    rounds = sum(text.rounds for text in served) or math.nan
    gaps = [
        (sum(s.accepted) - (a - 1) * s.rounds) / rounds - (sum(p.accepted) - (b - 1) * p.rounds) / max(1e-9, total)
        for total in [sum(text.rounds for text in predicted)]
        for s, p in zip(served, predicted)
    ]
    n = len(gaps)
    return a - b, math.sqrt(n / (n - 1) * sum(gap * gap for gap in gaps)) if n > 1 else math.nan


def tokens_per_second(texts: Sequence[ServedText]) -> float:
    """Σ tokens / Σ seconds, prompts included."""
    seconds = sum(text.seconds for text in texts)
    return sum(len(text.ids) for text in texts) / seconds if seconds else math.nan


def speedup(texts: Sequence[ServedText], plain: Sequence[ServedText]) -> list[float]:
    """For each prompt, tokens/s with a draft over tokens/s without; after the first token where both clocks tell."""
    ratios = []
    for ours, theirs in zip(texts, plain):
        a, b = (_pace(text, ours.decode_seconds and theirs.decode_seconds) for text in (ours, theirs))
        if a and b:
            ratios.append(a / b)
    return ratios


def round_cost(text: ServedText, plain: ServedText) -> float:
    """Time of a round with a draft, in that of a token without one; the first token is of neither."""
    a, b = (one.decode_seconds or one.seconds for one in (text, plain))
    return float(a / max(1, text.drafts.rounds) / (b / max(1, len(plain.ids) - 1)))


def _pace(text: ServedText, decoding: Any) -> float:
    if decoding and len(text.ids) > 1:
        return (len(text.ids) - 1) / float(text.decode_seconds or math.nan)
    return len(text.ids) / text.seconds if text.seconds else 0.0


def median(values: Sequence[float]) -> float:
    """The median; NaN of nothing."""
    return statistics.median(values) if values else math.nan


CANDIDATES = 10  # of a draft in llama.cpp, which takes their probabilities as if there were no others
UNDRAFTED = -1.0  # stands for the acceptance of a token that the draft is not sure enough of


@dataclass(frozen=True)
class Rounds:
    """How an engine arranges its rounds."""

    first: int = 1  # tokens that are written before the first draft: 1 where reading the prompt gives a token
    past_end: bool = True  # tokens accepted behind the one that ends the text are counted
    to_budget: bool = False  # drafts are no longer than the tokens still wanted, less one
    whole_only: bool = False  # rounds whose draft was cut by the budget or the text's end are left out of the counts


@dataclass
class Acceptance:
    """A draft's acceptance on texts of the target."""

    # for each text, by depth in the draft (the last holds for all deeper ones), the acceptance of every token, and of
    # those behind its end, as far as a draft can reach. Depth matters to feature heads only: their first token is
    # drafted from the target's states, the next ones from their own.
    texts: list[list[list[float]]]
    lengths: list[int]  # tokens of each text
    agreement: float  # share of the texts' tokens that are the target's own argmax; 1 for greedy texts of this target
    logprob: float  # mean log q(y) of the texts' tokens under the draft at temperature 1


@torch.inference_mode()
def acceptance(
    target: PreTrainedModel,
    draft: DraftModel,
    texts: Sequence[tuple[Sequence[int], Sequence[int]]],
    warp: LogitsWarper,
    *,
    tail: int,
    depth: int = 1,
    greedy_draft: bool = True,
    p_min: float = 0.0,
) -> Acceptance:
    """Teacher-forced acceptance of a draft on texts that the target wrote.

    Args:
        target: p.
        draft: q.
        texts: (prompt, new tokens) of each text.
        warp: the decoding mode of the target.
        tail: greedy tokens of the target to append behind each text's end, for drafts that reach beyond it.
        depth: longest draft.
        greedy_draft: the draft proposes its most probable token, as vLLM and llama.cpp do unless told otherwise.
        p_min: drafts end before a token that the draft, among its `CANDIDATES`, gives less than this probability.
    """
    drafting = dataclasses.replace(warp, temperature=0.0) if greedy_draft else warp
    limit = getattr(target.config.get_text_config(), "max_position_embeddings", None) or 1 << 30
    read = []
    for prompt, new in texts:
        ids = [*prompt, *new]
        read.append((_continued(target, ids, tail) if tail and new and len(ids) + tail <= limit else ids, len(prompt)))
    rows: list[list[list[float]]] = [[[]] for _ in texts]
    right, logprob, total = 0, 0.0, 0
    for forced in teacher_forced(target, {"": draft}, read, depth=depth):
        ids, start = read[forced.number]
        before, by_depth = prefixes(warp, ids, start), forced.q[""]
        y = torch.tensor(ids[start:], device=forced.p.device)[:, None]
        p = warp(forced.p, before).gather(1, y)[:, 0].clamp_min(1e-30)
        if warp.greedy:  # the text is what the engine's target wrote: certain, whatever rounding makes of ours
            p = torch.ones_like(p)
        kept = [(drafting(logits, before).gather(1, y)[:, 0] / p).clamp(max=1) for logits in by_depth]
        if p_min:
            for values, logits in zip(kept, by_depth):
                likeliest = logits.float().topk(min(CANDIDATES, logits.shape[-1])).values.softmax(-1)
                values[likeliest[:, 0] < p_min] = UNDRAFTED
        rows[forced.number] = [values.double().tolist() for values in kept]
        n, q_logits = len(texts[forced.number][1]), by_depth[0]
        right += int((forced.p.argmax(-1)[:n] == y[:n, 0]).sum())
        logprob += float(q_logits.float().log_softmax(-1).gather(1, y)[:n].sum())
        total += n
    return Acceptance(rows, [len(new) for _, new in texts], right / max(1, total), logprob / max(1, total))


@torch.inference_mode()
def target_logprob(
    target: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float
) -> tuple[float, float]:
    """Mean log p(y) of the texts' tokens at this temperature, and its standard error over texts.

    Samples of the target have its entropy; sampled texts of a draft that is verified exactly have it too.
    """
    sums = [0.0] * len(texts)
    for forced in teacher_forced(target, {}, [([*prompt, *new], len(prompt)) for prompt, new in texts]):
        logits = forced.p.float() / temperature
        y = torch.tensor(list(texts[forced.number][1]), device=logits.device)[:, None]
        sums[forced.number] = float(logits.log_softmax(-1).gather(1, y).sum())
    return clustered_ratio(sums, [len(new) for _, new in texts])


def _continued(target: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    """The target's greedy continuation, whatever token ends a text."""
    given = torch.tensor([ids], device=target.device)
    model: Any = target
    config = GenerationConfig(max_new_tokens=count, do_sample=False, pad_token_id=0)
    own, model.generation_config = model.generation_config, config
    try:
        out = model.generate(given, attention_mask=torch.ones_like(given))
    finally:
        model.generation_config = own
    return [int(i) for i in out[0]]


def predicted_drafts(
    accept: Sequence[Sequence[float]], length: int, budget: int, draft_length: int, rounds: Rounds
) -> Drafts:
    """Expected drafts of one text.

    Args:
        accept: by depth, acceptance of each of its tokens and of those behind its end (see `Acceptance`).
        length: its tokens.
        budget: most tokens that it could have had.
        draft_length: tokens drafted a round.
        rounds: how the engine arranges them.
    """
    counted = Drafts(accepted=[0.0] * draft_length)
    reach = [0.0] * (length + draft_length + 2)
    if length > rounds.first:
        reach[rounds.first] = 1.0
    for start in range(rounds.first, length):
        here = reach[start]
        if not here:
            continue
        k = min(draft_length, len(accept[0]) - start)
        if rounds.to_budget:
            k = min(k, budget - start - 1)
        at = (accept[min(i, len(accept) - 1)][start + i] for i in range(k))
        k = next((i for i, kept in enumerate(at) if kept == UNDRAFTED), k)
        whole = start + draft_length < length
        alive = here
        for i in range(max(0, k)):
            kept = accept[min(i, len(accept) - 1)][start + i]
            reach[start + i + 1] += alive * (1 - kept)
            alive *= kept
            if whole or (not rounds.whole_only and (rounds.past_end or start + i < length)):
                counted.accepted[i] += alive
        reach[start + max(0, k) + 1] += alive
        if k > 0 and (whole or not rounds.whole_only):
            counted.rounds += here
            counted.drafted += here * k
    return counted


def predicted_of(told: Acceptance, budget: int, draft_length: int, rounds: Rounds) -> list[Drafts]:
    """Expected drafts of each text (see `predicted_drafts`)."""
    return [predicted_drafts(accept, n, budget, draft_length, rounds) for accept, n in zip(told.texts, told.lengths)]


def predicted_speedup(
    told: Acceptance, budget: int, draft_length: int, rounds: Rounds, round_cost: Callable[[float], float]
) -> float:
    """Median over texts of tokens after the first / (expected rounds · cost of a round).

    Args:
        told: acceptance of the texts.
        budget: most tokens of a text.
        draft_length: tokens drafted a round.
        rounds: how the engine arranges them.
        round_cost: of a round that drafts so many tokens, in steps without a draft.
    """
    every = predicted_of(told, budget, draft_length, dataclasses.replace(rounds, whole_only=False))
    return median(
        [
            (length - rounds.first) / (drafts.rounds * round_cost(drafts.drafted / drafts.rounds))
            for drafts, length in zip(every, told.lengths)
            if drafts.rounds
        ]
    )
