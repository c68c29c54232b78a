"""The loop that serves every decoding method: propose, score, verify, commit, observe.

In each round the drafter proposes a token tree, the target scores it in one forward, verification keeps a path of it
and adds one token, both caches roll back to that path, and the adaptive parts learn from what happened. A round is one
of any number of texts, whose forwards are made together; `decode.loop` decodes many prompts with it.
"""

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.draft import Draft
from decode.drafters.base import Drafter, DraftRequest
from decode.errors import UserError
from decode.models.huggingface_runner import rows_that_fit
from decode.models.runner import Runner, synchronize
from decode.sampling import LogitsWarper, Rng, Rows, TorchRng, WarpedRows, argmax, one_hot
from decode.stopping import DraftLengths, StopRule
from decode.trace import Round, Trace
from decode.verify import AcceptanceRule, Exact, VerifyStats, verify, verify_greedy


@dataclass
class Method:
    """A decoding method: a drafter, a stop rule and an acceptance rule."""

    name: str
    drafter: Drafter
    stop: StopRule
    rule: AcceptanceRule = field(default_factory=Exact)
    # limits the drafts of all texts of a round to what pays; None: the stop rule alone ends them
    lengths: DraftLengths | None = None

    def reset(self) -> None:
        """Forget everything adapted so far, the drafter's learned weights included."""
        self.stop.reset()
        self.rule.reset()
        self.drafter.reset()
        if self.lengths is not None:
            self.lengths.reset()


