"""The loop that serves every decoding method: propose, score, verify, commit, observe.

In each round the drafter proposes a token tree, the target scores it in one forward, verification keeps a path of it
and adds one token, both caches roll back to that path, and the adaptive parts learn from what happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from decode.core.acceptance import AcceptanceRule, Exact, js_distance, pick
from decode.core.drafter import Drafter
from decode.core.errors import UserError
from decode.core.proposal import Draft
from decode.core.rng import Rng, TorchRng
from decode.core.sampling import Warp, one_hot
from decode.core.stopping import StopRule
from decode.core.synchronize import synchronize
from decode.core.target import Target
from decode.core.trace import Round, Trace, Values
from decode.verify import verify_chain, verify_greedy, verify_tree, verify_tree_relaxed


@dataclass
class System:
    """A decoding method: a drafter, a stop rule and an acceptance rule."""

    name: str
    drafter: Drafter
    stop: StopRule
    rule: AcceptanceRule = field(default_factory=Exact)

    @property
    def lossless(self) -> bool:
        """Whether the output has the target's distribution."""
        return self.rule.exact

    def reset(self) -> None:
        """Forget everything adapted so far, the drafter's learned weights included."""
        self.stop.reset()
        self.rule.reset()
        self.drafter.reset()


@dataclass
class Output:
    """A finished text.

    Attributes:
        ids: prompt and generated tokens.
        prompt_length: how many of them are the prompt.
        trace: the record of its rounds.
        written_by: for each generated token who wrote it: ``draft`` (accepted), ``fix`` (correction of a rejected
            draft) or ``target`` (bonus token or plain step).
        rejected: for each generated token the drafted tokens rejected at its place.
    """

    ids: list[int]
    prompt_length: int
    trace: Trace
    written_by: list[str] = field(default_factory=list)
    rejected: list[list[int]] = field(default_factory=list)

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


@torch.inference_mode()
def rounds(
    target: Target,
    system: System,
    warp: Warp,
    prompt: list[int],
    *,
    max_new_tokens: int = 128,
    stop_ids: Collection[int] = (),
    rng: Rng | None = None,
    trace: Trace | None = None,
    finished: Callable[[list[int]], bool] | None = None,
) -> Iterator[tuple[Round, list[int]]]:
    """Decode, yielding each round with the tokens it really added (cut at a stop id or at the budget).

    Args:
        target: the model to decode from.
        system: the method.
        warp: logits to probabilities, for target and draft alike.
        prompt: token ids; the last one is the first pending token.
        max_new_tokens: budget; a context that is too short for it ends the text earlier.
        stop_ids: tokens that end the text; the ending token is part of it.
        rng: source of every random choice; seeded from entropy if not given.
        trace: filled on the way.
        finished: called on the generated tokens after each round, to stop on strings.

    Raises:
        UserError: a bad prompt, or a target that gives logits of NaN or +inf.
    """
    check_prompt(target, prompt, max_new_tokens)
    rng = rng or TorchRng(device=target.runner.device)
    if warp.greedy and isinstance(rng, TorchRng):
        rng = rng.for_greedy()
    trace = Trace() if trace is None else trace
    drafter, stop, rule, device = system.drafter, system.stop, system.rule, target.runner.device
    compare_tokens = warp.greedy and rule.exact and rule.neutral
    ids = list(prompt)
    # the last generated token is never read, so the text may be one longer than the context
    end = min(len(prompt) + max_new_tokens, target.runner.limit + 1)
    clock = time.perf_counter
    began = clock()
    target.runner.reserve(end)
    target.runner.captured_layers = drafter.captured_layers
    target.prefill(ids[:-1])
    drafter.stop_ids = stop_ids
    drafter.start(ids)
    stop.start()
    rule.start()
    synchronize(device)
    trace.prefill_seconds += clock() - began

    while len(ids) < end:
        t0 = _mark(device)
        stop.begin()
        room = end - len(ids) - 1
        draft = drafter.propose(ids, stop, room, rng)
        t1 = _mark(device)
        logits = target.score(ids[-1], draft)
        if not math.isfinite(_checksum(logits)):
            raise UserError(
                f"the target's logits are NaN or +inf after {len(ids)} tokens; check its weights, or load it in "
                "bfloat16 or float32"
            )
        texts = [draft.text_before(ids, i) for i in range(-1, len(draft))] if warp.needs_prefix else None
        probs: Tensor | Callable[[], Tensor]
        measured: Measured
        if compare_tokens and draft.is_chain:
            top = warp.top(logits, texts)
            path, token, agreed = verify_greedy(draft, top)
            probs, measured = partial(one_hot, top, logits), (agreed if len(draft) else None, None, None)
        else:
            probs = warp(logits, texts)
            path, token, measured = _verify(draft, probs, logits, rule, rng)
        target.commit(path)
        t2 = _mark(device)
        seconds = _seconds(t0, t1), _seconds(t1, t2)
        result = Round(draft, path, token, probs, logits, target.hidden, seconds)
        new = _cut(result.emitted, end - len(ids), stop_ids)
        ids += new
        if len(new) <= len(path):
            target.runner.truncate(len(ids) - 1)
        drafter.commit(ids)
        stop.observe(result)
        rule.observe(result)
        drafter.observe(result)
        cut = result.depth >= room or any(token in stop_ids for token in draft.ids)
        trace.close(result, *measured, cut=cut)
        trace.tokens += len(new)
        done = bool(new and new[-1] in stop_ids) or (finished is not None and finished(ids[len(prompt) :]))
        trace.total_seconds += clock() - began
        yield result, new
        began = clock()
        if done:
            return


