"""The distillation loss alone, at large vocabularies: time and peak memory of each way to compute it."""

import ctypes
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import HEAVY_HEAD
from rich.console import Console
from torch import Tensor, nn
from transformers.utils import logging as hf_logging

from decode.core.runner_protocol import synchronize
from decode.models.free_memory import free_memory
from decode.report.bench_tables import plain_table
from distill.experiments.huggingface_trainer import selective_loss
from distill.losses.chunked_kl import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.token_selection import top_share
from distill.models.lm_head import LMHead
from distill.teacher.target_distribution import HiddenRows
from distill.training.lightning_trainer import quiet

BUFFERS = 14
"""Copies of all rows times the vocabulary that the plain loss may have alive at once, for a guess of its needs; the
figure reported is measured."""


@dataclass
class Sides:
    """Hidden states ``[rows, width]`` and output layers of draft, target and reference; the draft's have gradients."""

    hidden: list[Tensor]
    linears: list[nn.Linear]
    k: float  # Share of the rows that is selected; 1: all, without a reference

    @classmethod
    def of(cls, rows: int, vocab: int, width: int, k: float, device: torch.device) -> "Sides":
        """Random ones, the same for the same arguments."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            linears = [nn.Linear(width, vocab, bias=False).requires_grad_(i == 0).to(device) for i in range(3)]
            hidden = [torch.randn(rows, width, device=device).requires_grad_(i == 0) for i in range(3)]
        return cls(hidden, linears, k)

    def first(self, rows: int) -> "Sides":
        """The same with fewer rows."""
        hidden = [values[:rows].detach().requires_grad_(i == 0) for i, values in enumerate(self.hidden)]
        return Sides(hidden, self.linears, self.k)


def plain(sides: Sides) -> Tensor:
    """Whole logits, PyTorch's KLDivLoss, autograd."""
    draft, target = (linear(hidden) for linear, hidden in zip(sides.linears[:2], sides.hidden))
    if sides.k == 1:
        loss = torch.nn.KLDivLoss(reduction="none")(draft.log_softmax(-1), target.softmax(-1))
        return loss.sum(-1).mean()
    return selective_loss(draft, target, sides.linears[2](sides.hidden[2]), k=sides.k, mean=True)


def chunked(sides: Sides, *, compiled: bool = False) -> Tensor:
    """The one that trains here."""
    heads = [LMHead.of(linear) for linear in sides.linears]
    target, fused = HiddenRows(sides.hidden[1], heads[1]), partial(fused_loss, compiled=compiled)
    if sides.k == 1:
        return fused(sides.hidden[0], heads[0], target, LossRequest(Divergence(), metrics=False)).total / len(
            sides.hidden[0]
        )
    with torch.no_grad():  # once per run in training, and cached; here it is part of the time
        known = fused(sides.hidden[2], heads[2], target, LossRequest(Divergence(), metrics=False)).losses
    task = LossRequest(Divergence(), lambda values: top_share(values - known, sides.k), metrics=False)
    found = fused(sides.hidden[0], heads[0], target, task)
    assert found.chosen is not None
    return found.total / len(found.chosen)


