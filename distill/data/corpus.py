"""The corpus: three splits of token ids with label masks, and how a batch is made of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decode.bench.datasets import PRESETS, Row, quiet_datasets
from decode.bench.scorers import SCORERS
from decode.bench.suites import Prompt, Suite
from decode.errors import UserError
from decode.models.loading import load_tokenizer
from distill.config.data import DataSettings
from distill.data.chat import IGNORE, ChatFormat, check_masks, prompt_part, train_tokenizer
from distill.data.example_table import example_table
from distill.data.own_prompts import PromptSampler, prompt_rows
from distill.data.sources import SPLITS, SourceRows, load_rows


@dataclass
class Corpus:
    """Examples of the three splits.

    Each split has the columns ``input_ids`` and ``labels`` (lists of equal length, not shifted, -100 where no loss
    is taken), ``prompt`` and ``response`` (the texts), and ``messages``: JSON of the turns before the response where
    the prompt is a chat, else empty. For plain text every token is a label, and ``prompt`` is the first quarter of a
    block. Prompts without answers have no labels, and an empty ``response``.
    """

    tokenizer: PreTrainedTokenizerBase
    train: Dataset
    validation: Dataset
    test: Dataset
    fingerprint: str
    """Hash of the settings, the tokenizer and every token id and label."""
    kind: str = "pairs"
    """pairs, chat or text."""
    answered: bool = True
    """Whether the examples have responses; without, the target has to answer them."""
    chat: bool = False
    """Whether prompts are chats in the tokenizer's template."""
    notes: list[str] = field(default_factory=list)
    """What was left out and why, a sentence each."""


def load_corpus(
    settings: DataSettings,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sampler: Callable[[ChatFormat], PromptSampler] | None = None,
) -> Corpus:
    """Reads, splits, tokenises and masks the corpus.

    Args:
        settings: see `DataSettings`.
        seed: chooses the sample and the order where the source has more rows than asked for; for arithmetic, the
            problems themselves. Which split a row is in does not depend on it.
        tokenizer: the target's. None: ``settings.tokenizer``, or else a small one trained on the training texts.
        sampler: gives, for the target's chat template, the prompts that the target writes; None: it writes none.

    Raises:
        UserError: settings, files or masks that cannot be used.
    """
    settings.validate()
    quiet_datasets()
    rows = _own_prompts(settings, seed, tokenizer, sampler) if settings.from_target else load_rows(settings, seed)
    tokenizer = tokenizer or _tokenizer(settings, rows.splits["train"], seed)
    if settings.chat_template is not None:
        tokenizer.chat_template = settings.chat_template
    chat = _chat_format(settings, rows, tokenizer)
    limits = (settings.train_limit, settings.validation_examples, settings.test_examples)
    splits = {}
    for split, limit in zip(SPLITS, limits, strict=True):
        splits[split] = example_table(rows, split, limit, settings, seed, tokenizer, chat)
        if not settings.from_target:
            check_masks(splits[split], tokenizer, rows.kind)
    fingerprint = _fingerprint(settings, tokenizer, splits)
    return Corpus(
        tokenizer,
        **splits,
        fingerprint=fingerprint,
        kind=rows.kind,
        answered=not settings.from_target,
        chat=chat is not None,
        notes=rows.notes,
    )


def _own_prompts(
    settings: DataSettings,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None,
    sampler: Callable[[ChatFormat], PromptSampler] | None,
) -> SourceRows:
    """Prompts of the target and of a file, as chats without an answer."""
    samples, markers = None, frozenset[str]()
    if sampler is not None and tokenizer is not None and settings.prompts.writes:
        if settings.chat_template is not None:
            tokenizer.chat_template = settings.chat_template
        source = sampler(ChatFormat(tokenizer, settings.system, settings.template_args))
        samples, markers = iter(source), source.turn.markers
    splits, notes = prompt_rows(settings, seed, samples, markers)
    return SourceRows("chat", {**splits}, notes)


