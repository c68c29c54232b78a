"""What the frozen target says of a batch: its distributions at label tokens, and the states that a head reads."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.models.heads.eagle import DraftHead, draft_ids
from distill.data.dataset import FEATURES, PLACES, Batch
from distill.engine.check import FIRST, AnswerCheck
from distill.kept import Shapes
from distill.losses.divergences import TargetRows, log_probs
from distill.networks.layers import entering
from distill.networks.lm_head import LMHead, one_text_a_row
from distill.networks.models import rows_at_once

HIDDEN, INSIDE = "target_hidden", "target_inside"
"""Columns of batches: the target's last hidden states ``[label tokens, hidden]``; and ``[label tokens, 2]``, the
probability that the target gives to the head's ids together, and whether its most probable token is one of them."""
TOPK = "target_topk"
"""The ids and log-probabilities of the k most probable ids, as int32 ``[label tokens, 2, k]``."""
States = tuple[Tensor, Tensor | None]
"""The target's last hidden states after its final norm ``[label tokens, hidden]``, and what a head reads of it
``[batch, time, width]``, zeros after the last label."""
Source = Callable[[Batch], States]
"""Gives the target's states of a batch: `read_states` by a forward pass here, `distill.signal.engine` by an engine."""
BYTES = {"float32": (4, 0), "bfloat16": (2, 0), "float8": (1, 4)}
"""Of a kept number, and of the scale of a layer's state of a token."""
FORMATS = {"float32": "float32", "bfloat16": "int16", "float8": "uint8"}
"""How numbers are kept, by numpy's name: it has no bfloat16 or float8, so that their bits are."""


def read_states(model: PreTrainedModel, layers: Sequence[int], batch: Batch) -> States:
    """The states of a batch by a forward pass of the target; a head reads those that enter ``layers``.

    The number of layers stands for the last hidden state, after the final norm.
    """
    ids, places = batch["input_ids"].to(model.device), batch[PLACES].to(model.device)
    # not the draft's precision: the target computes in its own
    with torch.autocast(model.device.type, enabled=False), torch.inference_mode(False), torch.no_grad():
        count = int(model.config.get_text_config().num_hidden_layers)
        with (
            one_text_a_row(model, places),
            entering(model, [layer for layer in layers if layer < count]) as states,
        ):
            last = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        features = torch.cat([states.get(layer, last) for layer in layers], -1) if layers else None
        return last.flatten(0, 1).index_select(0, places), features