def _liger() -> Iterator[tuple[str, Callable[[Sides], Tensor]]]:
    """Liger's losses of all rows, as far as they are installed: in PyTorch, and as Triton kernels on a GPU."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return
    chunks = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)

    def in_pytorch(sides: Sides) -> Tensor:
        labels = torch.zeros(len(sides.hidden[0]), dtype=torch.long, device=sides.hidden[0].device)
        pairs = [part for i in (0, 1) for part in (sides.hidden[i], sides.linears[i].weight)]
        loss: Tensor = chunks(*pairs, labels)
        return loss

    yield "Liger, PyTorch", in_pytorch
    if not torch.cuda.is_available():
        return
    from liger_kernel.transformers import LigerFusedLinearJSD

    kernel = LigerFusedLinearJSD(jsd_beta=0.0)
    yield (
        "Liger, Triton",
        lambda sides: kernel(sides.hidden[0], sides.linears[0].weight, sides.hidden[1], sides.linears[1].weight),
    )


def ways(k: float) -> dict[str, Callable[[Sides], Tensor]]:
    """How the mean loss of the selected rows can be computed here; those of others know no selection."""
    own: dict[str, Callable[[Sides], Tensor]] = {
        "plain": plain,
        "chunked": chunked,
        "compiled": partial(chunked, compiled=True),
    }
    return own | (dict(_liger()) if k == 1 else {})


def loss_table(
    rows: int, vocabularies: list[int], width: int, shares: list[float], rounds: int, threads: int
) -> list[dict[str, Any]]:
    """Seconds, peak memory and their ratios to the plain loss, for each vocabulary, share of the rows and way."""
    return [
        line
        for vocab in vocabularies
        for k in shares
        for line in alone(_measured, (rows, vocab, width, k, rounds), threads)
    ]


def show_losses(lines: list[dict[str, Any]], console: Console) -> None:
    """Prints the table."""
    if not lines:
        return
    cells = [
        [
            f"{line['vocab']:,}",
            f"{line['k']:g}",
            line["way"],
            f"{line['seconds']:.2f} s",
            f"{line['speedup']:.2f}",
            bytes_of(line["peak_bytes"]),
            "" if line["memory_ratio"] is None else f"{line['memory_ratio']:.1f}",
        ]
        for line in lines
    ]
    headings = ["ids", "selected", "computed", "time", "plain / it", "peak memory", "plain / it"]
    title = f"the loss alone, {lines[0]['rows']:,} tokens, with gradients"
    console.print(plain_table(title, headings, cells, HEAVY_HEAD))
    for line in lines:
        if line["measured_rows"] < line["rows"]:
            console.print(
                f"  {line['way']} does not fit here at {line['vocab']:,} ids: measured on {line['measured_rows']:,} "
                "tokens and scaled",
                highlight=False,
            )


def bytes_of(count: int | None) -> str:
    """For the table."""
    return "unknown" if count is None else f"{count / 1e6:,.0f} MB"


def _measured(case: tuple[int, int, int, float, int]) -> list[dict[str, Any]]:
    """The lines of one vocabulary and share. In turn, so that other work on the machine affects all ways alike."""
    rows, vocab, width, k, rounds = case
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole = Sides.of(rows, vocab, width, k, device)
    fits = rows
    while fits > 64 and fits * vocab * 4 * BUFFERS > free_memory(device) / 2:
        fits //= 2
    made = ways(k)
    sides = {name: whole.first(fits if name == "plain" else rows) for name in made}
    found: dict[str, list[tuple[float, int | None]]] = {name: [] for name in made}
    for number in range(rounds + 1):
        for name, way in made.items():
            one = _once(way, sides[name], device)
            if number:  # the first time kernels are compiled and memory is taken
                scale = rows / len(sides[name].hidden[0])
                found[name].append((one[0] * scale, None if one[1] is None else int(one[1] * scale)))
    lines = []
    for name, measured in found.items():
        seconds, peaks = zip(*measured)
        ratios = [first[0] / own[0] for first, own in zip(found["plain"], measured)]
        peak, first = (None if None in of else max(of) for of in (peaks, [peak for _, peak in found["plain"]]))
        line = {"vocab": vocab, "k": k, "way": name, "rows": rows, "measured_rows": len(sides[name].hidden[0])}
        line |= {"seconds": statistics.median(seconds), "speedup": statistics.median(ratios), "peak_bytes": peak}
        lines.append(line | {"memory_ratio": first / peak if first and peak else None})
    return lines


def _once(way: Callable[[Sides], Tensor], sides: Sides, device: torch.device) -> tuple[float, int | None]:
    """Seconds (of the processor, where it computes) and peak bytes of a loss with its gradients."""
    sides.hidden[0].grad = sides.linears[0].weight.grad = None
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # or the next peak begins in memory that is kept
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    synchronize(device)
    memory, started = Memory(device), clock()
    way(sides).backward()
    synchronize(device)
    return clock() - started, memory.peak()


class Memory:
    """Peak memory from now on, over what is in use now: the device's, or the process's on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        except OSError:
            self.before = -1
            return
        self.before = _status("VmRSS")

    def peak(self) -> int | None:
        """Bytes; None where this system does not say."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) - self.before
        return None if self.before < 0 else _status("VmHWM") - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def alone(work: Callable[[Any], Any], argument: Any, threads: int) -> Any:
    """The result of ``work(argument)`` in a fresh process, so that memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_quietly, (work, argument, threads))


def _quietly(work: Callable[[Any], Any], argument: Any, threads: int) -> Any:
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with quiet():
        return work(argument)
