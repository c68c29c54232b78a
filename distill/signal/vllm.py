"""The target's states out of vLLM.

It gives the states that enter the asked layers, and the last layer's output before the final norm, which the target's
own norm and output head, read from its files, turn into its distributions.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from distill.data.dataset import Batch, Picks, collate, label_mask
from distill.engine.states import Ids, StateFiles
from distill.networks.layers import final_norm
from distill.signal.target import States


class EngineStates:
    """Gives the states of batches; a callable as `distill.signal.target.Source`.

    ``parts`` has the target's final norm; a head reads the states that enter ``captured``, a language model none.
    """

    def __init__(
        self, files: StateFiles, parts: PreTrainedModel, captured: Sequence[int], device: torch.device
    ) -> None:
        self.files, self.norm = files, final_norm(parts).to(device)
        self.planes, self.last = [files.layers.index(layer) for layer in captured], len(files.layers) - 1
        self.like = parts.get_input_embeddings().weight[:0].to(device)  # ``[0, width]``

    @torch.no_grad()
    def __call__(self, batch: Batch) -> States:
        """The last hidden states at the label tokens, and the features of a head, of a batch."""
        mask, like = label_mask(batch["labels"]).to(self.like.device), self.like
        texts = read_texts(batch)
        states = iter(self.files.take([ids for ids in texts if ids]))
        hidden, features = [like], []
        for ids, labels in zip(texts, mask):
            part = next(states).to(like) if ids else like[:, None].expand(0, self.last + 1, -1)
            with torch.autocast(like.device.type, enabled=False):
                normed = self.norm(part[:, -1])
            hidden.append(normed[labels[: len(ids)]])
            planes = [normed if plane == self.last else part[:, plane] for plane in self.planes]
            if planes:  # a head that reads the last state reads it after the norm
                rows = torch.cat(planes, -1)
                features.append(functional.pad(rows, (0, 0, 0, len(labels) - len(ids))))
        return torch.cat(hidden), torch.stack(features) if features else None


def read_texts(batch: Batch) -> list[Ids]:
    """The tokens of each text of a batch whose states are needed: all that precede its last label."""
    mask = label_mask(batch["labels"])
    counts = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in mask]
    return [ids[:count].tolist() for ids, count in zip(batch["input_ids"], counts)]


def texts_of(batches: Iterable[Picks]) -> Iterator[Ids]:
    """The texts of batches whose states will be asked for, in order."""
    return (ids for picks in batches for ids in read_texts(collate(picks)) if ids)