def packed(states: Tensor, planes: int, dtype: str) -> Tensor:
    """States ``[..., planes · width]`` as they are kept: in float8 (e4m3) with a float32 scale for each plane."""
    if dtype != "float8":
        return states.bfloat16().view(torch.int16) if dtype == "bfloat16" else states.float()
    parts = states.float().unflatten(-1, (planes, -1))
    scale = parts.abs().amax(-1, keepdim=True).clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    numbers = (parts / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([numbers, scale.contiguous().view(torch.uint8)], -1).flatten(-2)


def unpacked(values: Tensor, planes: int) -> Tensor:
    """The states of their kept values ``[..., bytes or numbers]``."""
    if values.dtype == torch.int16:
        return values.view(torch.bfloat16)
    if values.dtype != torch.uint8:
        return values
    parts = values.unflatten(-1, (planes, -1))
    numbers, scale = parts[..., :-4].contiguous(), parts[..., -4:].contiguous()
    return (numbers.view(torch.float8_e4m3fn).float() * scale.view(torch.float32)).flatten(-2)


def label_tokens(batch: Batch) -> Tensor:
    """The labels of a batch ``[label tokens]``."""
    return batch["labels"].flatten().index_select(0, batch[PLACES] + 1)


class Signal:
    """The target as a draft sees it in training: `rows` reads it from the batch, or asks for its states.

    Not an ``nn.Module`` on purpose: the target is in no checkpoint, no optimiser and no distributed wrapper.

    Args:
        target: The target, of which output head and embedding alone are used, but for the next case.
        kind: ``online`` keeps nothing; ``hidden`` last hidden states; ``topk`` the k largest log-probabilities.
        source: Gives the states of a batch for which nothing is kept; None: ``target`` itself does, if it is online.
        reader: The draft that is trained, whose ids it gives, and a head's states; None: all ids.
        layers: Of a head whose vocabulary has yet to be chosen, the layers whose entering states it reads.
        vocab: Ids that target and draft share, of a language model. None: all of the target's.
        k: Of ``topk``.
        dtype: Number format in which states are kept (see `FORMATS`).

    Attributes:
        check: Looks at the labels of every batch whose states are not kept yet; None where servers wrote none of them.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        kind: Literal["hidden", "topk", "online"] = "online",
        reader: PreTrainedModel | DraftHead | None = None,
        source: Source | None = None,
        *,
        layers: Sequence[int] = (),
        vocab: int | None = None,
        k: int = 64,
        dtype: str = "float32",
    ) -> None:
        target.eval().requires_grad_(False)
        self.kind = kind
        self.model = target if kind == "online" and source is None else None
        self.all_ids = LMHead(target)
        self.ids = None if reader is None else draft_ids(reader)
        self.head = self.all_ids.only(self.ids)
        self.vocab = min(vocab or self.head.vocab, self.head.vocab)
        self.k = min(k, self.vocab)
        self.layers = tuple(reader.captured_layers if isinstance(reader, DraftHead) else layers)
        self.embedding = target.get_input_embeddings() if self.layers else nn.Module()
        self.source = partial(read_states, target, self.layers) if source is None else source
        self.check: AnswerCheck | None = None
        self.dtype, state, (_, scale) = dtype, FORMATS[dtype], BYTES[dtype]
        self.columns, width = Shapes(), int(self.head.linear.weight.shape[1])  # of what is kept
        if self.layers:
            self.columns[FEATURES] = (len(self.layers) * (width + scale),), state
        if kind == "topk":
            self.columns[TOPK] = (2, self.k), "int32"
            self.columns |= {} if self.ids is None else {INSIDE: ((2,), "float32")}
        elif self.layers != (target.config.get_text_config().num_hidden_layers,):  # else the features are the same
            self.columns[HIDDEN] = (width + scale,), state

    @property
    def key(self) -> tuple[Any, ...]:
        """What the kept values depend on beside the target and the texts."""
        ids = self.vocab if self.ids is None else self.ids.tolist()
        return self.kind, self.dtype, self.columns, self.layers, ids if self.kind == "topk" else None

    def to(self, device: torch.device) -> None:
        """Moves what computes beside the draft there, unless it was loaded there."""
        for part in (self.head, self.embedding, self.all_ids, self.model):
            if part is not None and any(weight.device != device for weight in part.parameters()):
                part.to(device)
        if self.ids is not None:
            self.ids = self.ids.to(device)

    @torch.no_grad()
    def rows(self, batch: Batch) -> tuple[TargetRows, Any]:
        """The target's distributions at the label tokens, and the features that a head reads ``[batch, time, width]``.

        Both come from the batch's columns, or from the source. Features are in float32 or better; None without a head.
        """
        places, labels = batch[PLACES], label_tokens(batch)
        if self.ids is not None:
            place = torch.searchsorted(self.ids, labels).clamp_max(len(self.ids) - 1)
            labels = place.where(self.ids[place] == labels, -1)
        hidden, features = self.states(batch)
        if features is not None:
            features = features.to(torch.promote_types(features.dtype, torch.float32))
        if self.kind == "topk":
            top = batch[TOPK]
            target = TargetRows(top[:, 1].contiguous().view(torch.float32), self.vocab, ids=top[:, 0])
        else:
            target = TargetRows(hidden, self.head.vocab, self.head)
        target.labels = labels.where(labels < target.vocab, -1)
        if self.ids is not None:
            inside = batch[INSIDE] if INSIDE in batch or hidden is None else self.inside(hidden).to(places.device)
            target.mass, target.learnable = inside.unbind(1)
        return target, features

    def states(self, batch: Batch) -> tuple[Tensor | None, Tensor | None]:
        """The last hidden states at the label tokens (not of topk) and the features, of the columns or the source."""
        places = batch[PLACES]
        if not self.columns.keys() & batch.keys():
            last, read = self.source(batch)
            if "weight" in batch:  # of a training: validation batches come again and again
                self.look(batch, last)
            return last.to(places.device), None if read is None else read.to(places.device)
        hidden = unpacked(batch[HIDDEN], 1) if HIDDEN in batch else None
        features = unpacked(batch[FEATURES], len(self.layers)) if FEATURES in batch else None
        if hidden is None and features is not None:
            hidden = features.flatten(0, 1).index_select(0, places)
        return hidden, features

    def look(self, batch: Batch, hidden: Tensor) -> None:
        """Show a batch's labels to the check, with the last hidden states before them."""
        if self.check is not None:
            self.check.add(self.all_ids, hidden, label_tokens(batch), len(batch["labels"]))

    def inside(self, hidden: Tensor) -> Tensor:
        """`INSIDE` of last hidden states ``[rows, hidden]``."""
        inside, weight = [], self.all_ids.linear.weight
        states = hidden.to(weight.device, torch.promote_types(hidden.dtype, weight.dtype))
        for rows in states.split(rows_at_once(len(weight), weight.device)):
            logits = self.all_ids(rows).float()
            drafted = logits if self.ids is None else logits[:, self.ids.to(logits.device)]
            mass = (drafted.logsumexp(-1) - logits.logsumexp(-1)).exp()
            inside.append(torch.stack([mass, (drafted.amax(-1) == logits.amax(-1)).float()], -1).to(hidden.device))
        return torch.cat(inside)

    # -- what is kept -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def kept(self, batch: Batch, states: States | None = None) -> dict[str, Tensor]:
        """The columns of a batch as they are kept, of given states or the source's; `FEATURES` are still padded."""
        hidden, features = states or self.source(batch)
        self.look(batch, hidden)
        if self.check is not None:
            self.check.judge(FIRST)
        hidden = hidden.to(self.head.linear.weight.device)
        values = {HIDDEN: packed(hidden, 1, self.dtype)}
        if features is not None:
            values[FEATURES] = packed(features, len(self.layers), self.dtype)
        if TOPK in self.columns:
            parts = []
            for rows in hidden.split(rows_at_once(self.vocab, hidden.device)):
                top = log_probs(self.head(rows, self.vocab)).float().topk(self.k, sorted=True)
                parts.append(torch.stack([top.indices.int(), top.values.view(torch.int32)], 1))
            values[TOPK] = torch.cat(parts)
        if INSIDE in self.columns:
            values[INSIDE] = self.inside(hidden)
        return {name: values[name].cpu() for name in self.columns}

    @torch.no_grad()
    def kept_inside(self, batch: Batch) -> dict[str, Tensor]:
        """`INSIDE` of a batch with the kept states, which do not depend on the ids that a head drafts."""
        hidden, _ = self.states(batch)
        assert hidden is not None
        return {INSIDE: self.inside(hidden.to(self.all_ids.linear.weight.device)).cpu()}
