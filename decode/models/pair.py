"""A target with its tokenizer and its draft, opened once and used for any number of texts and measurements."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from decode.models.choose_runner import open_draft_runner, open_runner
from decode.models.loading import load_model, load_tokenizer, open_draft
from decode.models.other_tokenizer import DraftModel
from decode.models.runner import Runner
from decode.sampling import LogitsWarper


@dataclass
class Pair:
    """A target and, where there is one, the draft model or feature head that drafts for it."""

    target: PreTrainedModel  # the target
    tokenizer: PreTrainedTokenizerBase  # the target's
    draft: DraftModel | None = None  # the draft
    target_name: str = ""  # the folder or Hub name that the target was loaded from
    draft_name: str | None = None  # the draft's
    pack: str = "auto"  # see `decode.models.choose_runner.open_runner`

    @cached_property
    def runner(self) -> Runner:
        """The target's forward with its cache."""
        return open_runner(self.target, pack=self.pack)

    @cached_property
    def draft_runner(self) -> Runner | None:
        """The draft's."""
        return None if self.draft is None else open_draft_runner(self.draft, self.target, self.pack)


def load(
    target: str | os.PathLike[str],
    draft: str | os.PathLike[str] | None = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    draft_vocabulary: str = "same",
    pack: str = "auto",
) -> Pair:
    """Open a target and, if given, a draft for it.

    Args:
        target: folder, Hub name or GGUF file.
        draft: the same of a draft model, or the folder of a feature head; ``None`` for methods without one.
        device: ``auto`` is the first GPU, without one the CPU.
        dtype: ``auto`` is the checkpoint's on a GPU, float32 on a CPU.
        device_map: passed to transformers, to spread the target over several devices.
        trust_remote_code: run the Python code that a Hub repository brings.
        draft_vocabulary: ``intersection`` takes a draft whose tokenizer differs from the target's; ``same`` refuses it.
        pack: see `decode.models.choose_runner.open_runner`.

    Raises:
        UserError: a model that cannot be read, or two that do not fit each other.
    """
    tokenizer = load_tokenizer(target, trust_remote_code=trust_remote_code)
    model = load_model(target, device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
    pair = Pair(model, tokenizer, target_name=str(target), pack=pack)
    if draft is not None:
        pair.draft_name = str(draft)
        pair.draft = open_draft(
            draft, model, tokenizer, vocabulary=draft_vocabulary, trust_remote_code=trust_remote_code
        )
    return pair


NEUTRAL: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Sampling settings that change nothing."""

UNSUPPORTED: dict[Any, tuple[str, ...]] = {
    1: ("num_beams", "typical_p", "top_h", "encoder_repetition_penalty", "guidance_scale"),
    0: ("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "min_length", "min_new_tokens",
        "encoder_no_repeat_ngram_size"),
    None: ("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "begin_suppress_tokens",
           "sequence_bias", "watermarking_config", "stop_strings"),
}  # fmt: skip
"""Fields that change the texts of `generate` and are not followed here, by their neutral value besides None."""


def own_sampling(model: PreTrainedModel) -> dict[str, Any]:
    """The settings of the model's ``generation_config`` that are in `NEUTRAL` and not neutral."""
    found = {name: getattr(model.generation_config, name, None) for name in NEUTRAL}
    return {name: value for name, value in found.items() if value is not None and value != NEUTRAL[name]}


def own_processors(model: PreTrainedModel) -> list[LogitsProcessor]:
    """Further processors that the model's ``generation_config`` asks for, in the order of `generate`."""
    config, device = model.generation_config, model.get_input_embeddings().weight.device
    processors: list[LogitsProcessor] = []
    if getattr(config, "no_repeat_ngram_size", None):
        processors.append(NoRepeatNGramLogitsProcessor(config.no_repeat_ngram_size))
    if getattr(config, "bad_words_ids", None):
        ends = None if config.eos_token_id is None else torch.tensor(config.eos_token_id, device=device).view(-1)
        processors.append(NoBadWordsLogitsProcessor(config.bad_words_ids, ends))
    if getattr(config, "suppress_tokens", None):
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    return processors


def own_warp(model: PreTrainedModel, temperature: float, given: Mapping[str, Any]) -> LogitsWarper:
    """The sampling of a target: given settings first, then those of its ``generation_config``.

    Args:
        model: the target.
        temperature: 0 is greedy.
        given: values for names in `NEUTRAL`; None leaves one to the model.
    """
    settings = NEUTRAL | own_sampling(model) | {name: value for name, value in given.items() if value is not None}
    return LogitsWarper(temperature, **settings, processors=own_processors(model))


def described(model: PreTrainedModel, warp: LogitsWarper) -> str:
    """Which fields of the model's ``generation_config`` are followed and which are not; empty without any."""
    config, own = model.generation_config, own_sampling(model)
    followed = [
        f"{name} {value:g}"
        for name, value in own.items()
        if getattr(warp, name) == value and (name == "repetition_penalty" or not warp.greedy)
    ]
    followed += [type(processor).__name__.removesuffix("LogitsProcessor") for processor in own_processors(model)]
    missing = [
        name for off, names in UNSUPPORTED.items() for name in names if getattr(config, name, None) not in (None, off)
    ]
    parts = [f"follows {', '.join(followed)}"] if followed else []
    parts += [f"does not follow {', '.join(missing)}, so texts differ from the model's own generate"] if missing else []
    return f"the model's generation_config: decoding {'; '.join(parts)}" if parts else ""
