"""What feature heads read of the target: hidden states of every token, and its distributions where labels are.

Both come from one forward pass, whose results are kept on disk, or are computed anew for every batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.heads import FeatureHead
from distill.data.batches import Batch, EvalBatches, Ints, TokenDataset, label_mask
from distill.files import fingerprint
from distill.losses.chunked import TargetRows
from distill.models.lm_head import LMHead
from distill.teacher.store import Array, Kept, Part, cached_in_shards, check_finite, fill, scatter
from distill.teacher.target_distribution import HiddenRows, TargetSignal, TargetSource, moved

FEATURES, INSIDE = "features", "target_inside"
"""Names of the values: the captured states ``[tokens, feature width]``; and ``[label tokens, 2]``, how much probability
the target gives to the head's ids together, and whether its most probable token is one of them."""

SOME_ROWS = 256  # rows whose logits over the whole vocabulary are in memory at a time


class FeatureSource:
    """The frozen target as a source of features and of distributions over the head's ids.

    Not an ``nn.Module`` on purpose: the target is in no checkpoint and no optimiser.

    Attributes:
        ids: these ids; None: all.

    Args:
        model: the target. With a signal that is kept only its embedding and its head stay referenced.
        head: tells which states are its feature, and which ids it drafts.
        signal: what batches carry; ``online``: nothing.
        stays: see `TargetSource`.
    """

    def __init__(self, model: PreTrainedModel, head: FeatureHead, signal: TargetSignal, *, stays: bool = False) -> None:
        self.signal, self.ids, self.version = signal, head.draft_ids(), head.version
        kept = replace(signal, kind="hidden", bfloat16=False) if signal.kind == "online" else signal
        self.target = TargetSource(
            model, kept, self.ids, stays=stays
        )  # distributions over the head's ids, renormalised to them
        self.embedding, self.whole = model.get_input_embeddings(), LMHead(model)
        self.captured_layers, self.width = head.captured_layers, head.feature_width
        self.model = model if signal.kind == "online" else None

    def to(self, device: torch.device) -> None:
        """Moves there what computes beside the head."""
        self.embedding = moved(self.embedding, device, stays=self.target.stays)
        self.target.to(device)
        if self.model is not None and not self.target.stays:
            self.model.to(device)

    def complete(self, batch: Batch) -> Batch:
        """The batch with the target's values, by a forward pass where nothing is kept."""
        if self.model is None:
            return batch
        mask, where = label_mask(batch["labels"]), self.model.device
        # not the head's precision: the target computes in its own
        with self.signal.forward_precision(where), torch.inference_mode(False), torch.no_grad():
            features, last = self.compute(self.model, batch["input_ids"].to(where))
        found = {FEATURES: features, "target_hidden": last[mask.to(last.device)]}
        if self.ids is not None:
            found[INSIDE] = self.inside(found["target_hidden"])
        return batch | {name: values.to(mask.device) for name, values in found.items()}

    def features(self, batch: Batch) -> Tensor:
        """The feature of every token, ``[batch, time, feature width]`` in float32 or better."""
        values: Tensor = batch[FEATURES]
        values = values.view(torch.bfloat16) if values.dtype == torch.int16 else values
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def rows(self, batch: Batch, mask: Tensor) -> TargetRows:
        """The target's distributions at the label rows, over the head's ids."""
        if self.version == 1 and self.target.signal.kind == "hidden":  # its feature is what logits are made of
            return HiddenRows(self.features(batch)[mask], self.target.head)
        return self.target.rows(batch, mask)

    def compute(self, model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Features ``[batch, time, feature width]`` and last hidden states ``[batch, time, hidden]``, by a forward."""
        out = model.base_model(input_ids=ids, use_cache=False, output_hidden_states=True)
        last = out.last_hidden_state
        return torch.cat([out.hidden_states[layer].to(last.device) for layer in self.captured_layers], -1), last

    def inside(self, hidden: Tensor) -> Tensor:
        """What `INSIDE` names, of last hidden states ``[rows, hidden]``."""
        assert self.ids is not None
        hidden = hidden.to(self.whole.linear.weight.device)
        ids, found = self.ids.to(hidden.device), []
        for rows in hidden.split(SOME_ROWS):
            with self.signal.forward_precision(rows.device):
                logits = self.whole(rows)
            logits = logits.float() / self.signal.temperature
            own = logits[:, ids]
            mass = (own.logsumexp(-1) - logits.logsumexp(-1)).exp()
            found.append(torch.stack([mass, (own.amax(-1) == logits.amax(-1)).float()], -1))
        return torch.cat(found) if found else hidden.new_empty(0, 2, dtype=torch.float32)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def layout(self, rows: TokenDataset) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shapes and numpy types of the values of some examples."""
        states = "int16" if self.signal.bfloat16 else "float32"
        found: dict[str, tuple[tuple[int, ...], str]] = {FEATURES: ((len(rows.ids), self.width), states)}
        if not (self.version == 1 and self.signal.kind == "hidden"):
            shape, dtype = self.signal.layout(self.target.head)
            found[self.signal.name] = (rows.label_count, *shape), dtype
        if self.ids is not None:
            found[INSIDE] = (rows.label_count, 2), "float32"
        return found

    def bytes(self, rows: TokenDataset) -> int:
        """Size of the values of some examples."""
        return sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in self.layout(rows).values())

    def keep(self, model: PreTrainedModel, rows: TokenDataset, folder: Path, split: str, made_from: str) -> None:
        """Puts the values of every example, on disk, into ``rows``; they are computed unless they are there."""
        ids = None if self.ids is None else self.ids.tolist()
        key = fingerprint(made_from, self.captured_layers, self.signal.key, self.signal.bfloat16, ids, split, len(rows))

        def key_of(name: str) -> str:  # a hidden signal's own key is without the temperature
            scaled = name == INSIDE and self.signal.kind == "hidden" and self.signal.temperature != 1
            return fingerprint(key, name, *([self.signal.temperature] if scaled else []))

        def wanted(some: TokenDataset) -> list[Kept]:
            return [
                Kept(folder / f"{name}_{split}.npy", key_of(name), shape, dtype)
                for name, (shape, dtype) in self.layout(some).items()
            ]

        self._put(rows, cached_in_shards(rows, wanted, lambda some: self._parts(model, some), model))

    def keep_now(self, model: PreTrainedModel, rows: TokenDataset) -> None:
        """The same in memory: for texts that are used for a while only."""
        arrays = [np.empty(shape, dtype) for shape, dtype in self.layout(rows).values()]
        fill(arrays, self._parts(model, rows))
        self._put(rows, arrays)

    def _put(self, rows: TokenDataset, arrays: Sequence[Array]) -> None:
        for name, array in zip(self.layout(rows), arrays, strict=True):
            (rows.tokens if name == FEATURES else rows.signals)[name] = array

    @torch.no_grad()
    def _parts(self, model: PreTrainedModel, rows: TokenDataset) -> Iterator[list[Part]]:
        model.eval()
        for examples in EvalBatches(rows, 16, pad_id=0).indices():
            features, *labelled = self._values(model, rows, examples)
            places = [per_example(rows, examples, features), *(scatter(rows, examples, values) for values in labelled)]
            yield from map(list, zip(*places, strict=True))

    def _values(self, model: PreTrainedModel, rows: TokenDataset, examples: Ints) -> list[Array]:
        """The values of some examples, in the order of `layout`; the features padded, ``[batch, time, width]``."""
        batch = rows.batch(examples, 0)
        mask = label_mask(batch["labels"]).to(model.device)
        with self.signal.forward_precision(model.device):
            features, last = self.compute(model, batch["input_ids"].to(model.device))
        check_finite(last, "target's hidden states", examples)
        states = features.bfloat16().view(torch.int16) if self.signal.bfloat16 else features.float()
        found, labelled = [states], last[mask.to(last.device)]
        names = self.layout(rows)
        if self.signal.name in names:
            found.append(self.signal.encode(labelled, self.target.head))
        if INSIDE in names:
            found.append(self.inside(labelled))
        return [values.cpu().numpy() for values in found]


def per_example(rows: TokenDataset, examples: Ints, values: Array) -> Iterator[Part]:
    """Values ``[batch, time, ...]`` of a batch, example by example, with the places where they belong."""
    for row, example in enumerate(examples):
        start, end = int(rows.offsets[example]), int(rows.offsets[example + 1])
        yield slice(start, end), values[row, : end - start]
