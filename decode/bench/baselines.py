"""Transformers' own generation as baselines of a benchmark."""

import copy
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from decode.models.runner import synchronize
from decode.sampling import LogitsWarper

TRANSFORMERS_BASELINES = {
    "generate": "model.generate",
    "generate-assistant": "generate(assistant_model=…), the fixed draft length of `vanilla`",
    "generate-assistant-dynamic": "generate(assistant_model=…), its defaults: up to 20 tokens, confidence 0.4",
    "generate-prompt-lookup": "generate(prompt_lookup_num_tokens=…)",
}
"""Baselines by name, with their calls."""

NEEDS_DRAFT = {"generate-assistant", "generate-assistant-dynamic"}


@dataclass
class TransformersBaseline:
    """One way of calling ``generate``."""

    name: str  # a key of `TRANSFORMERS_BASELINES`
    target: PreTrainedModel  # the model
    draft: PreTrainedModel | None  # the assistant, for the methods that take one
    warp: LogitsWarper  # sampling settings; further processors are those of the model's own generation_config
    stop_ids: Collection[int] = ()  # tokens that end a text; none generates to the full length
    draft_length: int | None = None  # tokens drafted in a round (assistant of fixed length) or looked up

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int) -> tuple[list[list[int]], float, int]:
        """Generate for several prompts in one call, padded on the left; several prompts only for ``generate``.

        Returns:
            The new tokens of each up to its end, the seconds it took (prompts included), and the target's forwards.
        """
        model: Any = self.target
        device = model.get_input_embeddings().weight.device
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        extra: dict[str, Any] = {}
        with ExitStack() as stack:
            stack.enter_context(using_config(model, self._config(max_new_tokens)))
            if self.name in NEEDS_DRAFT:
                assert self.draft is not None
                stack.enter_context(using_config(self.draft, self._draft_config()))
                extra["assistant_model"] = self.draft
            if self.name == "generate-prompt-lookup":
                extra["prompt_lookup_num_tokens"] = self.draft_length or 10
            forwards = stack.enter_context(_counted(model))
            torch.manual_seed(seed)
            synchronize(device)
            began = time.perf_counter()
            out = model.generate(ids, attention_mask=mask, **extra)
            synchronize(device)
            seconds = time.perf_counter() - began
        return [cut_at(row, self.stop_ids) for row in out[:, longest:].tolist()], seconds, forwards[0]

    def _config(self, max_new_tokens: int) -> GenerationConfig:
        """The model's own generation config with the benchmark's settings."""
        warp, ends = self.warp, sorted(self.stop_ids)
        config = copy.deepcopy(self.target.generation_config)
        sampling = dict.fromkeys(("temperature", "top_k", "top_p", "min_p"))
        if not warp.greedy:
            sampling |= {name: getattr(warp, name) for name in sampling}
            sampling["min_p"] = sampling["min_p"] or None
        config.update(
            max_new_tokens=max_new_tokens,
            max_length=None,
            do_sample=not warp.greedy,
            num_beams=1,
            repetition_penalty=warp.repetition_penalty,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            **sampling,
        )
        return config

    def _draft_config(self) -> GenerationConfig:
        fixed = self.name == "generate-assistant"
        return GenerationConfig(
            num_assistant_tokens=(self.draft_length or 5) if fixed else 20,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0 if fixed else 0.4,
            pad_token_id=0,
        )


def cut_at(tokens: Sequence[int], ends: Collection[int]) -> list[int]:
    """Tokens up to and including the first end token."""
    last = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return list(tokens[: last + 1])


@contextmanager
def using_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config inside the block."""
    own = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _counted(model: Any) -> Iterator[list[int]]:
    count = [0]

    def add(*_: object) -> None:
        count[0] += 1

    hook = model.register_forward_pre_hook(add)
    try:
        yield count
    finally:
        hook.remove()


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' warnings about its own arguments."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
