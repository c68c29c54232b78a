"""What early layers, verification, stop rules and bookkeeping cost on this machine, in steps of plain decoding."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.core.rng import TorchRng
from decode.core.sampling import Warp
from decode.core.stopping import Confidence, StopRule, token_probability
from decode.core.synchronize import synchronize
from decode.core.target import Target
from decode.core.thresholds import Fixed
from decode.drafters.acceptance_probe import AcceptanceProbe
from decode.drafters.early_exit import EarlyExitDrafter
from decode.loop import System, decode
from decode.measure.cost import CostModel
from decode.measure.forward_timer import time_forwards
from decode.methods import MethodInputs, build
from decode.models.runners.fast_runner import FastRunner
from decode.models.runners.layer_subset import LayerSubset
from decode.models.structure import decoder_layers

WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 25)
"""Tokens of the timed reads; costs between them are interpolated."""


@dataclass
class Costs:
    """Times of one model on one machine.

    Attributes:
        exits: for each exit layer a cost model whose v(n) verifies with the shared cache, in steps of plain decoding.
        confidence: what reading a confidence adds to each drafted token, by stop rule, in the same unit.
    """

    exits: dict[int, CostModel]
    confidence: dict[str, float] = field(default_factory=dict)


def of_weights(model: PreTrainedModel, exits: Sequence[int]) -> Costs:
    """Costs where the weights that are read decide, as for a large model at batch one on a GPU.

    Verification takes one step whatever the draft's length, a drafted token its share of layers and head, stop rules
    and bookkeeping nothing.
    """
    layers = [sum(p.numel() for p in layer.parameters()) for layer in decoder_layers(model)]
    head = model.get_output_embeddings().weight.numel()
    whole = sum(layers) + head
    return Costs({e: CostModel((sum(layers[:e]) + head) / whole, {1: 1.0}) for e in exits})


@torch.inference_mode()
def measure(
    runner: FastRunner,
    exits: Sequence[int],
    probes: dict[str, AcceptanceProbe],
    warp: Warp,
    prompts: Sequence[list[int]],
    *,
    max_new_tokens: int,
    seconds: float = 12.0,
) -> Costs:
    """Time early layers, verification behind them, stop rules and bookkeeping, in units of a plain decoding step.

    Args:
        runner: the target.
        exits: exit layers.
        probes: one of each kind, to time them.
        warp: decoding mode.
        prompts: a few, for whole texts.
        max_new_tokens: of these.
        seconds: no further turn of measurements begins after this time.
    """
    context = max(1, min(len(prompts[0]) + max_new_tokens // 2, runner.limit - WIDTHS[-1] - 1))
    tokens = (torch.arange(context + WIDTHS[-1], device=runner.device) * 7919 + 1) % runner.vocab_size
    runner.truncate(0)
    runner.reserve(len(tokens) + 1)
    runner.read(tokens[:context], head=0)
    times: dict[tuple[int, int], list[float]] = {}
    warping: dict[int, list[float]] = {n: [] for n in WIDTHS}
    began = time.perf_counter()
    for turn in range(12):
        if turn > 3 and time.perf_counter() - began > seconds:
            break
        for layer in exits:
            for n in WIDTHS:
                draft, verify, warped = _draft_and_verify(runner, layer, n, warp, tokens[context:], context)
                if turn:
                    warping[n].append(warped)
                    times.setdefault((layer, n), []).append(verify)
                    times.setdefault((layer, 0), []).extend(draft)
    middle = _smooth({key: _typical(seen) for key, seen in times.items()}, exits)
    step, per_round = _bookkeeping(runner, exits[0], warp, prompts, max_new_tokens)
    base = step  # of decoding without a draft as it is: no read behind early layers is as fast
    watched = _confidences(runner, exits[0], probes, warp, tokens, context)
    plain = watched.pop("length")
    rows = {n: _typical(warping[n]) - _typical(warping[2]) for n in WIDTHS}  # a round of two rows has its in per_round
    costs = Costs({}, {name: max(0.0, (spent - plain) / base) for name, spent in watched.items()})
    for layer in exits:
        early = middle[layer, 0]
        handling = max(0.0, plain - middle[exits[0], 0])
        costs.exits[layer] = CostModel(
            early / base,
            {n: (middle[layer, n] + max(0.0, rows[n])) / base for n in WIDTHS},
            overhead=max(0.0, per_round - handling) / base,
            draft_overhead=handling / base,
            target_seconds=base,
            draft_seconds=early,
            context=context,
        )
    runner.truncate(0)
    return costs


def _typical(seconds: Sequence[float]) -> float:
    """The lower quartile: other programs only ever make a measurement longer."""
    return float(np.quantile(seconds, 0.25))


def _smooth(times: dict[tuple[int, int], float], exits: Sequence[int]) -> dict[tuple[int, int], float]:
    """Times of three exits and more on the straight line through them: every layer costs the same."""
    if len(exits) < 3:
        return times
    lines = {n: np.polyfit(exits, [times[layer, n] for layer in exits], 1) for n in (0, *WIDTHS)}
    return {(layer, n): max(1e-9, float(np.polyval(lines[n], layer))) for layer, n in times}


def _draft_and_verify(
    runner: FastRunner, layer: int, n: int, warp: Warp, tokens: Tensor, context: int
) -> tuple[list[float], float, float]:
    """Seconds of each early read of n − 1 tokens, of the read of n that takes them up, and of warping its rows."""
    clock, subset = time.perf_counter, LayerSubset(layer)
    draft = []
    for i in range(n - 1):
        began = clock()
        runner.read_subset(tokens[i : i + 1], subset)
        synchronize(runner.device)
        draft.append(clock() - began)
    began = clock()
    logits = runner.read(tokens[:n])
    synchronize(runner.device)
    verify = clock() - began
    began = clock()
    warp.top(logits) if warp.greedy else warp(logits)
    synchronize(runner.device)
    warped = clock() - began
    runner.truncate(context)
    return draft, verify, warped


def _confidences(
    runner: FastRunner, layer: int, probes: dict[str, AcceptanceProbe], warp: Warp, tokens: Tensor, context: int
) -> dict[str, float]:
    """Seconds of a drafted token under each stop rule, bookkeeping included."""
    rules: dict[str, Confidence | None] = {"length": None, "token": token_probability, **probes}
    drafter = EarlyExitDrafter(runner, warp, LayerSubset(layer))
    rng = TorchRng(0, runner.device)
    rng = rng.for_greedy() if warp.greedy else rng
    spent: dict[str, list[float]] = {name: [] for name in rules}
    runner.truncate(0)
    runner.read(tokens[:context], head=0)
    ids = tokens[: context + 1].tolist()
    for turn in range(12):
        for name, confidence in rules.items():
            stop = StopRule(8, confidence, threshold=Fixed(-1.0))
            stop.begin()
            began = time.perf_counter()
            drafter.propose(ids, stop, 8, rng)
            synchronize(runner.device)
            if turn:
                spent[name].append((time.perf_counter() - began) / 8)
            runner.truncate(context)
    return {name: _typical(seen) for name, seen in spent.items()}


def _bookkeeping(
    runner: FastRunner, layer: int, warp: Warp, prompts: Sequence[list[int]], max_new_tokens: int
) -> tuple[float, float]:
    """Seconds of a plain step, and those outside the forwards of a round that drafts one token."""

    def seconds(system: Any, *, forwards: bool) -> float:
        spent = []
        for i, ids in enumerate(prompts):
            with time_forwards(runner) as watch:
                out = decode(
                    Target(runner), system, warp, ids, max_new_tokens=max_new_tokens, rng=TorchRng(i, runner.device)
                )
            rounds = out.trace.rounds
            # the prompt's read is inside a forward too, so nothing of it is left behind
            left_out = out.trace.prefill_seconds if forwards else watch.seconds
            spent.append((out.trace.total_seconds - left_out) / max(1, rounds))
        return statistics.median(spent)

    plain = build("autoregressive", MethodInputs(runner, warp))
    drafted = System("one", EarlyExitDrafter(runner, warp, LayerSubset(layer)), StopRule(1))
    return seconds(plain, forwards=True), seconds(drafted, forwards=False)
