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


def slots_of(lengths: Tensor) -> dict[str, Tensor]:
    """The slots of a draft after each token of texts, which has so many slots, ``[texts, time]``; on the host.

    Returns:
        ``start`` and ``slot`` of all masked slots as `masked` takes them; of each slot, ordered by its place in the
        draft, where its state is in ``kept``, the last token before its draft in ``begin``, and its place ``step``.
    """
    texts, time = lengths.shape
    drafts = [(torch.arange(1, int(row.max()))[:, None] < row).nonzero() for row in lengths]
    start = pad_sequence([draft[:, 1] for draft in drafts], batch_first=True, padding_value=time)
    slot = pad_sequence([draft[:, 0] + 1 for draft in drafts], batch_first=True)
    there = torch.cat([lengths > 0, start < time], 1).flatten().nonzero()[:, 0]
    step, begin = functional.pad(slot, (time, 0)).flatten()[there], _begins(start, time).flatten()[there]
    order = step.argsort(stable=True)
    return {"start": start, "slot": slot} | {"kept": there[order], "begin": begin[order], "step": step[order]}


def _begins(start: Tensor, time: int) -> Tensor:
    """The last token before the draft of each token and masked slot of texts, of a token itself."""
    return torch.cat([torch.arange(time, device=start.device).expand(len(start), -1), start], 1)


@contextmanager
def masked(tokens: Tensor, start: Tensor, slot: Tensor, mask: int | None) -> Iterator[dict[str, Tensor]]:
    """Within it, a model's forward with the inputs that are given reads texts, and behind them slots of many drafts.

    A slot sees the text up to the last token before its draft, and the slots of its draft up to itself.

    Args:
        tokens: of the texts  # [batch, time]
        start: position of the last token before the draft, of each slot; ``time`` where there is none  # [batch, slots]
        slot: place of each in its draft, from 1  # [batch, slots]
        mask: id of the mask token.
    """
    time = tokens.shape[1]
    begin, place = _begins(start, time), functional.pad(slot, (time, 0))
    query, key = begin[:, :, None], begin[:, None]
    allowed = ((place == 0)[:, None] & (key <= query)) | (key == query)  # attention is causal by position besides
    positions = (begin + place).clamp_max(time - 1)  # what follows a text's end is not asked for
    with attending(allowed[:, None], positions):
        yield {"input_ids": functional.pad(tokens, (0, slot.shape[1]), value=mask), "position_ids": positions}
