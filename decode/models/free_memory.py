"""How much memory a device has left, and how many texts it holds."""

import math
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

GROWTH = 2.5  # memory that caches take for a moment while they grow, in caches


def rows_that_fit(
    device: torch.device, bytes_per_token: int, lengths: Sequence[int], batch_size: int | None = None
) -> int:
    """How many texts to have at once: as many as asked for, unless memory holds fewer, which a warning says.

    Args:
        device: that holds the caches.
        bytes_per_token: of the caches; 0 where that is unknown.
        lengths: tokens of the texts.
        batch_size: texts asked for; None: all.
    """
    longest, wanted = max(lengths, default=1), max(1, min(batch_size or len(lengths), len(lengths)))
    rows = wanted
    if bytes_per_token and (room := free_memory(device)) < math.inf:
        rows = max(1, min(wanted, int(room / (GROWTH * longest * bytes_per_token))))
    if rows < wanted:
        warnings.warn(
            f"memory holds {rows} texts of {longest} tokens; writing {rows} instead of {wanted} at once", stacklevel=3
        )
    return rows


def free_memory(device: torch.device) -> float:
    """Bytes that can still be allocated; infinite where the system does not tell."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    meminfo = Path("/proc/meminfo")
    if device.type == "cpu" and meminfo.exists():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return math.inf
