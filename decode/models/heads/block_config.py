"""The configuration of block heads: their shape for a target, and the token that stands in the slots to be filled."""

import math
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen3Config

from decode.errors import UserError
from decode.files import Fields
from decode.models.heads.eagle import shape_of

BLOCK_ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dspark": "DSparkDraftModel",
    "dflash2": "DFlash2DraftModel",
}
CANDIDATES = 16  # of DFlash 2, as published and served
TAPS, GROUP = 2, 16  # of DFlash 2, as published


def default_layers(layers: int, count: int) -> tuple[int, ...]:
    """DFlash's target layers, counted from 0 as it counts them: spread evenly from layer 1 to layer N − 3.

    Raises:
        UserError: a target of too few layers.
    """
    if layers < 2:
        raise UserError(f"a block head reads states between the target's layers, and a target of {layers} has none")
    first = min(1, layers - 2)
    last = max(first, layers - 3)
    return tuple(sorted({round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def block_config(
    target: Any,
    version: str,
    *,
    layers: int,
    block: int,
    mask_id: int,
    target_layers: list[int] | None = None,
    draft_vocab: int | None = None,
    markov_rank: int = 0,
    confidence: bool = False,
    window: int | None = None,
    causal: bool = False,
) -> Qwen3Config:
    """The configuration of a block head of the target's width; its target layers are as published if not given.

    With a `window` (see `BlockLayer`) all layers slide.

    Raises:
        UserError: a number that does not fit the target.
    """
    depth = int(target.num_hidden_layers)
    ids = target_layers or list(default_layers(depth, max(3, layers)))
    if sorted(set(ids)) != list(ids) or ids[0] < 0 or ids[-1] >= depth - 1:
        raise UserError(
            f"the target layers of a block head are {list(ids)}; expected ascending numbers from 0 to {depth - 2} (the "
            f"last layer, {depth - 1}, is left out: its state is normed before heads can read it)"
        )
    return Qwen3Config(
        **shape_of(target),
        **added(version, target.hidden_size, markov_rank, confidence=confidence),
        draft_vocab_size=min(draft_vocab or target.vocab_size, target.vocab_size),
        num_target_layers=depth,
        num_hidden_layers=layers,
        layer_types=["full_attention" if window is None else "sliding_attention"] * layers,
        sliding_window=window,
        use_sliding_window=window is not None,
        target_layer_ids=list(ids),
        block_size=block,
        mask_token_id=mask_id,
        sample_from_anchor=version == "dspark",
        is_causal=causal,
    )


def added(version: str, width: int, markov_rank: int, *, confidence: bool) -> Fields:
    """The fields of a head's configuration that its version decides, beside those of every block head."""
    fields: Fields = {"architectures": [BLOCK_ARCHITECTURES[version]]}
    if version == "dflash2":
        convolutions = {"conv_kernel_size": TAPS, "conv_group_size": math.gcd(GROUP, width)}
        return fields | convolutions | {"selector_rank": markov_rank, "selector_top_k": CANDIDATES}
    return fields | {
        "markov_rank": markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and markov_rank > 0,
    }


UNUSED_NAMES = ("reserved", "unused", "extra_token", "placeholder", "<|extra", "[mask]", "<mask>", "<|mask")
"""Parts of the names of tokens that a tokenizer keeps for later use."""
UNWRITTEN = ("ÿ", "<0xFF>")  # the names of a byte that no text in UTF-8 holds


def mask_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """The id that stands in masked slots: one that no text holds, and neither pad nor the end of a text.

    In this order: a mask token of the tokenizer, a reserved token, a row of the embedding behind the tokenizer's ids,
    the byte 0xFF of a byte-level vocabulary, or the last special token that has no role and that the chat template does
    not name. ``rows`` are those of the target's embedding.

    Raises:
        UserError: there is none.
    """
    known: dict[str, int] = tokenizer.get_vocab()
    taken = {None, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}
    named = [token for token in known if any(part in token.lower() for part in UNUSED_NAMES)]
    reserved = [known[token] for token in named if token[:1] in "<[" or token in tokenizer.all_special_tokens]
    behind, roles = max(known.values(), default=-1) + 1, tokenizer.all_special_tokens
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    unused = [i for token, i in special.items() if token not in roles and token not in str(tokenizer.chat_template)]
    last = max(unused, default=None)
    for choice in (tokenizer.mask_token_id, *sorted(reserved), behind, *map(known.get, UNWRITTEN), last):
        if choice not in taken and choice < rows:
            return int(choice)
    raise UserError(
        "the target's vocabulary has no reserved token for masked slots, no row behind its ids and no unused byte: add "
        "a special token to its tokenizer that no text holds, or train a draft without (student.kind eagle3)"
    )
