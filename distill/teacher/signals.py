"""The frozen target as a source of distributions and features: by a forward pass, or from what was kept of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads import FeatureHead
from distill.config.drafts import Signal, TeacherSettings
from distill.data.batches import Batch, Ints, TokenDataset, label_mask
from distill.losses.chunked import RowIndex, TargetRows, pick
from distill.losses.divergences import LEAST_TAIL, FoldedDistributions, TokenDistributions, log_probs
from distill.models.lm_head import LMHead, last_hidden

Module = TypeVar("Module", bound=nn.Module)
HIDDEN, FEATURES, INSIDE = "target_hidden", "features", "target_inside"
"""Names in batches: the target's last hidden states ``[label rows, hidden]``; the states that a head reads, ``[batch,
time, width]``; and ``[label rows, 2]``, the probability that the target gives to the head's ids together, and whether
its most probable token is one of them."""
SOME_ROWS = 256  # rows whose logits over the whole vocabulary are in memory at a time


class _WholeRows:
    """Rows that know every id's log-probability."""

    log_probs: Callable[[RowIndex, Tensor, float], Tensor]

    def compare(self, place: RowIndex, logits: Tensor, temperature: float) -> TokenDistributions:
        """See `TargetRows`."""
        log_q = logits.log_softmax(-1)
        return TokenDistributions(self.log_probs(place, log_q, temperature), log_q)


@dataclass
class HiddenRows(_WholeRows):
    """Rows as last hidden states ``[rows, hidden]``; a chunk's logits are the head times them."""

    hidden: Tensor
    head: LMHead

    @property
    def vocab(self) -> int:
        """Ids that the target knows."""
        return self.head.vocab

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """The target's exact log-probabilities."""
        vocab = log_q.shape[1]
        rows = self.hidden[place].to(self.head.linear.weight.dtype)
        return log_probs(self.head.first(rows, vocab), vocab, temperature).to(log_q.dtype)

    def at(self, rows: RowIndex) -> HiddenRows:
        """See `TargetRows`."""
        return HiddenRows(pick(self.hidden, rows), self.head)


@dataclass
class TopRows:
    """Rows as their k most probable ids and the log-probabilities of these, ``[rows, k]``.

    The tail, the probability of the other ids, is distributed as the draft's own: p(v) = tail · q(v) / q(others). Every
    divergence then equals the one between the distributions in which the other ids are one outcome, which is a lower
    bound of the true one; α is off by at most the tail; and the gradient is exact for what is computed.
    """

    ids: Tensor
    log_p: Tensor
    vocab: int

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """The target's own at its top ids, the draft's shape elsewhere; at the temperature they were taken at."""
        ids, top = self.ids[place].long(), self.log_p[place].to(log_q.dtype)
        others = log_q.scatter(1, ids, -torch.inf)
        tail = (1 - top.exp().sum(-1, keepdim=True)).clamp_min(LEAST_TAIL)
        return (others + (tail.log() - others.logsumexp(-1, keepdim=True))).scatter(1, ids, top)

    def compare(self, place: RowIndex, logits: Tensor, temperature: float) -> TokenDistributions:
        """The other ids folded to one outcome."""
        return FoldedDistributions(self.ids[place].long(), self.log_p[place].to(logits.dtype), logits)

    def at(self, rows: RowIndex) -> TopRows:
        """See `TargetRows`."""
        return TopRows(pick(self.ids, rows), pick(self.log_p, rows), self.vocab)


@dataclass
class LogProbRows(_WholeRows):
    """Rows as the log-probabilities of all ids, ``[rows, vocab]``, at the temperature they were taken at."""

    log_p: Tensor

    @property
    def vocab(self) -> int:
        """Ids that target and draft share."""
        return self.log_p.shape[1]

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """The target's exact log-probabilities."""
        return self.log_p[place].to(log_q.dtype)

    def at(self, rows: RowIndex) -> LogProbRows:
        """See `TargetRows`."""
        return LogProbRows(pick(self.log_p, rows))


