"""A draft in a real engine: acceptance as the engine counts it beside the predicted one, speed, and identity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from decode.bench.baselines import using_config
from decode.bench.session import Item
from decode.bench.statistics import median_interval
from decode.engines.acceptance import (
    Acceptance,
    ServedText,
    Text,
    acceptance,
    difference_error,
    marginal_rates,
    mean_length,
    predicted_drafts,
    round_cost,
    speedups,
    target_logprob,
    tokens_per_second,
)
from decode.engines.gap_causes import Cause, causes_in_files, causes_in_numbers
from decode.engines.launch import opened
from decode.engines.settings import EngineSettings
from decode.errors import UserError
from decode.models.loading import load_tokenizer
from decode.models.other_tokenizer import DraftModel
from decode.models.shapes import config_for
from decode.sampling import LogitsWarper

ASSUMED = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptance rates for which the speedup of an untrained draft is computed, the same at every position."""


@dataclass
class CheckOptions:
    """Draft lengths, temperatures and budget of a check."""

    draft_lengths: Sequence[int] = (3, 5, 7)  # tokens drafted per round; the engine is started once for each
    temperatures: Sequence[float] = (0.0, 1.0)  # 0 is greedy
    max_new_tokens: int = 64
    seed: int = 0
    chat: bool = False  # the prompts stand in the chat template, so the engine's ids of their texts are not compared


@dataclass
class Check:
    """Result of a check."""

    engine: str
    rows: list[dict[str, Any]] = field(default_factory=list)  # one for each temperature and draft length
    causes: list[Cause] = field(default_factory=list)  # of differences


def serve_check(
    engine: str,
    settings: EngineSettings,
    target: PreTrainedModel,
    draft: DraftModel,
    items: Sequence[Item],
    stop_ids: Sequence[int],
    options: CheckOptions,
    progress: Callable[[str], None] = lambda _: None,
    folders: tuple[str, str] | None = None,
) -> Check:
    """Run prompts through an engine, without and with the draft, and predict the acceptance.

    Args:
        engine: vllm or llama.cpp.
        settings: how the engine is started.
        target: as transformers loads it.
        draft: likewise.
        items: prompts.
        stop_ids: tokens that end a text.
        options: lengths, temperatures, budget.
        progress: called with the name of each step.
        folders: of target and draft, if the engine reads other files.

    Raises:
        UserError: the engine is missing, does not start, or does not answer.
    """
    context = max(len(item.ids) for item in items) + options.max_new_tokens + max(options.draft_lengths) + 1
    settings = dataclasses.replace(settings, context=context)
    folders = folders or (settings.target, settings.draft)
    checked, other_ids = Check(engine, causes=causes_in_files(*folders, context=context, engine=engine)), None

    def written(length: int | None) -> dict[float, list[ServedText]]:
        nonlocal other_ids
        drafted = f"{length} drafted tokens" if length else "no draft"
        progress(f"{engine}: starting, {drafted}")
        found: dict[float, list[ServedText]] = {}
        with opened(engine, settings, length) as server:
            if not options.chat:
                apart = (server.differs_in_ids(item.prompt.text, item.ids) for item in items[:4])
                other_ids = other_ids or next(filter(None, apart), None)
            for temperature in options.temperatures:
                progress(f"{engine}: {len(items)} texts at T = {temperature:g}, {drafted}")
                # the first request of a temperature compiles kernels and fills caches
                server.write(items[0].ids, temperature=temperature, seed=0, max_new_tokens=8, stop_ids=stop_ids)
                found[temperature] = [
                    server.write(
                        item.ids, temperature=temperature, seed=options.seed + i, max_new_tokens=options.max_new_tokens,
                        stop_ids=stop_ids,
                    )
                    for i, item in enumerate(items)
                ]  # fmt: skip
        return found

    def pairs(texts: Sequence[ServedText]) -> list[Text]:
        return [(item.ids, text.ids) for item, text in zip(items, texts)]

    if settings.url is None:
        plain = written(None)
    else:  # the server that runs has the draft
        plain = {t: _own_texts(target, items, stop_ids, t, options) for t in options.temperatures}
    progress("predicting acceptance from the texts")
    longest, greedy = max(options.draft_lengths), settings.draft_sampling == "greedy"
    predicted = {
        t: acceptance(target, draft, pairs(texts), LogitsWarper(t), longest, greedy_draft=greedy or not t)
        for t, texts in plain.items()
    }
    entropy = {t: target_logprob(target, pairs(texts), t) for t, texts in plain.items() if t}
    for length in options.draft_lengths:
        for temperature, texts in written(length).items():
            row = _row(engine, temperature, length, texts, plain[temperature], predicted[temperature], options)
            if settings.url is not None:
                row |= dict.fromkeys(("speedup", "speedup_ci95", "plain_tokens_per_second"))
            if temperature:
                (mean, se), (own, own_se) = target_logprob(target, pairs(texts), temperature), entropy[temperature]
                row |= {"target_logprob": mean, "plain_target_logprob": own}
                row["lossless"] = abs(mean - own) <= max(0.05, 4 * math.hypot(se, own_se))
            checked.rows.append(row)
    agreement = predicted[0.0].agreement if 0.0 in predicted else None
    checked.causes += causes_in_numbers(checked.rows, other_ids=other_ids, agreement=agreement)
    return checked


