"""The loop of every decoding method: propose, score, verify, commit, learn; for one text or several.

In each round the drafter proposes a token tree, the target scores it in one forward, verification keeps a path of it
and adds one token, the caches roll back to that path, and the adaptive parts learn from the round. Between rounds the
target's cache holds one position less than the text: the last token is pending, chosen but not yet read.
"""

import copy
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from decode.core.draft import Draft, Drafts, Ids, foreign, upload
from decode.core.lengths import DraftLengths
from decode.core.round import Round
from decode.core.sampling import History, LogitsWarper, Rng, TorchRng
from decode.core.stop import StopRule
from decode.core.verify import AcceptanceRule, Exact, Verification, Verified
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.errors import UserError
from decode.models.api import Model, Read, read_prompt, rows_that_fit, synchronize
from decode.models.tokens import StopStrings


@dataclass
class Method:
    """A decoding method: a drafter, a stop rule and an acceptance rule."""

    name: str
    drafter: Drafter
    stop: StopRule
    rule: AcceptanceRule = field(default_factory=Exact)
    # limits the drafts of all texts of a round to what pays; None: the stop rule alone ends them
    lengths: DraftLengths | None = None


class Text:
    """A text that is decoded: its ids, caches, random numbers and rounds.

    Args:
        target: the model to decode from.
        method: the method.
        warp: logits to probabilities, for target and draft alike.
        prompt: token ids; the last one is the first pending token.
        max_new_tokens: budget; a context that is too short for it ends the text earlier.
        stop_ids: tokens that end the text; the ending token is part of it.
        stop_strings: strings that end the text; the token that completes one is its last.
        rng: source of every random choice; seeded from entropy if not given.
        shares_learning: True: later texts reuse what the method learns here. False: the text starts from the method's
            current state and discards what it learns.

    Attributes:
        ids: prompt and generated tokens.
        rounds: the trace.
        finish: why the text ended (``eos``, ``stop``, ``length``, ``context``); empty while it goes on.
        error: why the prompt cannot be decoded, or None.
    """

    def __init__(
        self,
        target: Model,
        method: Method,
        warp: LogitsWarper,
        prompt: Ids,
        *,
        max_new_tokens: int = 128,
        stop_ids: Collection[int] = (),
        stop_strings: StopStrings | None = None,
        rng: Rng | None = None,
        shares_learning: bool = True,
    ) -> None:
        self.warp, self.ids, self.stop_ids, self.prompt_length = warp, list(prompt), stop_ids, len(prompt)
        self.shares_learning, self.stop_strings = shares_learning, stop_strings
        self.stop, self.rule = method.stop, method.rule if shares_learning else copy.deepcopy(method.rule)
        if not shares_learning and method.lengths is None:  # with `lengths` the texts depend on one another already
            self.stop = copy.copy(method.stop)
            self.stop.threshold = copy.deepcopy(self.stop.threshold)
        self.rng = rng or TorchRng()
        self.history = History(self.ids)
        self.budget = len(prompt) + max_new_tokens
        self.long = len(prompt) > target.boundary
        # the last generated token is never read, so the text may be one longer than the context
        self.end = min(self.budget, (target.limit if self.long else target.boundary) + 1)
        self.cache: Any = None
        self.state: Any = None
        self.rounds: list[Round] = []
        self.prefill_seconds = self.total_seconds = 0.0
        self.finish = ""
        error = foreign(prompt, target.vocab_size)
        if not prompt:
            error = "the prompt is empty; give at least one token (a BOS token will do)"
        elif max_new_tokens < 1:
            error = f"max_new_tokens is {max_new_tokens}; it has to be at least 1"
        elif len(prompt) > target.limit:
            error = f"the prompt has {len(prompt)} tokens, the target's context holds {target.limit}; shorten it"
        self.error = UserError(error) if error else None

    @property
    def new_ids(self) -> Ids:
        """The generated tokens."""
        return self.ids[self.prompt_length :]

    @property
    def remaining(self) -> int:
        """Tokens that may be drafted: one is left for the correction or the bonus."""
        return self.end - len(self.ids) - 1

    def start(self, target: Model, method: Method) -> None:
        """Open the caches and read the prompt, all but its pending token.

        Raises:
            UserError: a prompt that cannot be decoded.
        """
        if self.error is not None:
            raise self.error
        drafter, began = method.drafter, time.perf_counter()
        self.cache = target.new_cache()
        deferred = method.lengths is not None and not method.lengths.chosen
        prompt = Prompt(self.ids, self.cache, self.stop_ids, deferred, self.shares_learning)
        self.state = drafter.start(prompt)
        feed = partial(drafter.feed, self.state, prompt)
        read_prompt(target, self.cache, self.ids[:-1], capture=drafter.capture, each=feed)
        self.rule.start()
        synchronize(target.device)
        self.prefill_seconds = time.perf_counter() - began
        self.total_seconds += self.prefill_seconds

    def close(self, drafter: Drafter) -> None:
        """Free the caches."""
        if self.state is not None:
            drafter.close(self.state)
        if self.cache is not None:
            self.cache.close()
        self.state = self.cache = None

    def accept(self, emitted: Ids) -> Ids:
        """Grow by these tokens up to the text's end: a stop id, a stop string, the budget or the context.

        Returns:
            The tokens that were added.
        """
        new = emitted[: self.end - len(self.ids)]
        for count, token in enumerate(new, 1):
            self.ids.append(token)
            if token in self.stop_ids:
                self.finish = "eos"
            elif self.stop_strings is not None and self.stop_strings.ends(self.ids):
                self.finish = "stop"
            if self.finish:
                return new[:count]
        if len(self.ids) >= self.end:
            self.finish = "length" if self.end == self.budget else "context"
        return new

    def grow(self, draft: Draft, verified: Verified, seconds: tuple[float, float]) -> Round:
        """Grow by the kept tokens and the one after them, and add the round to the trace.

        What stands in the draft behind a token that ends a text, and all of it behind the place where this one ends,
        is no part of the round.
        """
        v, ids, depth = verified, draft.ids, draft.depth
        cut = depth >= self.remaining
        new = self.accept([*(ids[i] for i in v.path), v.token])
        ends = [token for token in ids if token in self.stop_ids]
        kept = depth if len(new) > len(v.path) else len(new)
        if ends or kept < depth:
            draft, place = draft.cut(ends, kept)
            path = [place[node] for node in v.path if node in place]
            tested = len(path) + ((path[-1] if path else -1) in draft.parents)
            measured = [None if part is None else part[:tested] for part in (v.overlap, v.spent, v.distance)]
            v, cut = Verified(path, v.token, *measured), True
        r = Round(draft, v.path, v.token, new, cut, seconds, v.overlap, v.spent, v.distance)
        self.rounds.append(r)
        self.stop.observe(r)
        self.rule.observe(r)
        return r