class Target:
    """The target model over its rolling cache.

    Between rounds the cache holds one position less than the text: the last token is pending, chosen but not read.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner

    @property
    def hidden(self) -> Tensor:
        """Last hidden states ``[n + 1, width]`` of the rows scored last."""
        return self.runner.hidden

    def prefill(self, ids: list[int]) -> None:
        """Read a new text, all but its pending token."""
        self.runner.truncate(0)
        if ids:
            self.runner.read(torch.tensor(ids, device=self.runner.device), head=0)

    def score(self, pending: int, draft: Draft) -> Tensor:
        """One forward over the pending token and the draft.

        Returns:
            Logits ``[n + 1, vocab]``: row 0 follows the pending token, row i + 1 follows node i.

        Raises:
            UserError: a tree that branches, and a target that reads none.
        """
        tokens, tree = self.feed(pending, draft)
        return self.runner.read(tokens, tree)

    def feed(self, pending: int, draft: Draft) -> tuple[Tensor, Draft | None]:
        """The tokens that `score` reads, and the tree if they are no chain; see there."""
        device = self.runner.device
        self._base = self.runner.length
        first = torch.full((1,), pending, device=device)
        if not len(draft):
            return first, None
        if not draft.is_chain and not self.runner.supports_trees:
            raise tree_error(self.runner)
        return torch.cat([first, draft.tokens.to(device)]), None if draft.is_chain else draft

    def commit(self, path: list[int]) -> None:
        """Keep the pending token and the accepted path, drop the other nodes."""
        self.runner.keep(self._base, [self._base, *(self._base + 1 + i for i in path)])


def score_together(targets: Sequence[Target], pending: Sequence[int], drafts: Sequence[Draft]) -> Sequence[Tensor]:
    """`Target.score` of several texts of one model, in one forward where its runner can."""
    if len(targets) == 1:
        return [targets[0].score(pending[0], drafts[0])]
    tokens, trees = zip(*(target.feed(token, draft) for target, token, draft in zip(targets, pending, drafts)))
    counts = [len(part) for part in tokens]
    runners = [target.runner for target in targets]
    return runners[0].read_texts(runners, torch.cat(tokens), counts, trees).split(counts)


def tree_error(runner: Runner) -> UserError:
    """What to say where a method drafts trees and the target reads chains only."""
    return UserError(
        f"{runner.name} cannot verify token trees: {runner.tree_refusal}; use a method that drafts chains (vanilla, "
        "eagle, prompt-lookup, layerskip)"
    )


@dataclass
class Output:
    """A finished text."""

    ids: list[int]  # prompt and generated tokens
    prompt_length: int  # how many of them are the prompt
    trace: Trace  # the record of its rounds
    # for each generated token who wrote it: ``draft`` (accepted), ``fix`` (correction of a rejected draft) or
    # ``target`` (bonus token or plain step)
    written_by: list[str] = field(default_factory=list)
    # for each generated token the drafted tokens rejected at its place
    rejected: list[list[int]] = field(default_factory=list)
    error: UserError | None = None  # why the prompt could not be decoded, where others were decoded with it

    @property
    def new_ids(self) -> list[int]:
        """The generated tokens."""
        return self.ids[self.prompt_length :]


def check_prompt(target: Target, prompt: list[int], max_new_tokens: int) -> None:
    """Refuse what cannot be decoded.

    Raises:
        UserError: an empty prompt, ids outside the vocabulary, or more tokens than the context holds.
    """
    if not prompt:
        raise UserError("the prompt is empty; give at least one token (a BOS token will do)")
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}; it has to be at least 1")
    foreign = next((i for i in prompt if not 0 <= i < target.runner.vocab_size), None)
    if foreign is not None:
        raise UserError(
            f"the prompt holds token id {foreign}, but the target's ids are 0 to {target.runner.vocab_size - 1}; "
            "was it tokenised with another model's tokenizer?"
        )
    if len(prompt) > target.runner.limit:
        raise UserError(
            f"the prompt has {len(prompt)} tokens, the target's context holds {target.runner.limit}; shorten it"
        )


class Text:
    """A text that is being decoded: its own caches, method, chance and record.

    Args:
        target: the model to decode from, on a cache that is this text's alone.
        system: the method; its parts are this text's alone.
        warp: logits to probabilities, for target and draft alike.
        prompt: token ids; the last one is the first pending token.
        max_new_tokens: budget; a context that is too short for it ends the text earlier.
        stop_ids: tokens that end the text; the ending token is part of it.
        rng: source of every random choice; seeded from entropy if not given.
        trace: filled on the way.

    Attributes:
        ids: prompt and generated tokens.

    Raises:
        UserError: a bad prompt.
    """

    def __init__(
        self,
        target: Target,
        system: Method,
        warp: LogitsWarper,
        prompt: list[int],
        *,
        max_new_tokens: int = 128,
        stop_ids: Collection[int] = (),
        rng: Rng | None = None,
        trace: Trace | None = None,
    ) -> None:
        check_prompt(target, prompt, max_new_tokens)
        self.target, self.system, self.warp, self.ids = target, system, warp, list(prompt)
        rng = rng or TorchRng(device=target.runner.device)
        self.rng = rng.for_greedy() if warp.greedy and isinstance(rng, TorchRng) else rng
        self.trace = Trace() if trace is None else trace
        self.stop_ids = stop_ids
        self.compare_tokens = warp.greedy and system.rule.exact and system.rule.is_exact_now
        # the last generated token is never read, so the text may be one longer than the context
        self.end = min(len(prompt) + max_new_tokens, target.runner.limit + 1)
        self.done = False  # whether the text has ended

    @property
    def room(self) -> int:
        """How deep a draft may be: the tokens that the text may still grow by, less one."""
        return self.end - len(self.ids) - 1

    def start(self) -> None:
        """Read the prompt."""
        system, runner, began = self.system, self.target.runner, time.perf_counter()
        self.began = began
        runner.reserve(self.end)
        runner.captured_layers = system.drafter.captured_layers
        self.target.prefill(self.ids[:-1])
        system.drafter.stop_ids = self.stop_ids
        system.drafter.defer_prefill = system.lengths is not None and not system.lengths.chosen
        system.drafter.start(self.ids)
        system.rule.start()
        synchronize(runner.device)
        self.trace.prefill_seconds += time.perf_counter() - began

    def asks(self, limit: int | None = None) -> DraftRequest:
        """What the drafter is asked in the round that begins; `limit` is the longest draft of all texts."""
        system, room = self.system, self.room
        system.stop.begin()
        if system.lengths is not None:
            system.stop.threshold.price(system.lengths.token_cost)
        return DraftRequest(
            system.drafter, self.ids, system.stop, room if limit is None else min(limit, room), self.rng
        )

    def allowed(self, result: Round, asked: DraftRequest) -> int:
        """The longest draft that the round could have had; one that the text's end cut could not have been longer."""
        ended = any(token in self.stop_ids for token in result.draft.ids)
        return result.drafted if ended else asked.max_depth

    def verify(self, draft: Draft, logits: Tensor) -> tuple[Round, VerifyStats]:
        """Keep a path of the draft, and choose the token that follows it.

        Raises:
            UserError: logits of NaN or +inf.
        """
        ids, warp = self.ids, self.warp
        top = argmax(logits)
        if not math.isfinite(logits.gather(-1, top[:, None]).sum(dtype=torch.float32).item()):
            raise UserError(
                f"the target's logits are NaN or +inf after {len(ids)} tokens; check its weights, or load it in "
                "bfloat16 or float32"
            )
        texts = [draft.text_before(ids, i) for i in range(-1, len(draft))] if warp.needs_prefix else None
        probs: Tensor | Callable[[], Tensor]
        p: Rows
        measured: VerifyStats
        if self.compare_tokens:
            top = top if texts is None else warp.top(logits, texts)
            path, token, agreed = verify_greedy(draft, top)
            probs, measured = partial(one_hot, top, logits), (agreed or None, None, None)
        else:
            few = draft.probs is None and logits.is_cpu  # rows are read where verification goes
            p = WarpedRows(warp, logits, texts) if few else warp(logits, texts)
            path, token, measured = verify(draft, p, logits, self.system.rule, self.rng)
            probs = partial(warp, logits, texts) if isinstance(p, WarpedRows) else p
        self.target.commit(path)
        return Round(draft, path, token, probs, logits, self.target.hidden), measured

    def settle(self, result: Round, measured: VerifyStats) -> list[int]:
        """Grow by what the round emitted, and let every adaptive part learn from it."""
        system, ids, stop_ids, room = self.system, self.ids, self.stop_ids, self.room
        new = _cut(result.emitted, self.end - len(ids), stop_ids)
        ids += new
        if len(new) <= len(result.path):
            self.target.runner.truncate(len(ids) - 1)
        system.drafter.commit(ids)
        system.stop.observe(result)
        system.rule.observe(result)
        system.drafter.observe(result)
        cut = result.depth >= room or any(token in stop_ids for token in result.draft.ids)
        self.trace.close(result, *measured, cut=cut)
        self.trace.tokens += len(new)
        self.done = bool(new and new[-1] in stop_ids) or len(ids) >= self.end
        if self.done:
            self.trace.wall_seconds += time.perf_counter() - self.began
        return new