def _own_texts(
    target: PreTrainedModel, items: Sequence[Item], stop_ids: Sequence[int], temperature: float, options: CheckOptions
) -> list[ServedText]:
    """Texts of the target without a draft, written by transformers."""
    ends = {"eos_token_id": list(stop_ids) or None, "pad_token_id": next(iter(stop_ids), 0)}
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    texts = []
    for i, item in enumerate(items):
        prompt = torch.tensor([item.ids], device=target.device)
        with using_config(target, GenerationConfig(max_new_tokens=options.max_new_tokens, **ends, **sampling)):
            torch.manual_seed(options.seed + i)
            out = target.generate(prompt, attention_mask=torch.ones_like(prompt))
        texts.append(ServedText(out[0, len(item.ids) :].tolist(), math.nan))
    return texts


def fits(served: float, predicted: float, error: float) -> bool:
    """Whether two rates agree within two standard errors, or within 0.02 where there is no error."""
    return abs(served - predicted) <= max(2 * error if math.isfinite(error) else 0.0, 0.02)


def _row(
    engine: str,
    temperature: float,
    length: int,
    texts: Sequence[ServedText],
    plain: Sequence[ServedText],
    kept: Acceptance,
    options: CheckOptions,
) -> dict[str, Any]:
    """Served beside predicted at one temperature and draft length."""
    served = [text.drafts for text in texts]
    budget = options.max_new_tokens if engine == "llama.cpp" else None
    expected = [predicted_drafts(accept, n, length, budget=budget) for accept, n in zip(kept.texts, kept.lengths)]
    (mean, mean_se), (expected_mean, expected_se) = mean_length(served), mean_length(expected)
    # greedy texts are the same with a draft as without, so that the errors are those of the differences
    error = math.hypot(mean_se, expected_se) if temperature else difference_error(served, expected)
    positions = [
        {
            "position": i, "served_marginal": ours, "served_marginal_se": ours_se, "predicted_marginal": theirs,
            "predicted_marginal_se": theirs_se, "within": fits(ours, theirs, math.hypot(ours_se, theirs_se)),
        }
        for i, ((ours, ours_se), (theirs, theirs_se)) in enumerate(
            zip(marginal_rates(served, length), marginal_rates(expected, length)), 1
        )
    ]  # fmt: skip
    middle, low, high = median_interval(speedups(texts, plain))
    same = [a.ids == b.ids for a, b in zip(texts, plain)]
    shorter = (len(a.ids) < len(b.ids) and a.ids == b.ids[: len(a.ids)] for a, b in zip(texts, plain))
    return {
        "engine": engine,
        "temperature": temperature,
        "draft_length": length,
        "positions": positions,
        "served_length": mean,
        "served_length_se": mean_se,
        "predicted_length": expected_mean,
        "predicted_length_se": expected_se,
        "difference_se": error,
        "fits": fits(mean, expected_mean, error),
        "tokens_per_second": tokens_per_second(texts),
        "plain_tokens_per_second": tokens_per_second(plain),
        "speedup": middle,
        "speedup_ci95": [low, high],
        "identical_share": None if temperature else sum(same) / len(same),
        "texts": len(texts),
        "cut": 0 if temperature else sum(shorter),
    }


def write_untrained_draft(folder: Path, target: str, shape: str, seed: int) -> int:
    """Write a Llama of a shape with random weights and the target's tokenizer; returns its number of parameters.

    Raises:
        UserError: the shape is not width x layers x heads, or the heads do not divide the width into even parts.
    """
    parts = shape.lower().split("x")
    if len(parts) != 3 or not all(part.isdigit() and int(part) for part in parts):
        raise UserError(f"draft_shape is {shape!r}; give width x layers x heads, such as 192x2x3")
    width, layers, heads = map(int, parts)
    if width % heads or (width // heads) % 2:
        raise UserError(f"draft_shape is {shape!r}: {heads} heads do not divide a width of {width} into even parts")
    ours = AutoConfig.from_pretrained(target).get_text_config()
    ends = {key: getattr(ours, key, None) for key in ("bos_token_id", "eos_token_id")}
    config = config_for(
        "llama", hidden_size=width, layers=layers, heads=heads, vocab=ours.vocab_size,
        positions=ours.max_position_embeddings, extra=ends,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    load_tokenizer(target).save_pretrained(folder)
    return sum(weight.numel() for weight in model.parameters())


def time_untrained_draft(
    engine: str,
    settings: EngineSettings,
    items: Sequence[Item],
    options: CheckOptions,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Time rounds with an untrained draft, and compute its speedup at assumed acceptance rates.

    A round takes the same time whatever is accepted of its draft, so the speedup at a conditional acceptance rate a is
    (1 + a + a² + … + aᵏ) / cost of a round of k drafted tokens in steps of the target without a draft.
    """
    context = max(len(item.ids) for item in items) + options.max_new_tokens + max(options.draft_lengths) + 1
    settings = dataclasses.replace(settings, context=context)

    def written(length: int | None) -> list[ServedText]:
        progress(f"{engine}: {f'{length} drafted tokens' if length else 'no draft'}")
        with opened(engine, settings, length) as server:
            server.write(items[0].ids, temperature=0.0, seed=0, max_new_tokens=8, ignore_eos=True)
            how: dict[str, Any] = {"temperature": 0.0, "seed": 0, "max_new_tokens": options.max_new_tokens}
            return [server.write(item.ids, ignore_eos=True, **how) for item in items]

    plain, rows = written(None), []
    for length in options.draft_lengths:
        costs = [round_cost(text, alone) for text, alone in zip(written(length), plain)]
        for rate in ASSUMED:
            tokens = sum(rate**i for i in range(length + 1))
            middle, low, high = median_interval([tokens / cost for cost in costs])
            rows.append(
                {"acceptance": rate, "draft_length": length, "tokens_per_round": tokens, "speedup": middle,
                 "speedup_ci95": [low, high]}
            )  # fmt: skip
    return rows
