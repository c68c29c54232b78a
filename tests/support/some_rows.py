"""A few examples of random ids, and settings to train on them."""

import atexit
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset

from distill.config.models import TrainingSettings
from distill.data.chat import IGNORE, prompt_part
from distill.data.corpus import Corpus
from distill.data.dataset import Examples
from distill.kept import Kept, Shapes
from distill.kinds.base import Draft, reference_losses
from distill.losses.divergences import Divergence
from distill.signal.kept import keep_columns
from distill.signal.target import Signal

Module = TypeVar("Module")
TRAINING = TrainingSettings(steps=4, batch_size=2, lr=1e-2)


def from_lists(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> Examples:
    return Examples.of(Dataset.from_dict({"input_ids": list(ids), "labels": list(labels)}))


def some_rows(count: int = 6, seed: int = 0, *, prompt: int = 3, empty: Sequence[int] = ()) -> Examples:
    """Examples of 5 to 11 tokens, whose first ones are a prompt; those numbered ``empty`` have no label."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(2, 48, n).tolist() for n in rng.integers(5, 12, count)]
    starts = [len(row) if number in empty else prompt for number, row in enumerate(ids)]
    return from_lists(ids, [[IGNORE] * start + row[start:] for start, row in zip(starts, ids)])


def scratch(shapes: Shapes) -> Kept:
    """A store in a folder that ends with the process."""
    folder = mkdtemp(prefix="kept-")
    atexit.register(shutil.rmtree, folder)
    return Kept(shapes, Path(folder))


def add_column(examples: Examples, name: str, values: np.ndarray) -> Examples:
    """Adds values of the label tokens ``[label tokens, ...]`` as a column that batches carry."""
    kept = scratch({name: (values.shape[1:], str(values.dtype))})
    for key, part in zip(examples.keys, np.split(values, np.cumsum(examples.label_counts)[:-1])):
        kept.put(int(key), {name: part})
    kept.flush()
    examples.columns[name] = kept
    return examples


def add_losses(reference: Draft, signal: Signal, examples: Examples, divergence: Divergence, precision: str) -> None:
    """Adds a reference's losses, as a run of AdaSPEC does."""
    shapes, compute = reference_losses(reference, signal, divergence, precision)
    keep_columns(scratch(shapes), [examples], compute)


def prompts_of(corpus: Corpus, *splits: Dataset) -> list[str]:
    """The texts of the prompts of a corpus's splits."""
    rows = [row for split in splits for row in split]
    texts = corpus.tokenizer.batch_decode([prompt_part(row["input_ids"], row["labels"]) for row in rows])
    return [text.removeprefix("<s> ") for text in texts]


def spans(tokenizer: Any, input_ids: list[int], labels: list[int]) -> list[tuple[list[int], str]]:
    """The ids before each labelled span, and its text."""
    found = []
    for place, token in enumerate(labels):
        if token == IGNORE:
            continue
        if labels[place - 1] == IGNORE or not place:
            found.append((input_ids[:place], []))
        found[-1][1].append(token)
    return [(before, tokenizer.decode(ids)) for before, ids in found]


def everything(examples: Examples) -> dict[str, Any]:
    """A batch of all examples."""
    return examples.batch(np.arange(len(examples)))


def attached(module: Module, processes: int = 1) -> Module:
    """A module that believes to be in a trainer, at a step that is not logged."""
    trainer = SimpleNamespace(world_size=processes, log_every_n_steps=100, global_step=0, sanity_checking=False)
    module._trainer = trainer  # type: ignore[attr-defined]
    return module