def _checksum(logits: Tensor) -> float:
    """Σ of the rows' largest logits: not finite where one is NaN or +inf, or where a row rules out every token."""
    return logits.amax(-1).sum(dtype=torch.float32).item()


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


Measured = tuple[Values | None, Values | None, Values | None]


def _verify(draft: Draft, p: Tensor, logits: Tensor, rule: AcceptanceRule, rng: Rng) -> tuple[list[int], int, Measured]:
    """Accepted path, following token, and (overlap, tv spent, js distance) at the tested positions."""
    k = len(draft)
    if draft.probs is None:
        spent = None
        if rule.neutral or not k:
            path, token = verify_tree(draft, p, rng)
        else:
            path, token, spent = verify_tree_relaxed(draft, p, logits, rule, rng)
        overlap = _overlap_of_tree(draft, p, path)
        if overlap is not None and spent is None and not rule.exact:
            spent = torch.zeros_like(overlap)
        return path, token, (overlap, spent, None)
    q, x = draft.probs, draft.tokens
    raw = None
    if rule.needs_raw and draft.logits is not None:
        raw = (logits[:k], draft.logits)
    accept = rule.accept_prob(p[:k], q, x, raw)
    path, token = verify_chain(draft, p, accept, rule, rng)
    t = min(len(path) + 1, k)
    overlap = torch.minimum(p[:t], q[:t]).sum(-1)
    if rule.exact:
        return path, token, (overlap, None, None)
    spent = rule.tv_spent(p[:t], q[:t], x[:t], accept[:t])
    return path, token, (overlap, spent, js_distance(p[:t], q[:t]))


def _overlap_of_tree(draft: Draft, p: Tensor, path: list[int]) -> Tensor | None:
    """Σ min(p, q) at the tested nodes: under a one-hot q the target's probability of the tokens drafted below each."""
    rows = [0, *(node + 1 for node in path)]
    if draft.is_chain:
        return pick(p, draft.tokens[: len(rows)].to(p.device)) if len(draft) else None
    children = draft.children()
    masses = [p[r, list(children[r])].sum() for r in rows if children[r]]
    return torch.stack(masses) if masses else None


def decode(
    target: Target,
    system: System,
    warp: Warp,
    prompt: list[int],
    *,
    annotate: bool = False,
    **options: object,
) -> Output:
    """Decode one prompt to its end; see `rounds` for the options.

    Args:
        target: the model to decode from.
        system: the method.
        warp: logits to probabilities.
        prompt: token ids.
        annotate: also record who wrote each token and what was rejected there.
        options: passed to `rounds`.
    """
    out = Output(list(prompt), len(prompt), Trace())
    for result, new in rounds(target, system, warp, prompt, trace=out.trace, **options):  # type: ignore[arg-type]
        out.ids += new
        if annotate:
            out.written_by += who_wrote(result)[: len(new)]
            out.rejected += [[] for _ in new]
            if len(new) == result.accepted + 1:
                out.rejected[-1] = rejected_tokens(result)
    return out


def who_wrote(result: Round) -> list[str]:
    """``draft``, ``fix`` or ``target`` for each emitted token of a round."""
    last = "fix" if rejected_tokens(result) else "target"
    return ["draft"] * result.accepted + [last]


def rejected_tokens(result: Round) -> list[int]:
    """Drafted tokens that were proposed for the place of the round's last token."""
    last = result.path[-1] if result.path else -1
    return [t for t, parent in zip(result.draft.ids, result.draft.parents) if parent == last]
