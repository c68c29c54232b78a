"""What early layers, verification, stop rules and bookkeeping cost on this machine, in steps of plain decoding."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

import numpy as np

from decode.bench.costs import CostModel
from decode.drafters.base import NoDrafter
from decode.drafters.early_exit import EarlyExitDrafter
from decode.loop import Method, rounds
from decode.models.fast_forward import LayerSubset
from decode.models.fast_runner import FastRunner
from decode.sampling import LogitsWarper, TorchRng
from decode.stopping import Confidence, Fixed, StopRule, token_probability
from decode.trace import Trace

LENGTHS = (1, 2, 4, 8, 16, 24)  # draft lengths that are timed; costs between them are interpolated
RULED = 8  # tokens a round while stop rules are timed
ROUNDS, TURNS = 4, 9  # rounds of a text that are timed, and most texts of every system


@dataclass
class Costs:
    """Times of one model on one machine."""

    # for each exit layer a cost model whose v(n) verifies with the shared cache, in steps of plain decoding; its c is
    # that of the layers, its `draft_overhead` what a drafted token costs whatever the exit (head, bookkeeping)
    exits: dict[int, CostModel]
    # what reading a confidence adds to each drafted token, by stop rule, in the same unit
    confidence: dict[str, float] = field(default_factory=dict)


def measure(
    runner: FastRunner,
    exits: Sequence[int],
    probes: Mapping[str, Confidence],
    warp: LogitsWarper,
    prompts: Sequence[list[int]],
    *,
    longest: int = LENGTHS[-1],
    seconds: float = 20.0,
) -> Costs:
    """Time rounds of decoding at fixed draft lengths: the drafted tokens, their verification, the bookkeeping.

    Of many exits the first, the middle and the last one are timed: every layer costs the same, so the others lie on
    the straight line through them.

    Args:
        runner: the target.
        exits: exit layers.
        probes: one of each kind, to time them.
        warp: decoding mode.
        prompts: token ids, as long as the contexts that costs are wanted for.
        longest: longest draft that costs are wanted for.
        seconds: no further turn of measurements begins after this time.
    """
    timed = sorted({exits[0], exits[len(exits) // 2], exits[-1]})
    room = (runner.limit - max(map(len, prompts))) // ROUNDS - 2
    lengths = [k for before, k in pairwise((0, *LENGTHS)) if before < longest and k <= room] or [1]
    ruled = min(RULED, lengths[-1])
    confidences: dict[str, Confidence] = {"token": token_probability, **probes}
    drafters = {layer: EarlyExitDrafter(runner, warp, LayerSubset(layer)) for layer in timed}
    systems = {(0, 0, ""): Method("plain", NoDrafter(), StopRule(1))}
    systems |= {(e, k, ""): Method("length", drafters[e], StopRule(k)) for e in timed for k in lengths}
    systems |= {
        (timed[0], ruled, name): Method(name, drafters[timed[0]], StopRule(ruled, confidence, threshold=Fixed(-1.0)))
        for name, confidence in confidences.items()
    } | {(timed[0], ruled, "length"): Method("length", drafters[timed[0]], StopRule(ruled))}
    seen: dict[tuple[int, int, str], list[tuple[float, float, float]]] = {key: [] for key in systems}
    began = time.perf_counter()
    for turn in range(TURNS):
        if turn > 3 and time.perf_counter() - began > seconds:
            break
        for key, system in systems.items():
            found = _timed_rounds(runner, system, key[1], warp, prompts[turn % len(prompts)], turn)
            if turn:  # the first one warms up
                seen[key].append(found)
    # the lower quartile: other programs only ever make a measurement longer
    draft, verify, rest = ({k: float(np.quantile([f[i] for f in v], 0.25)) for k, v in seen.items()} for i in range(3))
    plain = verify[0, 0, ""]
    step = plain + rest[0, 0, ""]
    slope, start = _line(timed, [float(np.median([draft[e, k, ""] for k in lengths])) for e in timed])
    lines = {k + 1: _line(timed, [verify[e, k, ""] for e in timed]) for k in lengths}
    reading = {name: draft[timed[0], ruled, name] - draft[timed[0], ruled, "length"] for name in confidences}
    bookkeeping = float(np.median([rest[e, k, ""] for e in timed for k in lengths]))
    costs = Costs({}, {name: max(0.0, spent) / step for name, spent in reading.items()})
    for layer in exits:
        costs.exits[layer] = CostModel(
            max(1e-9, slope * layer) / step,
            {1: plain / step} | {n: max(1e-9, a * layer + b) / step for n, (a, b) in lines.items()},
            overhead=bookkeeping / step,
            draft_overhead=max(0.0, start) / step,
            target_seconds=step,
            draft_seconds=slope * layer + start,
            context=len(prompts[0]),
        )
    return costs


def _timed_rounds(
    runner: FastRunner, system: Method, length: int, warp: LogitsWarper, prompt: list[int], seed: int
) -> tuple[float, float, float]:
    """Mean seconds of a drafted token, of a verification, and of what a round takes besides."""
    count, trace = ROUNDS if length else 4 * ROUNDS, Trace()
    rng = TorchRng(seed, runner.device)
    budget = count * (length + 2)  # so that no draft is cut
    for _ in islice(rounds(runner, system, warp, prompt, max_new_tokens=budget, rng=rng, trace=trace), count):
        pass
    draft, verify, n = sum(trace.draft_seconds), sum(trace.verify_seconds), len(trace.drafted)
    rest = trace.total_seconds - trace.prefill_seconds - draft - verify
    return draft / max(1, sum(trace.drafted)), verify / n, rest / n


def _line(x: Sequence[int], y: Sequence[float]) -> tuple[float, float]:
    """Slope and value at 0 of the straight line through the points; one point has a line through the origin."""
    if len(x) == 1:
        return y[0] / x[0], 0.0
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(start)
