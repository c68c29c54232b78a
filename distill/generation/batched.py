"""Many prompts answered at once, by the model's own forward; finished texts leave the batch.

Every text has its own chance, named by numbers such as (seed, example), so that what is written for a prompt does not
depend on when it is written, and a run that was killed writes the same again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from decode.core.rng import inverse
from decode.core.sampling import Warp


def chance(*name: int, count: int) -> NDArray[np.float64]:
    """The uniform numbers ``[count]`` of one text."""
    return np.random.default_rng(name).random(count)


@torch.no_grad()
def answer(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    uniforms: Sequence[NDArray[np.float64]],
    warp: Warp,
    stop_ids: Collection[int],
) -> list[list[int]]:
    """Continues every prompt to an end-of-text token or its budget.

    Args:
        model: A causal language model; evaluated in evaluation mode, and left as it was found.
        prompts: Token ids, at least one each.
        budgets: Longest continuation of each prompt; none is written for 0 or less.
        uniforms: One number from [0, 1) a token that may be written, for every prompt.
        warp: Logits to probabilities; one that looks at no prefix.
        stop_ids: Tokens that end a text and are its last.

    Returns:
        The continuations.
    """
    training = model.training
    model.eval()
    try:
        return _answer(model, prompts, budgets, uniforms, warp, set(stop_ids))
    finally:
        model.train(training)


def _answer(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    budgets: Sequence[int],
    uniforms: Sequence[NDArray[np.float64]],
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
        tokens = inverse(warp(logits), u[:, None])
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
