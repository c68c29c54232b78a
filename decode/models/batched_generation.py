"""Texts of many prompts at once, by the model's own forward; finished texts leave the batch.

Every text has uniform draws of its own, named by numbers such as (seed, example), so that what is written for a prompt
depends neither on its neighbours nor on when it is written, and a run that was killed writes the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decode.core.rng import TorchRng, inverse
from decode.core.sampling import Warp

Draws = Callable[[int, int], Sequence[float]]
"""Given a prompt's number and a count, so many numbers from [0, 1): one a token of its text."""


def draws_named(*name: int) -> Draws:
    """Draws of text i from numpy's generator seeded by (name, i)."""
    return lambda text, count: uniform_draws(*name, text, count=count)


def draws_of_loop(seed: int) -> Draws:
    """The draws that the decoding loop without a drafter takes with `TorchRng` (seed + i) for text i, on the CPU."""
    return lambda text, count: TorchRng(seed + text).row_uniforms(count)


def uniform_draws(*name: int, count: int) -> list[float]:
    """Uniform numbers ``[count]`` named by integers."""
    return np.random.default_rng(name).random(count).tolist()


def write_texts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    warp: Warp,
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
        batch_size: prompts at once, those of similar length together; None: all.
        progress: called with the number of texts finished since the last call.

    Returns:
        The continuations, in the order of the prompts.
    """
    limits = [budgets] * len(prompts) if isinstance(budgets, int) else list(budgets)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i])) if batch_size else list(range(len(prompts)))
    texts: list[list[int]] = [[] for _ in prompts]
    with _evaluating(model):
        for at in range(0, len(order), batch_size or max(1, len(order))):
            chosen = order[at : at + (batch_size or len(order))]
            uniforms = [draws(i, max(0, limits[i])) for i in chosen]
            written = _write(
                model, [prompts[i] for i in chosen], [limits[i] for i in chosen], uniforms, warp, set(stop_ids)
            )
            for i, text in zip(chosen, written):
                texts[i] = text
            if progress is not None:
                progress(len(chosen))
    return texts


@contextmanager
def _evaluating(model: PreTrainedModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@torch.no_grad()
def _write(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    uniforms: Sequence[Sequence[float]],
    warp: Warp,
    stop_ids: set[int],
) -> list[list[int]]:
    device = model.get_input_embeddings().weight.device
    texts: list[list[int]] = [[] for _ in prompts]
    live = [place for place, budget in enumerate(budgets) if budget > 0]
    if not live:
        return texts
    feed, mask = _left_padded([prompts[place] for place in live], device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=model.config)
    while True:
        logits = model(
            input_ids=feed,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        u = torch.tensor([uniforms[place][len(texts[place])] for place in live], dtype=torch.float64, device=device)
        prefixes = [[*prompts[place], *texts[place]] for place in live] if warp.needs_prefix else None
        tokens = warp.top(logits, prefixes) if warp.greedy else inverse(warp(logits, prefixes), u[:, None])
        for place, token in zip(live, tokens.tolist()):
            texts[place].append(token)
        going = [
            row
            for row, place in enumerate(live)
            if texts[place][-1] not in stop_ids and len(texts[place]) < budgets[place]
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


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask ``[batch, time]``, every prompt ending in the last column."""
    width = max(map(len, prompts))
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
        mask[row, width - len(prompt) :] = 1
    return ids.to(device), mask.to(device)
