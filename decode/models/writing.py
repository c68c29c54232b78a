"""Texts of many prompts at once, by the hand-written forward where it knows the model, else by the model's own.

Every text has uniform draws of its own, named by numbers such as (seed, example), so that what is written for a prompt
depends neither on its neighbours nor on when it is written, and a run that was killed writes the same again.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from decode.models.choose_runner import fast_if_equal
from decode.models.families import is_small
from decode.models.fast_runner import FastRunner
from decode.models.huggingface_runner import last_logits, rows_that_fit
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


def draws_of_loop(seed: int) -> Draws:
    """The draws that the decoding loop without a drafter takes with `TorchRng` (seed + i) for text i, on the CPU."""
    return lambda text, count: TorchRng(seed + text).uniforms(count)


def uniform_draws(*name: int, count: int) -> list[float]:
    """Uniform numbers ``[count]`` from numpy's generator seeded by these integers."""
    return np.random.default_rng(name).random(count).tolist()


@torch.no_grad()
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
    """Continue every prompt to an end-of-text token or its budget.

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
    limits = [budgets] * len(prompts) if isinstance(budgets, int) else budgets
    asked = [i for i in range(len(prompts)) if limits[i] > 0]
    if batch_size:
        asked.sort(key=lambda i: len(prompts[i]))
    rows = min(batch_size or len(asked), len(asked))
    uniforms = {i: draws(i, limits[i]) for i in asked}
    texts: list[list[int]] = [[] for _ in prompts]

    def choose(live: Sequence[int], logits: Tensor) -> list[bool]:
        """Append one token to each of these texts, by its own uniform number; whether each goes on."""
        prefixes = [[*prompts[i], *texts[i]] for i in live] if warp.needs_prefix else None
        if warp.greedy:
            tokens = warp.top(logits, prefixes)
        else:
            u = torch.tensor([uniforms[i][len(texts[i])] for i in live], dtype=torch.float64, device=logits.device)
            tokens = inverse(warp(logits, prefixes), u[:, None])
        for i, token in zip(live, tokens.tolist()):
            texts[i].append(token)
        return [texts[i][-1] not in stop_ids and len(texts[i]) < limits[i] for i in live]

    @torch.inference_mode()
    def continuously(runner: FastRunner, rows: int) -> Iterator[int]:
        """By the hand-written forward: the place of a finished text is taken by a waiting one, the longest first."""
        waiting, live = deque(reversed(asked)), list[int]()
        caches: dict[int, Any] = {}
        runner.reserve(rows=rows)
        while waiting or live:
            new = 0  # prompts are read along with the others' next tokens, some at a time
            while len(live) < rows and waiting and (not new or new + len(prompts[waiting[0]]) <= PROMPT_TOKENS):
                i = waiting.popleft()
                caches[i] = runner.new_cache()
                live.append(i)
                new += len(prompts[i])
            if not waiting:
                runner.reserve(rows=1)  # from now on texts that end give their memory back
            live.sort(key=lambda i: caches[i].row)
            feeds = [torch.tensor(texts[i][-1:] or prompts[i], device=runner.device) for i in live]
            goes_on = choose(live, runner.forward([caches[i] for i in live], feeds, last=1).logits)
            for i in [i for i, on in zip(live, goes_on) if not on]:
                caches.pop(i).close()
                yield i
            live = [i for i in live if i in caches]

    def in_batches() -> Iterator[int]:
        """By the model's own forward: batches, in which finished texts leave their places empty."""
        for at in range(0, len(asked), max(1, rows)):
            live, cache = asked[at : at + rows], DynamicCache(config=model.config)
            known = [torch.tensor([list(prompts[i]), [1] * len(prompts[i])]).T for i in live]
            device = model.get_input_embeddings().weight.device
            feed, mask = pad_sequence(known, batch_first=True, padding_side="left").to(device).unbind(-1)
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            while live:
                inputs = {"input_ids": feed, "attention_mask": mask, "position_ids": positions}
                logits = last_logits(model, 1, **inputs, past_key_values=cache, use_cache=True).logits[:, -1]
                goes_on = choose(live, logits)
                yield from (i for i, on in zip(live, goes_on) if not on)
                live = [i for i, on in zip(live, goes_on) if on]
                kept = torch.tensor(goes_on, device=device).nonzero()[:, 0]
                if live and len(kept) < len(goes_on):
                    cache.reorder_cache(kept)  # recurrent layers have no batch_select_indices
                    mask, positions = mask[kept], positions[kept]
                feed = torch.tensor([texts[i][-1:] for i in live], device=device)
                positions, mask = positions[:, -1:] + 1, torch.cat([mask, mask.new_ones(len(mask), 1)], 1)

    training = model.training
    model.eval()
    try:
        weights = sum(p.numel() for p in model.parameters())
        # weights are packed for products of several rows; large models are not held twice
        packed = rows >= FEW and weights >= PACKED and is_small(model)
        runner = fast_if_equal(model, "on" if packed else "off")
        if progress is not None:
            progress(len(prompts) - len(asked))
        if runner is not None:
            lengths = [len(prompts[i]) + limits[i] for i in asked]
            rows = rows_that_fit(runner.device, runner.cache_bytes_per_token, lengths, batch_size)
        for _ in in_batches() if runner is None else continuously(runner, rows):
            if progress is not None:
                progress(1)
    finally:
        model.train(training)
    return texts
