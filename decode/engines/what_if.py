"""A draft that is not trained yet, timed in vLLM: random weights of its shape, and assumed acceptances."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from decode.bench.session import Item
from decode.bench.statistics import median_interval
from decode.engines.acceptance import ServedText, median, round_cost, tokens_per_second
from decode.engines.launch import opened
from decode.engines.settings import EngineSettings
from decode.errors import UserError, scratch_folder
from decode.models.shapes import config_for


def parse_shape(shape: str) -> tuple[int, int, int]:
    """Width, layers and heads of ``192x2`` or ``576x4x9``; heads are 64 wide where they are not given.

    Raises:
        UserError: another form, or a width that the heads do not divide into even parts.
    """
    parts = shape.lower().split("x")
    if len(parts) not in (2, 3) or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"draft_shape is {shape!r}; give width x layers, such as 192x2, or with heads 576x4x9")
    width, layers = int(parts[0]), int(parts[1])
    heads = int(parts[2]) if len(parts) == 3 else max(1, width // 64)
    if width % heads or (width // heads) % 2:
        raise UserError(f"draft_shape is {shape!r}: {heads} heads do not divide a width of {width} into even parts")
    return width, layers, heads


def write_random_draft(folder: Path, target: str, shape: str, seed: int) -> int:
    """A Llama of this shape with random weights and the target's vocabulary; returns its parameters."""
    ours = AutoConfig.from_pretrained(target).get_text_config()
    width, layers, heads = parse_shape(shape)
    config = config_for(
        "llama",
        hidden_size=width,
        layers=layers,
        heads=heads,
        vocab=ours.vocab_size,
        positions=ours.max_position_embeddings,
        extra={key: getattr(ours, key, None) for key in ("bos_token_id", "eos_token_id")},
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def marginal_rates(acceptance: float, length: int) -> list[float]:
    """α, α², …: the rates under the names by which vLLM takes them."""
    return [acceptance ** (i + 1) for i in range(length)]


def what_if(
    settings: EngineSettings,
    shape: str,
    rates: dict[str, Callable[[int], Sequence[float]]],
    items: Sequence[Item],
    lengths: Sequence[int],
    max_new_tokens: int,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time the target alone, then rounds with a random draft of a shape, and what they give at assumed acceptances.

    A round of k drafted tokens takes the same time whatever is accepted of them, and a random draft's are not: so the
    engine is started once for each length, and needs no way of accepting at given rates (vLLM's
    `rejection_sample_method: synthetic` is one, which its CPU build lacks).

    Args:
        settings: of vLLM; `draft` is filled in here.
        shape: as `parse_shape` takes it.
        rates: by label, marginal acceptance rates for a draft length.
        items: prompts.
        lengths: drafted tokens a round.
        max_new_tokens: of each text; no token ends one.
        seed: of the weights.
        progress: told what is being done.
    """
    say = progress or (lambda _: None)
    settings.context = max(len(item.ids) for item in items) + max_new_tokens + max(lengths) + 1

    def written(length: int | None) -> list[ServedText]:
        with opened("vllm", settings, length) as server:
            write = partial(server.write, temperature=0.0, seed=0, ignore_eos=True)
            write(items[0].ids, max_new_tokens=8)
            return [write(item.ids, max_new_tokens=max_new_tokens) for item in items]

    rows = []
    with scratch_folder() as folder:
        settings.draft = str(folder)
        parameters = write_random_draft(folder, settings.target, shape, seed)
        say("vllm: without a draft")
        plain = written(None)
        for length in lengths:
            say(f"vllm: {length} drafted tokens")
            out = written(length)
            costs = [round_cost(text, alone) for text, alone in zip(out, plain)]
            for label, rates_of in rates.items():
                tokens = 1 + sum(rates_of(length))
                middle, low, high = median_interval([tokens / cost for cost in costs])
                rows.append(
                    {
                        "acceptance": label,
                        "draft_length": length,
                        "tokens_per_round": tokens,
                        "round_cost": median(costs),
                        "speedup": middle,
                        "speedup_ci95": [low, high],
                    }
                )
    return {
        "shape": shape,
        "parameters": parameters,
        "plain_tokens_per_second": tokens_per_second(plain),
        "rows": rows,
    }
