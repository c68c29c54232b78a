"""A smaller language model of the same vocabulary drafts, the target's own first layers, or a head on its states."""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Drafts, Ids, upload
from decode.core.round import Round
from decode.core.sampling import LogitsWarper, Prefixes
from decode.core.stop import DraftedTokens, Watch
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.api import PIECE, Model, Out, Read, read_prompt
from decode.models.fast.forward import FastRunner, self_speculating
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.mtp import MtpRunner
from decode.models.heads.runner import DraftHeadRunner, in_target

Step = Callable[[Sequence[int], Tensor | None], Out]
"""Given the numbers of the sequences that draft on, and the token that each drafted last ``[n]`` (None: none yet), the
output for the next one, a row of each."""


@dataclass
class ModelState:
    """The draft model's cache of a sequence, and the tokens that end the text."""

    cache: Any
    stop_ids: Collection[int]


def by_text(steps: Sequence[tuple[Sequence[int], Tensor]], count: int) -> Tensor:
    """``[count, k, ..]`` from the values that some sequences had at each of k steps; 0 where one had none."""
    if all(len(texts) == count for texts, _ in steps):
        return torch.stack([values for _, values in steps], 1)
    first = steps[0][1]
    filled = first.new_zeros(count, len(steps), *first.shape[1:])
    for step, (texts, values) in enumerate(steps):
        filled[upload(texts, first.device), step] = values
    return filled


