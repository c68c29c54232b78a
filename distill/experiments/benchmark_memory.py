"""The memory of the distillation loss alone, at a large vocabulary, against the straightforward one."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as hf_logging

from distill.experiments.huggingface_trainer import selective_loss
from distill.losses.chunked_kl import LossRequest, fused_loss
from distill.losses.divergences import Divergence
from distill.losses.token_selection import top_share
from distill.models.lm_head import LMHead
from distill.teacher.target_distribution import HiddenRows
from distill.training.trainer import quiet

SIDES = ("straightforward", "draftsmith")

BUFFERS = 14
"""Copies of all rows times the vocabulary that the straightforward loss may have alive at once, for a guess of its
needs; the figure reported is measured."""

Size = tuple[int, int, int]  # rows, vocabulary, width of the hidden states


def loss_memory(rows: int, vocab: int, width: int, threads: int) -> dict[str, Any]:
    """Peak memory of both; where the straightforward one cannot fit, of the largest power-of-two share that does."""
    plain, room = rows, _room()
    while plain > 64 and plain * vocab * 4 * BUFFERS > room:
        plain //= 2
    sizes = {"straightforward": plain, "draftsmith": rows}
    works = {"straightforward": _loss_straightforward, "draftsmith": _loss_here}
    found: dict[str, Any] = {"rows": rows, "vocab": vocab, "measured_rows": sizes}
    for side in SIDES:
        seconds, peak = alone(works[side], (sizes[side], vocab, width), threads)
        scale = rows / sizes[side]
        found[side] = {"peak_bytes": None if peak is None else int(peak * scale), "seconds": seconds * scale}
    plain_peak, peak = (found[side]["peak_bytes"] for side in SIDES)
    found["memory_ratio"] = plain_peak / peak if plain_peak and peak else None
    found["scaled"] = plain < rows
    return found


def _sides(rows: int, vocab: int, width: int) -> list[tuple[torch.Tensor, torch.nn.Linear]]:
    """Hidden states and head of draft, target and reference; the draft's carry gradients."""
    generator = torch.Generator().manual_seed(0)
    sides = []
    for number in range(3):
        linear = torch.nn.Linear(width, vocab, bias=False).requires_grad_(number == 0)
        sides.append((torch.randn(rows, width, generator=generator).requires_grad_(number == 0), linear))
    return sides


def _loss_straightforward(size: Size) -> tuple[float, int | None]:
    sides, memory, started = _sides(*size), Memory(torch.device("cpu")), time.perf_counter()
    mask = torch.ones(size[0], dtype=torch.bool)
    logits = [linear(hidden) for hidden, linear in sides]  # whole logits, then cut to the label positions
    draft, target, reference = (values[mask] for values in logits)
    selective_loss(draft, target, reference, k=0.4, mean=True).backward()
    return time.perf_counter() - started, memory.peak()


def _loss_here(size: Size) -> tuple[float, int | None]:
    sides, memory, started = _sides(*size), Memory(torch.device("cpu")), time.perf_counter()
    heads = [LMHead.of(linear) for _, linear in sides]
    target = HiddenRows(sides[1][0], heads[1])
    with torch.no_grad():  # once per run in training, and cached; here it is part of the time
        known = fused_loss(sides[2][0], heads[2], target, LossRequest(Divergence(), metrics=False)).losses
    task = LossRequest(Divergence(), lambda values: top_share(values - known, 0.4), metrics=False)
    found = fused_loss(sides[0][0], heads[0], target, task)
    assert found.chosen is not None
    (found.total / len(found.chosen)).backward()
    return time.perf_counter() - started, memory.peak()


class Memory:
    """Peak memory from now on, over what is in use now: the device's, or the process's on Linux."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = 0
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
            return torch.cuda.max_memory_allocated(self.device)
        return None if self.before < 0 else _status("VmHWM") - self.before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _room() -> float:
    """Half the memory that is free."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 4e9
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")) / 2


def alone(work: Callable[[Any], Any], argument: Any, threads: int) -> Any:
    """The result of ``work(argument)`` in a fresh process, so that memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_quietly, (work, argument, threads))


def _quietly(work: Callable[[Any], Any], argument: Any, threads: int) -> Any:
    hf_logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with quiet():
        return work(argument)
