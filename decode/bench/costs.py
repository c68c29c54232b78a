"""Measured costs, in one-token target forwards: c of a draft forward, v(n) of an n-token target forward.

Forwards are timed by `measure_costs`, the bookkeeping of decoding around them by `with_bookkeeping`, and drafting with
the target's own first layers by `exit_costs`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from decode import loop
from decode.drafters.base import NoDrafter
from decode.drafters.early_exit import EarlyExitDrafter
from decode.loop import Method
from decode.method_options import MethodOptions
from decode.methods import MethodInputs, build
from decode.models.block_runner import BlockRunner
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner
from decode.models.other_tokenizer import ForeignRunner
from decode.models.runner import Runner, synchronize
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import Confidence, Fixed, RoundCosts, StopRule, between, token_probability
from decode.trace import Trace

LONGEST = 15  # v(n) is measured for n up to LONGEST + 1
AGAIN = 0.5  # a rejection is as likely early as late in a draft: then half of it is read again where there is a state
VERIFIED = 3  # features that a block head reads before it drafts
BURST = 5  # most draft forwards in a row before a target forward is timed
SETTLE, STEADY = 0.03, 8
"""Seconds of one-token target forwards before timing starts, and the number of those that are timed."""
TURNS, LEAST_TURNS, MOST_SECONDS = 15, 3, 5.0
"""Turns of measurements; after the least number of them, no further one begins after so many seconds."""
REPEATS, ROUNDS = 3, 8  # bookkeeping is the median of so many repeats of so many rounds
EXIT_LENGTHS = (1, 2, 4, 8, 16, 24)  # draft lengths of early exits that are timed
RULED = 8  # tokens a round while stop rules are timed
EXIT_ROUNDS, EXIT_TURNS, EXIT_SECONDS = 4, 9, 20.0  # rounds of a text, most texts of each method, seconds of all


@dataclass
class CostModel:
    """Costs of one pair on one machine, in forwards of the target over one token of each sequence."""

    cost_ratio: float  # c; 0 without a draft model
    verify_cost: dict[int, float]  # v(n) at the measured n, v(1) = 1
    overhead: float = 0.0  # o, bookkeeping of a speculative round beyond that of a plain step
    draft_overhead: float = 0.0  # bookkeeping of a drafted token
    target_seconds: float = 0.0  # median time of a one-token target forward
    draft_seconds: float = 0.0  # median time of a one-token draft forward
    context: int = 0  # tokens in the caches during the measurement
    batch: int = 1  # sequences in every forward
    step_overhead: float = 0.0  # bookkeeping of a plain step
    read_again: float = 0.0  # tokens of the last round that a round reads again for each drafted one
    per_block: bool = False  # a draft forward drafts a whole block (DFlash, DSpark) instead of a token

    def v(self, n: float) -> float:
        """Cost of an n-token target forward, linear between the measured points and beyond them."""
        return between(self.verify_cost, n)

    @property
    def plain(self) -> float:
        """Cost of a plain step, bookkeeping included."""
        return 1 + self.step_overhead

    def drafting(self, drafted: float) -> float:
        """Cost of the draft forwards of so many tokens."""
        return self.cost_ratio * (min(1.0, drafted) if self.per_block else drafted)

    def of_round(self, drafted: float) -> float:
        """Cost of a round with this number of drafted tokens, bookkeeping included."""
        drafting = self.drafting(drafted) + drafted * self.draft_overhead
        return drafting + self.verifying(drafted + 1) + self.overhead + self.step_overhead

    def verifying(self, n: float) -> float:
        """Cost of the target forward of a round that verifies n − 1 tokens."""
        return self.v(n + self.read_again * (n - 1))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> CostModel:
        """The inverse of `to_dict`."""
        return cls(**{**content, "verify_cost": {int(n): float(v) for n, v in content["verify_cost"]}})

    def to_dict(self) -> dict[str, Any]:
        """For reports; v as a list of ``[n, v(n)]``."""
        return asdict(self) | {"verify_cost": [[n, v] for n, v in sorted(self.verify_cost.items())]}


def round_costs(costs: Iterable[CostModel]) -> RoundCosts:
    """Seconds of the parts of a round by batch size, bookkeeping included."""
    step, draft, verify, block = {}, {}, {}, {}
    for cost in costs:
        unit, b = cost.target_seconds, cost.batch
        step[b] = unit * cost.plain
        block[b] = unit * cost.cost_ratio * cost.per_block
        draft[b] = unit * (cost.cost_ratio + cost.draft_overhead) - block[b]
        verify[b] = {n: unit * (cost.verifying(n) + cost.overhead + cost.step_overhead) for n in cost.verify_cost}
    return RoundCosts(step, draft, verify, block)


@torch.inference_mode()
def measure_costs(
    target: Runner,
    draft: Runner | None = None,
    *,
    widths: Iterable[int] = range(1, LONGEST + 2),
    context: int = 128,
    batch: int = 1,
) -> CostModel:
    """Time the forwards of a pair in the order in which decoding runs them.

    A one-token target forward follows several others, as without a draft; draft forwards follow each other, and an
    n-token target forward follows n − 1 of them (at most `BURST`). In isolation the same forwards take between half and
    twice the time, depending on what the processor's caches hold.

    Args:
        target: the target.
        draft: the draft model, if there is one.
        widths: the n of v(n).
        context: tokens before the measured ones; fewer if a model's context is shorter.
        batch: sequences in every forward.
    """
    runners = [target] if draft is None or draft is target else [target, draft]
    room = min(runner.limit for runner in runners)
    widths = sorted({n for n in widths if 1 < n < room})
    steady = min(STEADY, room - 1)
    longest = max([steady, *widths])
    context = max(1, min(context, room - longest))
    if isinstance(draft, ForeignRunner):  # it drafts common tokens only, each of which is one of its own
        known = draft.vocabulary.target_ids.cpu()
    else:
        known = torch.arange(min(runner.vocab_size for runner in runners))
    random = torch.Generator().manual_seed(0)
    tokens = known[torch.randint(len(known), (context + longest,), generator=random)].to(target.device)
    caches: dict[int, list[Any]] = {id(runner): [] for runner in runners}
    block = isinstance(draft, BlockRunner)
    if isinstance(draft, BlockRunner):
        features = torch.randn(context, draft.head.feature_width, generator=random).to(draft.device, draft.dtype)

    def seconds(runner: Runner, n: int, times: int = 1) -> list[float]:
        """Times of successive n-token forwards after the context."""
        rows, found = caches[id(runner)], []
        for _ in range(times):
            feed = tokens[rows[0].length : rows[0].length + n].to(runner.device)
            if isinstance(runner, BlockRunner):
                for cache in rows:
                    cache.settle(features[:VERIFIED])
            synchronize(runner.device)
            began = time.perf_counter()
            if isinstance(runner, BlockRunner):
                runner.draft(rows, feed.tolist() * batch, [runner.head.drafts] * batch)
            else:
                runner.forward(rows, [feed] * batch, last=1 if n == 1 else None)
            synchronize(runner.device)
            found.append(time.perf_counter() - began)
        for cache in rows:
            cache.truncate(context)
        return found

    plain: list[float] = []
    drafting: list[float] = []
    verifying: dict[int, list[float]] = {n: [] for n in widths}
    try:
        for runner in runners:
            runner.reserve(rows=batch, capacity=len(tokens))
            for _ in range(batch):
                cache = runner.new_cache()
                caches[id(runner)].append(cache)
                if isinstance(runner, BlockRunner):
                    cache.settle(features)
                else:
                    runner.forward([cache], [tokens[:context].to(runner.device)], last=0)
        began = time.perf_counter()
        for turn in range(TURNS):
            if turn >= LEAST_TURNS and time.perf_counter() - began > MOST_SECONDS:
                break
            settled = 0.0
            while settled < SETTLE:
                settled += sum(seconds(target, 1, steady))
            plain += seconds(target, 1, steady)
            first = turn % max(1, len(widths))
            for n in widths[first:] + widths[:first]:
                if draft is not None:
                    drafting += seconds(draft, 1, 1 if block else min(n - 1, BURST))
                if draft is None or not turn:
                    seconds(target, n)  # warms up
                verifying[n] += seconds(target, n)
    finally:
        for runner in runners:
            for cache in caches[id(runner)]:
                cache.close()
            runner.reserve(rows=1)
    one, drafted = float(np.median(plain)), float(np.median(drafting or [0.0]))
    verify = {1: 1.0} | {n: float(np.median(times)) / one for n, times in verifying.items()}
    again = AGAIN * target.recurrent
    return CostModel(drafted / one, verify, 0, 0, one, drafted, context, batch, read_again=again, per_block=block)


def timed_rounds(
    target: Runner, method: Method, warp: LogitsWarper, prompts: Sequence[list[int]], count: int, seed: int = 0
) -> tuple[float, float, float, float]:
    """Decode some rounds of sequences together.

    Returns:
        Mean seconds of a round's drafting, of its verification and of the rest of it, and the mean number of tokens
        drafted for each sequence.
    """
    budget = count * (method.stop.window + 2)  # so that no draft is cut
    sequences = [
        loop.Sequence(target, method, warp, prompt, max_new_tokens=budget, rng=TorchRng(seed + i, target.device))
        for i, prompt in enumerate(prompts)
    ]
    for _ in islice(loop.run(target, method, sequences, len(sequences)), count * len(sequences)):
        pass
    whole = Trace()
    for one in sequences:
        whole.extend(one.trace)
    rounds, drafting, verifying = whole.rounds / len(prompts), sum(whole.draft_seconds), sum(whole.verify_seconds)
    rest = whole.total_seconds - whole.prefill_seconds - drafting - verifying
    return drafting / rounds, verifying / rounds, rest / rounds, sum(whole.drafted) / whole.rounds


def with_bookkeeping(
    cost: CostModel, target: Runner, draft: Runner, warp: LogitsWarper, prompts: Sequence[list[int]]
) -> CostModel:
    """The costs with the bookkeeping of a plain step, of a round beyond it, and of a drafted token.

    Bookkeeping is what a round takes beyond the models' forwards; two draft lengths separate its parts. It is measured
    on the CPU only, where a forward has ended when its call returns, and 0 elsewhere.
    """
    if target.device.type != "cpu":
        return cost
    rounds = []  # cost beyond the forwards and drafted tokens of a round, for each draft length
    for length in (0, 2, 8):
        inputs = MethodInputs(target, warp, draft if length else None, options=MethodOptions(length or None))
        method, found = build("vanilla" if length else "autoregressive", inputs), []
        for repeat in range(REPEATS):
            chosen = [prompts[(repeat * cost.batch + i) % len(prompts)] for i in range(cost.batch)]
            *parts, k = timed_rounds(target, method, warp, chosen, ROUNDS, repeat * cost.batch)
            found.append((sum(parts) / cost.target_seconds - cost.drafting(k) - cost.verifying(k + 1), k))
        rounds.append(np.median(found, axis=0).tolist())
    (plain, _), (short, few), (long, many) = rounds
    plain, slope = max(0.0, plain), max(0.0, (long - short) / (many - few)) if many > few else 0.0
    rest = max(0.0, short - slope * few - plain)
    return replace(cost, overhead=rest, draft_overhead=slope, step_overhead=plain)


def exit_costs(
    runner: FastRunner,
    exits: Sequence[int],
    probes: Mapping[str, Confidence],
    warp: LogitsWarper,
    prompts: Sequence[list[int]],
    *,
    longest: int = EXIT_LENGTHS[-1],
) -> tuple[dict[int, CostModel], dict[str, float]]:
    """Time rounds of decoding whose drafts exit early.

    Of many exits the first, the middle and the last one are timed: every layer costs the same, so the others lie on
    the straight line through them.

    Args:
        runner: the target.
        exits: exit layers.
        probes: one of each kind, to time them.
        warp: decoding mode.
        prompts: token ids, as long as the contexts that costs are wanted for.
        longest: longest draft that costs are wanted for.

    Returns:
        For each exit layer the costs in steps of plain decoding: v(n) verifies with the shared cache, c is that of the
        layers, and `draft_overhead` what a drafted token costs whatever the exit (head, bookkeeping). And, by the name
        of a confidence (``token`` and those of `probes`), what reading it adds to each drafted token.
    """
    timed = sorted({exits[0], exits[len(exits) // 2], exits[-1]})
    room = (runner.limit - max(map(len, prompts))) // EXIT_ROUNDS - 2
    lengths = [k for before, k in pairwise((0, *EXIT_LENGTHS)) if before < longest and k <= room] or [1]
    ruled, confidences = min(RULED, lengths[-1]), {"token": token_probability, **probes}
    drafters = {layer: EarlyExitDrafter(runner, warp, LayerSubset(layer)) for layer in timed}
    methods = {(0, 0, ""): Method("plain", NoDrafter(), StopRule(1))}
    methods |= {(e, k, ""): Method("length", drafters[e], StopRule(k)) for e in timed for k in lengths}
    for name, confidence in confidences.items():
        stop = StopRule(ruled, confidence, threshold=Fixed(-1.0))
        methods[timed[0], ruled, name] = Method(name, drafters[timed[0]], stop)
    seen: dict[tuple[int, int, str], list[tuple[float, ...]]] = {key: [] for key in methods}
    began = time.perf_counter()
    for turn in range(EXIT_TURNS):
        if turn > 3 and time.perf_counter() - began > EXIT_SECONDS:
            break
        for key, method in methods.items():
            count = EXIT_ROUNDS if key[1] else 4 * EXIT_ROUNDS
            drafting, *others, k = timed_rounds(runner, method, warp, [prompts[turn % len(prompts)]], count, turn)
            if turn:  # the first one warms up
                seen[key].append((drafting / max(1.0, k), *others))
    # the lower quartile: other programs only ever make a measurement longer
    low = {key: np.quantile(found, 0.25, axis=0) for key, found in seen.items()}  # drafting, verification, the rest
    step, degree = float(low[0, 0, ""][1:].sum()), min(1, len(timed) - 1)
    drafted = np.polyfit(timed, [np.median([low[e, k, ""][0] for k in lengths]) for e in timed], degree)
    fixed = max(0.0, float(drafted[-1])) * degree  # of a drafted token, whatever the exit
    bookkeeping = float(np.median([low[e, k, ""][2] for e in timed for k in lengths]))
    verified = {k + 1: np.polyfit(timed, [low[e, k, ""][1] for e in timed], degree) for k in lengths}
    costs = {}
    for layer in exits:
        seconds = max(1e-9, float(np.polyval(drafted, layer)) - fixed)
        widths = {n: max(1e-9, float(np.polyval(line, layer))) / step for n, line in verified.items()}
        known = {1: float(low[0, 0, ""][1]) / step} | widths
        overheads = bookkeeping / step, fixed / step
        costs[layer] = CostModel(seconds / step, known, *overheads, step, seconds + fixed, len(prompts[0]))
    unread = low[timed[0], ruled, ""][0]
    return costs, {name: max(0.0, float(low[timed[0], ruled, name][0] - unread)) / step for name in confidences}
