"""Texts of many prompts at once, and the logits of a target and its drafts on texts that the target wrote.

Every text has uniform draws of its own, named by numbers such as (seed, example), so that what is written for a prompt
depends neither on its neighbours nor on when it is written, and a run that was killed writes the same again.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from decode.core.draft import Ids, foreign
from decode.core.sampling import LogitsWarper, TorchRng, inverse
from decode.errors import UserError
from decode.files import Fields
from decode.models.api import Model, Read, locked, read_prompt, rows_that_fit
from decode.models.check import fast_if_equal
from decode.models.fast.forward import FastRunner
from decode.models.fast.layout import is_small
from decode.models.fast.weights import FEW
from decode.models.heads.block import BlockHead
from decode.models.heads.eagle import DraftHead, FeatureHead, finish_of, finished, output_head
from decode.models.heads.mtp import MtpHead
from decode.models.heads.runner import in_target
from decode.models.huggingface import arguments_of, cache_argument, facts_of, last_logits, states_of

# -- writing -----------------------------------------------------------------------------------------------------------

GROUP = 4
"""Batches that are asked for together where bits have to repeat: a finished text's place is taken by a waiting one of
its group, so that only a group's last texts leave places empty."""
PROMPT_TOKENS = 1024  # most tokens of prompts in a forward; a longer prompt is read in pieces before
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


def side_by_side(prompts: Sequence[Ids], device: torch.device) -> tuple[Tensor, ...]:
    """The tokens of prompts, filled up on the left, and their attention mask, ``[batch, time]`` each."""
    known = [torch.tensor([list(ids), [1] * len(ids)]).T for ids in prompts]
    return pad_sequence(known, batch_first=True, padding_side="left").to(device).unbind(-1)


UNPADDED = {"deepseek_v4"}
"""Model types whose texts depend on padding; those without the argument ``position_ids`` may too."""


@dataclass
class _Writer:
    """The texts of `write_texts`, which grow by one token at a time."""

    prompts: Sequence[Ids]
    limits: Sequence[int]
    warp: LogitsWarper
    stop_ids: Collection[int]
    draws: Draws

    def __post_init__(self) -> None:
        self.asked = [i for i, limit in enumerate(self.limits) if limit > 0]
        self.texts: list[Ids] = [[] for _ in self.prompts]
        self.uniforms = {} if self.warp.greedy else {i: self.draws(i, self.limits[i]) for i in self.asked}

    def grow(self, live: Sequence[int], logits: Tensor) -> list[bool]:
        """Append one token to each of these texts, by its own uniform number; whether each goes on."""
        texts, warp = self.texts, self.warp
        prefixes = [[*self.prompts[i], *texts[i]] for i in live] if warp.needs_prefix else None
        if warp.greedy:
            tokens = warp.top(logits, prefixes)
        else:
            u = torch.tensor([self.uniforms[i][len(texts[i])] for i in live], dtype=torch.float64, device=logits.device)
            tokens = inverse(warp(logits, prefixes), u[:, None])
        for i, token in zip(live, tokens.tolist()):
            texts[i].append(token)
        return [texts[i][-1] not in self.stop_ids and len(texts[i]) < self.limits[i] for i in live]

    @torch.inference_mode()
    def continuously(self, runner: FastRunner, rows: int) -> Iterator[int]:
        """By the hand-written forward: the place of a finished text is taken by a waiting one, the longest first."""
        waiting, live, caches = deque(reversed(self.asked)), list[int](), dict[int, Any]()
        prompts, texts = self.prompts, self.texts
        try:
            while waiting or live:
                new = 0  # prompts are read along with the others' next tokens, some at a time
                while len(live) < rows and waiting and (not new or new + len(prompts[waiting[0]]) <= PROMPT_TOKENS):
                    i = waiting.popleft()
                    live.append(i)
                    caches[i] = runner.new_cache()
                    ahead = max(0, len(prompts[i]) - PROMPT_TOKENS)
                    read_prompt(runner, caches[i], list(prompts[i][:ahead]))
                    new += len(prompts[i]) - ahead
                if not waiting:
                    runner.reserve(rows=1)  # from now on texts that end give their memory back
                live.sort(key=lambda i: caches[i].row)
                feeds = [texts[i][-1:] or prompts[i][caches[i].length :] for i in live]
                reads = [Read(caches[i], torch.tensor(feed, device=runner.device)) for i, feed in zip(live, feeds)]
                goes_on = self.grow(live, runner.forward(reads, last=1).logits)
                for i in [i for i, on in zip(live, goes_on) if not on]:
                    caches.pop(i).close()
                    yield i
                live = [i for i in live if i in caches]
        finally:
            for cache in caches.values():
                cache.close()
            runner.reserve(rows=1)

    @torch.no_grad()
    def in_batches(self, model: PreTrainedModel, rows: int) -> Iterator[int]:
        """By the model's own forward: batches, in which finished texts leave their places empty."""
        unpadded = "position_ids" not in arguments_of(model) or model.config.model_type in UNPADDED
        by_length = groupby(self.asked, lambda i: len(self.prompts[i]))
        groups = [list(numbers) for _, numbers in by_length] if unpadded else [self.asked]
        cache_name = cache_argument(model)
        for live in (group[at : at + rows] for group in groups for at in range(0, len(group), rows)):
            cache = DynamicCache(config=model.config)
            device = model.get_input_embeddings().weight.device
            feed, mask = side_by_side([self.prompts[i] for i in live], device)
            positions = (mask.cumsum(-1) - 1).clamp_min(0)
            while live:
                inputs = {"input_ids": feed, "attention_mask": mask, "position_ids": positions}
                logits = last_logits(model, 1, **inputs, **{cache_name: cache}, use_cache=True).logits[:, -1]
                goes_on = self.grow(live, logits)
                yield from (i for i, on in zip(live, goes_on) if not on)
                live = [i for i, on in zip(live, goes_on) if on]
                kept = torch.tensor(goes_on, device=device).nonzero()[:, 0]
                if live and len(kept) < len(goes_on):
                    cache.reorder_cache(kept)  # recurrent layers have no batch_select_indices
                    mask, positions = mask[kept], positions[kept]
                feed = torch.tensor([self.texts[i][-1:] for i in live], device=device)
                positions, mask = positions[:, -1:] + 1, torch.cat([mask, mask.new_ones(len(mask), 1)], 1)


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

    Args:
        target: a causal language model, put into evaluation mode meanwhile, or an opened one.
        prompts: token ids, at least one each.
        warp: logits to probabilities.
        budgets: longest continuation, of all prompts or of each; none is written for 0 or less.
        stop_ids: tokens that end a text.
        draws: of sampling; greedy texts draw nothing.
        batch_size: prompts at once, those of similar length together; None: all, or as many as memory holds. The
            hand-written forward begins a waiting text as soon as one is finished.
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
    writer, training = _Writer(prompts, limits, warp, stop_ids, draws), model.training
    asked, tell = writer.asked, progress or (lambda count: None)
    if unknown := foreign(chain(*prompts), model.get_input_embeddings().weight.shape[0]):
        raise UserError(unknown)
    tell(len(prompts) - len(asked))
    if batch_size:
        asked.sort(key=lambda i: len(prompts[i]))
    if not asked:
        return writer.texts
    model.eval()
    try:
        if opened is None:
            # weights are packed for products of several rows; large models are not held twice
            several = min(batch_size or len(asked), len(asked)) >= FEW
            packed = several and sum(p.numel() for p in model.parameters()) >= PACKED and is_small(model)
            opened = fast_if_equal(model, "on" if packed else "off")
        lengths = [len(prompts[i]) + limits[i] for i in asked]
        rows = rows_that_fit(facts["device"], facts["cache_bytes_per_token"], lengths, batch_size)
        finished = writer.in_batches(model, rows)
        if isinstance(opened, FastRunner):
            opened.reserve(rows, max(lengths))
            finished = writer.continuously(opened, rows)
        with locked(opened):
            for _ in finished:
                tell(1)
    finally:
        model.train(training)
    return writer.texts


