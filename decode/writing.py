"""Texts of many prompts at once: what a target answers, and what is learned from.

Every text has uniform draws of its own, named by numbers such as (seed, example), so that what is written for a prompt
depends neither on its neighbours nor on when it is written, and a run that was killed writes the same again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from decode.core.draft import Ids
from decode.core.sampling import LogitsWarper, Prefixes, TorchRng
from decode.core.stop import StopRule
from decode.drafters.base import NoDrafter
from decode.loop import Method, Text, run
from decode.models.api import Model, rows_that_fit
from decode.models.check import fast_if_equal
from decode.models.fast.forward import FastRunner
from decode.models.fast.layout import is_small
from decode.models.fast.weights import FEW
from decode.models.huggingface import arguments_of, cache_argument, facts_of, last_logits

GROUP = 4
"""Batches that are written from one queue where bits have to repeat: a waiting text takes the place of a finished one
of its group."""
PACKED = 1 << 22
"""Smallest model (weights) that is packed for writing: at 16 rows 1.7 times as fast at 135M weights, 1.2 at 7M."""
UNPADDED = {"deepseek_v4"}
"""Model types whose texts depend on padding; those without the argument ``position_ids`` may too."""

Draws = Callable[[int, int], Sequence[float]]
"""Given a prompt's number and a count, so many numbers from [0, 1): one a token of its text."""


def draws_of_loop(seed: int) -> Draws:
    """The draws that the decoding loop without a drafter takes with `TorchRng` (seed + i) for text i, on the CPU."""
    return lambda text, count: TorchRng(seed + text).uniforms(count)


def uniform_draws(*name: int, count: int) -> list[float]:
    """Uniform numbers ``[count]`` from numpy's generator seeded by these integers."""
    return np.random.default_rng(name).random(count).tolist()


class ListedRng(TorchRng):
    """These numbers, one after the other."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self._ready = list(reversed(numbers))


def side_by_side(prompts: Sequence[Ids], device: torch.device) -> tuple[Tensor, ...]:
    """The tokens of prompts, filled up on the left, and their attention mask, ``[batch, time]`` each."""
    columns = [torch.tensor([list(ids), [1] * len(ids)]).T for ids in prompts]
    return pad_sequence(columns, batch_first=True, padding_side="left").to(device).unbind(-1)


def write_texts(
    target: PreTrainedModel | Model,
    prompts: Sequence[Ids],
    warp: LogitsWarper,
    *,
    budgets: int | Sequence[int],
    stop_ids: Collection[int],
    draws: Draws,
    batch_size: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Ids]:
    """Continue every prompt to an end-of-text token, which is the last one, or to its budget.

    The hand-written forward decodes by the loop without a drafter, other models by batches of their own forward.

    Args:
        target: a causal language model, put into evaluation mode meanwhile, or an opened one.
        prompts: token ids, at least one each.
        warp: logits to probabilities.
        budgets: longest continuation, of all prompts or of each; none is written for 0 or less.
        stop_ids: tokens that end a text.
        draws: of sampling; greedy texts draw nothing.
        batch_size: prompts at once, those of similar length together; None: all, or as many as memory holds. The loop
            begins a waiting text as soon as one is finished.
        progress: called with the number of texts finished since the last call.

    Returns:
        The continuations, in the order of the prompts.

    Raises:
        UserError: a prompt holds an id that the model does not read.
    """
    opened = target if isinstance(target, Model) else None
    model = target.model if isinstance(target, Model) else target
    facts, tell, texts = facts_of(model), progress or (lambda count: None), dict[int, Text]()
    facts["vocab_size"] = len(model.get_input_embeddings().weight)
    method, of_model = Method("", NoDrafter(), StopRule()), cast(Model, SimpleNamespace(**facts))
    for i, (prompt, limit) in enumerate(
        zip(prompts, [budgets] * len(prompts) if isinstance(budgets, int) else budgets)
    ):
        if limit > 0 and len(prompt) <= facts["limit"]:
            rng = ListedRng(() if warp.greedy else draws(i, limit))
            text = Text(of_model, method, warp, prompt, max_new_tokens=limit, stop_ids=stop_ids, rng=rng)
            if text.error:
                raise text.error
            texts[i] = text
    tell(len(prompts) - len(texts))
    asked, training = list(texts.values()), model.training
    if batch_size:
        asked.sort(key=lambda text: text.prompt_length)
    model.eval()
    try:
        if opened is None and asked:
            # weights are packed for products of several rows; large models are not held twice
            several = min(batch_size or len(asked), len(asked)) >= FEW
            packed = several and sum(p.numel() for p in model.parameters()) >= PACKED and is_small(model)
            opened = fast_if_equal(model, "on" if packed else "off")
        ends = [text.end for text in asked]
        rows = rows_that_fit(facts["device"], facts["cache_bytes_per_token"], ends, batch_size)
        if isinstance(opened, FastRunner):
            for text, _ in run(opened, method, reversed(asked), rows):  # the longest first
                tell(bool(text.finish))
        else:
            for ended in _in_batches(model, asked, warp, rows):
                tell(ended)
    finally:
        model.train(training)
    return [texts[i].new_ids if i in texts else [] for i in range(len(prompts))]


@torch.no_grad()
def _in_batches(model: PreTrainedModel, texts: list[Text], warp: LogitsWarper, rows: int) -> Iterator[int]:
    """Write texts by a model's own forward, in batches, in which finished texts leave places empty.

    Yields:
        After each token the number of texts that it ended.
    """
    unpadded = "position_ids" not in arguments_of(model) or model.config.model_type in UNPADDED
    # LongRoPE rotates a whole batch by the factors of its longest text
    groups = [list(group) for _, group in groupby(texts, lambda text: (text.long, unpadded and text.prompt_length))]
    cache_name, device = cache_argument(model), model.get_input_embeddings().weight.device
    for live in (group[at : at + rows] for group in groups for at in range(0, len(group), rows)):
        cache = DynamicCache(config=model.config)
        feed, mask = side_by_side([text.ids for text in live], device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        while live:
            inputs = {"input_ids": feed, "attention_mask": mask, "position_ids": positions}
            logits = last_logits(model, 1, **inputs, **{cache_name: cache}, use_cache=True).logits[:, -1]
            prefixes = Prefixes([text.history for text in live]) if warp.needs_prefix else None
            if warp.greedy:
                tokens = warp.top(logits, prefixes)
            else:
                numbers = live[0].rng.together([text.rng for text in live], [1] * len(live), device)
                tokens = numbers.draw(warp(logits, prefixes))
            for text, token in zip(live, tokens.tolist()):
                text.accept([token])
            kept = [at for at, text in enumerate(live) if not text.finish]
            yield len(live) - len(kept)
            if 0 < len(kept) < len(live):
                places = torch.tensor(kept, device=device)
                cache.reorder_cache(places)  # recurrent layers have no batch_select_indices
                mask, positions = mask[places], positions[places]
            live = [live[at] for at in kept]
            feed = torch.tensor([text.ids[-1:] for text in live], device=device)
            positions, mask = positions[:, -1:] + 1, torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