def step(target: Model, method: Method, texts: Sequence[Text]) -> list[Round]:
    """Decode one round of every text: a draft each, one forward of the target over all of them, verification.

    The host waits for an accelerator once, for the result; besides, some drafters do once. Seconds that the texts spend
    together count in equal parts for each.

    Raises:
        UserError: a target that gives logits of NaN or +inf, or reads no trees.
    """
    began, device, share = time.perf_counter(), target.device, 1 / len(texts)
    drafter, lengths, limit = method.drafter, method.lengths, None
    if lengths is not None:
        limit = lengths.limit(len(texts))
        method.stop.threshold.price(lengths.step_costs, lengths.block_cost)
    t0 = _mark(device)
    requests = []
    for text in texts:
        most = text.remaining if limit is None else min(limit, text.remaining)
        requests.append(DraftRequest(text.state, text.ids, text.stop, most, text.rng, text.history, text.rule.unwarped))
    drafts = drafter.propose(requests, device)
    t1 = _mark(device)
    tokens, counts = _with_pending(texts, drafts), [n + 1 for n in drafts.lengths]
    trees = [None if tree.is_chain else tree for tree in drafts.trees or ()] or [None] * len(texts)
    if target.tree_refusal and any(trees):
        raise UserError(target.tree_error)
    caches = [text.cache for text in texts]
    out = target.forward(list(map(Read, caches, tokens.split(counts), trees)), capture=drafter.capture)
    rules, rngs, histories = zip(*((text.rule, text.rng, text.history) for text in texts))
    verification = Verification(drafts, tokens, out.logits, texts[0].warp, rules, rngs, histories)
    t2 = _mark(device)
    proposed, verified = verification.read()
    seconds = share * _seconds(t0, t1), share * _seconds(t1, _mark(device) if device.type == "cpu" else t2)
    kept = [[0, *(node + 1 for node in v.path)] for v in verified]
    bases = [cache.length - count for cache, count in zip(caches, counts)]
    target.keep(caches, bases, [[base + i for i in of] for base, of in zip(bases, kept)])
    rounds, rows = [], []
    for text, draft, v, of, start in zip(texts, proposed, verified, kept, accumulate(counts, initial=0)):
        rounds.append(text.grow(draft, v, seconds))
        rows.append([start + i for i in of[: len(rounds[-1].new)]])
        if len(text.ids) <= text.cache.length:
            text.cache.truncate(len(text.ids) - 1)
    drafter.update(requests, rounds, out, rows)
    if lengths is not None and limit:
        # a draft that a stop id ended could not have been longer
        longest = [
            r.drafted if any(token in text.stop_ids for token in r.draft.ids) else asked.max_depth
            for text, r, asked in zip(texts, rounds, requests)
        ]
        lengths.observe(zip(rounds, longest))
    spent = share * (time.perf_counter() - began)
    for text in texts:
        text.total_seconds += spent
    return rounds


