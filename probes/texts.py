"""Texts that the target writes itself, many at once: what probes are trained and judged on."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel

from decode.core.sampling import Warp

Text = tuple[list[int], int]
"""Token ids, and how many of them are the prompt."""


@torch.inference_mode()
def write_texts(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    warp: Warp,
    *,
    stop_ids: Collection[int],
    max_new_tokens: int,
    batch_size: int = 32,
    seed: int = 0,
) -> list[Text]:
    """The model's own continuation of every prompt.

    Args:
        model: the target.
        prompts: token ids.
        warp: greedy, or temperature and top-p.
        stop_ids: tokens that end a text; the ending one is part of it.
        max_new_tokens: longest continuation; less where the context ends.
        batch_size: prompts at once.
        seed: of sampling.

    Returns:
        The texts in the order of the prompts.
    """
    room = int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    texts: dict[int, Text] = {}
    pad = min(stop_ids, default=0)
    sampling = {} if warp.greedy else {"temperature": warp.temperature, "top_p": warp.top_p, "top_k": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for at in range(0, len(order), batch_size):
            chosen = order[at : at + batch_size]
            longest = max(len(prompts[i]) for i in chosen)
            ids = torch.full((len(chosen), longest), pad)
            mask = torch.zeros_like(ids)
            for row, i in enumerate(chosen):
                ids[row, longest - len(prompts[i]) :] = torch.tensor(prompts[i])
                mask[row, longest - len(prompts[i]) :] = 1
            config = GenerationConfig(
                max_new_tokens=max(1, min(max_new_tokens, room - longest)),
                do_sample=not warp.greedy,
                eos_token_id=sorted(stop_ids) or None,
                pad_token_id=pad,
                **sampling,
            )
            out = model.generate(
                ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config
            ).tolist()
            for i, row_ids in zip(chosen, out):
                new = row_ids[longest:]
                end = next((j + 1 for j, token in enumerate(new) if token in stop_ids), len(new))
                texts[i] = (list(prompts[i]) + new[:end], len(prompts[i]))
    return [texts[i] for i in range(len(prompts))]
