"""Transformers' own generation as baselines of a benchmark."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.core.draft import Ids, until_end
from decode.core.sampling import LogitsWarper
from decode.models.api import synchronize
from decode.models.open import own_processors
from decode.writing import side_by_side


def generate(
    name: str,
    target: PreTrainedModel,
    draft: Any,
    warp: LogitsWarper,
    prompts: Sequence[Ids],
    *,
    max_new_tokens: int,
    seed: int,
    stop_ids: Collection[int] = (),
    draft_length: int | None = None,
) -> tuple[list[Ids], float, int]:
    """Call ``generate`` once for several prompts, padded on the left; several prompts only for ``generate`` itself.

    The name is a key of `decode.methods.BASELINES`; of the model's own generation_config its processors alone are
    followed, as in decoding here. Without `stop_ids` texts have the full length. `draft_length` tokens are drafted in a
    round or looked up.

    Returns:
        The new tokens of each up to its end, the seconds it took (prompts included), and the target's forwards.
    """
    device, ends = target.get_input_embeddings().weight.device, sorted(stop_ids)
    ids, mask = side_by_side(prompts, device)
    forwards: list[None] = []
    given = () if warp.greedy else ("temperature", "top_k", "top_p", "min_p")
    config = GenerationConfig(  # a new one: a model's own may switch its cache off, or cost in other ways
        max_new_tokens=max_new_tokens, do_sample=not warp.greedy, repetition_penalty=warp.repetition_penalty,
        eos_token_id=ends or None, pad_token_id=ends[0] if ends else 0, use_cache=True,
        **{key: getattr(warp, key) or None for key in given},
    )  # fmt: skip
    draft_config = GenerationConfig(
        num_assistant_tokens=draft_length, num_assistant_tokens_schedule="constant", pad_token_id=0,
        assistant_confidence_threshold=0.0,
    )  # fmt: skip
    processors, drafting = own_processors(target), using_config(draft, draft_config) if draft else nullcontext()
    counting = target.register_forward_pre_hook(lambda *_: forwards.append(None))
    with counting, using_config(target, config), drafting:
        torch.manual_seed(seed)
        synchronize(device)
        began = time.perf_counter()
        out = target.generate(
            ids, attention_mask=mask, assistant_model=draft, logits_processor=processors,
            prompt_lookup_num_tokens=draft_length if name == "generate-prompt-lookup" else None,
        )  # fmt: skip
        synchronize(device)
        seconds = time.perf_counter() - began
    return [until_end(row, ends) for row in out[:, ids.shape[1] :].tolist()], seconds, len(forwards)


@contextmanager
def using_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Replace the generation config of a model inside the block."""
    before, model.generation_config = model.generation_config, config
    try:
        yield
    finally:
        model.generation_config = before
