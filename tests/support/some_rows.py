"""A few examples of random ids, and settings to train on them."""

import atexit
import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
from datasets import Dataset
from pandas import DataFrame

from decode.incoming import LeftOut, usable
from decode.measure.suites import Row
from decode.models.open import stop_ids
from distill.config.data import DataSettings
from distill.config.models import TrainingSettings
from distill.data import corpus as corpora
from distill.data import sources
from distill.data.chat import IGNORE, ChatFormat, Example, prompt_part
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


Made = tuple[list[Example], list[tuple[str, str]]]
"""Examples, and reason and detail of what is noted of rows."""


def made_of_plain(plain: Sequence[Row], tokenizer: Any, settings: DataSettings, *, chat: bool = True) -> Made:
    """What the corpus makes of rows in the plain shape."""
    form = ChatFormat(tokenizer, settings.system, settings.args(), stop_ids(None, tokenizer))
    columns = {name: [row[name] for row in plain] for name in sources.PLAIN}
    entries = list(zip(*corpora._tokenised(columns, settings, form, chat).values()))
    entries = [dict(zip(corpora.ENTRIES, entry)) for entry in entries]
    examples = [Example(entry["input_ids"], entry["labels"]) for entry in entries if not entry["reason"]]
    return examples, [(entry["reason"], entry["detail"]) for entry in entries if entry["reason"]]


def made_of(row: Row, tokenizer: Any, *beside: Row, chat: bool = True, **settings: Any) -> Made:
    """What the corpus makes of a row among others of these columns."""
    given = DataSettings(**{"source": "rows.jsonl", "max_length": 2000} | settings)
    left_out, empty = LeftOut(), dict.fromkeys(sources.PLAIN, "")
    _, shape, _ = sources._shape(given, [row, *beside])
    plain = [empty | made | {"number": number} for number, made in usable([row], left_out, shape)]
    examples, notes = made_of_plain(plain, tokenizer, given, chat=chat)
    return examples, [(reason, detail) for reason, _, detail in left_out] + notes


def write_rows(path: Path, rows: Sequence[Row]) -> str:
    """A file of rows in the format that its name ends with; returns its path."""
    match path.suffix:
        case ".parquet":
            DataFrame(rows).to_parquet(path)
        case ".csv":
            DataFrame(rows).to_csv(path, index=False)
        case ".json":
            path.write_text(json.dumps(rows))
        case ".txt":
            path.write_text("\n".join(row["text"] for row in rows))
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def taught(tokenizer: Any, examples: Iterable[Any]) -> list[tuple[str, list[str]]]:
    """The prompt of each example, and the texts that are learned."""
    return [
        (
            tokenizer.decode(prompt_part(input_ids, labels)).removeprefix("<s> "),
            [text for _, text in spans(tokenizer, input_ids, labels)],
        )
        for input_ids, labels in examples
    ]


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
