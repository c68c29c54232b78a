"""Costs that must not grow with a text or with the number of texts, each at two lengths.

    python tests/benchmarks/growth.py [ROW ...] [--json FILE]

Models are random, of SmolLM2-135M's shape with two layers unless a row says otherwise; one thread. A row that grows
with what it should not grow with shows it as a ratio that is far from the one expected.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from decode.core.draft import Draft
from decode.core.round import Round, metrics
from decode.core.sampling import LogitsWarper
from decode.core.stop import StopRule
from decode.drafters.base import NoDrafter
from decode.loop import Method, Text, decode, run
from decode.measure.acceptance import offline_alphas
from decode.models.check import open_runner
from decode.models.fast.cache import KVCache, NewTokens, Row
from decode.models.fast.forward import fast_runner
from decode.models.tokens import StopStrings
from decode.writing import draws_of_loop, write_texts

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from tokenizers_of_kinds import byte_level

GREEDY = LogitsWarper()


def model(layers: int = 2, positions: int = 20_000, kv_heads: int = 3) -> PreTrainedModel:
    """A random Llama of SmolLM2-135M's width."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=kv_heads, max_position_embeddings=positions, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def ids(count: int, vocab: int = 1024) -> list[int]:
    return [(i * 7919 + i // 13) % vocab for i in range(count)]


def seconds(work: Callable[[], Any], times: int = 3) -> float:
    """The median time."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent)


def prompt(length: int) -> dict[str, float]:
    """A prompt is read, by the loop and by transformers' generate, one after the other."""
    target = model(layers=8)
    runner, method, prompt_ids = open_runner(target), Method("", NoDrafter(), StopRule()), ids(length)
    tensor, ours, theirs = torch.tensor([prompt_ids]), [], []
    for _ in range(3):
        ours.append(seconds(lambda: decode(runner, method, GREEDY, prompt_ids, max_new_tokens=1), 1))
        theirs.append(seconds(lambda: target.generate(tensor, max_new_tokens=1, do_sample=False, pad_token_id=0), 1))
    return {
        "seconds": statistics.median(ours),
        "of transformers": statistics.median(a / b for a, b in zip(ours, theirs)),
    }


def prompt_memory(length: int) -> dict[str, float]:
    """Peak memory of reading a prompt, above what the opened model takes."""
    runner, method = open_runner(model()), Method("", NoDrafter(), StopRule())
    return {"MB": megabytes_more(lambda: decode(runner, method, GREEDY, ids(length), max_new_tokens=1))}


def trace(texts: int) -> dict[str, float]:
    """Metrics of so many texts of 60 rounds."""
    draft = Draft(range(3))
    rounds = [[Round(draft, [0], 5, [0, 5], overlap=[0.9, 0.4]) for _ in range(60)] for _ in range(texts)]
    return {"seconds": seconds(lambda: metrics(rounds))}


def per_token(prompt_length: int, new: int, **options: Any) -> list[float]:
    """Seconds of each round after a prompt."""
    runner = open_runner(model())
    method = Method("", options.pop("drafter", None) or NoDrafter(), StopRule(8))
    text = Text(runner, method, options.pop("warp", GREEDY), ids(prompt_length), max_new_tokens=new, **options)
    spent, began = [], 0.0
    for _ in run(runner, method, [text]):
        now = time.perf_counter()
        spent.append(now - began)
        began = now
    return spent[1:]


def stop_strings(length: int) -> dict[str, float]:
    """What a stop string costs a token, after a text of this length."""
    ends, text = StopStrings(byte_level(), ["never to be met"]), ids(length, 256)
    return {"ms a token": 1e3 * seconds(lambda: [ends.ends(text) for _ in range(20)]) / 20}


def budget(tokens: int) -> dict[str, float]:
    """A text of two tokens with a budget that is not used."""
    runner, method = open_runner(model(layers=30)), Method("", NoDrafter(), StopRule())
    first = decode(runner, method, GREEDY, ids(8), max_new_tokens=1).new_ids
    spent = seconds(lambda: decode(runner, method, GREEDY, ids(8), max_new_tokens=tokens, stop_ids=set(first)))
    return {"seconds": spent}


class Wide(NoDrafter):
    """Drafts a tree of 60 nodes."""

    trees = True

    def draft(self, request: Any) -> Draft:
        return Draft(list(range(60)), [i - 3 if i > 2 else -1 for i in range(60)])


def penalty(length: int) -> dict[str, float]:
    """A round of a tree of 60 nodes with a repetition penalty, above one without; greedy."""
    many = [LogitsWarper(repetition_penalty=1.1), GREEDY]
    with_it, without = (statistics.median(per_token(length, 24, warp=warp, drafter=Wide())) for warp in many)
    return {"ms a round more": 1e3 * (with_it - without)}


def runners(calls: int) -> dict[str, float]:
    """Texts of one token written call by call with an open runner."""
    target = model()
    runner = open_runner(target)

    def write() -> None:
        for _ in range(calls):
            write_texts(runner, [ids(4)], GREEDY, draws=draws_of_loop(0), budgets=1, stop_ids=())

    return {"seconds": seconds(write, 1)}


def long_text(length: int) -> dict[str, float]:
    """Tokens after a prompt of this length: a round at the end beside one at the start, less attention's own share."""
    spent = per_token(length, length)
    return {
        "ms at the start": 1e3 * statistics.median(spent[:100]),
        "ms at the end": 1e3 * statistics.median(spent[-100:]),
    }


def megabytes_more(work: Callable[[], Any]) -> float:
    """Peak memory of some work above what is held before it (Linux)."""

    def megabytes(name: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    before = megabytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    work()
    return megabytes("VmHWM") - before


def cache_growth(length: int) -> dict[str, float]:
    """Peak memory of a cache while the text of this length is read, in its size at the end."""
    cache = KVCache(10, 9, 64, torch.empty(0))
    size = length * cache.bytes_per_token / 2**20

    def fill() -> None:
        cache.reserve(1, length)
        for end in range(512, length + 1, 512):
            cache.grow(1, end)
            cache.tensor[..., end - 512 : end, :] = 1.0

    return {"of its size": megabytes_more(fill) / size}


def batch_mask(length: int) -> dict[str, float]:
    """Where 6 new tokens of each of 64 texts belong, of which one is that long; one key head for three of queries."""
    network = fast_runner(model(layers=1, positions=40_000)).network
    rows = [network.cache.new_row(Row) for _ in range(64)]
    new = [NewTokens(row, length - 64 * i, 6) for i, row in enumerate(rows)]
    network.place(new)
    began = time.process_time()
    network.place(new)
    return {"ms of CPU": 1e3 * (time.process_time() - began)}


def offline(length: int) -> dict[str, float]:
    """Peak memory of offline acceptance of a text with so many response tokens and 64,000 ids."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, max_position_embeddings=8192)  # fmt: skip
    target = AutoModelForCausalLM.from_config(config).eval()
    text = (ids(length + 8, 64_000), 8)
    return {"MB": megabytes_more(lambda: offline_alphas(target, {"": target}, [text], LogitsWarper(1.0)))}


def tree_trace(rounds: int) -> dict[str, float]:
    """Memory of the rounds of a text, each with a tree of 60 nodes."""
    runner, method = open_runner(model(layers=1)), Method("", Wide(), StopRule(8))
    text = Text(runner, method, GREEDY, ids(8), max_new_tokens=60 * rounds)
    tracemalloc.start()
    for _ in islice(run(runner, method, [text]), rounds):
        pass
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"KB a round": held / 1024 / rounds}


ROWS: dict[str, tuple[Callable[[int], dict[str, float]], tuple[int, int]]] = {
    "prompt": (prompt, (1000, 4000)),
    "prompt-memory": (prompt_memory, (1000, 4000)),
    "cache-growth": (cache_growth, (1024, 4096)),
    "batch-mask": (batch_mask, (8000, 32_000)),
    "offline": (offline, (512, 4096)),
    "tree-trace": (tree_trace, (50, 200)),
    "trace": (trace, (500, 2000)),
    "stop-strings": (stop_strings, (1000, 8000)),
    "budget": (budget, (64, 16_000)),
    "penalty": (penalty, (1000, 4000)),
    "runners": (runners, (2, 8)),
    "long-text": (long_text, (1000, 8000)),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), help=", ".join(ROWS))
    parser.add_argument("--json", type=Path, help="write the numbers there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table, found = Table("row", "length", "measured"), {}
    for name in arguments.rows:
        measure, lengths = ROWS[name]
        for length in lengths:
            found[f"{name} {length}"] = values = measure(length)
            table.add_row(name, f"{length:,}", ", ".join(f"{value:.4g} {unit}" for unit, value in values.items()))
    Console(width=100).print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
