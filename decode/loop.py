"""The loop of every decoding method: propose, score, verify, commit, learn; for one sequence or several.

In each step the drafter proposes a token tree, the target scores it in one forward, verification keeps a path of it and
adds one token, the caches roll back to that path, and the adaptive parts learn from the result. Between steps the
target's cache holds one position less than the sequence: the last token is pending, chosen but not yet read.
"""

import copy
import math
import time
from collections import abc, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest, Prompt
from decode.errors import UserError
from decode.models.huggingface_runner import rows_that_fit
from decode.models.runner import Output, Runner, synchronize
from decode.sampling import LogitsWarper, Rng, Rows, TorchRng, WarpedRows, argmax, one_hot
from decode.stopping import DraftLengths, StopRule
from decode.trace import Step, Trace
from decode.verify import AcceptanceRule, Exact, VerifyStats, verify, verify_greedy


@dataclass
class Method:
    """A decoding method: a drafter, a stop rule and an acceptance rule."""

    name: str
    drafter: Drafter
    stop: StopRule
    rule: AcceptanceRule = field(default_factory=Exact)
    # limits the drafts of all sequences of a step to what pays; None: the stop rule alone ends them
    lengths: DraftLengths | None = None


def tree_error(runner: Runner) -> UserError:
    """The error where a method drafts trees and the target reads chains only."""
    return UserError(
        f"{runner.name} cannot verify token trees: {runner.tree_refusal}; use a method that drafts chains (vanilla, "
        "eagle, prompt-lookup, layerskip)"
    )


