"""Costs of a round that must not grow with a text or with the number of texts, each at two lengths.

    python tests/benchmarks/growth.py [ROW ...]

The model is random, of SmolLM2-135M's width with two layers; one thread. What must not grow in memory, tests count.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from decode.core.draft import Draft
from decode.core.sampling import LogitsWarper
from decode.core.stop import StopRule
from decode.drafters.base import Drafter, NoDrafter
from decode.loop import Method, Text, run
from decode.models.check import open_runner
from decode.models.fast.cache import NewTokens, Row
from decode.models.fast.forward import fast_runner
from decode.models.tokens import StopStrings

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tokenizers_of_kinds import byte_level

GREEDY = LogitsWarper()


def model(layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=40_000, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def ids(count: int, vocab: int = 1024) -> list[int]:
    return [(i * 7919 + i // 13) % vocab for i in range(count)]


def per_round(length: int, new: int, drafter: Drafter, warp: LogitsWarper = GREEDY) -> list[float]:
    """Milliseconds of each round after a prompt."""
    runner = open_runner(model())
    method = Method("", drafter, StopRule(8))
    spent, began = [], 0.0
    for _ in run(runner, method, [Text(runner, method, warp, ids(length), max_new_tokens=new)]):
        now = time.perf_counter()
        spent.append(1e3 * (now - began))
        began = now
    return spent[1:]


def stop_strings(length: int) -> dict[str, float]:
    """What a stop string costs a token, after a text of this length."""
    ends, text, spent = StopStrings(byte_level(), ["never to be met"]), ids(length, 256), []
    for _ in range(50):
        began = time.perf_counter()
        ends.ends(text)
        spent.append(time.perf_counter() - began)
    return {"ms a token": 1e3 * statistics.median(spent)}


class Wide(NoDrafter):
    """Drafts a tree of 60 nodes."""

    trees = True

    def draft(self, request: Any) -> Draft:
        return Draft(list(range(60)), [i - 3 if i > 2 else -1 for i in range(60)])


def penalty(length: int) -> dict[str, float]:
    """A round of a tree of 60 nodes with a repetition penalty, above one without; greedy."""
    warps = LogitsWarper(repetition_penalty=1.1), GREEDY
    with_it, without = (statistics.median(per_round(length, 24, Wide(), warp)) for warp in warps)
    return {"ms a round more": with_it - without}


def long_text(length: int) -> dict[str, float]:
    """Tokens after a prompt of this length: a round at the end beside one at the start, less attention's own share."""
    spent = per_round(length, length, NoDrafter())
    return {"ms at the start": statistics.median(spent[:100]), "ms at the end": statistics.median(spent[-100:])}


def batch_mask(length: int) -> dict[str, float]:
    """Where 6 new tokens of each of 64 texts belong, of which one is that long; one key head for three of queries."""
    network = fast_runner(model(layers=1)).network
    rows = [network.cache.new_row(Row) for _ in range(64)]
    new = [NewTokens(row, length - 64 * i, 6) for i, row in enumerate(rows)]
    network.place(new)
    began = time.process_time()
    network.place(new)
    return {"ms of CPU": 1e3 * (time.process_time() - began)}


ROWS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, int]]] = {
    "batch-mask": (batch_mask, (8000, 32_000)),
    "stop-strings": (stop_strings, (1000, 8000)),
    "penalty": (penalty, (1000, 4000)),
    "long-text": (long_text, (1000, 8000)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=", ".join(ROWS))
    torch.set_num_threads(1)
    table = Table("row", "length", "measured")
    for name in parser.parse_args().rows:
        measure, lengths = ROWS[name]
        for length in lengths:
            values = measure(length)
            table.add_row(name, f"{length:,}", ", ".join(f"{value:.4g} {unit}" for unit, value in values.items()))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