def step(texts: Sequence[Text]) -> list[tuple[Round, list[int]]]:
    """One round of every text: a draft each, one forward of the target over all of them, and what it adds to each.

    Seconds that the texts spend together count in equal parts for each.

    Raises:
        UserError: a target that gives logits of NaN or +inf.
    """
    began, device, share = time.perf_counter(), texts[0].target.runner.device, 1 / len(texts)
    t0 = _mark(device)
    lengths = texts[0].system.lengths
    limit = None if lengths is None else lengths.limit(len(texts))
    asked = [text.asks(limit) for text in texts]
    drafts = texts[0].system.drafter.propose_together(asked) if limit != 0 else [Draft.empty() for _ in texts]
    t1 = _mark(device)
    logits = score_together([text.target for text in texts], [text.ids[-1] for text in texts], drafts)
    verified = [text.verify(draft, rows) for text, draft, rows in zip(texts, drafts, logits)]
    t2 = _mark(device)
    seconds = share * _seconds(t0, t1), share * _seconds(t1, t2)
    if lengths is not None and limit:
        lengths.observe((result, text.allowed(result, one)) for text, (result, _), one in zip(texts, verified, asked))
    added, together = [], tuple(len(draft) for draft in drafts)
    for text, (result, measured) in zip(texts, verified):
        result.seconds, result.together = seconds, together
        added.append((result, text.settle(result, measured)))
    spent = share * (time.perf_counter() - began)
    for text in texts:
        text.trace.total_seconds += spent
    return added


@torch.inference_mode()
def rounds(
    target: Target, system: Method, warp: LogitsWarper, prompt: list[int], **options: Any
) -> Iterator[tuple[Round, list[int]]]:
    """Decode one text, yielding each round with the tokens it really added (cut at a stop id or at the budget).

    Arguments are those of `Text`; the system's own parts decode it, and what they learn stays for the next text.

    Raises:
        UserError: a bad prompt, or a target that gives logits of NaN or +inf.
    """
    text = Text(target, system, warp, prompt, **options)
    began = time.perf_counter()
    text.start()
    text.trace.total_seconds += time.perf_counter() - began
    while not text.done:
        yield step([text])[0]


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


def _cut(tokens: list[int], budget: int, stop_ids: Collection[int]) -> list[int]:
    """Tokens up to the first stop id, at most `budget`; cutting an exact text leaves it exact."""
    tokens = tokens[:budget]
    for i, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: i + 1]
    return tokens