@dataclass(frozen=True)
class TargetSignal:
    """What is kept of the target for each label token.

    Attributes:
        kind: ``online`` keeps nothing, ``hidden`` last hidden states, ``topk`` the k largest log-probabilities,
            ``log_probs`` all of them.
        bfloat16: Hidden states in bfloat16.
        k: Of ``topk``.
        vocab: Of log-probabilities: ids that target and draft share; the softmax is over these.
        temperature: Of log-probabilities: divides the logits before the softmax.
        autocast: The forward pass computes under bfloat16 autocast.
    """

    kind: Signal = "online"
    bfloat16: bool = False
    k: int = 64
    vocab: int = 0
    temperature: float = 1.0
    autocast: bool = False

    @classmethod
    def of(
        cls, settings: TeacherSettings, vocab: int, temperature: float = 1.0, *, bfloat16: bool = False
    ) -> TargetSignal:
        """The signal of the settings, over ``vocab`` ids; ``auto`` is hidden (see `store.choose_signal` for runs)."""
        kind: Signal = "hidden" if settings.signal == "auto" else settings.signal
        return cls(kind, bfloat16, settings.signal_k, vocab, temperature, settings.signal_autocast is True)

    @property
    def name(self) -> str:
        """Name in batches and of files."""
        return HIDDEN if self.kind == "online" else f"target_{self.kind}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What the kept values depend on."""
        if self.kind == "hidden":
            return self.kind, self.bfloat16, self.autocast
        return self.kind, self.k if self.kind == "topk" else None, self.vocab, self.temperature, self.autocast

    def layout(self, head: LMHead) -> tuple[tuple[int, ...], str]:
        """Shape and numpy type of one label token's values. numpy has no bfloat16: its bits are stored as int16."""
        if self.kind == "topk":
            return (2, min(self.k, self.vocab)), "int32"
        if self.kind == "log_probs":
            return (self.vocab,), "float32"
        return (int(head.linear.weight.shape[1]),), "int16" if self.bfloat16 else "float32"

    def encode(self, hidden: Tensor, head: LMHead) -> Tensor:
        """Values to be kept ``[rows, ...]`` of last hidden states ``[rows, hidden]``."""
        hidden = hidden.to(head.linear.weight.device)
        if self.kind == "hidden":
            return hidden.bfloat16().view(torch.int16) if self.bfloat16 else hidden.float()
        shape, dtype = self.layout(head)
        parts = [hidden.new_empty(0, *shape, dtype=getattr(torch, dtype))]
        for rows in hidden.split(SOME_ROWS):
            log_p = log_probs(head.first(rows, self.vocab), self.vocab, self.temperature).float()
            if self.kind == "topk":
                top = log_p.topk(shape[1], sorted=True)
                log_p = torch.stack([top.indices.int(), top.values.view(torch.int32)], 1)
            parts.append(log_p)
        return torch.cat(parts)

    def decode(self, values: Tensor, head: LMHead) -> TargetRows:
        """The rows of a batch from their kept values."""
        if self.kind == "topk":
            return TopRows(values[:, 0], values[:, 1].contiguous().view(torch.float32), self.vocab)
        if self.kind == "log_probs":
            return LogProbRows(values)
        return HiddenRows(values.view(torch.bfloat16) if values.dtype == torch.int16 else values, head)


