"""Language models that draft several tokens in one forward: mask tokens stand for those before them (PARD, 2504.18583).

Slot 0 of a draft is the text's last token, slot i the i-th mask token behind it. Each slot gives the distribution of
the token that follows it, which does not depend on the tokens that are drawn in the slots before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from decode.models.huggingface import attending


def mask_of(draft: Any) -> int | None:
    """The id of the mask token of a draft, opened or as it was loaded; None: it drafts a token in each forward."""
    token: int | None = getattr(getattr(getattr(draft, "model", draft), "config", None), "pard_token", None)
    return token


def slots_of(lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The layout of texts whose tokens are each followed by a draft of so many slots, ``[texts, time]``, on the host.

    Returns:
        Of each token and of each masked slot behind the text the last token before its draft (of a token itself, of
        what fills up ``time``) and its place in the draft, both ``[texts, width]``; and where the slots are among all
        of these, ordered by their place.
    """
    drafts = [(torch.arange(int(row.max()))[:, None] + 1 < row).nonzero() for row in lengths]
    time, columns = lengths.shape[1], [[draft[:, i] for draft in drafts] for i in (0, 1)]
    starts = pad_sequence(columns[1], batch_first=True, padding_value=time)
    begin = torch.cat([torch.arange(time).expand(len(lengths), -1), starts], 1)
    place = functional.pad(pad_sequence(columns[0], batch_first=True) + 1, (time, 0))
    there = (functional.pad(lengths, (0, 1)).gather(1, begin) > place).flatten().nonzero()[:, 0]
    return begin, place, there[place.flatten()[there].argsort(stable=True)]


@contextmanager
def masked(tokens: Tensor, begin: Tensor, place: Tensor, mask: int | None) -> Iterator[dict[str, Tensor]]:
    """Within it, a model's forward with the inputs that are given reads texts, and behind them masked slots of drafts.

    A slot sees the text up to the last token before its draft, and the slots of its draft up to itself.

    Args:
        tokens: of the texts  # [batch, time]
        begin: see `slots_of`.
        place: the same.
        mask: id of the mask token.
    """
    query, key, time = begin[:, :, None], begin[:, None], tokens.shape[1]
    allowed = ((place == 0)[:, None] & (key <= query)) | (key == query)  # attention is causal by position besides
    positions = (begin + place).clamp_max(time - 1)  # what follows a text's end is not asked for
    with attending(allowed[:, None], positions):
        ids = functional.pad(tokens, (0, begin.shape[1] - time), value=mask)
        yield {"input_ids": ids, "position_ids": positions}
