"""The corpus: three splits of token ids with labels, made by ``datasets`` and kept in the run's folder."""

import atexit
import hashlib
import json
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.compute
import transformers
from datasets import Dataset, Features, List, Value, concatenate_datasets, load_from_disk
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decode.errors import UserError
from decode.files import read_json, replaced, write_json, write_text
from decode.incoming import LeftOut, UnusableRow
from decode.measure.suites import PRESETS, Prompt, Row, Suite, quiet_datasets
from decode.models.open import load_tokenizer, stop_ids, unnamed_ends
from decode.models.tokens import PROMPT_END, TRAINED, check_template
from decode.options import ChatSettings
from decode.progress import current
from distill import ranks
from distill.config.data import DataSettings
from distill.data.chat import IGNORE, ChatFormat, Example, Turn, label, render_row, text_blocks
from distill.data.dataset import Examples
from distill.data.prompts import PromptWriter, prompt_rows
from distill.data.sources import SPLITS, SourceRows, data_files, load_rows
from distill.data.tables import mapped_table
from distill.files import files_state, fingerprint, sizes

VERSION = 13  # raised when a change of the code changes which examples are made of the same rows, or what is kept
BATCH = 1000  # rows tokenised together
A_PROCESS = 5000  # rows for which starting one more process pays
VOCABULARY = 1024  # largest vocabulary of a tokenizer that is trained here
EOS, PAD = "<|endoftext|>", "<|pad|>"
CORPUS_FILES = ("*/*", "about.json")
COLUMNS = Features(
    {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
    | {"chat": Value("string"), "turn": Value("int32")}
)
ENTRIES = Features(COLUMNS | {"reason": Value("string"), "detail": Value("string"), "number": Value("int64")})
"""Columns of what is made of rows: an example, or with a ``reason`` what is told of a row that is left out or cut."""


@dataclass
class Corpus:
    """Examples of the three splits.

    Each split has the columns ``input_ids`` and ``labels`` (lists of equal length, not shifted, -100 where no loss is
    taken). For plain text every token is a label. ``turn`` counts the examples of the same row before, and ``chat`` is
    the row of the first one as JSON if the assistant has several turns in it, else empty.
    """

    tokenizer: PreTrainedTokenizerBase  # of the target
    train: Dataset
    validation: Dataset
    test: Dataset
    fingerprint: str  # hash of the settings, the tokenizer and every token id and label but those of the test
    answered: bool  # whether the examples have responses; if not, the target has to answer them
    chat: bool  # whether prompts are written by the chat template
    notes: list[str]  # what was left out and why
    highest: int = 0  # the largest token id


def load_corpus(
    settings: DataSettings,
    *,
    seed: int,
    folder: Path | None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sampler: PromptWriter | None = None,
    files: Any = None,
) -> Corpus:
    """The corpus that is kept in a folder; the first process makes it unless it is there, made from the same.

    Args:
        settings: Source, limits and templates.
        seed: Chooses the sample and the order where the source has more rows than wanted; for arithmetic, the
            problems themselves. Which split a row is in does not depend on it.
        folder: Where it is kept; None: nowhere after the process has ended.
        tokenizer: The target's. None: ``settings.tokenizer``, or else a small one trained on the training texts.
        sampler: Writes prompts with the target; None: nothing does.
        files: What `decode.models.open.files_of` returns of the target, which may name more ids that end a text.

    Raises:
        UserError: Settings, files or masks that cannot be used.
    """
    settings.validate()
    quiet_datasets()
    if tokenizer is None and settings.tokenizer is not None:
        tokenizer = load_tokenizer(settings.tokenizer)
    if tokenizer is not None:
        settings.use(tokenizer)
    if alone := folder is None:
        folder = Path(tempfile.mkdtemp(prefix="corpus-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if alone or ranks.is_first():
        read = (*data_files(settings), settings.prompts.file, settings.tokenizer)
        written = sampler.made_from if sampler is not None and settings.from_target else None
        known = None if tokenizer is None else [_identity(tokenizer), stop_ids(files, tokenizer)]
        key = fingerprint(VERSION, transformers.__version__, settings.key(), files_state(read), known, seed, written)
        if read_json(folder / "corpus.json") != {"key": key, "files": sizes(folder, CORPUS_FILES)}:
            with replaced(folder) as aside:
                aside.mkdir()
                _make(aside, settings, seed, tokenizer, sampler, files)
                write_json(aside / "corpus.json", {"key": key, "files": sizes(aside, CORPUS_FILES)})
    ranks.barrier()
    splits: Row = {split: load_from_disk(str(folder / split)) for split in SPLITS}
    tokenizer = tokenizer or load_tokenizer(str(folder / "tokenizer"))
    corpus, kept = Corpus(tokenizer, **splits, **read_json(folder / "about.json")), settings.key()
    # saved with every model of the run; by their kind rows may be texts or chats whatever data.chat is
    tokenizer.init_kwargs[TRAINED] = {key: kept[key] for key in vars(ChatSettings())} | {"chat": corpus.chat}
    return corpus


def _make(
    folder: Path,
    settings: DataSettings,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None,
    sampler: PromptWriter | None,
    files: Any,
) -> None:
    """Reads, splits, tokenises and masks the rows, and writes the corpus into an empty folder."""

    def form(tokenizer: PreTrainedTokenizerBase) -> ChatFormat:
        return ChatFormat(tokenizer, settings.system, settings.args(), stop_ids(files, tokenizer))

    if settings.from_target:
        if sampler is None or tokenizer is None:
            rows = SourceRows("chat", *prompt_rows(settings, seed, None))
        else:
            written = sampler.samples(form(tokenizer), settings.prompts, seed)
            rows = SourceRows("chat", *prompt_rows(settings, seed, written, sampler.say))
    else:
        rows = load_rows(settings, seed, folder / "rows")
    if tokenizer is None:
        train = rows.splits["train"]
        chosen = Random(seed).sample(range(len(train)), min(len(train), settings.limits["train"] or len(train)))
        tokenizer = train_tokenizer(map(_text_of, train.select(chosen)))
        settings.use(tokenizer)
        if rows.kind == "pairs" and all(prompt.endswith("\n") for prompt in train[:100]["prompt"]):
            tokenizer.init_kwargs[PROMPT_END] = "\n"
        tokenizer.save_pretrained(folder / "tokenizer")
    chat = rows.kind == "chat" or (rows.kind == "pairs" and settings.use(tokenizer))
    if chat:
        check_template(tokenizer, settings.system)
        if "strftime_now" in str(tokenizer.chat_template) and "date_string" not in str(settings.template_args):
            rows.notes.append(f"the chat template writes the date: texts hold {date.today():%d %B %Y}, later too")
        if rows.kind == "pairs":
            rows.notes.append("pairs are put into the tokenizer's chat template; data.chat false leaves them plain")
    learned = settings.key() | {"test_examples": None}  # by it answers and signals are known
    digest = hashlib.sha256(json.dumps([learned, _identity(tokenizer), *form(tokenizer).ends], sort_keys=True).encode())
    highest = 0
    for split, wanted in settings.limits.items():
        limit = wanted or sys.maxsize
        order = array("q", range(len(rows.splits[split])))
        Random(f"{seed}/{split}").shuffle(order)
        ordered, left_out = rows.splits[split].select(order), LeftOut()
        current().update(name=f"tokenising {split}", total=min(limit, len(ordered)), done=0)
        if rows.kind == "text":  # blocks span rows
            blocks = islice(text_blocks(tokenizer, (row["text"] for row in ordered), settings.max_length), limit)
            made = mapped_table(folder / "tokenised" / f"{split}.arrow", ENTRIES, map(_entry, blocks))
        else:
            tokenised = partial(_tokenised, settings=settings, form=form(tokenizer), chat=chat)
            made, left_out = _examples(ordered, limit, tokenised, folder / "tokenised" / split)
        rows.tell(split, left_out)
        lost = {row for why, row, _ in left_out if why.endswith(" dropped") and not why.startswith("longer")}
        if len(lost) > max(1, len(made)) or not len(made):
            raise UserError(
                f"data: {len(made)} {split} examples are made, and {len(lost)} rows cannot be learned as they would be "
                f"served ({'; '.join(rows.notes) or 'the texts are too short'}): give more rows or data.files.{split}, "
                "name their columns with data.prompt_template and data.response_template, raise data.max_length or set "
                "data.overlong to cut, give a template that fits them with data.chat_template, or the prompts alone "
                "with data.source target and data.prompts.file"
            )
        examples = Examples.of(made)
        digest.update(examples.keys.tobytes() if split != "test" else b"")
        highest = max(highest, pyarrow.compute.max(pyarrow.compute.list_flatten(examples.ids)).as_py())
        made.select_columns(list(COLUMNS)).save_to_disk(str(folder / split))
    for scratch in ("rows", "tokenised"):
        shutil.rmtree(folder / scratch, ignore_errors=True)
    if files is not None and (unnamed := unnamed_ends(files, tokenizer)):
        rows.notes.append(unnamed)
    write_text(folder / "dropped.jsonl", "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows.dropped))
    about = {"answered": not settings.from_target, "chat": chat, "highest": highest, "notes": rows.notes}
    write_json(folder / "about.json", about | {"fingerprint": digest.hexdigest()})


def _text_of(row: Row) -> str:
    if text := row["text"] or row["prompt"] + row["response"]:
        return str(text)
    return "\n".join(message["content"] for message in json.loads(row["messages"]))


def _entry(example: Example | None = None, **about: Any) -> Row:
    """An example, or with a ``reason`` what is told of a row that is left out or cut."""
    values = (example or Example([], []))._asdict()
    return values | {"chat": "", "turn": 0, "number": 0, "reason": "", "detail": ""} | about


def _examples(rows: Dataset, limit: int, function: Any, folder: Path) -> tuple[Dataset, LeftOut]:
    """The entries of one split that are examples, up to ``limit``, and the rows that are not used as they are."""
    folder.mkdir(parents=True)
    parts = [Dataset.from_dict({name: [] for name in ENTRIES}, features=ENTRIES)]  # a source may have no row left
    left_out, missing, start = LeftOut(), limit, 0
    while missing and start < len(rows):
        batch = rows.select(range(start, min(len(rows), start + max(BATCH, round(1.1 * missing)))))
        processes = min(len(batch) // A_PROCESS, os.cpu_count() or 1)
        if processes > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process, without a warning
        made = batch.map(
            function,
            batched=True,
            batch_size=BATCH,
            num_proc=processes if processes > 1 else None,
            remove_columns=batch.column_names,
            features=ENTRIES,
            cache_file_name=str(folder / f"{start}.arrow"),
            new_fingerprint=f"{folder.name}-{start}",
        )
        start += len(batch)
        learned = np.asarray(pyarrow.compute.equal(made.data.column("reason"), ""))
        told = made.select_columns(["reason", "number", "detail"]).select(np.flatnonzero(~learned))
        left_out += [(row["reason"], row["number"], row["detail"]) for row in told]
        parts.append(made.select(np.flatnonzero(learned)[:missing]))
        missing -= len(parts[-1])
        current().advance(len(parts[-1]))
    return concatenate_datasets(parts), left_out


def _tokenised(columns: Mapping[str, list[Any]], settings: DataSettings, form: ChatFormat, chat: bool) -> Row:
    """The entries of a batch of rows."""
    entries, usable = list[Row](), list[tuple[Row, list[Turn]]]()

    def tell(row: Row, reason: str, detail: str = "") -> None:
        entries.append(_entry(number=row["number"], reason=reason, detail=detail))

    for values in zip(*columns.values()):
        row = dict(zip(columns, values))
        if chat:
            row["variables"] = json.dumps(settings.args(row["number"]) | json.loads(row["variables"] or "{}"))
        try:
            turns, notes = render_row(row, form if chat else None)
        except UnusableRow as error:
            tell(row, f"{error.reason} dropped", error.detail)
            continue
        usable.append((row, turns))
        for note in notes:
            tell(row, note)
    labelled = label(form.tokenizer, [turns for _, turns in usable], form.ends, chat=chat)
    for (row, turns), examples in zip(usable, labelled):
        if isinstance(examples, UnusableRow):
            tell(row, f"{examples.reason} dropped", examples.detail)
            continue
        if len(examples) > 1:
            tell(row, "split into one example per assistant turn: the chat template changes earlier turns")
        conversation = f"[{row['messages']}, {row['variables']}]" if len(turns) > 1 else ""
        for turn, example in enumerate(examples):
            if over := len(example.input_ids) > settings.max_length:
                del example.input_ids[settings.max_length :], example.labels[settings.max_length :]
            learned = any(token != IGNORE for token in example.labels) and settings.overlong == "cut"
            if over:
                how = "cut at the end" if learned else "dropped"
                tell(row, f"longer than data.max_length ({settings.max_length} tokens) {how}")
            if learned or not over:
                entries.append(_entry(example, chat="" if turn else conversation, turn=turn))
    return {name: [entry[name] for entry in entries] for name in ENTRIES}


# -- tokenizers -------------------------------------------------------------------------------------------------------


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that encodes any text without loss; the same texts give the same tokenizer.

    Every digit is a token of its own, so that numbers are copied and computed digit by digit. ``vocab_size`` counts
    special tokens and the 256 bytes too.

    Returns:
        A tokenizer with ``<|endoftext|>`` (id 0) as end of text and ``<|pad|>`` (id 1); it adds neither by itself.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[EOS, PAD],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
    )


def _identity(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything that decides a tokenizer's ids of texts and chats."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    return hashlib.sha256(f"{type(tokenizer)}{rules}{special}{tokenizer.chat_template}".encode()).hexdigest()


def test_suite(corpus: Corpus, source: str, count: int) -> Suite:
    """The first test prompts of a corpus, with the scorer of their task where it has one."""
    tokenizer, examples = corpus.tokenizer, Examples.of(corpus.test, count)
    prompts = []
    for number in range(len(examples)):
        ids, prompt = examples.text(number)[0], examples.prompt(number)
        response = str(tokenizer.decode(ids[len(prompt) :], skip_special_tokens=True))
        prompts.append(Prompt(f"test/{number}", str(tokenizer.decode(prompt)), response, ids=tuple(prompt)))
    preset = PRESETS.get(source)
    return Suite(source, prompts, preset.score if preset else None)
