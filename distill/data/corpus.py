"""The corpus: three splits of token ids with labels, made by ``datasets.map`` and kept in the run's folder."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import transformers
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_from_disk
from transformers import PreTrainedTokenizerBase

from decode.bench.datasets import PRESETS, Row, quiet_datasets
from decode.bench.suites import SCORERS, Prompt, Suite
from decode.errors import UserError, read_json
from decode.models.loading import load_tokenizer
from decode.models.tokens import check_template
from decode.progress import current
from distill import ranks
from distill.config.data import DataSettings
from distill.data.chat import (
    IGNORE,
    ChatFormat,
    Example,
    Turn,
    label,
    prompt_part,
    render_row,
    text_blocks,
)
from distill.data.messages import UnusableRow
from distill.data.own_prompts import Sample, prompt_rows
from distill.data.sources import SPLITS, LeftOut, SourceRows, load_rows, sentences
from distill.data.tokenizer import train_tokenizer
from distill.files import checksum, files_state, fingerprint, replaced, write_json

VERSION = 6  # raised when a change of the code changes which examples are made of the same rows, or what is kept
PATIENCE = 600.0  # seconds for which another process may find data of process 0 that differ from its own
BATCH = 1000  # rows tokenised together
A_PROCESS = 5000  # rows for which starting one more process pays

COLUMNS = {
    "input_ids": List(Value("int32")),
    "labels": List(Value("int32")),
    "prompt": Value("string"),
    "response": Value("string"),
}


@dataclass
class Corpus:
    """Examples of the three splits.

    Each split has the columns ``input_ids`` and ``labels`` (lists of equal length, not shifted, -100 where no loss is
    taken), and the texts ``prompt`` and ``response``. For plain text every token is a label, and ``prompt`` is the
    first quarter of a block.

    Attributes:
        tokenizer: Of the target.
        fingerprint: Hash of the settings, the tokenizer and every token id and label.
        answered: Whether the examples have responses; if not, the target has to answer them.
        chat: Whether prompts are written by the chat template.
        notes: What was left out and why.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset
    test: Dataset
    fingerprint: str
    answered: bool = True
    chat: bool = False
    notes: list[str] = field(default_factory=list)


def load_corpus(
    settings: DataSettings,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sampler: Callable[[ChatFormat], tuple[Iterator[Sample], Collection[str]]] | None = None,
    ends: Sequence[int] = (),
) -> Corpus:
    """Reads, splits, tokenises and masks the corpus.

    Args:
        settings: Source, limits and templates.
        seed: Chooses the sample and the order where the source has more rows than wanted; for arithmetic, the
            problems themselves. Which split a row is in does not depend on it.
        tokenizer: The target's. None: ``settings.tokenizer``, or else a small one trained on the training texts.
        sampler: Gives, for the target's chat template, the prompts that the target writes, and texts that none of them
            may contain; None: it writes none.
        ends: Ids that end the target's texts; none: the tokenizer's end-of-text token.

    Raises:
        UserError: Settings, files or masks that cannot be used.
    """
    settings.validate()
    quiet_datasets()
    if tokenizer is None and settings.tokenizer is not None:
        try:
            tokenizer = load_tokenizer(settings.tokenizer)
        except UserError as error:
            raise UserError(f"data.tokenizer: {error}") from error
    template = settings.template()
    if tokenizer is not None and template is not None:
        tokenizer.chat_template = template
    if settings.from_target:
        written: tuple[Iterator[Sample] | None, Collection[str]] = None, ()
        if sampler is not None and tokenizer is not None and settings.prompts.writes:
            written = sampler(ChatFormat(tokenizer, settings.system, settings.template_args, ends))
        rows = SourceRows("chat", *prompt_rows(settings, seed, *written))
    else:
        rows = load_rows(settings, seed)
    if tokenizer is None:
        train = rows.splits["train"]
        sample = Random(seed).sample(range(len(train)), min(len(train), settings.train_limit or len(train)))
        tokenizer = train_tokenizer((_text_of(train[place]) for place in sample), settings.tokenizer_vocab_size)
        tokenizer.chat_template = template
    form = ChatFormat(tokenizer, settings.system, settings.template_args, ends)
    by_setting = bool(tokenizer.chat_template) if settings.chat == "auto" else settings.chat
    chat = rows.kind == "chat" or (rows.kind == "pairs" and by_setting)
    if chat and not tokenizer.chat_template:
        raise UserError(
            f"data: the tokenizer {tokenizer.name_or_path!r} has no chat template: choose an instruction-tuned "
            "model's tokenizer, give data.chat_template, or kind pairs with data.chat false"
        )
    if chat:
        check_template(tokenizer, settings.system)
    if chat and rows.kind == "pairs":
        rows.notes.append(
            "pairs are put into the tokenizer's chat template, as the model is served (data.chat false leaves them "
            "plain, --show-example shows one)"
        )
    digest = hashlib.sha256(json.dumps([settings.key(), _identity(tokenizer), *ends], sort_keys=True).encode())
    splits, limits = {}, (settings.train_limit or sys.maxsize, settings.validation_examples, settings.test_examples)
    for split, limit in zip(SPLITS, limits, strict=True):
        ordered = list(rows.splits[split])
        Random(f"{seed}/{split}").shuffle(ordered)
        current().update(name=f"tokenising {split}", total=min(limit, len(ordered)), done=0)
        left_out = LeftOut()
        if rows.kind == "text":  # blocks span rows
            blocks = text_blocks(tokenizer, (row["text"] for row in ordered), settings.max_length)
            splits[split] = Dataset.from_dict(_table(islice(blocks, limit)), features=Features(COLUMNS))
        else:
            splits[split], left_out = _examples(ordered, limit, settings, form, chat)
        rows.notes += (said := sentences(split, left_out))
        lost = {row for why, row, _ in left_out if why.endswith(" dropped") and not why.startswith("longer")}
        if len(lost) > max(1, len(splits[split])):
            raise UserError(
                f"data: {len(lost)} {split} rows cannot be learned as they would be served, and {len(splits[split])} "
                f"can ({'; '.join(said)}): look at the first of them, give a template that fits them with "
                "data.chat_template, or the prompts alone with data.source target and data.prompts.file"
            )
        if not len(splits[split]):
            raise UserError(
                f"data: no {split} example is left ({'; '.join(rows.notes) or 'the texts are too short'}): raise "
                "data.max_length, set data.overlong to cut, or give more data"
            )
        for batch in splits[split].select_columns(["input_ids", "labels"]).with_format("numpy").iter(BATCH):
            for ids in (*batch["input_ids"], *batch["labels"]):
                digest.update(np.asarray(ids, dtype=np.int32).tobytes() + b"|")
    return Corpus(
        tokenizer,
        **splits,
        fingerprint=digest.hexdigest(),
        answered=not settings.from_target,
        chat=chat,
        notes=rows.notes,
    )