def decode(
    target: Target,
    system: Method,
    warp: LogitsWarper,
    prompt: list[int],
    *,
    annotate: bool = False,
    **options: object,
) -> Output:
    """Decode one prompt to its end (see `rounds`); `annotate` records who wrote each token and what was rejected."""
    out = Output(list(prompt), len(prompt), Trace())
    for result, new in rounds(target, system, warp, prompt, trace=out.trace, **options):
        out.ids += new
        if annotate:
            out.written_by += result.written_by[: len(new)]
            out.rejected += [[] for _ in new]
            if len(new) == result.accepted + 1:
                out.rejected[-1] = result.rejected_at_end
    return out


Place = tuple[Runner, Drafter]  # caches and drafter of one text at a time


@torch.inference_mode()
def decode_texts(
    target: Target,
    system: Method,
    warp: LogitsWarper,
    prompts: Sequence[list[int]],
    *,
    rngs: Sequence[Rng],
    batch_size: int | None = None,
    max_new_tokens: int = 128,
    finished: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Output]:
    """Decode many prompts, at most `batch_size` at once.

    Every text begins with what the system has learned so far and keeps what it learns to itself, so that it depends on
    its prompt and its `Rng` alone, not on its neighbours (in exact arithmetic; rounding may decide ties otherwise).
    With `Method.lengths` all texts share what was learned of acceptances: exact rules stay exact, but a sampled text
    then depends on its neighbours.

    Args:
        target: the model to decode from.
        system: the method; it learns nothing.
        warp: logits to probabilities.
        prompts: token ids.
        rngs: of each text.
        batch_size: texts at once; None: all. Where memory does not hold so many, fewer are taken, with a warning.
        max_new_tokens: see `Text`.
        finished: called with the number of each text that has ended.
        options: see `Text`.

    Returns:
        The texts in the order of the prompts; one that cannot be decoded has an `error` and no new token.

    Raises:
        UserError: a model or method that serves one text at a time, or logits of NaN or +inf.
    """
    outputs = [Output(list(prompt), len(prompt), Trace()) for prompt in prompts]
    waiting: deque[int] = deque()
    for i, output in enumerate(outputs):
        try:
            check_prompt(target, prompts[i], max_new_tokens)
            waiting.append(i)
        except UserError as error:
            output.error = error
    rows = _rows(target, system, [len(prompts[i]) + max_new_tokens for i in waiting], batch_size)
    live: list[tuple[int, Text, Place]] = []
    with places(target, system, rows) as free:
        while waiting or live:
            while free and waiting:
                i, place = waiting.popleft(), free.pop()
                own, trace = system_for_one_text(system, place[1]), outputs[i].trace
                text = Text(
                    Target(place[0]), own, warp, prompts[i],
                    max_new_tokens=max_new_tokens, rng=rngs[i], trace=trace, **options,
                )  # fmt: skip
                began = time.perf_counter()
                text.start()
                trace.total_seconds += time.perf_counter() - began
                live.append((i, text, place))
            while free:  # nobody waits for them, and neighbouring rows attend together
                for part in free.pop():
                    part.close()
            live.sort(key=lambda one: one[2][0].row)
            going = []
            for (i, text, place), (_, new) in zip(live, step([text for _, text, _ in live])):
                outputs[i].ids += new
                if not text.done:
                    going.append((i, text, place))
                    continue
                free.append(place)
                if finished is not None:
                    finished(i)
            live = going
    return outputs


@contextmanager
def places(target: Target, system: Method, count: int) -> Iterator[list[Place]]:
    """Caches and drafters for `count` texts; a single one uses the caches that are there."""
    runners: Sequence[Runner] = [target.runner] if count == 1 else target.runner.fork(count)
    drafters: Sequence[Drafter] = []
    try:
        drafters = system.drafter.fork(runners)
        yield list(zip(runners, drafters))
    finally:
        parts: list[Runner | Drafter] = [*runners, *drafters] if count > 1 else []
        for part in reversed(parts):
            part.close()


def _rows(target: Target, system: Method, lengths: Sequence[int], batch_size: int | None) -> int:
    """How many texts of these lengths to decode at once."""
    runner = target.runner
    bytes_per_token = runner.cache_bytes_per_token + system.drafter.cache_bytes_per_token
    return rows_that_fit(runner.device, bytes_per_token, [min(n, runner.limit) for n in lengths], batch_size)


def system_for_one_text(system: Method, drafter: Drafter) -> Method:
    """The method with parts that a text may change: copies of what they have learned."""
    stop = copy.copy(system.stop)
    stop.threshold = copy.deepcopy(stop.threshold)
    return replace(system, drafter=drafter, stop=stop, rule=copy.deepcopy(system.rule))