class ModelDrafter(Drafter):
    """Draws from q, warped exactly as the target is, until the stop rule or the window ends the draft.

    A drafted token that ends the text is kept; on a CPU, where looking at it is free, it ends the draft.

    Padded vocabularies of one family differ after the ids they share: a draft row that is longer than the target's
    vocabulary is cut, a shorter one filled with probability 0, which the residual makes up for.
    """

    runner: Model
    sample = True  # draw tokens; else the likeliest are drafted, as they are in greedy decoding

    def __init__(self, runner: Model, warp: LogitsWarper, vocab: int) -> None:
        self.runner, self.warp, self.vocab = runner, warp, vocab
        self.cache_bytes_per_token = runner.cache_bytes_per_token

    def start(self, prompt: Prompt) -> ModelState:
        """Read the prompt but for its pending token, unless the draft's context cannot hold it."""
        state = ModelState(self.runner.new_cache(), prompt.stop_ids)
        if not prompt.defer_prefill and self.room(state, prompt.ids) >= 0:
            read_prompt(self.runner, state.cache, self.ids(prompt.ids[:-1]))
        return state

    def room(self, state: ModelState, ids: Ids) -> int:
        """How many tokens may be drafted after a text."""
        return self.runner.remaining(ids)

    def limit(self, request: DraftRequest) -> int:
        """The longest draft that the stop rule, the text's budget and the draft model allow."""
        asked, runner = min(request.stop.window, request.max_depth), self.runner
        if asked > 0 and not runner.outgrown and runner.remaining(request.ids) < 1:
            runner.outgrown = True
            warnings.warn(
                f"after {runner.limit} tokens nothing is drafted: the context of {runner.name} holds no more",
                stacklevel=2,
            )
        return min(asked, self.room(request.state, request.ids))

    def propose(self, requests: Sequence[DraftRequest], device: torch.device) -> Drafts:
        """See `Drafter.propose`: the draft model reads the next token of all sequences in one forward."""
        limits, none = list(map(self.limit, requests)), [Draft(())] * len(requests)
        texts = [i for i, limit in enumerate(limits) if limit > 0]
        if not texts:
            return Drafts.of(none, device)
        drafts = self.drafts([requests[i] for i in texts], [limits[i] for i in texts])
        return drafts.to(device).for_texts(texts, none)

    def drafts(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> Drafts:
        """Drafts of at most these lengths, which are at least 1."""
        return self.chains(requests, limits, self.steps(requests))

    def steps(self, requests: Sequence[DraftRequest]) -> Step:
        """Reads the next token of each sequence, first all that its cache lacks."""
        device, caches = self.runner.device, [request.state.cache for request in requests]

        def step(texts: Sequence[int], tokens: Tensor | None) -> Out:
            if tokens is None:
                unread = list(map(self.unread, requests))
                return self.read(caches, upload([*chain(*unread)], device).split(list(map(len, unread))))
            return self.read([caches[i] for i in texts], tokens.split(1))

        return step

    def read(self, caches: Sequence[Any], feeds: Sequence[Tensor]) -> Out:
        """The output for the last of the tokens that each sequence feeds."""
        return self.runner.forward(list(map(Read, caches, feeds)), last=1)

    def chains(self, requests: Sequence[DraftRequest], limits: Sequence[int], step: Step) -> Drafts:
        """Draft token by token, all sequences at once."""
        warp, count, stop = self.warp, len(requests), requests[0].stop
        certain, raw = warp.greedy or not self.sample, requests[0].keep_logits
        watch = None if stop.confidence is None else Watch([request.stop for request in requests])
        numbers = None
        if not certain:
            rngs = [request.rng for request in requests]
            numbers = rngs[0].together(rngs, limits, self.runner.device)
        live, lengths, out = list(range(count)), [0] * count, step(range(count), None)
        # of each step, the texts that drafted on and what they drafted, or what it was drawn from
        tokens, probs, logits = (list[tuple[list[int], Tensor]]() for _ in range(3))
        for at in range(max(limits)):
            row = in_target(out.logits, None, self.vocab)
            prefixes = None
            if warp.needs_prefix:
                path = by_text(tokens, count)[upload(live, row.device)] if tokens else None
                prefixes = Prefixes([requests[i].history for i in live], None, path)
            q = row if certain else warp(row, prefixes)
            drafted = DraftedTokens(q, row, out.hidden, None, certain, out.accepted)
            if watch is not None and stop.refuse:
                watch.look(live, drafted)
                if watch.lengths.keys() >= {*live}:
                    break
            # of a deterministic draft a draw from one-hot weights, which is their argmax
            picked = drafted.tokens = warp.top(row, prefixes) if numbers is None else numbers.draw(q, at, live)
            if watch is not None and not stop.refuse:
                watch.look(live, drafted)
            tokens.append((live, picked))
            probs += [] if certain else [(live, q)]
            logits += [(live, row)] if raw else []
            for text in live:
                lengths[text] += 1
            done = set(watch.lengths) if watch is not None else set()
            if picked.is_cpu:  # where looking at tokens is free
                done |= {i for i, token in zip(live, picked.tolist()) if token in requests[i].state.stop_ids}
            elif not done >= {*live}:  # all go on until none does, so that no result depends on the device's speed
                done = set()
            going = [place for place, text in enumerate(live) if limits[text] > at + 1 and text not in done]
            if not going:
                break
            if len(going) < len(live):
                live, picked = [live[place] for place in going], picked[upload(going, picked.device)]
            out = step(live, picked)
        if watch is not None:
            watch.finish()
            lengths = [min(n, watch.lengths.get(i, n)) for i, n in enumerate(lengths)]
        if not tokens:
            return Drafts.of([Draft(())] * count, self.runner.device)
        drawn, unwarped = (by_text(steps, count) if steps else None for steps in (probs, logits))
        seen = None if watch is None else [values[:n] for values, n in zip(watch.seen, lengths)]
        return Drafts(
            by_text(tokens, count), lengths, None, drawn, unwarped, set() if certain else {*range(count)}, seen
        )

    def ids(self, ids: Ids) -> Ids:
        """Ids as the draft reads them; one that only the target knows is read as the draft's last."""
        last = self.runner.vocab_size - 1
        return [min(i, last) for i in ids] if self.vocab > self.runner.vocab_size else ids

    def unread(self, request: DraftRequest) -> Ids:
        """The tokens that a text's cache lacks, two after a fully accepted round; of many, only the last."""
        cache, ids = request.state.cache, request.ids
        if len(ids) - cache.length > PIECE:  # as a prompt is read
            read_prompt(self.runner, cache, self.ids(ids[cache.length : -1]))
        return self.ids(ids[cache.length :])

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """Drop what was rejected; an unread tail is fed by the next proposal."""
        for request in requests:
            request.state.cache.truncate(len(request.ids) - 1)

    def close(self, state: ModelState) -> None:
        """See `Drafter.close`."""
        state.cache.close()


class EarlyExitDrafter(ModelDrafter):
    """Drafts with the first `exit_layer` layers and the model's own final norm and head, in the target's cache.

    So LayerSkip and AdaSPEED do. What the draft computed is used by verification, and the target's rollback is the
    draft's. Stop rules read the hidden state that the head read at the exit.

    Raises:
        UserError: a target whose layers cannot draft, or that lacks the layer.
    """

    runner: FastRunner

    def __init__(self, target: Model, warp: LogitsWarper, exit_layer: int) -> None:
        super().__init__(self_speculating(target, exit_layer), warp, target.vocab_size)
        self.exit_layer = exit_layer
        self.cache_bytes_per_token = 0  # the drafter has no cache

    def start(self, prompt: Prompt) -> ModelState:
        """The target reads the prompt for both."""
        return ModelState(prompt.cache, prompt.stop_ids)

    def read(self, caches: Sequence[Any], feeds: Sequence[Tensor]) -> Out:
        """See `ModelDrafter.read`."""
        return self.runner.forward(list(map(Read, caches, feeds)), last=1, exit_layer=self.exit_layer)

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """The target has dropped what was rejected for both."""

    def close(self, state: ModelState) -> None:
        """The target closes its cache."""


class HeadDrafter(ModelDrafter):
    """Drafts with a head, which the loop gives the target's hidden states that `capture` names.

    They wait until the head drafts, but no more than those of `PIECE` tokens do.
    """

    def __init__(self, runner: DraftHeadRunner | MtpRunner, target: Model, warp: LogitsWarper) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.capture = runner.head.captured_layers

    def start(self, prompt: Prompt) -> ModelState:
        """The head has read nothing yet: see `feed`."""
        return ModelState(self.runner.new_cache(), prompt.stop_ids)

    def feed(self, state: ModelState, prompt: Prompt, captured: Tensor) -> None:
        """Read a piece of the prompt, unless that may wait."""
        self._queue(state, prompt.ids, captured, at_once=not prompt.defer_prefill)

    def _queue(self, state: ModelState, ids: Ids, features: Tensor, *, at_once: bool = False) -> None:
        """Queue the target's features of a text's next tokens; in a full context none is ever read again."""
        cache = state.cache
        if self.runner.remaining(ids) <= 0:
            cache.truncate(0)
            return
        cache.settle(features)
        if len(cache.unread) >= (2 if at_once else PIECE):
            self._read_text(state, ids)

    def _read_text(self, state: ModelState, ids: Ids) -> None:
        """Read the tokens of a text whose features wait, but for the last one."""
        cache = state.cache
        known = max(1, cache.length) + len(cache.unread) - 1
        read_prompt(self.runner, cache, self.ids(ids[cache.length : known]))

    def update(
        self, requests: Sequence[DraftRequest], rounds: Sequence[Round], out: Out, rows: Sequence[Sequence[int]]
    ) -> None:
        """Queue the target's features of the token that was pending and of the accepted ones."""
        assert out.captured is not None
        features = out.captured.index_select(0, upload([*chain(*rows)], out.captured.device))
        for request, part in zip(requests, features.split(list(map(len, rows)))):
            self._queue(request.state, request.ids, part)


class FeatureDrafter(HeadDrafter):
    """Drafts a chain with a feature head, drawn from the head's warped distribution like any draft model's.

    After every round the pairs that were drafted from the head's own states are replaced by pairs with the target's.
    """

    def room(self, state: ModelState, ids: Ids) -> int:
        """See `ModelDrafter.room`; a text of one token has no feature yet."""
        return super().room(state, ids) if len(state.cache.unread) else 0


class BlockDrafter(HeadDrafter):
    """Drafts a chain from one forward of a block head (DFlash and its descendants).

    It holds the likeliest tokens, as engines serve such heads, or with `sample` tokens drawn from q. The former are a
    deterministic draft, which exact rules accept with the target's probability. Drawn ones come from q given the tokens
    that were really drawn, which is 0 of ids that are no candidates where a scorer chooses among these; without a
    scorer all slots are drawn independently, so that their tokens need not fit together.
    """

    runner: BlockRunner

    def __init__(self, runner: BlockRunner, target: Model, warp: LogitsWarper, *, sample: bool = False) -> None:
        super().__init__(runner, target, warp)
        self.sample = sample

    def _read_text(self, state: ModelState, ids: Ids) -> None:
        self.runner.read(state.cache)

    def drafts(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> Drafts:
        """Tokens are chosen from left to right once the block was computed; all at once where nothing looks at them."""
        runner, caches = self.runner, [request.state.cache for request in requests]
        block = runner.draft(caches, [request.ids[-1] for request in requests], limits)
        certain, watched = self.warp.greedy or not self.sample, requests[0].stop.confidence is not None
        at_once = certain and (not runner.head.conditional or runner.head.candidates > 0)
        if at_once and not (watched or self.warp.needs_prefix or requests[0].keep_logits):
            return Drafts(runner.likeliest(block), list(limits))
        slots = iter(range(max(limits)))

        def step(texts: Sequence[int], tokens: Tensor | None) -> Out:
            return runner.condition(block, next(slots), texts, tokens, greedy=certain if watched else None)

        return self.chains(requests, limits, step)