def _text_of(row: Row) -> str:
    if "messages" in row:
        return "\n".join(message["content"] for message in row["messages"])
    return str(row["text"]) if "text" in row else row["prompt"] + row["response"]


def _table(examples: Iterable[Example]) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for example in examples:
        for name, values in table.items():
            values.append(getattr(example, name))
    return table


def _examples(
    rows: list[Row], limit: int, settings: DataSettings, form: ChatFormat, chat: bool
) -> tuple[Dataset, LeftOut]:
    """The examples of one split, up to ``limit``, and the rows that are not used as they are."""
    parts, left_out, have = list[Dataset](), LeftOut(), 0
    while rows and have < limit:
        count = max(BATCH, round(1.1 * (limit - have)))  # some will be dropped
        batch, rows = rows[:count], rows[count:]
        processes = min(max(1, len(batch) // A_PROCESS), os.cpu_count() or 1)
        if processes > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process, without a warning
        # JSON, because rows need not agree in the types of their fields
        made = Dataset.from_dict({"row": [json.dumps(row, default=str) for row in batch]}).map(
            partial(_tokenised, settings=settings, form=form, chat=chat),
            batched=True,
            batch_size=BATCH,
            num_proc=processes if processes > 1 else None,
            remove_columns=["row"],
            features=Features(COLUMNS | {"left_out": Value("string")}),
            new_fingerprint=os.urandom(8).hex(),  # never looked up: the whole corpus is kept
        )
        notes = made["left_out"][:]
        left_out += [(why, number, detail) for note in notes if note for why, number, detail in json.loads(note)]
        kept = [place for place, note in enumerate(notes) if not note]
        parts.append(made.select_columns(list(COLUMNS)).select(kept[: limit - have]))
        have += len(parts[-1])
        current().update(done=have)
    return concatenate_datasets(parts), left_out


def _tokenised(
    batch: Mapping[str, list[str]], settings: DataSettings, form: ChatFormat, chat: bool
) -> dict[str, list[Any]]:
    """The examples of a batch of rows as a table; its last entry, without ids, is about rows not used as they are."""
    rows, left_out, length = dict[int, list[Turn]](), LeftOut(), settings.max_length
    for row in map(json.loads, batch["row"]):
        try:
            rows[row["number"]], notes = render_row(row, form if chat else None)
            left_out += [(note, row["number"], "") for note in notes]
        except UnusableRow as error:
            left_out.append((f"{error.reason} dropped", row["number"], error.detail))
    kept = list[Example]()
    for number, found in zip(rows, label(form.tokenizer, [*rows.values()], form.ends, chat=chat)):
        if isinstance(found, UnusableRow):
            left_out.append((f"{found.reason} dropped", number, found.detail))
            continue
        if len(found) > 1:
            why = "made into an example for each assistant's turn, because the template rewrites earlier ones"
            left_out.append((why, number, ""))
        for example in found:
            if len(example.input_ids) > length:
                labels = example.labels[:length]
                cut = settings.overlong == "cut" and any(token != IGNORE for token in labels)
                how = "cut at the end" if cut else "dropped"
                left_out.append((f"longer than data.max_length ({length} tokens) {how}", number, ""))
                if not cut:
                    continue
                example = replace(example, input_ids=example.input_ids[:length], labels=labels)
            kept.append(example)
    table = _table([*kept, Example([], [], "", "")])
    return table | {"left_out": [""] * len(kept) + [json.dumps(left_out)]}


# -- the corpus on disk -----------------------------------------------------------------------------------------------


def kept_corpus(
    settings: DataSettings,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    made_from: Any,
    load: Callable[..., Corpus],
) -> Corpus:
    """The corpus in ``folder`` if it is sound and made from the same; else the first process makes it there.

    Args:
        settings: Of the data.
        tokenizer: The target's; None: the settings', or one trained on the texts.
        folder: Where it is kept.
        made_from: What it depends on beside settings, tokenizer and files.
        load: Makes it.

    Raises:
        UserError: Another process has other data than the first one.
    """
    settings.validate()
    paths = (settings.source, settings.train_file, settings.validation_file, settings.test_file, settings.prompts.file)
    files = files_state(path for path in (*paths, settings.tokenizer) if path)
    own = None if tokenizer is None else _identity(tokenizer)
    key, began = fingerprint(VERSION, transformers.__version__, settings.key(), files, own, made_from), time.monotonic()

    def there() -> Corpus | None:
        note = read_json(folder / "corpus.json")
        if not ranks.is_first() and note.get("key", key) != key and time.monotonic() - began > PATIENCE:
            raise UserError(
                f"process {ranks.rank()} has other data than process 0, which made {folder}: give both the same "
                "configuration, data files and tokenizer, and the same versions of packages"
            )
        if note.get("key") != key or note["files"] != _checksums(folder):
            return None
        splits: dict[str, Any] = {split: load_from_disk(str(folder / split)) for split in SPLITS}
        path = settings.tokenizer or folder / "tokenizer"
        found = tokenizer or load_tokenizer(path)
        if (template := settings.template()) is not None:
            found.chat_template = template
        return Corpus(found, **splits, **note["about"])

    if (found := there()) is not None:
        return found
    if not ranks.is_first():
        return ranks.wait_for(there, "the tokenised data")
    (folder / "corpus.json").unlink(missing_ok=True)
    corpus = load()
    with replaced(folder) as aside:
        for split in SPLITS:
            getattr(corpus, split).save_to_disk(str(aside / split))
        corpus.tokenizer.save_pretrained(aside / "tokenizer")
        about = {name: getattr(corpus, name) for name in ("fingerprint", "answered", "chat", "notes")}
        write_json(aside / "corpus.json", {"key": key, "files": _checksums(aside), "about": about})
    return there() or corpus


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides a tokenizer's ids of texts and chats."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    return hashlib.sha256(f"{type(tokenizer)}{rules}{special}{tokenizer.chat_template}".encode()).hexdigest()


def _checksums(folder: Path) -> dict[str, int]:
    files = (path for split in SPLITS for path in sorted((folder / split).glob("*")))
    return {str(path.relative_to(folder)): checksum(path) for path in files}


def test_suite(corpus: Corpus, source: str, count: int) -> Suite:
    """The first test prompts of a corpus, with the scorer of their task where it has one."""
    preset = PRESETS.get(source)
    score = SCORERS.get(preset.scorer) if preset is not None and preset.scorer else None
    rows = corpus.test.select(range(min(count, len(corpus.test))))
    prompts = [
        Prompt(f"test/{i}", row["prompt"], row["response"], ids=tuple(prompt_part(row["input_ids"], row["labels"])))
        for i, row in enumerate(rows)
    ]
    return Suite(source, prompts, None if score is None else (lambda p, text: score(text, p.reference or "")))
