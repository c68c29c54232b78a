"""What a model's own ``generation_config.json`` asks of decoding: sampling settings, processors, and what is not met.

`generate` follows that file unless other settings are given, so decoding as a model's own `generate` would means to
read it too. What a user gives goes before it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from decode.core.sampling import Warp

NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings that change nothing."""

OTHERS: dict[Any, tuple[str, ...]] = {
    1: ("num_beams", "typical_p", "top_h", "encoder_repetition_penalty", "guidance_scale"),
    0: ("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "min_length", "min_new_tokens",
        "encoder_no_repeat_ngram_size"),
    None: ("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens",
           "sequence_bias", "watermarking_config", "stop_strings"),
}  # fmt: skip
"""By neutral value (None always is one) the fields that change what `generate` writes and are not followed here."""


def own_sampling(model: PreTrainedModel) -> dict[str, Any]:
    """The sampling settings of the model's ``generation_config``, those of `NEUTRAL`."""
    config = model.generation_config
    found = {name: getattr(config, name, None) for name in NEUTRAL}
    return {name: value for name, value in found.items() if value is not None and value != NEUTRAL[name]}


def own_processors(model: PreTrainedModel) -> list[LogitsProcessor]:
    """Further processors that the model's ``generation_config`` asks for, in the order of `generate`."""
    config, device = model.generation_config, model.get_input_embeddings().weight.device
    processors: list[LogitsProcessor] = []
    if getattr(config, "no_repeat_ngram_size", None):
        processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if getattr(config, "bad_words_ids", None):
        ends = config.eos_token_id
        ends = None if ends is None else torch.tensor([ends] if isinstance(ends, int) else ends, device=device)
        processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, ends))
    if getattr(config, "suppress_tokens", None):
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    return processors


def own_warp(model: PreTrainedModel, temperature: float, given: Mapping[str, Any]) -> Warp:
    """The sampling of a target: what is given, else what its ``generation_config`` says, else nothing.

    Args:
        model: the target.
        temperature: 0 is greedy.
        given: of `NEUTRAL`'s settings those that a user has set; None leaves one to the model.
    """
    settings = NEUTRAL | own_sampling(model) | {name: value for name, value in given.items() if value is not None}
    return Warp(temperature, **settings, processors=own_processors(model))


def described(model: PreTrainedModel, warp: Warp) -> str:
    """How decoding follows or leaves the model's ``generation_config``; empty where it asks for nothing."""
    config, parts = model.generation_config, []
    names = [name for name in own_sampling(model) if name == "repetition_penalty" or not warp.greedy]
    followed = [f"{name} {getattr(warp, name):g}" for name in names if getattr(warp, name) == getattr(config, name)]
    followed += [type(processor).__name__.removesuffix("LogitsProcessor") for processor in own_processors(model)]
    changed = [
        f"{name} {getattr(warp, name):g} for {getattr(config, name):g}"
        for name in names
        if getattr(warp, name) != getattr(config, name)
    ]
    if getattr(config, "do_sample", False) and warp.temperature != (own := getattr(config, "temperature", None) or 1.0):
        changed.append(f"temperature {warp.temperature:g} for {own:g}")
    others = ((name, neutral) for neutral, names in OTHERS.items() for name in names)
    missing = [name for name, neutral in others if getattr(config, name, None) not in (None, neutral)]
    parts += [f"follows {', '.join(followed)}"] if followed else []
    parts += [f"takes {', '.join(changed)}"] if changed else []
    parts += [f"does not follow {', '.join(missing)}, so texts differ from the model's own generate"] if missing else []
    return f"the model's generation_config: decoding {'; '.join(parts)}" if parts else ""
