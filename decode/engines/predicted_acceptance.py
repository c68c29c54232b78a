"""What a draft should do in an engine: its acceptance on given texts, and the rounds that follow from it.

For a text y of the target's own, the token drafted at position i was accepted with probability min(1, q(y_i) / p(y_i)),
whatever was drafted: a drafted x is kept with probability min(1, p(x) / q(x)), so that P(x kept) = min(p, q)(x), of
p(x) in all. Drafting greedily is q one-hot, and greedy decoding p one-hot; one formula serves them all. Rounds then
follow one another as the engine runs them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.core.sampling import Warp
from decode.core.trace_metrics import clustered_ratio
from decode.engines.acceptance_counts import Drafts, median
from decode.measure.offline_acceptance import prefixes
from decode.models.other_tokenizer import DraftModel
from decode.models.teacher_forcing import teacher_forced

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
    warp: Warp,
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
