"""Language models that draft several tokens in one forward: mask tokens stand for those before them (PARD, 2504.18583).

Slot 0 of a draft is the text's last token, slot i the i-th mask token behind it. Each slot gives the distribution of
the token that follows it, which does not depend on the tokens that are drawn in the slots before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from decode.models.api import Model
from decode.models.huggingface import attending


def mask_of(draft: Any) -> int | None:
    """The id of the mask token of a draft, opened or as it was loaded; None: it drafts a token in each forward."""
    config = getattr(draft.model if isinstance(draft, Model) else draft, "config", None)
    token: int | None = getattr(config, "pard_token", None)
    return token


@contextmanager
def masked(tokens: Tensor, start: Tensor, slot: Tensor, mask: int) -> Iterator[dict[str, Tensor]]:
    """Within it, a model's forward with the inputs that are given reads texts, and behind them slots of many drafts.

    A slot sees the text up to the last token before its draft, and the slots of its draft up to itself.

    Args:
        tokens: of the texts  # [batch, time]
        start: position of the last token before the draft, of each slot; -1 where there is none  # [batch, slots]
        slot: place of each in its draft, from 1  # [batch, slots]
        mask: id of the mask token.
    """
    texts, time = tokens.shape
    begin = torch.cat([torch.arange(time, device=tokens.device).expand(texts, -1), start], 1)
    place = torch.cat([torch.zeros_like(tokens), slot], 1)
    of_text, earlier = place[:, None] == 0, begin[:, None] <= begin[:, :, None]
    own = (begin[:, None] == begin[:, :, None]) & (place[:, None] <= place[:, :, None])
    allowed = torch.where(of_text, earlier, own)[:, None]  # by query and key
    positions = (begin + place).clamp_max(time - 1)  # what follows a text's end is not asked for
    with attending(allowed, positions):
        yield {"input_ids": torch.cat([tokens, torch.full_like(start, mask)], 1), "position_ids": positions}