# -- teacher forcing ---------------------------------------------------------------------------------------------------

ForcedText = tuple[Sequence[int], int]  # token ids, and how many of them are the prompt
TOKENS = 4096  # most tokens of a forward, unless one text has more
LOGITS = 1 << 25  # most logits of a model that are held at once
States = tuple[Tensor, Callable[[Tensor], Tensor]]  # that an output head reads  # [batch, time, hidden]; to logits


@dataclass
class TeacherForcedLogits:
    """What is predicted at some response tokens of a text; the pieces of a text follow each other."""

    number: int  # of the text
    at: slice  # which of its tokens
    p: Tensor  # the target's logits  # [tokens, vocab]
    # of each draft its logits as first drafted token; of a head then those as second, third, … drafted token, from its
    # own states before it and the text's true tokens  # [tokens, vocab] each
    q: dict[str, list[Tensor]]
    length: int  # drafted tokens of a block
    last: bool  # whether the text has no further ones


@torch.no_grad()
def teacher_forced(
    target: PreTrainedModel,
    drafts: Mapping[str, PreTrainedModel | DraftHead],
    texts: Sequence[ForcedText],
    *,
    depth: int = 1,
    shorter: Iterable[int] = (),
) -> Iterator[TeacherForcedLogits]:
    """Read all texts that have a response with the target and with every draft, those of similar length together.

    Texts stand side by side, filled up on the right: attention looks to the left and never sees that. Heads draft
    `depth` tokens at each position; block heads also as many as `shorter` says, which are other tokens. Logits are
    computed for at most `LOGITS` of a model at once, whatever the length of a text.

    Yields:
        The logits of each text, shortest text first, piece by piece; of each piece then those of the `shorter` blocks.
    """
    shorter, vocab = list(shorter), len(target.get_output_embeddings().weight)
    heads = {name: draft for name, draft in drafts.items() if isinstance(draft, DraftHead)}
    layers = {layer for head in heads.values() for layer in head.captured_layers}
    for numbers in _groups(texts, TOKENS):
        tokens = pad_sequence([torch.tensor(list(texts[i][0])) for i in numbers], batch_first=True).to(target.device)
        (hidden, logits), captured = _states(target, tokens, layers)
        read: dict[str, list[States]] = {}  # by depth
        for name, draft in drafts.items():
            if not isinstance(draft, DraftHead):
                read[name] = [_states(draft, tokens)[0]]
            elif not isinstance(draft, BlockHead):
                read[name] = _unrolled(draft, target, tokens, captured, depth)
        for i, number in enumerate(numbers):
            ids, start = texts[number]
            row, pieces = tokens[i : i + 1, : len(ids)], range(start, len(ids), max(1, LOGITS // vocab))
            for begin, length in product(pieces, (depth, *shorter)):
                at, q = slice(begin, min(begin + pieces.step, len(ids))), {}
                for name, draft in drafts.items():
                    if isinstance(draft, BlockHead):
                        if length == depth or draft.drafts > length:
                            q[name] = _blocks(draft, target, row, captured, i, length, at, vocab)
                    elif length == depth:
                        back = 2 if isinstance(draft, DraftHead) else 1
                        q[name] = [
                            rows_of(draft, to_logits(states[i][max(0, at.start - n) : max(0, at.stop - n)]), vocab, at)
                            for n, (states, to_logits) in enumerate(read[name], back)
                        ]
                p = logits(hidden[i, at.start - 1 : at.stop - 1])
                yield TeacherForcedLogits(number, at, p, q, length, at.stop == len(ids))


def _states(model: PreTrainedModel, tokens: Tensor, layers: Collection[int] = ()) -> tuple[States, Sequence[Tensor]]:
    """What a model's output head reads of texts and how it becomes logits, and the hidden states of these layers."""
    head, known = model.get_output_embeddings(), model.get_input_embeddings().weight.shape[0]
    tokens = tokens.clamp(max=known - 1)  # a draft of a shorter padded vocabulary reads its last id
    inputs: Fields = {"input_ids": tokens, "use_cache": False}
    read: list[Tensor] = []

    def last_only(module: Any, given: tuple[Tensor]) -> Tensor:
        read.append(given[0])
        return given[0][:, -1:]

    hook = head.register_forward_pre_hook(last_only)
    try:
        out = model(**inputs, output_hidden_states=states_of(layers))
    finally:
        hook.remove()
    to_logits, (hidden,) = (lambda rows: finished(head(rows), *finish_of(model))), read
    if not torch.allclose(to_logits(hidden[:, -1:]), out.logits[:, -1:], rtol=1e-3, atol=1e-3):
        hidden, to_logits = model(**inputs).logits, lambda rows: rows  # more follows this model's head
    return (hidden, to_logits), out.hidden_states or ()


def _unrolled(
    head: DraftHead, target: PreTrainedModel, tokens: Tensor, captured: Sequence[Tensor], depth: int
) -> list[States]:
    """The states of a feature head by depth, of which the first drafts the second token that it reads."""
    assert isinstance(head, FeatureHead | MtpHead)
    features = torch.cat([captured[layer] for layer in head.captured_layers], -1)
    embeds = (head.embed_tokens or target.get_input_embeddings())(tokens[:, 1:])
    shared = output_head(target, head.draft_ids()) if head.version == 1 else None
    to_logits = partial(head.logits, target_head=shared)
    return [(states, to_logits) for states in head.unroll(embeds, features[:, :-1], depth)]


def _blocks(
    head: BlockHead, target: PreTrainedModel, tokens: Tensor, captured: Sequence[Tensor], row: int, depth: int,
    at: slice, vocab: int,
) -> list[Tensor]:  # fmt: skip
    """The logits of a block head by depth: those of each block of `depth` tokens that reaches these tokens of a row."""
    first, width = max(0, at.start - depth), tokens.shape[1]
    features = torch.cat([captured[layer][row : row + 1, :width] for layer in head.captured_layers], -1)
    by_depth = enumerate(head.teacher_forced(target, tokens, features, depth, first, at.stop - 1), first + 1)
    return [rows_of(head, logits[0, max(0, at.start - n) : max(0, at.stop - n)], vocab, at) for n, logits in by_depth]


def rows_of(draft: Any, logits: Tensor, vocab: int, at: slice) -> Tensor:
    """A draft's logits of the last of these tokens for all of them, a head's in the target's vocabulary.

    Tokens before them get an impossible row: all −inf except the first id.
    """
    if not isinstance(draft, DraftHead):
        return logits
    found = in_target(logits, draft.draft_ids(), vocab)
    missing = found.new_full((at.stop - at.start - len(found), vocab), -torch.inf)
    missing[:, 0] = 0.0
    return torch.cat([missing, found])


def _groups(texts: Sequence[ForcedText], most: int) -> Iterator[list[int]]:
    """Numbers of texts with a response, in the order of their lengths, as many as have `most` tokens when filled up."""
    group: list[int] = []
    answered = [i for i, (ids, start) in enumerate(texts) if len(ids) > start]
    for i in sorted(answered, key=lambda i: len(texts[i][0])):
        if group and (len(group) + 1) * len(texts[i][0]) > most:
            yield group
            group = []
        group.append(i)
    if group:
        yield group
