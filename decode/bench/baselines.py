"""Transformers' own generation as baselines of a benchmark."""

import copy
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging as hf_logging

from decode.models.runner import synchronize
from decode.sampling import LogitsWarper

TRANSFORMERS_BASELINES: dict[str, int | None] = {
    "generate": None,
    "generate-assistant": 5,
    "generate-assistant-dynamic": 20,
    "generate-prompt-lookup": 10,
}
"""Baselines with their draft lengths where none is given.

``generate-assistant`` drafts a fixed number of tokens as `vanilla` does; ``generate-assistant-dynamic`` has
transformers' defaults, up to 20 tokens and a confidence of 0.4.
"""

NEEDS_DRAFT = {"generate-assistant", "generate-assistant-dynamic"}


@dataclass
class TransformersBaseline:
    """One way of calling ``generate``."""

    name: str  # a key of `TRANSFORMERS_BASELINES`
    target: PreTrainedModel  # the model
    draft: PreTrainedModel | None  # the assistant, for the methods that take one
    warp: LogitsWarper  # sampling settings; further processors are those of the model's own generation_config
    stop_ids: Collection[int] = ()  # tokens that end a text; none generates to the full length
    draft_length: int | None = None  # tokens drafted in a round or looked up

    def run(self, prompts: Sequence[list[int]], max_new_tokens: int, seed: int) -> tuple[list[list[int]], float, int]:
        """Generate for several prompts in one call, padded on the left; several prompts only for ``generate``.

        Returns:
            The new tokens of each up to its end, the seconds it took (prompts included), and the target's forwards.
        """
        model: Any = self.target
        device, warp, ends = model.get_input_embeddings().weight.device, self.warp, sorted(self.stop_ids)
        longest, forwards, extra = max(map(len, prompts)), [0], dict[str, Any]()
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        config, fixed = copy.deepcopy(model.generation_config), self.name == "generate-assistant"
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
        draft_config = GenerationConfig(
            num_assistant_tokens=self.draft_length,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0 if fixed else 0.4,
            pad_token_id=0,
        )
        if self.name in NEEDS_DRAFT:
            extra["assistant_model"] = self.draft
        if self.name == "generate-prompt-lookup":
            extra["prompt_lookup_num_tokens"] = self.draft_length

        def count(*_: object) -> None:
            forwards[0] += 1

        hook = model.register_forward_pre_hook(count)
        try:
            with using_config(model, config), using_config(self.draft, draft_config):
                torch.manual_seed(seed)
                synchronize(device)
                began = time.perf_counter()
                out = model.generate(ids, attention_mask=mask, **extra)
                synchronize(device)
                seconds = time.perf_counter() - began
        finally:
            hook.remove()
        new = out[:, longest:].tolist()
        lengths = [next((i + 1 for i, token in enumerate(row) if token in self.stop_ids), len(row)) for row in new]
        return [row[:length] for row, length in zip(new, lengths)], seconds, forwards[0]


@contextmanager
def using_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the generation config of a model, if there is one, inside the block."""
    own = getattr(model, "generation_config", None)
    if model is not None:
        model.generation_config = config
    try:
        yield
    finally:
        if model is not None:
            model.generation_config = own


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' warnings about its own arguments."""
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(level)
