"""A smaller language model of the same vocabulary drafts, the target's own first layers, or a head on its states."""

import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Drafts, Ids, upload, upload_all
from decode.core.round import Round
from decode.core.sampling import LogitsWarper, Prefixes
from decode.core.stop import DraftedTokens, Watch
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.models.api import PIECE, Model, Out, Read, read_prompt
from decode.models.fast.forward import FastRunner, self_speculating
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.mtp import MtpRunner
from decode.models.heads.runner import DraftHeadRunner, in_target

Step = Callable[[int, Sequence[int], Tensor | None], Out]
"""Given how many tokens were drafted, the numbers of the sequences that draft on, and the token that each drafted last
``[n]`` (None: none yet), the output for the next one, a row of each."""


@dataclass
class ModelState:
    """The draft model's cache of a sequence, and the tokens that end the text."""

    cache: Any
    stop_ids: Collection[int]


@dataclass
class Column:
    """The tokens that several texts drafted at once, and what they were drawn from."""

    texts: Sequence[int]
    tokens: Tensor  # long ``[n]``
    probs: Tensor | None  # ``[n, vocab]``; None: they are certain
    logits: Tensor | None  # ``[n, vocab]``, where a rule reads them


def by_text(columns: Sequence[Column], name: str, count: int) -> Tensor | None:
    """``[count, k, ..]`` from an attribute of each of k columns; 0 where a text had none."""
    values = [getattr(column, name) for column in columns]
    if values[0] is None:
        return None
    if len(columns[-1].texts) == count:
        return torch.stack(values, 1)
    filled = values[0].new_zeros(count, len(columns), *values[0].shape[1:])
    for at, (column, value) in enumerate(zip(columns, values)):
        filled[upload(column.texts, filled.device), at] = value
    return filled


