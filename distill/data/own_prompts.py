"""Prompts without answers: those that the target writes (Magpie) and those of a file, in three splits."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from random import Random
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.datasets import Row, messages_of, read_rows
from decode.errors import UserError
from decode.models.tokens import plain_ids, written_ids
from decode.models.writing import GROUP, uniform_draws, write_texts
from decode.progress import current
from decode.sampling import LogitsWarper
from distill.config.data import DataSettings, PromptSettings
from distill.data.chat import ChatFormat
from distill.data.messages import UnusableRow, read_messages
from distill.data.response_file import ResponseFile

WORD = re.compile(r"\w+")
MIN_TOKENS = 4  # shortest prompt
ASCII_LETTERS = 0.9  # smallest share of ASCII letters, a cheap rule for English
START_WORDS = 10  # a prompt whose first words are those of an earlier one is a near duplicate
OVERLAP = 0.6  # and so is one with this share of its word trigrams in one earlier prompt
TRIES = 8  # samples at most for each prompt wanted
SAMPLING = LogitsWarper(1.0, top_p=0.95)  # Magpie samples broadly, and leaves out what is hardly ever said
ORDER = ("test", "validation", "train")  # prompts are dealt out in this order: more training ones change no other split
PROBE = "\ue000prompt\ue001"  # replaces the user's words while their place in a rendered chat is searched; in no text


@dataclass(frozen=True)
class Sample:
    """What the target wrote as the user's turn, after the given words of ``opening``."""

    text: str  # without the end token
    tokens: int
    ended: bool  # before the limit
    opening: str = ""


@dataclass
class PromptFilter:
    """Keeps prompts that are new and usable, and counts why the others were dropped.

    Attributes:
        settings: Limits.
        markers: Texts of the chat template that no prompt may contain.
        kept: Number of prompts kept so far.
        dropped: Number of prompts dropped for each reason.
        seen: Words of the prompts that were kept, and their first words.
        places: Numbers of the prompts that have a word trigram, by trigram.
    """

    settings: PromptSettings
    markers: Collection[str] = ()
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seen: set[str | tuple[str, ...]] = field(default_factory=set)
    places: dict[tuple[str, ...], list[int]] = field(default_factory=lambda: defaultdict(list))

    def is_usable(self, sample: Sample) -> bool:
        """Whether a prompt that the target wrote is kept."""
        settings, text, letters = self.settings, sample.text, [c for c in sample.text if c.isalpha()]
        foreign = sum(map(str.isascii, letters)) < ASCII_LETTERS * max(1, len(letters))
        reasons = {
            f"unfinished after {settings.max_tokens} tokens": not sample.ended,
            f"shorter than {MIN_TOKENS} tokens": sample.tokens < MIN_TOKENS or not text.strip(),
            "broken characters": "\ufffd" in text,
            "template markers inside": any(marker in text for marker in self.markers),
            f"less than {ASCII_LETTERS:.0%} ASCII letters": foreign,
        }
        found = [reason for reason, holds in reasons.items() if holds]
        self.dropped.update(found[:1])
        return not found and self.is_new(text)

    def is_new(self, text: str) -> bool:
        """Whether a prompt repeats none that was kept, nearly or exactly; it is then kept itself."""
        words = WORD.findall(text.lower())
        whole, start = " ".join(words) or text, tuple(words[:START_WORDS])
        triples = {tuple(words[at : at + 3]) for at in range(len(words) - 2)}
        shared = Counter(chain.from_iterable(self.places.get(triple, ()) for triple in triples))
        near = max(shared.values(), default=0) >= max(1, math.ceil(OVERLAP * len(triples)))
        if whole in self.seen or start in self.seen or near:
            self.dropped["repeated" if whole in self.seen else "nearly repeated"] += 1
            return False
        self.seen |= {whole, start} if len(start) == START_WORDS else {whole}
        for triple in triples:
            self.places[triple].append(self.kept)
        self.kept += 1
        return True

    def reasons(self) -> str:
        """The reasons for dropping prompts, each with its count."""
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())


