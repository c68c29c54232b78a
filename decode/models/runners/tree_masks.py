"""Attention masks of token trees, for every family whose masks transformers makes.

transformers describes each kind of mask (causal, sliding window, chunks) as a function of two positions, evaluated by
the function registered for the attention implementation. While a tree is read, the registry holds ours: it evaluates
the same function at the tree's positions (a node's depth, not its place in the cache) and hides other branches. So
every layer gets the mask of its own kind, whatever the family.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from decode.core.proposal import Draft

IMPLEMENTATIONS = ("sdpa", "eager")  # attention implementations that take any mask


def tree_mask(tree: Draft, past: int) -> Tensor:
    """bool ``[n + 1, past + n + 1]`` for the pending token and the tree: the past, itself, its ancestors."""
    n = len(tree) + 1
    mask = torch.ones(n, past + n, dtype=torch.bool)
    mask[0, past + 1 :] = False
    mask[1:, past + 1 :] = tree.ancestry()
    return mask


@contextmanager
def masks_of_tree(tree: Draft, past: int, implementation: str, device: torch.device) -> Iterator[None]:
    """Within it, transformers makes the masks of a forward over the pending token and the tree, behind `past` tokens.

    Not for threads that call other models meanwhile.
    """
    allowed = tree_mask(tree, past).to(device)[None, None]
    position = torch.cat([torch.arange(past), past + torch.tensor([0, *tree.depths()])]).to(device)
    one = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)

    def make(*, mask_function: Callable[..., Tensor], dtype: torch.dtype = torch.float32, **_: Any) -> Tensor:
        seen = mask_function(one, one, position[past:].view(1, 1, -1, 1), position.view(1, 1, 1, -1)) & allowed
        if implementation == "sdpa":
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)

    ALL_MASK_ATTENTION_FUNCTIONS[implementation] = make
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[implementation]


def tree_refusal(config: PreTrainedConfig, arguments: set[str]) -> str:
    """Why trees cannot be read, as far as the configuration says; empty if they can."""
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in IMPLEMENTATIONS:
        return f"its attention implementation {implementation} takes no tree mask; load it with sdpa or eager"
    if "position_ids" not in arguments or getattr(config, "alibi", False):
        return "it takes a token's position from its place in the cache (no position_ids)"
    if getattr(config, "attn_temperature_tuning", False):
        return "it scales attention by a token's place in the cache (attn_temperature_tuning)"
    window = getattr(config, "window_size", None)
    if isinstance(window, int) and "local" in str(getattr(config, "attention_layers", "")):
        return f"its local attention (window_size {window}) counts places in the cache, not positions"
    return ""
