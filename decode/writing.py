"""Texts of many prompts at once: what a target answers, and what is learned from.

Every text has uniform draws of its own, named by numbers such as (seed, example), so that what is written for a prompt
depends neither on its neighbours nor on when it is written, and a run that was killed writes the same again.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import chain, groupby

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from decode.core.draft import Ids, foreign
from decode.core.sampling import LogitsWarper, Prefixes, TorchRng, inverse
from decode.core.stop import StopRule
from decode.drafters.base import NoDrafter
from decode.errors import UserError
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
    facts, limits = facts_of(model), [budgets] * len(prompts) if isinstance(budgets, int) else budgets
    limits = [min(limit, facts["limit"] + 1 - len(ids)) for limit, ids in zip(limits, prompts)]
    asked, tell = [i for i, limit in enumerate(limits) if limit > 0], progress or (lambda count: None)
    if unknown := foreign(chain(*prompts), model.get_input_embeddings().weight.shape[0]):
        raise UserError(unknown)
    texts: list[Ids] = [[] for _ in prompts]
    tell(len(prompts) - len(asked))
    if not asked:
        return texts
    if batch_size:
        asked.sort(key=lambda i: len(prompts[i]))
    training = model.training
    model.eval()
    try:
        if opened is None:
            # weights are packed for products of several rows; large models are not held twice
            several = min(batch_size or len(asked), len(asked)) >= FEW
            packed = several and sum(p.numel() for p in model.parameters()) >= PACKED and is_small(model)
            opened = fast_if_equal(model, "on" if packed else "off")
        lengths = [len(prompts[i]) + limits[i] for i in asked]
        rows = rows_that_fit(facts["device"], facts["cache_bytes_per_token"], lengths, batch_size)
        rngs = {i: ListedRng(() if warp.greedy else draws(i, limits[i])) for i in asked}
        if isinstance(opened, FastRunner):
            method, began = Method("", NoDrafter(), StopRule()), {}
            for i in reversed(asked):  # the longest first
                began[i] = Text(
                    opened, method, warp, prompts[i], max_new_tokens=limits[i], stop_ids=stop_ids, rng=rngs[i]
                )
            for grown, _ in run(opened, method, began.values(), rows):
                tell(bool(grown.finish))
            for i, written in began.items():
                texts[i] = written.new_ids
        else:
            writer = _in_batches(model, asked, prompts, limits, warp, stop_ids, rngs, rows)
            for i, text in writer:
                texts[i] = text
                tell(1)
    finally:
        model.train(training)
    return texts


@torch.no_grad()
def _in_batches(
    model: PreTrainedModel,
    asked: Sequence[int],
    prompts: Sequence[Ids],
    limits: Sequence[int],
    warp: LogitsWarper,
    stop_ids: Collection[int],
    rngs: dict[int, ListedRng],
    rows: int,
) -> Iterator[tuple[int, Ids]]:
    """The texts of `asked` prompts by a model's own forward: in batches, in which finished texts leave places empty."""
    unpadded = "position_ids" not in arguments_of(model) or model.config.model_type in UNPADDED
    by_length = groupby(asked, lambda i: len(prompts[i]))
    groups = [list(numbers) for _, numbers in by_length] if unpadded else [asked]
    cache_name, device = cache_argument(model), model.get_input_embeddings().weight.device
    for live in (group[at : at + rows] for group in groups for at in range(0, len(group), rows)):
        cache, texts = DynamicCache(config=model.config), {i: list(prompts[i]) for i in live}
        feed, mask = side_by_side([prompts[i] for i in live], device)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        while live:
            inputs = {"input_ids": feed, "attention_mask": mask, "position_ids": positions}
            logits = last_logits(model, 1, **inputs, **{cache_name: cache}, use_cache=True).logits[:, -1]
            prefixes = Prefixes.of(texts[i] for i in live) if warp.needs_prefix else None
            if warp.greedy:
                tokens = warp.top(logits, prefixes)
            else:
                numbers = torch.tensor([rngs[i].uniforms(1) for i in live], dtype=torch.float64, device=device)
                tokens = inverse(warp(logits, prefixes), numbers)
            ended = []
            for i, token in zip(live, tokens.tolist()):
                texts[i].append(token)
                ended.append(token in stop_ids or len(texts[i]) - len(prompts[i]) >= limits[i])
            yield from ((i, texts[i][len(prompts[i]) :]) for i, over in zip(live, ended) if over)
            live = [i for i, over in zip(live, ended) if not over]
            kept = torch.tensor(ended, device=device).logical_not().nonzero()[:, 0]
            if live and any(ended):
                cache.reorder_cache(kept)  # recurrent layers have no batch_select_indices
                mask, positions = mask[kept], positions[kept]
            feed = torch.tensor([texts[i][-1:] for i in live], device=device)
            positions, mask = positions[:, -1:] + 1, torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
