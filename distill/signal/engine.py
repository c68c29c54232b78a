"""The target's states out of vLLM.

It gives the states that enter the asked layers, and the last layer's output before the final norm, which the target's
own norm and output head, read from its files, turn into its distributions.
"""

from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from distill.data.dataset import PLACES, Batch, Examples, Picks, collate, label_mask
from distill.engine.states import Ids, StateFiles
from distill.kept import Kept
from distill.networks.layers import final_norm
from distill.signal.kept import values_of
from distill.signal.target import Signal, States


class EngineStates:
    """Gives the states of batches; a callable as `distill.signal.target.Source`.

    ``parts`` has the target's final norm; a head reads the states that enter ``captured``, a language model none.
    """

    def __init__(
        self, files: StateFiles, parts: PreTrainedModel, captured: Sequence[int], device: torch.device
    ) -> None:
        self.files, self.norm = files, final_norm(parts).to(device)
        self.planes = [files.layers.index(layer) for layer in captured]
        self.like = parts.get_input_embeddings().weight[:0].to(device)  # ``[0, width]``

    @torch.no_grad()
    def __call__(self, batch: Batch) -> States:
        """The last hidden states at the label tokens, and the features of a head, of a batch."""
        texts = read_texts(batch)
        states = iter(self.files.take([ids for ids in texts if ids]))
        return self.of(batch, [next(states) if ids else None for ids in texts])

    @torch.no_grad()
    def of(self, batch: Batch, given: Sequence[Tensor | None]) -> States:
        """The same of the texts' states ``[tokens, layers, width]``; None of those that have no label."""
        states = self.like.new_zeros(*batch["input_ids"].shape, len(self.files.layers), self.like.shape[1])
        for number, part in enumerate(given):
            if part is not None:
                states[number, : len(part)] = part.to(states)
        with torch.autocast(states.device.type, enabled=False):  # a head too reads the last state normed
            states[:, :, -1] = self.norm(states[:, :, -1])
        hidden = states[:, :, -1].flatten(0, 1).index_select(0, batch[PLACES].to(states.device))
        return hidden, torch.cat([states[:, :, plane] for plane in self.planes], -1) if self.planes else None


class Packed:
    """Keeps the states of texts as they come out of the engine, each packed at once.

    Args:
        signal: Says what is kept of a text.
        source: Turns what an engine gives into states.
        kept: Where they are kept.
    """

    def __init__(self, signal: Signal, source: EngineStates, kept: Kept) -> None:
        self.signal, self.source, self.kept, self.lock = signal, source, kept, Lock()

    def put(self, input_ids: Ids, labels: Ids, states: Tensor) -> None:
        """Take the states of all tokens of an example but the last. Threads may call it at once."""
        rows = Examples.of(Dataset.from_dict({"input_ids": [input_ids], "labels": [labels]}))
        batch = rows.batch(np.array([0]))
        with self.lock:  # so that one text at a time is on the device
            columns = self.signal.kept(batch, self.source.of(batch, [states]))
        (values,) = values_of(columns, [(rows, 0)])
        self.kept.put(int(rows.keys[0]), values)

    def close(self) -> None:
        """Write what is left."""
        self.kept.flush()


def read_texts(batch: Batch) -> list[Ids]:
    """The tokens of each text of a batch whose states are needed: all that precede its last label."""
    mask = label_mask(batch["labels"])
    counts = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in mask]
    return [ids[:count].tolist() for ids, count in zip(batch["input_ids"], counts)]


def texts_of(batches: Iterable[Picks]) -> Iterator[Ids]:
    """The texts of batches whose states will be asked for, in order."""
    return (ids for picks in batches for ids in read_texts(collate(picks, ())) if ids)