def _with_pending(texts: Sequence[Text], drafts: Drafts) -> Tensor:
    """Of each text the pending token and its draft, one text after the other, long ``[rows]``."""
    pending = upload([text.ids[-1:] for text in texts], drafts.tokens.device)
    tokens, longest = torch.cat([pending, drafts.tokens], 1), drafts.tokens.shape[1] + 1
    counts = [n + 1 for n in drafts.lengths]
    if min(counts) == longest:
        return tokens.flatten()
    places = [text * longest + i for text, n in enumerate(counts) for i in range(n)]
    return tokens.flatten().index_select(0, upload(places, tokens.device))


@torch.inference_mode()
def run(target: Model, method: Method, texts: Iterable[Text], rows: int = 1) -> Iterator[tuple[Text, Round]]:
    """Decode texts to their ends, at most `rows` at once; a waiting one begins when another one has ended.

    Other threads may decode with the same models: each round of a thread keeps the others waiting.

    Yields:
        After every round, each text that took part, and its record.
    """
    waiting, live, drafter = deque(texts), list[Text](), method.drafter
    # in one order, so that no two threads wait for each other
    first, second = sorted((target, drafter.runner or target), key=id)

    def reserve(rows: int, length: int = 0) -> None:
        target.reserve(rows, length)
        drafter.reserve(rows, length)

    with first.lock, second.lock:
        reserve(rows, max((text.end for text in waiting), default=0))
    try:
        while waiting or live:
            with first.lock, second.lock:
                while waiting and len(live) < rows:
                    live.append(waiting.popleft())
                    live[-1].start(target, method)
                if rows > 1 and not waiting:  # from now on texts that end give their memory back
                    reserve(1)
                live.sort(key=lambda text: text.cache.row)
                rounds = step(target, method, live)
            yield from zip(live, rounds)
            if ended := [text for text in live if text.finish]:
                with first.lock, second.lock:
                    for text in ended:
                        text.close(drafter)
                live = [text for text in live if not text.finish]
    finally:
        with first.lock, second.lock:
            for text in live:
                text.close(drafter)
            reserve(1)


def decode(target: Model, method: Method, warp: LogitsWarper, prompt: Ids, **options: Any) -> Text:
    """Decode one prompt to its end; arguments are those of `Text`.

    Raises:
        UserError: a bad prompt, or a target that gives logits of NaN or +inf.
    """
    text = Text(target, method, warp, prompt, **options)
    for _ in run(target, method, [text]):
        pass
    return text


def decode_texts(
    target: Model,
    method: Method,
    warp: LogitsWarper,
    prompts: Sequence[Ids],
    *,
    rngs: Sequence[Rng],
    batch_size: int | None = None,
    **options: Any,
) -> list[Text]:
    """Decode many prompts, at most `batch_size` at once.

    Every text begins with what the method has learned so far and keeps what it learns to itself, so that it depends on
    its prompt and its `Rng` alone, not on its neighbours (in exact arithmetic; rounding may decide ties otherwise).
    With `Method.lengths` all texts, and later ones too, share what it and the stop rule learn: exact rules stay exact,
    but a text that is sampled, or verified by a relaxed rule, then depends on its neighbours.

    Args:
        target: the model to decode from.
        method: the method; its rules and its drafter learn nothing, but for the stop rule beside `lengths`.
        warp: logits to probabilities.
        prompts: token ids.
        rngs: of each text.
        batch_size: texts at once; None: all. Where memory does not hold so many, fewer are taken, with a warning.
        options: see `Text`.

    Returns:
        The texts in the order of the prompts; one that cannot be decoded has an `error` and no new token.

    Raises:
        UserError: logits of NaN or +inf.
    """
    texts = [
        Text(target, method, warp, prompt, rng=rng, shares_learning=False, **options)
        for prompt, rng in zip(prompts, rngs, strict=True)
    ]
    waiting = [text for text in texts if text.error is None]
    bytes_per_token = target.cache_bytes_per_token + method.drafter.cache_bytes_per_token
    rows = rows_that_fit(target.device, bytes_per_token, [min(text.end, target.limit) for text in waiting], batch_size)
    for _ in run(target, method, waiting, rows):
        pass
    return texts


def _mark(device: torch.device) -> Any:
    """A point in time, on the GPU's own stream where there is one, so that the host need not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Time between two marks, both of which have passed."""
    if isinstance(end, float):
        return end - begin
    return 1e-3 * float(begin.elapsed_time(end))