def prompt_rows(
    settings: DataSettings, seed: int, samples: Iterator[Sample] | None, markers: Collection[str] = ()
) -> tuple[dict[str, list[Row]], list[str]]:
    """The prompts of each split as chats of one user's turn, and notes about them.

    No prompt repeats another one, nearly or exactly, in its own split or across splits.

    Args:
        settings: Number and source of the prompts, and limits.
        seed: Order of the file's rows.
        samples: What the target writes; None: nothing.
        markers: Texts of the chat template that no prompt may contain.

    Raises:
        UserError: Too few of the samples can be used, or a file without prompts.
    """
    own, kept, notes = settings.prompts, PromptFilter(settings.prompts, markers), list[str]()
    limits = dict(zip(ORDER, (settings.test_examples, settings.validation_examples, settings.train_limit or 0)))
    splits: dict[str, list[Row]] = {split: [] for split in ORDER}
    if own.file is not None:
        rows = read_rows(own.file)
        given = [messages for messages in map(prompt_of, rows) if messages is not None]
        if not given:
            raise UserError(
                f"data.prompts.file {own.file!r} holds no prompts: a row needs a column instruction (and input), "
                "question, prompt, messages or turns, the first row has " + ", ".join(map(repr, rows[0]))
            )
        Random(f"{seed}/prompts").shuffle(given)
        new = (messages for messages in given if kept.is_new(str(messages[-1]["content"])))
        for split in ORDER:
            wanted = range(1, round(own.file_share * limits[split]) + 1)
            splits[split] = [{"messages": messages, "number": i, "ask": True} for i, messages in zip(wanted, new)]
        notes.append(
            f"prompts from {own.file}: {sum(map(len, splits.values()))} used, {kept.dropped.total()} dropped as "
            f"repetitions, {len(rows) - len(given)} rows without a prompt"
        )
        kept.dropped.clear()
    missing = {split: 0 if splits[split] and not own.writes else limits[split] - len(splits[split]) for split in ORDER}
    total, written, accepted, work = sum(missing.values()), 0, 0, current()
    if not total:
        return splits, notes
    if samples is None:
        raise UserError(
            "data.source is target, which has to write its own prompts, and no target is named here: give target.model "
            "(a folder of an instruct model), or prompts with data.prompts.file and data.prompts.file_share 1"
        )
    work.update(name="prompts of the target", total=total)
    for split in [name for name in ORDER for _ in range(missing[name])]:
        for sample in samples:
            written += 1
            if kept.is_usable(sample):
                break
            if written >= max(100, TRIES * total):
                raise UserError(
                    f"data.source is target, and of {written} prompts that it wrote {accepted} can be used of {total} "
                    f"wanted ({kept.reasons()}): use an instruction-tuned target, loosen the limits of data.prompts, "
                    "or add prompts with data.prompts.file"
                )
        message = {"role": "user", "content": (sample.opening + sample.text).strip()}
        splits[split].append({"messages": [message], "number": written, "ask": True})
        accepted += 1
        work.update(done=accepted)
    notes.append(
        f"prompts of the target: {written} written, {accepted} kept ({accepted / written:.0%}); "
        f"dropped: {kept.reasons() or 'none'}"
    )
    return splits, notes


def prompt_of(row: Row) -> list[dict[str, Any]] | None:
    """The turns of a row up to the first question, or None if it has none; rows may have any of the usual shapes."""
    chat, turns = row.get("messages") or row.get("conversations") or messages_of(row.get("prompt")), row.get("turns")
    if not chat:
        text = row.get("question") or row.get("prompt") or ""
        if row.get("instruction"):
            text = "\n\n".join(str(part) for part in (row["instruction"], row.get("input")) if part)
        elif isinstance(turns, list) and turns:
            text = turns[0]
        chat = [{"role": "user", "content": text}]
    before: list[dict[str, Any]] = []
    try:
        messages, _ = read_messages(chat)
    except UnusableRow:
        return None
    for message in messages:
        before.append({"role": message["role"], "content": message["content"].strip()})
        if message["role"] == "user":
            return before
    return None