class ModelDrafter(Drafter):
    """Draws from q, warped exactly as the target is, until the stop rule or the window ends the draft.

    A drafted token that ends the text is kept; on a CPU, where looking at it is free, it ends the draft.

    Padded vocabularies of one family differ after the ids they share: a draft row that is longer than the target's
    vocabulary is cut, a shorter one filled with probability 0, which the residual makes up for.
    """

    runner: Model
    together = PIECE  # most tokens of a text that are read with its draft, if it has as many
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
        limits = list(map(self.limit, requests))
        texts = [i for i, limit in enumerate(limits) if limit > 0]
        if not texts:
            return Drafts.of([Draft(())] * len(requests), device, trees=self.trees)
        drafts = self.drafts([requests[i] for i in texts], [limits[i] for i in texts])
        return drafts.to(device).spread(texts, len(requests))

    def drafts(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> Drafts:
        """Drafts of at most these lengths, which are at least 1; the first step reads all that a cache lacks."""
        device, caches = self.runner.device, [request.state.cache for request in requests]

        def step(at: int, texts: Sequence[int], tokens: Tensor | None) -> Out:
            if tokens is None:
                return self.read(caches, upload_all(list(map(self.unread, requests)), device))
            return self.read([caches[i] for i in texts], tokens[:, None].unbind())

        return self.chains(requests, limits, step)

    def read(self, caches: Sequence[Any], feeds: Sequence[Tensor]) -> Out:
        """The output for the last of the tokens that each sequence feeds."""
        return self.runner.forward(list(map(Read, caches, feeds)), last=1)

    def chains(self, requests: Sequence[DraftRequest], limits: Sequence[int], step: Step) -> Drafts:
        """Draft token by token, all sequences at once."""
        warp, count, stop, device = self.warp, len(requests), requests[0].stop, self.runner.device
        certain = warp.greedy or not self.sample
        # the draft's own columns suffice, and are fewer, where nothing reads ids among the target's
        narrow = None if warp.needs_prefix or requests[0].keep_logits else self.runner.columns
        watch = None if stop.confidence is None else Watch([request.stop for request in requests])
        rngs = [request.rng for request in requests]
        numbers = None if certain else rngs[0].together(rngs, limits, device)
        live, lengths, columns = list(range(count)), [0] * count, list[Column]()
        picked: Tensor | None = None
        for at in range(max(limits)):
            out = step(at, live, picked)
            row = in_target(out.logits, self.runner.columns, self.vocab) if narrow is None else out.logits
            prefixes = self.prefixes(requests, live, columns) if warp.needs_prefix else None
            q = row if certain else warp(row, prefixes)
            drafted = DraftedTokens(q, row, out.hidden, None, certain)
            if watch is not None and stop.refuse:
                watch.look(live, drafted)
                if watch.lengths.keys() >= {*live}:
                    break
            # of a deterministic draft a draw from one-hot weights, which is their argmax
            drafted.tokens = warp.top(row, prefixes) if numbers is None else numbers.draw(q, at, live)
            if watch is not None and not stop.refuse:
                watch.look(live, drafted)
            picked = drafted.tokens if narrow is None else narrow[drafted.tokens]
            columns.append(Column(live, picked, None if certain else q, row if requests[0].keep_logits else None))
            for text in live:
                lengths[text] += 1
            done = {text for text in live if limits[text] == at + 1}
            ended = set(watch.lengths) if watch is not None else set()
            if picked.is_cpu:  # where looking at tokens is free
                done |= {i for i, token in zip(live, picked.tolist()) if token in requests[i].state.stop_ids}
            if picked.is_cpu or ended >= {*live}:  # elsewhere no result depends on its speed
                done |= ended
            going = [place for place, text in enumerate(live) if text not in done]
            if not going:
                break
            if len(going) < len(live):
                live, picked = [live[place] for place in going], picked[upload(going, device)]
        if watch is not None:
            watch.finish()
            lengths = [min(n, watch.lengths.get(i, n)) for i, n in enumerate(lengths)]
            del columns[max(lengths) :]  # drafted before the host knew that all texts had ended
        if not columns:
            return Drafts.of([Draft(())] * count, device)
        tokens, probs, logits = (by_text(columns, name, count) for name in ("tokens", "probs", "logits"))
        assert tokens is not None
        if probs is not None and narrow is not None:
            probs = probs.new_zeros(*tokens.shape, self.vocab).index_copy_(2, narrow, probs)
        seen: Any = None if watch is None else [values[:n] for values, n in zip(watch.seen, lengths)]
        return Drafts(tokens, lengths, None, probs, logits, confidence=seen)

    @staticmethod
    def prefixes(requests: Sequence[DraftRequest], live: Sequence[int], columns: Sequence[Column]) -> Prefixes:
        """The tokens before the next one of each text that drafts on."""
        tokens = by_text(columns, "tokens", len(requests)) if columns else None
        path = None if tokens is None else tokens[upload(live, tokens.device)]
        return Prefixes([requests[i].history for i in live], None, path)

    def ids(self, ids: Ids) -> Ids:
        """Ids as the draft reads them; one that only the target knows is read as the draft's last."""
        last = self.runner.vocab_size - 1
        return [min(i, last) for i in ids] if self.vocab > self.runner.vocab_size else ids

    def unread(self, request: DraftRequest) -> Ids:
        """The tokens that a text's cache lacks, two after a fully accepted round; of many, only the last."""
        cache, ids = request.state.cache, request.ids
        if len(ids) - cache.length > self.together:  # as a prompt is read
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


class ParallelDrafter(ModelDrafter):
    """Drafts a chain from one forward of a language model over the unread tokens and mask tokens (PARD, 2504.18583).

    The distributions of all tokens are fixed before the first is drawn, which exact rules need not know. The masks
    leave the cache at once; accepted tokens are read with the next draft.
    """

    together = 16  # logits of all tokens of the forward are computed

    def __init__(self, runner: Model, warp: LogitsWarper, vocab: int, mask: int) -> None:
        super().__init__(runner, warp, vocab)
        self.mask = mask

    def drafts(self, requests: Sequence[DraftRequest], limits: Sequence[int]) -> Drafts:
        """Tokens are chosen from left to right once all their distributions were computed."""
        device, caches = self.runner.device, [request.state.cache for request in requests]
        feeds = [[*self.unread(request), *[self.mask] * (n - 1)] for request, n in zip(requests, limits)]
        ends = [*accumulate(map(len, feeds))]
        out = self.runner.forward(list(map(Read, caches, upload_all(feeds, device))))
        for request in requests:
            request.state.cache.truncate(len(request.ids))

        def step(at: int, texts: Sequence[int], tokens: Tensor | None) -> Out:
            rows = upload([ends[i] - limits[i] + at for i in texts], device)
            return Out(out.logits[rows], out.hidden[rows])

        return self.chains(requests, limits, step)


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

    def __init__(
        self, runner: DraftHeadRunner | MtpRunner, target: Model, warp: LogitsWarper, *, sample: bool = True
    ) -> None:
        super().__init__(runner, warp, target.vocab_size)
        self.capture, self.sample = runner.head.captured_layers, sample

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

    It holds tokens drawn from q, or without `sample` the likeliest, as engines serve such heads. The latter are a
    deterministic draft, which exact rules accept with the target's probability. Drawn ones come from q given the tokens
    that were really drawn, which is 0 of ids that are no candidates where a scorer chooses among these; without a
    scorer all slots are drawn independently, so that their tokens need not fit together.
    """

    runner: BlockRunner

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

        def step(at: int, texts: Sequence[int], tokens: Tensor | None) -> Out:
            return runner.condition(block, at, texts, tokens)

        return self.chains(requests, limits, step)
