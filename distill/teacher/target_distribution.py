"""The frozen target as a source of distributions for label rows: by a forward pass, or from what was kept of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.config.drafts import DistillSettings, Signal
from distill.losses.chunked import RowIndex, TargetRows, pick
from distill.losses.divergences import LEAST_TAIL, FoldedDistributions, TokenDistributions, log_probs
from distill.models.lm_head import LMHead, last_hidden

Part = TypeVar("Part", bound=nn.Module)


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
        """Exactly the target's own."""
        vocab = log_q.shape[1]
        rows = self.hidden[place].to(self.head.linear.weight.dtype)
        return log_probs(self.head.first(rows, vocab), vocab, temperature).to(log_q.dtype)

    def at(self, rows: RowIndex) -> HiddenRows:
        """See `TargetRows`."""
        return HiddenRows(pick(self.hidden, rows), self.head)


@dataclass
class TopRows:
    """Rows as their k most probable ids and the log-probabilities of these, ``[rows, k]``.

    What is left to the other ids, the tail, is laid out as the draft lays out its own: p(v) = tail · q(v) / q(others).
    Every divergence then equals the one between the distributions in which the other ids are one outcome, which is a
    lower bound of the true one; α is off by at most the tail; and the gradient is exact for what is computed.
    """

    ids: Tensor
    log_p: Tensor
    vocab: int

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """The target's own at its top ids, the draft's shape elsewhere. At the temperature they were taken at."""
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
    """Rows as the log-probabilities of all ids, ``[rows, vocab]``."""

    log_p: Tensor

    @property
    def vocab(self) -> int:
        """Ids that target and draft share."""
        return self.log_p.shape[1]

    def log_probs(self, place: RowIndex, log_q: Tensor, temperature: float) -> Tensor:
        """Exactly the target's own. At the temperature they were taken at."""
        return self.log_p[place].to(log_q.dtype)

    def at(self, rows: RowIndex) -> LogProbRows:
        """See `TargetRows`."""
        return LogProbRows(pick(self.log_p, rows))


@dataclass(frozen=True)
class TargetSignal:
    """What is kept of the target for each label token."""

    # ``online`` keeps nothing, ``hidden`` last hidden states, ``topk`` the k largest log-probabilities,
    # ``log_probs`` all of them
    kind: Signal = "online"
    bfloat16: bool = False  # Hidden states in bfloat16
    k: int = 64  # Of ``topk``
    vocab: int = 0  # Of both log-probabilities: ids that target and draft share; the softmax is over these
    temperature: float = 1.0  # Of both: divides the logits before the softmax
    autocast: bool = False  # The forward pass before it computes under bfloat16 autocast

    @classmethod
    def of(cls, settings: DistillSettings, vocab: int) -> TargetSignal:
        """What the settings want kept, of ids that target and draft share."""
        half = settings.signal_dtype == "bfloat16"
        autocast = settings.signal_autocast is True  # auto is settled when a run begins
        kind: Signal = "hidden" if settings.signal == "auto" else settings.signal  # see `choose_signal` for runs
        return cls(kind, half, settings.signal_k, vocab, settings.temperature, autocast)

    def forward_precision(self, device: torch.device) -> torch.autocast:
        """Inside, a forward pass of the target computes as it does for the signal."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.autocast)

    @property
    def name(self) -> str:
        """Under which batches carry it."""
        return f"target_{self.kind}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What the kept values depend on."""
        computed = ("autocast",) if self.autocast else ()
        if self.kind == "hidden":
            return self.kind, self.bfloat16, *computed
        return self.kind, *((self.k,) if self.kind == "topk" else ()), self.vocab, self.temperature, *computed

    def layout(self, head: LMHead) -> tuple[tuple[int, ...], str]:
        """Shape and numpy type of one label token's values. numpy has no bfloat16: its bits stand as int16."""
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
        parts = [
            self._of(log_probs(head.first(rows, self.vocab), self.vocab, self.temperature).float())
            for rows in hidden.split(SOME_ROWS)
        ]
        shape, dtype = self.layout(head)
        return torch.cat(parts) if parts else hidden.new_empty(0, *shape, dtype=getattr(torch, dtype))

    def _of(self, log_p: Tensor) -> Tensor:
        """What is kept of log-probabilities ``[rows, vocab]``."""
        if self.kind == "log_probs":
            return log_p
        top = log_p.topk(min(self.k, self.vocab), sorted=True)
        return torch.stack([top.indices.int(), top.values.view(torch.int32)], 1)

    def decode(self, values: Tensor, head: LMHead) -> TargetRows:
        """The rows of a batch from their kept values."""
        if self.kind == "topk":
            return TopRows(values[:, 0], values[:, 1].contiguous().view(torch.float32), self.vocab)
        if self.kind == "log_probs":
            return LogProbRows(values)
        return HiddenRows(values.view(torch.bfloat16) if values.dtype == torch.int16 else values, head)


SOME_ROWS = 256  # rows whose whole logits are in memory at a time while what is kept of them is taken


class TargetSource:
    """The frozen target as a source of distributions for label rows.

    Not an ``nn.Module`` on purpose: the target is in no checkpoint, no optimiser and no distributed wrapper.

    Args:
        model: The target. With a signal that is kept only its head stays referenced.
        signal: What batches carry of it; None: nothing, it is run on every batch.
        ids: The ids that its distributions are over; None: all.
        stays: The model has a place of its own; the draft's device gets a copy of its head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        signal: TargetSignal | None = None,
        ids: Tensor | None = None,
        *,
        stays: bool = False,
    ) -> None:
        model.eval().requires_grad_(False)
        self.head, self.signal, self.stays = LMHead(model).only(ids), signal or TargetSignal(), stays
        self.model = model if self.signal.kind == "online" else None

    def to(self, device: torch.device) -> None:
        """Moves there what computes beside the draft."""
        self.head = moved(self.head, device, stays=self.stays)
        if self.model is not None and not self.stays:
            self.model.to(device)

    @torch.no_grad()
    def rows(self, batch: dict[str, Tensor], mask: Tensor) -> TargetRows:
        """The label rows of a batch, ``mask [batch, time]`` being where they are."""
        if self.model is None:
            return self.signal.decode(batch[self.signal.name], self.head)
        where, positions = self.model.device, batch.get("position_ids")
        # not the draft's precision: the target computes in its own
        with self.signal.forward_precision(where), torch.inference_mode(False), torch.no_grad():
            positions = None if positions is None else positions.to(where)
            hidden = last_hidden(self.model, batch["input_ids"].to(where), mask.to(where), positions)
        return HiddenRows(hidden.to(mask.device), self.head)


def moved(module: Part, device: torch.device, *, stays: bool) -> Part:
    """A part of the target on a device; if the target stays where it is, a copy of the part."""
    elsewhere = stays and next(module.parameters()).device != device
    return (copy.deepcopy(module) if elsewhere else module).to(device)