def collate(rows: Sequence[Mapping[str, Any]], pad_id: int) -> dict[str, Tensor]:
    """A batch, padded on the right to its longest row.

    Returns:
        ``input_ids``, ``labels`` (padding: -100) and ``attention_mask`` (padding: 0), each long ``[batch, time]``.
    """
    time = max(len(row["input_ids"]) for row in rows)
    fills = {"input_ids": pad_id, "labels": IGNORE}
    batch = {key: torch.full((len(rows), time), fill, dtype=torch.long) for key, fill in fills.items()}
    batch["attention_mask"] = torch.zeros(len(rows), time, dtype=torch.long)
    for place, row in enumerate(rows):
        length = len(row["input_ids"])
        for key in fills:
            batch[key][place, :length] = torch.as_tensor(row[key], dtype=torch.long)
        batch["attention_mask"][place, :length] = 1
    return batch


def test_suite(corpus: Corpus, source: str, count: int) -> Suite:
    """The first test prompts of a corpus, with the scorer of their task where it has one."""
    preset = PRESETS.get(source)
    score = SCORERS.get(preset.scorer) if preset is not None and preset.scorer else None
    rows = corpus.test.select(range(min(count, len(corpus.test))))
    ids = [prompt_part(ids, labels) for ids, labels in zip(rows["input_ids"], rows["labels"])]
    prompts = [
        Prompt(f"test/{i}", prompt, response, ids=tuple(known))
        for i, (prompt, response, known) in enumerate(zip(rows["prompt"], rows["response"], ids))
    ]
    return Suite(source, prompts, None if score is None else (lambda p, text: score(text, p.reference or "")))


def _tokenizer(settings: DataSettings, train: Sequence[Row], seed: int) -> PreTrainedTokenizerBase:
    if settings.tokenizer is None:
        sample = Random(seed).sample(range(len(train)), min(len(train), settings.train_limit or len(train)))
        return train_tokenizer((_all_text(train[place]) for place in sample), settings.tokenizer_vocab_size)
    try:
        return load_tokenizer(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
    except UserError as error:
        raise UserError(f"data.tokenizer: {error}") from error


def _all_text(row: Row) -> str:
    if "messages" in row:
        return "\n".join(message["content"] for message in row["messages"])
    return str(row["text"]) if "text" in row else row["prompt"] + row["response"]


def _chat_format(settings: DataSettings, rows: SourceRows, tokenizer: PreTrainedTokenizerBase) -> ChatFormat | None:
    """How chats and pairs are rendered; None for what is not put into a chat template. Says so in the notes.

    Raises:
        UserError: a template is needed, and the tokenizer has none.
    """
    wanted = rows.kind == "chat" or (rows.kind == "pairs" and settings.chat is not False)
    if not wanted or (rows.kind == "pairs" and settings.chat == "auto" and not tokenizer.chat_template):
        return None
    if not tokenizer.chat_template:
        raise UserError(
            f"data: the tokenizer {tokenizer.name_or_path!r} has no chat template: choose an instruction-tuned model's "
            "tokenizer, give data.chat_template, or kind pairs with data.chat false"
        )
    if rows.kind == "pairs":
        rows.notes.append(
            "pairs are put into the tokenizer's chat template, as the model is served (data.chat false leaves them "
            "plain, --show-example shows one)"
        )
    return ChatFormat(tokenizer, settings.system, settings.template_args)


def _fingerprint(settings: DataSettings, tokenizer: PreTrainedTokenizerBase, splits: dict[str, Dataset]) -> str:
    digest = hashlib.sha256(json.dumps(settings.key(), sort_keys=True).encode())
    digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    for split in SPLITS:
        for batch in splits[split].select_columns(["input_ids", "labels"]).with_format("numpy").iter(1000):
            for row in (*batch["input_ids"], *batch["labels"]):
                digest.update(np.asarray(row, dtype=np.int32).tobytes() + b"|")
    return digest.hexdigest()