class Sequence:
    """A text that is decoded: its ids, caches, chance and record.

    Args:
        target: the model to decode from.
        method: the method.
        warp: logits to probabilities, for target and draft alike.
        prompt: token ids; the last one is the first pending token.
        max_new_tokens: budget; a context that is too short for it ends the text earlier.
        stop_ids: tokens that end the text; the ending token is part of it.
        rng: source of every random choice; seeded from entropy if not given.
        trace: the record to add to; a new one if not given.
        alone: what the method learns from this text serves later ones; else the text begins with what was learned so
            far and keeps to itself what it learns.
        annotate: record who wrote each token and what was rejected.

    Attributes:
        ids: prompt and generated tokens.
        done: the text has ended.
        error: why the prompt cannot be decoded, or None.
        written_by: for each generated token ``draft`` (accepted), ``correction`` (of a rejected draft) or ``target``
            (bonus token or plain step).
        rejected: for each generated token the drafted tokens rejected at its place.
    """

    def __init__(
        self,
        target: Runner,
        method: Method,
        warp: LogitsWarper,
        prompt: list[int],
        *,
        max_new_tokens: int = 128,
        stop_ids: Collection[int] = (),
        rng: Rng | None = None,
        trace: Trace | None = None,
        alone: bool = True,
        annotate: bool = False,
    ) -> None:
        self.warp, self.ids, self.stop_ids, self.prompt_length = warp, list(prompt), stop_ids, len(prompt)
        self.stop, self.rule, self.alone, self.annotate = method.stop, method.rule, alone, annotate
        if not alone:
            self.stop, self.rule = copy.copy(method.stop), copy.deepcopy(method.rule)
            self.stop.threshold = copy.deepcopy(self.stop.threshold)
        rng = rng or TorchRng(device=target.device)
        self.rng = rng.for_greedy() if warp.greedy and isinstance(rng, TorchRng) else rng
        self.trace = Trace() if trace is None else trace
        self.compares_tokens = warp.greedy and self.rule.exact and self.rule.is_exact_now
        # the last generated token is never read, so the text may be one longer than the context
        self.end = min(len(prompt) + max_new_tokens, target.limit + 1)
        self.done = False
        self.cache: Any = None
        self.state: Any = None
        self.written_by: list[str] = []
        self.rejected: list[list[int]] = []
        error, foreign = "", [i for i in prompt if not 0 <= i < target.vocab_size]
        if not prompt:
            error = "the prompt is empty; give at least one token (a BOS token will do)"
        elif max_new_tokens < 1:
            error = f"max_new_tokens is {max_new_tokens}; it has to be at least 1"
        elif foreign:
            error = (
                f"the prompt holds token id {foreign[0]}, but the target's ids are 0 to {target.vocab_size - 1}; "
                "was it tokenised with another model's tokenizer?"
            )
        elif len(prompt) > target.limit:
            error = f"the prompt has {len(prompt)} tokens, the target's context holds {target.limit}; shorten it"
        self.error = UserError(error) if error else None

    @property
    def new_ids(self) -> list[int]:
        """The generated tokens."""
        return self.ids[self.prompt_length :]

    def start(self, target: Runner, method: Method) -> None:
        """Open the caches and read the prompt, all but its pending token.

        Raises:
            UserError: a prompt that cannot be decoded.
        """
        if self.error is not None:
            raise self.error
        drafter, ids, began = method.drafter, self.ids, time.perf_counter()
        target.reserve(capacity=self.end)
        self.cache, captured = target.new_cache(), None
        if len(ids) > 1:
            read = torch.tensor(ids[:-1], device=target.device)
            captured = target.forward([self.cache], [read], capture=drafter.capture, last=0).captured
        deferred = method.lengths is not None and not method.lengths.chosen
        self.state = drafter.start(Prompt(ids, self.cache, captured, self.stop_ids, deferred, self.alone))
        self.rule.start()
        synchronize(target.device)
        spent = time.perf_counter() - began
        self.trace.prefill_seconds += spent
        self.trace.total_seconds += spent

    def close(self, drafter: Drafter) -> None:
        """Free the caches."""
        if self.state is not None:
            drafter.close(self.state)
        if self.cache is not None:
            self.cache.close()
        self.state = None

    def verify(self, draft: Draft, out: Output) -> tuple[Step, VerifyStats]:
        """Keep a path of the draft, and choose the token that follows it.

        Args:
            draft: of n tokens.
            out: of the target, row 0 after the pending token and row i + 1 after node i.

        Raises:
            UserError: logits of NaN or +inf.
        """
        ids, warp, logits = self.ids, self.warp, out.logits
        top = argmax(logits)
        if not math.isfinite(logits.gather(-1, top[:, None]).sum(dtype=torch.float32).item()):
            raise UserError(
                f"the target's logits are NaN or +inf after {len(ids)} tokens; check its weights, or load it in "
                "bfloat16 or float32"
            )
        texts = [draft.text_before(ids, i) for i in range(-1, len(draft))] if warp.needs_prefix else None
        probs: Tensor | Callable[[], Tensor]
        if self.compares_tokens:
            top = top if texts is None else warp.top(logits, texts)
            path, token, agreed = verify_greedy(draft, top)
            stats: VerifyStats = (agreed or None, None, None)
            probs = partial(one_hot, top, logits)
        else:
            few = draft.probs is None and logits.is_cpu  # rows are read where verification goes
            p: Rows = WarpedRows(warp, logits, texts) if few else warp(logits, texts)
            path, token, stats = verify(draft, p, logits, self.rule, self.rng)
            probs = partial(warp, logits, texts) if isinstance(p, WarpedRows) else p
        base = self.cache.length - len(draft) - 1
        self.cache.keep(base, [base, *(base + 1 + i for i in path)])
        return Step(draft, path, token, probs, logits, out.captured), stats

    def grow(self, drafter: Drafter, result: Step, stats: VerifyStats) -> None:
        """Add what the step emitted, cut at a stop id and at the budget; every adaptive part learns from it."""
        ids, stop_ids, trace, remaining = self.ids, self.stop_ids, self.trace, self.end - len(self.ids)
        new = result.emitted[:remaining]
        result.new = new = next((new[: i + 1] for i, token in enumerate(new) if token in stop_ids), new)
        ids += new
        if len(new) <= len(result.path):
            self.cache.truncate(len(ids) - 1)
        self.stop.observe(result)
        self.rule.observe(result)
        drafter.update(self.state, ids, result)
        cut = result.depth >= remaining - 1 or any(token in stop_ids for token in result.draft.ids)
        trace.close(result, *stats, cut=cut)
        trace.tokens += len(new)
        if self.annotate:
            self.written_by += result.written_by
            self.rejected += result.rejected
        self.done = new[-1] in stop_ids or len(ids) >= self.end


def step(target: Runner, method: Method, sequences: abc.Sequence[Sequence]) -> list[Step]:
    """Decode one step of every sequence: a draft each, one forward of the target over all of them, verification.

    Seconds that the sequences spend together count in equal parts for each.

    Raises:
        UserError: a target that gives logits of NaN or +inf, or reads no trees.
    """
    began, device, share, lengths = time.perf_counter(), target.device, 1 / len(sequences), method.lengths
    drafter, t0 = method.drafter, _mark(device)
    limit = None if lengths is None else lengths.limit(len(sequences))
    requests = []
    for one in sequences:
        one.stop.begin()
        if lengths is not None:
            one.stop.threshold.price(lengths.token_cost, lengths.block_cost)
        remaining = one.end - len(one.ids) - 1  # one token is left for the correction or the bonus
        most = remaining if limit is None else min(limit, remaining)
        requests.append(DraftRequest(one.state, one.ids, one.stop, most, one.rng))
    drafts = drafter.propose(requests) if limit != 0 else [Draft.empty() for _ in sequences]
    t1 = _mark(device)
    feeds, trees = [], []
    for one, draft in zip(sequences, drafts):
        pending = torch.full((1,), one.ids[-1], device=device)
        feeds.append(torch.cat([pending, draft.tokens.to(device)]) if len(draft) else pending)
        trees.append(None if draft.is_chain else draft)
    if not target.supports_trees and any(tree is not None for tree in trees):
        raise tree_error(target)
    out = target.forward([one.cache for one in sequences], feeds, trees, capture=drafter.capture)
    outputs = out.split([len(feed) for feed in feeds])
    verified = [one.verify(draft, rows) for one, draft, rows in zip(sequences, drafts, outputs)]
    t2 = _mark(device)
    seconds, together = (share * _seconds(t0, t1), share * _seconds(t1, t2)), tuple(map(len, drafts))
    if lengths is not None and limit:
        # a draft that a stop id ended could not have been longer
        ended = [any(token in one.stop_ids for token in draft.ids) for one, draft in zip(sequences, drafts)]
        longest = [len(d) if end else asked.max_depth for d, end, asked in zip(drafts, ended, requests)]
        lengths.observe((result, allowed) for (result, _), allowed in zip(verified, longest))
    for one, (result, stats) in zip(sequences, verified):
        result.seconds, result.together = seconds, together
        one.grow(drafter, result, stats)
    spent = share * (time.perf_counter() - began)
    for one in sequences:
        one.trace.total_seconds += spent
    return [result for result, _ in verified]


