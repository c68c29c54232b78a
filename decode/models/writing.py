"""Texts of many prompts at once, by the hand-written forward where it knows the model, else by the model's own.

Every text has uniform draws of its own, named by numbers such as (seed, example), so that what is written for a prompt
depends neither on its neighbours nor on when it is written, and a run that was killed writes the same again.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decode.models.choose_runner import fast_if_equal
from decode.models.families import is_small
from decode.models.fast_runner import FastRunner
from decode.models.huggingface_runner import last_logits, rows_that_fit
from decode.models.ragged_batch import Row
from decode.models.weights import FEW
from decode.sampling import LogitsWarper, TorchRng, inverse

GROUP = 4
"""Batches that are asked for together where bits have to repeat: a finished text's place is taken by a waiting one of
its group, so that only a group's last texts leave places empty."""
PROMPT_TOKENS = 1024  # most tokens of prompts in a forward, unless one prompt has more
PACKED = 1 << 22
"""Smallest model (weights) that is packed for writing: at 16 rows 1.7 times as fast at 135M weights, 1.2 at 7M."""

Draws = Callable[[int, int], Sequence[float]]
"""Given a prompt's number and a count, so many numbers from [0, 1): one a token of its text."""


def draws_named(*name: int) -> Draws:
    """Draws of text i from numpy's generator seeded by (name, i)."""
    return lambda text, count: uniform_draws(*name, text, count=count)


def draws_of_loop(seed: int) -> Draws:
    """The draws that the decoding loop without a drafter takes with `TorchRng` (seed + i) for text i, on the CPU."""
    return lambda text, count: TorchRng(seed + text).uniforms(count)


def uniform_draws(*name: int, count: int) -> list[float]:
    """Uniform numbers ``[count]`` named by integers."""
    return np.random.default_rng(name).random(count).tolist()