@dataclass(frozen=True)
class UserTurn:
    """The user's turn of a chat template.

    Attributes:
        text: The template up to the user's words.
        before: Its ids.
        ends: Tokens that end a prompt: the first special token that the template writes after it, and the model's.
        markers: Texts of the template and special tokens, which no prompt may contain.
    """

    text: str
    before: list[int]
    ends: set[int]
    markers: frozenset[str]


def user_turn(chat: ChatFormat) -> UserTurn:
    """The user's turn, found by rendering a chat whose only words are a probe.

    Args:
        chat: Template, system message and the ends of the model's texts.

    Raises:
        UserError: No template, or none that writes something before a user's turn for the model to continue.
    """
    tokenizer, problem = chat.tokenizer, "its chat template writes no user's turn that it could continue"
    try:
        before, found, after = chat.render(chat.with_system([{"role": "user", "content": PROBE}])).partition(PROBE)
    except UserError as error:
        before, found, after, problem = "", "", "", f"{error} (data.system {chat.system!r})"
    before = before.rstrip(" ")
    if not found or not before.strip():
        raise UserError(
            f"data.source is target, so the target has to write what a user says, and {problem}: choose an "
            "instruction-tuned target, give another template with data.chat_template, or name a file with prompts as "
            "data.source with teacher.responses.source target"
        )
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    tail = [token for token in plain_ids(tokenizer, [after])[0] if token in special]
    stops = {*chat.ends, tokenizer.eos_token_id, *tail[:1]} - {None}
    if not stops:
        raise UserError(
            "data.source is target, and neither the model nor its chat template has a token that ends a user's turn: "
            "set eos_token in its tokenizer_config.json"
        )
    texts = [
        before.rsplit("\n", 1)[-1],
        before.strip().rsplit("\n", 1)[-1],
        after,
        *tokenizer.batch_decode([[token] for token in special]),
    ]
    markers = frozenset(text.strip() for text in texts if len(text.strip()) > 2)
    return UserTurn(before, written_ids(tokenizer, before), stops, markers)


def written_samples(
    tokenizer: PreTrainedTokenizerBase,
    turn: UserTurn,
    settings: PromptSettings,
    seed: int,
    file: ResponseFile,
    load: Callable[[], PreTrainedModel],
    say: Callable[[str], None],
) -> Iterator[Sample]:
    """Samples number 0, 1, 2, ..., each a function of the seed and its number; the target writes those not on disk.

    Args:
        tokenizer: The target's.
        turn: Where the user's text is.
        settings: Sampling.
        seed: Of the samples.
        file: Where they are kept.
        load: Loads the target; called once, when a sample is missing.
        say: Called with a line of progress after every batch.
    """
    model = None
    file.open()
    for start in count(step=GROUP * settings.batch_size):
        numbers = range(start, start + GROUP * settings.batch_size)
        openings = [settings.opening(number) for number in numbers]
        if not all(number in file.found for number in numbers):
            if model is None:
                model = load()
                current().begin(current().done)
            began = time.monotonic()
            texts = write_texts(
                model,
                [written_ids(tokenizer, turn.text + words) if words else turn.before for words in openings],
                SAMPLING,
                budgets=settings.max_tokens + 1,
                stop_ids=turn.ends,
                draws=lambda i, count, numbers=numbers: uniform_draws(seed, 5, numbers[i], count=count),  # type: ignore[misc]
                batch_size=settings.batch_size,
            )
            list(file.fill(zip(numbers, texts), tokenizer))
            speed = sum(map(len, texts)) / (time.monotonic() - began)
            current().detail = f"kept, {len(file.found)} written"
            say(f"{len(file.found)} prompts written ({speed:.0f} tokens/s)")
        for number, opening in zip(numbers, openings):
            ids = file.found[number]
            ended = bool(ids) and ids[-1] in turn.ends
            words = ids[:-1] if ended else ids
            text = tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            yield Sample(str(text), len(words), ended, opening)
