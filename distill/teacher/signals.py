"""The frozen target as a source of distributions and features: by a forward pass, or from what was kept of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads import DraftHead
from decode.models.mtp import MTP
from distill.config.drafts import Signal, TeacherSettings
from distill.data.batches import Batch, Ints, TokenDataset, label_mask
from distill.losses.divergences import TargetRows, log_probs
from distill.models.lm_head import LMHead, last_hidden

Module = TypeVar("Module", bound=nn.Module)
HIDDEN, FEATURES, INSIDE = "target_hidden", "features", "target_inside"
"""Names in batches: the target's last hidden states ``[label rows, hidden]``; the states that a head reads, ``[batch,
time, width]``; and ``[label rows, 2]``, the probability that the target gives to the head's ids together, and whether
its most probable token is one of them."""
SOME_ROWS = 256  # rows whose logits over the whole vocabulary are in memory at a time


@dataclass(frozen=True)
class TargetSignal:
    """What is kept of the target for each label token.

    Attributes:
        kind: ``online`` keeps nothing, ``hidden`` last hidden states, ``topk`` the k largest log-probabilities,
            ``log_probs`` all of them.
        bfloat16: Hidden states in bfloat16.
        k: Of ``topk``.
        vocab: Of log-probabilities: ids that target and draft share; the softmax is over these.
        autocast: The forward pass computes under bfloat16 autocast.
    """

    kind: Signal = "online"
    bfloat16: bool = False
    k: int = 64
    vocab: int = 0
    autocast: bool = False

    @classmethod
    def of(cls, settings: TeacherSettings, vocab: int, *, bfloat16: bool = False) -> TargetSignal:
        """The signal of the settings, over ``vocab`` ids; ``auto`` is hidden (see `store.choose_signal` for runs)."""
        kind: Signal = "hidden" if settings.signal == "auto" else settings.signal
        return cls(kind, bfloat16, settings.signal_k, vocab, settings.signal_autocast is True)

    @property
    def name(self) -> str:
        """Name in batches and of files."""
        return HIDDEN if self.kind == "online" else f"target_{self.kind}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What the kept values depend on."""
        if self.kind == "hidden":
            return self.kind, self.bfloat16, self.autocast
        return self.kind, self.k if self.kind == "topk" else None, self.vocab, self.autocast


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
        reader: DraftHead | None = None,
        *,
        stays: bool = False,
    ) -> None:
        model.eval().requires_grad_(False)
        self.signal, self.stays = signal or TargetSignal(), stays
        self.model = model if self.signal.kind == "online" else None
        self.ids = None if reader is None else reader.draft_ids()
        self.whole = LMHead(model)
        self.head = self.whole.only(self.ids)
        self.captured: tuple[int, ...] = () if reader is None else reader.captured_layers
        self.width = 0 if reader is None else reader.feature_width
        self.reads_last = reader is not None and reader.version in (1, MTP)  # the last hidden state alone
        self.embedding = nn.Module() if reader is None else model.get_input_embeddings()

    def to(self, device: torch.device) -> None:
        """Moves what computes beside the draft there; of a target that stays where it is, a copy."""

        def moved(part: Module) -> Module:
            elsewhere = self.stays and any(weight.device != device for weight in part.parameters())
            return (copy.deepcopy(part) if elsewhere else part).to(device)

        self.head, self.embedding = moved(self.head), moved(self.embedding)
        self.ids = None if self.ids is None else self.ids.to(device)
        if self.model is not None and not self.stays:
            self.model.to(device)

    @torch.no_grad()
    def complete(self, batch: Batch, mask: Tensor) -> Batch:
        """The batch with the target's values, by a forward pass if nothing is kept; ``mask`` is `label_mask`."""
        if self.model is None or HIDDEN in batch:
            return batch
        found = self.forward(self.model, batch, mask)
        return batch | {name: values.to(mask.device) for name, values in found.items()}

    @torch.no_grad()
    def rows(self, batch: Batch, mask: Tensor) -> TargetRows:
        """The target's distributions at the label rows, over the reader's ids; ``mask [batch, time]`` is where."""
        found = self._rows(batch, mask)
        labels = batch["labels"].roll(-1, 1)[mask]
        if self.ids is not None:
            place = torch.searchsorted(self.ids, labels).clamp_max(len(self.ids) - 1)
            labels = place.where(self.ids[place] == labels, -1)
        found.labels = labels.where(labels < found.vocab, -1)
        return found

    def _rows(self, batch: Batch, mask: Tensor) -> TargetRows:
        if self.reads_last and self.signal.kind == "hidden":
            return TargetRows(self.features(batch)[mask], self.head.vocab, self.head)
        values: Tensor = self.complete(batch, mask)[self.signal.name]
        if self.signal.kind == "topk":
            return TargetRows(values[:, 1].contiguous().view(torch.float32), self.signal.vocab, ids=values[:, 0])
        if self.signal.kind == "log_probs":
            return TargetRows(values, self.signal.vocab)
        return TargetRows(_loaded(values), self.head.vocab, self.head)

    def features(self, batch: Batch) -> Tensor:
        """The feature of every token, ``[batch, time, width]`` in float32 or better."""
        values = _loaded(batch[FEATURES])
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def forward(self, model: PreTrainedModel, batch: Batch, mask: Tensor) -> dict[str, Tensor]:
        """Last hidden states at the label rows, and for a reader its features and `INSIDE`."""
        where, positions = model.device, batch.get("position_ids")
        ids, mask = batch["input_ids"].to(where), mask.to(where)
        # not the draft's precision: the target computes in its own
        autocast = torch.autocast(where.type, torch.bfloat16, enabled=self.signal.autocast)
        with autocast, torch.inference_mode(False), torch.no_grad():
            if not self.captured:
                return {HIDDEN: last_hidden(model, ids, mask, None if positions is None else positions.to(where))}
            out = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
            last = out.last_hidden_state
            features = torch.cat([out.hidden_states[layer].to(last.device) for layer in self.captured], -1)
            found = {HIDDEN: last[mask.to(last.device)], FEATURES: features}
            if self.ids is None:
                return found
            inside, weight = [], self.whole.linear.weight
            for rows in found[HIDDEN].to(weight.device).split(SOME_ROWS):
                logits = self.whole(rows).float()
                own = logits[:, self.ids.to(logits.device)]
                mass = (own.logsumexp(-1) - logits.logsumexp(-1)).exp()
                inside.append(torch.stack([mass, (own.amax(-1) == logits.amax(-1)).float()], -1))
            return found | {INSIDE: torch.cat(inside)}

    # -- what is kept -------------------------------------------------------------------------------------------------

    def layout(self, rows: TokenDataset) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and numpy types of the values of some examples, by name: `FEATURES` by token, others by label."""
        signal, labels, state = self.signal, rows.label_count, "int16" if self.signal.bfloat16 else "float32"
        found: dict[str, tuple[tuple[int, ...], str]] = {}
        if self.captured:
            found[FEATURES] = (len(rows.ids), self.width), state
        if signal.kind == "topk":
            found[signal.name] = (labels, 2, min(signal.k, signal.vocab)), "int32"
        elif signal.kind == "log_probs":
            found[signal.name] = (labels, signal.vocab), "float32"
        elif not self.reads_last:
            found[signal.name] = (labels, int(self.head.linear.weight.shape[1])), state
        if self.ids is not None:
            found[INSIDE] = (labels, 2), "float32"
        return found

    @torch.no_grad()
    def values(self, model: PreTrainedModel, rows: TokenDataset, examples: Ints) -> dict[str, NDArray[Any]]:
        """The values of some examples as they are kept, by name, one example after the other.

        Raises:
            UserError: The target's hidden states are not finite.
        """
        batch, signal, names = rows.batch(examples), self.signal, self.layout(rows)
        found = self.forward(model.eval(), batch, label_mask(batch["labels"]))
        check_finite(found[HIDDEN], "target's hidden states", examples)
        if FEATURES in found:
            lengths = rows.lengths[examples].tolist()
            states = torch.cat([text[:length] for text, length in zip(found[FEATURES], lengths)])
            found[FEATURES] = self.stored(states)
        hidden = found[HIDDEN].to(self.head.linear.weight.device)
        if signal.kind == "hidden":
            found[signal.name] = self.stored(hidden)
        else:
            parts = []
            for some in hidden.split(SOME_ROWS):
                log_p = log_probs(self.head.first(some, signal.vocab), signal.vocab).float()
                if signal.kind == "topk":
                    top = log_p.topk(min(signal.k, signal.vocab), sorted=True)
                    log_p = torch.stack([top.indices.int(), top.values.view(torch.int32)], 1)
                parts.append(log_p)
            found[signal.name] = torch.cat(parts)
        return {name: found[name].cpu().numpy() for name in names}

    def stored(self, states: Tensor) -> Tensor:
        """States as they are kept. numpy has no bfloat16: its bits are stored as int16."""
        return states.bfloat16().view(torch.int16) if self.signal.bfloat16 else states.float()


def _loaded(states: Tensor) -> Tensor:
    """States from what `Teacher.stored` makes of them."""
    return states.view(torch.bfloat16) if states.dtype == torch.int16 else states


def check_finite(values: Tensor, what: str, examples: Ints) -> None:
    """Refuses values that are not numbers."""
    if not values.isfinite().all():
        raise UserError(
            f"the {what} are not finite in a batch of examples {sorted(examples.tolist())}: if target.dtype is "
            "float16, set it to float32 or bfloat16; otherwise the model itself is broken"
        )