def write_texts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    warp: LogitsWarper,
    *,
    budgets: int | Sequence[int],
    stop_ids: Collection[int],
    draws: Draws,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Continues every prompt to an end-of-text token or its budget.

    Args:
        model: a causal language model; put into evaluation mode meanwhile.
        prompts: token ids, at least one each.
        warp: logits to probabilities.
        budgets: longest continuation, of all prompts or of each; none is written for 0 or less.
        stop_ids: tokens that end a text and are its last.
        draws: of sampling.
        batch_size: prompts at once, those of similar length together; None: all. The hand-written forward begins a
            waiting text as soon as one is finished, and takes fewer at once where memory does not hold so many.
        progress: called with the number of texts finished since the last call.

    Returns:
        The continuations, in the order of the prompts.
    """
    limits = [budgets] * len(prompts) if isinstance(budgets, int) else list(budgets)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i])) if batch_size else list(range(len(prompts)))
    texts: list[list[int]] = [[] for _ in prompts]
    finished = progress or (lambda _: None)
    with _evaluating(model):
        asked = [i for i in reversed(order) if limits[i] > 0]
        runner = fast_if_equal(model, _packing(model, min(batch_size or len(asked), len(asked))))
        if runner is not None:
            finished(len(prompts) - len(asked))
            lengths = [len(prompts[i]) + limits[i] for i in asked]
            rows = rows_that_fit(runner.device, runner.cache_bytes_per_token, lengths, batch_size)
            uniforms = {i: draws(i, limits[i]) for i in asked}
            for i, text in _write_continuously(runner, prompts, uniforms, rows, warp, set(stop_ids)):
                texts[i] = text
                finished(1)
            return texts
        for at in range(0, len(order), batch_size or max(1, len(order))):
            chosen = order[at : at + (batch_size or len(order))]
            drawn = [draws(i, max(0, limits[i])) for i in chosen]
            written = _write(model, [prompts[i] for i in chosen], drawn, warp, set(stop_ids))
            for i, text in zip(chosen, written):
                texts[i] = text
            finished(len(chosen))
    return texts


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


# -- by the hand-written forward: a finished text's place is taken by a waiting one ------------------------------------


@torch.inference_mode()
def _write_continuously(
    runner: FastRunner,
    prompts: Sequence[Sequence[int]],
    uniforms: dict[int, Sequence[float]],
    rows: int,
    warp: LogitsWarper,
    stop_ids: set[int],
) -> Iterator[tuple[int, list[int]]]:
    """Write at most `rows` texts at once, yielding the number of each that is finished and its new tokens.

    `uniforms` holds the numbers of the texts in the order in which they begin, and as many draws as each may have
    tokens.
    """
    waiting, live = deque(uniforms), list[tuple[Row, int, list[int]]]()
    runner.reserve(rows=min(rows, len(waiting)))
    while waiting or live:
        new = 0  # prompts are read along with the others' next tokens, some at a time
        while len(live) < rows and waiting and (not new or new + len(prompts[waiting[0]]) <= PROMPT_TOKENS):
            live.append((runner.new_cache(), waiting.popleft(), []))
            new += len(prompts[live[-1][1]])
        if not waiting:
            runner.reserve(rows=1)  # from now on texts that end give their memory back
        live.sort(key=lambda text: text[0].row)
        feeds = [torch.tensor(written[-1:] or prompts[i], device=runner.device) for _, i, written in live]
        logits = runner.forward([cache for cache, _, _ in live], feeds, last=1).logits
        u = [uniforms[i][len(written)] for _, i, written in live]
        prefixes = [[*prompts[i], *written] for _, i, written in live] if warp.needs_prefix else None
        going = []
        for text, token in zip(live, next_tokens(logits, warp, prefixes, u)):
            cache, i, written = text
            written.append(token)
            if token in stop_ids or len(written) == len(uniforms[i]):
                cache.close()
                yield i, written
            else:
                going.append(text)
        live = going


def _packing(model: PreTrainedModel, rows: int) -> str:
    """Whether weights are packed for products of so many rows; large models are not held twice."""
    weights = sum(p.numel() for p in model.parameters())
    return "on" if rows >= FEW and weights >= PACKED and is_small(model) else "off"


# -- by the model's own forward: batches, in which finished texts leave their places empty -----------------------------


@torch.no_grad()
def _write(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    uniforms: Sequence[Sequence[float]],
    warp: LogitsWarper,
    stop_ids: set[int],
) -> list[list[int]]:
    device = model.get_input_embeddings().weight.device
    texts: list[list[int]] = [[] for _ in prompts]
    live = [place for place, u in enumerate(uniforms) if len(u)]
    if not live:
        return texts
    feed, mask = _left_padded([prompts[place] for place in live], device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    while True:
        inputs = {"input_ids": feed, "attention_mask": mask, "position_ids": positions}
        logits = last_logits(model, 1, **inputs, past_key_values=cache, use_cache=True).logits[:, -1]
        u = [uniforms[place][len(texts[place])] for place in live]
        prefixes = [[*prompts[place], *texts[place]] for place in live] if warp.needs_prefix else None
        chosen = next_tokens(logits, warp, prefixes, u)
        for place, token in zip(live, chosen):
            texts[place].append(token)
        tokens = torch.tensor(chosen, device=device)
        going = [
            row
            for row, place in enumerate(live)
            if texts[place][-1] not in stop_ids and len(texts[place]) < len(uniforms[place])
        ]
        if not going:
            return texts
        if len(going) < len(live):
            kept = torch.tensor(going, device=device)
            cache.batch_select_indices(kept)
            tokens, mask, positions = tokens[kept], mask[kept], positions[kept]
            live = [live[row] for row in going]
        feed, positions = tokens[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(live), 1)], 1)


def next_tokens(
    logits: Tensor, warp: LogitsWarper, prefixes: Sequence[Sequence[int]] | None, uniforms: Sequence[float]
) -> list[int]:
    """One token for each row of logits, by its own uniform number."""
    if warp.greedy:
        return warp.top(logits, prefixes).tolist()
    u = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    return inverse(warp(logits, prefixes), u[:, None]).tolist()


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[batch, time]``, every prompt ending in the last column."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