class Teacher:
    """The frozen target as a source of distributions at label rows, and of the features that a head reads.

    Not an ``nn.Module`` on purpose: the target is in no checkpoint, no optimiser and no distributed wrapper.

    Args:
        model: The target. With a signal that is kept only its output head (and embedding) stay referenced.
        signal: What batches carry of it; None: nothing, it is run on every batch.
        reader: The feature head that is trained, whose states and ids it gives; None: a language model is.
        stays: The model has devices of its own; the draft's device gets a copy of its head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        signal: TargetSignal | None = None,
        reader: FeatureHead | None = None,
        *,
        stays: bool = False,
    ) -> None:
        model.eval().requires_grad_(False)
        self.signal, self.stays = signal or TargetSignal(), stays
        self.model = model if self.signal.kind == "online" else None
        self.ids = None if reader is None else reader.draft_ids()
        self.head, self.whole = LMHead(model).only(self.ids), None if self.ids is None else LMHead(model)
        self.captured: tuple[int, ...] = ()
        self.width, self.version, self.embedding = 0, 0, nn.Module()
        if reader is not None:
            self.captured, self.width, self.version = reader.captured_layers, reader.feature_width, reader.version
            self.embedding = model.get_input_embeddings()

    def to(self, device: torch.device) -> None:
        """Moves what computes beside the draft there."""
        self.head = _moved(self.head, device, stays=self.stays)
        if self.captured:
            self.embedding = _moved(self.embedding, device, stays=self.stays)
        if self.model is not None and not self.stays:
            self.model.to(device)

    @torch.no_grad()
    def complete(self, batch: Batch, mask: Tensor) -> Batch:
        """The batch with the target's values, by a forward pass if nothing is kept; ``mask`` is `label_mask`."""
        if self.model is None or HIDDEN in batch:
            return batch
        found = self._forward(self.model, batch, mask)
        return batch | {name: values.to(mask.device) for name, values in found.items()}

    @torch.no_grad()
    def rows(self, batch: Batch, mask: Tensor) -> TargetRows:
        """The target's distributions at the label rows, over the reader's ids; ``mask [batch, time]`` is where."""
        if self.version == 1 and self.signal.kind == "hidden":  # its feature is the last hidden state
            return HiddenRows(self.features(batch)[mask], self.head)
        return self.signal.decode(self.complete(batch, mask)[self.signal.name], self.head)

    def features(self, batch: Batch) -> Tensor:
        """The feature of every token, ``[batch, time, width]`` in float32 or better."""
        values: Tensor = batch[FEATURES]
        values = values.view(torch.bfloat16) if values.dtype == torch.int16 else values
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def _forward(self, model: PreTrainedModel, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        """Last hidden states at the label rows, and for a reader its features and `INSIDE`."""
        where, positions = model.device, batch.get("position_ids")
        ids, mask = batch["input_ids"].to(where), mask.to(where)
        found: dict[str, Tensor] = {}
        # not the draft's precision: the target computes in its own
        autocast = torch.autocast(where.type, torch.bfloat16, enabled=self.signal.autocast)
        with autocast, torch.inference_mode(False), torch.no_grad():
            if not self.captured:
                return {HIDDEN: last_hidden(model, ids, mask, None if positions is None else positions.to(where))}
            out = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
            last = out.last_hidden_state
            found[HIDDEN] = last[mask.to(last.device)]
            found[FEATURES] = torch.cat([out.hidden_states[layer].to(last.device) for layer in self.captured], -1)
            if self.ids is not None:
                found[INSIDE] = self._inside(found[HIDDEN], self.ids)
        return found

    def _inside(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """What `INSIDE` names, of last hidden states ``[rows, hidden]``."""
        assert self.whole is not None
        hidden = hidden.to(self.whole.linear.weight.device)
        found, ids = [hidden.new_empty(0, 2, dtype=torch.float32)], ids.to(hidden.device)
        for rows in hidden.split(SOME_ROWS):
            logits = self.whole(rows).float() / self.signal.temperature
            own = logits[:, ids]
            mass = (own.logsumexp(-1) - logits.logsumexp(-1)).exp()
            found.append(torch.stack([mass, (own.amax(-1) == logits.amax(-1)).float()], -1))
        return torch.cat(found)

    # -- what is kept -------------------------------------------------------------------------------------------------

    def layout(self, rows: TokenDataset) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and numpy types of the values of some examples, by name."""
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.captured:
            found[FEATURES] = (len(rows.ids), self.width), "int16" if self.signal.bfloat16 else "float32"
        if not (self.version == 1 and self.signal.kind == "hidden"):
            shape, dtype = self.signal.layout(self.head)
            found[self.signal.name] = (rows.label_count, *shape), dtype
        if self.ids is not None:
            found[INSIDE] = (rows.label_count, 2), "float32"
        return found

    @torch.no_grad()
    def values(self, model: PreTrainedModel, rows: TokenDataset, examples: Ints) -> dict[str, NDArray[Any]]:
        """The values of some examples as they are kept, by name; the features padded, ``[batch, time, width]``.

        Raises:
            UserError: The target's hidden states are not finite.
        """
        batch, names = rows.batch(examples, 0), self.layout(rows)
        found = self._forward(model.eval(), batch, label_mask(batch["labels"]))
        check_finite(found[HIDDEN], "target's hidden states", examples)
        if self.signal.name in names:
            found[self.signal.name] = self.signal.encode(found[HIDDEN], self.head)
        if FEATURES in names:
            states = found[FEATURES]
            found[FEATURES] = states.bfloat16().view(torch.int16) if self.signal.bfloat16 else states.float()
        return {name: found[name].cpu().numpy() for name in names}


def check_finite(values: Tensor, what: str, examples: Ints) -> None:
    """Refuses values that are not numbers."""
    if not values.isfinite().all():
        raise UserError(
            f"the {what} are not finite in a batch of examples {sorted(examples.tolist())}: if target.dtype is "
            "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
        )


def _moved(module: Module, device: torch.device, *, stays: bool) -> Module:
    """A part of the target on a device; if the target stays where it is, a copy of the part."""
    elsewhere = stays and next(module.parameters()).device != device
    return (copy.deepcopy(module) if elsewhere else module).to(device)