@torch.inference_mode()
def run(
    target: Runner, method: Method, sequences: Iterable[Sequence], rows: int = 1
) -> Iterator[tuple[Sequence, Step]]:
    """Decode sequences to their ends, at most `rows` at once; a waiting one begins when another one has ended.

    Yields:
        After every step, each sequence that took part, and its record.
    """
    waiting, live = deque(sequences), list[Sequence]()

    def reserve(rows: int) -> None:
        target.reserve(rows=rows)
        method.drafter.reserve(rows)

    if rows > 1:
        reserve(rows)
    try:
        while waiting or live:
            while waiting and len(live) < rows:
                live.append(waiting.popleft())
                live[-1].start(target, method)
            if rows > 1 and not waiting:  # from now on sequences that end give their memory back
                reserve(1)
            live.sort(key=lambda one: one.cache.row)
            yield from zip(live, step(target, method, live))
            for one in live:
                if one.done:
                    one.close(method.drafter)
            live = [one for one in live if not one.done]
    finally:
        for one in live:
            one.close(method.drafter)
        if rows > 1:
            reserve(1)


def steps(target: Runner, method: Method, warp: LogitsWarper, prompt: list[int], **options: Any) -> Iterator[Step]:
    """Decode one text, yielding the record of each step.

    Arguments are those of `Sequence`; what the method learns serves later texts.

    Raises:
        UserError: a bad prompt, or a target that gives logits of NaN or +inf.
    """
    for _, result in run(target, method, [Sequence(target, method, warp, prompt, **options)]):
        yield result


def decode(target: Runner, method: Method, warp: LogitsWarper, prompt: list[int], **options: Any) -> Sequence:
    """Decode one prompt to its end (see `steps`)."""
    sequence = Sequence(target, method, warp, prompt, **options)
    for _ in run(target, method, [sequence]):
        pass
    return sequence


def decode_texts(
    target: Runner,
    method: Method,
    warp: LogitsWarper,
    prompts: abc.Sequence[list[int]],
    *,
    rngs: abc.Sequence[Rng],
    batch_size: int | None = None,
    finished: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Sequence]:
    """Decode many prompts, at most `batch_size` at once.

    Every text begins with what the method has learned so far and keeps what it learns to itself, so that it depends on
    its prompt and its `Rng` alone, not on its neighbours (in exact arithmetic; rounding may decide ties otherwise).
    With `Method.lengths` all texts share what was learned of acceptances: exact rules stay exact, but a sampled text
    then depends on its neighbours.

    Args:
        target: the model to decode from.
        method: the method; it learns nothing.
        warp: logits to probabilities.
        prompts: token ids.
        rngs: of each text.
        batch_size: texts at once; None: all. Where memory does not hold so many, fewer are taken, with a warning.
        finished: called with the number of each text that has ended.
        options: see `Sequence`.

    Returns:
        The texts in the order of the prompts; one that cannot be decoded has an `error` and no new token.

    Raises:
        UserError: logits of NaN or +inf.
    """
    texts = [Sequence(target, method, warp, p, rng=rng, alone=False, **options) for p, rng in zip(prompts, rngs)]
    waiting = [text for text in texts if text.error is None]
    bytes_per_token = target.cache_bytes_per_token + method.drafter.cache_bytes_per_token
    rows = rows_that_fit(target.device, bytes_per_token, [min(text.end, target.limit) for text in waiting], batch_size)
    for text, _ in run(target, method, waiting, rows):
        if text.done and finished is not None:
            finished(texts.index(text))
    return texts


def _mark(device: torch.device) -> Any:
    """A point in time, on the GPU's own stream where there is one, so that the host need not wait for it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    """Time between two marks, of which the last has passed."""
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return 1e-3 * float(begin.elapsed_time(end))
