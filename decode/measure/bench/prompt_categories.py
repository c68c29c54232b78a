"""The categories of a suite: what a benchmark measured, separately for each."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from decode.measure.bootstrap_statistics import Record, ratio_interval, speeds, sums_by


def category_rows(
    record: Record, of: Mapping[str, Record], categories: Sequence[str], seed: int
) -> list[dict[str, Any]]:
    """One row for each category: speeds, block efficiency and α with their bootstrap intervals over prompts.

    Args:
        record: a method's texts.
        of: the records that it is compared with (`speeds`).
        categories: of each prompt.
        seed: of the bootstrap.

    Returns:
        The rows; empty where all prompts are of one category.
    """
    names = list(dict.fromkeys(categories[: len(record.texts)]))
    if len(names) < 2:
        return []
    rows = []
    for name in names:
        kept = [i for i in range(len(record.texts)) if categories[i] == name]
        part, base = _part(record, kept), {method: _part(theirs, kept) for method, theirs in of.items()}
        rows.append({"category": name, "prompts": len(kept), **speeds(part, base, seed), **acceptance(part, seed)})
    return rows


def _part(record: Record, kept: Sequence[int]) -> Record:
    return Record([record.texts[i] for i in kept], record.greedy)


def acceptance(record: Record, seed: int) -> dict[str, Any]:
    """Block efficiency, and for our own methods that draft α, each with its bootstrap interval over prompts."""
    if not record.texts or not record.texts[0]:
        return {}
    if record.texts[0][0].trace is None:
        pairs = [(sum(len(t.new_ids) for t in texts), sum(t.forwards for t in texts)) for texts in record.texts]
        return _ratio("block_efficiency", pairs, seed)
    trace = record.trace()
    rounds = [1.0] * trace.rounds
    found = _ratio("block_efficiency", sums_by(trace.text, [m + 1 for m in trace.accepted], rounds), seed)
    distinct = record.trace(distinct=True)
    measured = [None if part is None else torch.as_tensor(part).double() for part in distinct.overlap]
    if any(part is not None and part.numel() for part in measured):
        sums = [0.0 if part is None else part.sum().item() for part in measured]
        counts = [0.0 if part is None else float(part.numel()) for part in measured]
        found |= _ratio("alpha", sums_by(distinct.text, sums, counts), seed)
    return found


def _ratio(name: str, pairs: Iterable[tuple[float, float]], seed: int) -> dict[str, Any]:
    middle, low, high = ratio_interval(pairs, seed)
    return {name: middle, f"{name}_ci95": [low, high]}
