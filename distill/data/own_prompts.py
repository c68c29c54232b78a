"""Rows of prompts without answers: those that the target writes and those of a file, in three splits."""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.bench.datasets import Row, read_rows
from decode.errors import UserError
from decode.models.tokens import plain_ids, written_ids
from decode.models.writing import GROUP, uniform_draws, write_texts
from decode.progress import current
from decode.sampling import LogitsWarper
from distill import ranks
from distill.config.data import DataSettings, PromptSettings
from distill.data.chat import ChatFormat, UnusableRow
from distill.data.response_file import Response, ResponseFile

WORD = re.compile(r"\w+")
Triple = tuple[str, ...]


class PromptFilter:
    """Keeps what is new and usable, and counts why the others were dropped.

    Args:
        settings: Limits.
        markers: Texts of the chat template that no prompt may contain.

    Attributes:
        kept: Prompts kept so far.
        dropped: How many were dropped for which reason.
    """

    def __init__(self, settings: PromptSettings, markers: Collection[str] = ()) -> None:
        self.settings, self.markers = settings, tuple(markers)
        self.kept, self.dropped = 0, Counter[str]()
        self._texts: set[str] = set()
        self._starts: set[Triple] = set()
        self._triples: list[set[Triple]] = []
        self._places: dict[Triple, list[int]] = defaultdict(list)

    def written(self, text: str, tokens: int, *, ended: bool) -> bool:
        """Whether a prompt that the target wrote is kept.

        Args:
            text: What it wrote, without the end token.
            tokens: How many tokens that is.
            ended: Whether it ended by itself.
        """
        return self._count(self._unusable(text, tokens, ended) or self._seen(text), text)

    def given(self, text: str) -> bool:
        """Whether a prompt of a file is kept: unless it repeats one before it."""
        return self._count(self._seen(text), text)

    def _count(self, reason: str | None, text: str) -> bool:
        if reason is not None:
            self.dropped[reason] += 1
            return False
        self.kept += 1
        words = _words(text)
        self._texts.add(" ".join(words) or text)
        if len(words) >= self.settings.same_start:
            self._starts.add(tuple(words[: self.settings.same_start]))
        triples = _triples(words)
        for triple in triples:
            self._places[triple].append(len(self._triples))
        self._triples.append(triples)
        return True

    def _unusable(self, text: str, tokens: int, ended: bool) -> str | None:
        """What is wrong with a prompt by itself."""
        settings = self.settings
        if not ended:
            return f"unfinished after {settings.max_tokens} tokens"
        if tokens < settings.min_tokens or not text.strip():
            return f"shorter than {settings.min_tokens} tokens"
        if "\ufffd" in text:
            return "broken characters"
        if any(marker in text for marker in self.markers):
            return "template markers inside"
        letters = [character for character in text if character.isalpha()]
        if sum(map(str.isascii, letters)) < settings.ascii_letters * max(1, len(letters)):
            return f"less than {settings.ascii_letters:.0%} ASCII letters"
        return None

    def _seen(self, text: str) -> str | None:
        """Whether it repeats a prompt that was kept."""
        words = _words(text)
        if (" ".join(words) or text) in self._texts:
            return "repeated"
        start = tuple(words[: self.settings.same_start])
        if len(start) == self.settings.same_start and start in self._starts:
            return "nearly repeated"
        triples = _triples(words)
        needed = math.ceil(self.settings.overlap * len(triples))
        if not needed:
            return None
        # an earlier prompt with so many of the triples has at least one of the rarest (all - needed + 1) among them
        rare = sorted(triples, key=lambda triple: (len(self._places.get(triple, ())), triple))
        places = {place for triple in rare[: len(triples) - needed + 1] for place in self._places.get(triple, ())}
        near = any(len(triples & self._triples[place]) >= needed for place in places)
        return "nearly repeated" if near else None


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _triples(words: list[str]) -> set[Triple]:
    return {tuple(words[at : at + 3]) for at in range(len(words) - 2)}


ORDER = ("test", "validation", "train")
"""Splits in the order in which prompts are dealt out, so that more training examples leave the others as they are."""


@dataclass(frozen=True)
class Sample:
    """What the target wrote as the user's turn."""

    text: str  # Without the end token
    tokens: int  # Its length
    ended: bool  # Whether it ended by itself
    opening: str = ""  # The given words before it


def prompt_rows(
    settings: DataSettings, seed: int, samples: Iterator[Sample] | None, markers: frozenset[str] = frozenset()
) -> tuple[dict[str, list[Row]], list[str]]:
    """The prompts of each split as chats of one user's turn, and what is to be said of them.

    No prompt repeats another one, nearly or exactly, in its own split or across splits.

    Args:
        settings: How many, from where, and which are kept.
        seed: Order of the file's rows.
        samples: What the target writes, as long as it is asked; None: nothing.
        markers: Texts of the chat template that no prompt may contain.

    Raises:
        UserError: too few of the samples can be used, or a file without prompts.
    """
    own = settings.prompts
    limits = {"train": settings.train_limit or 0, "validation": settings.validation_examples}
    limits["test"] = settings.test_examples
    kept = PromptFilter(own, markers)
    splits: dict[str, list[Row]] = {split: [] for split in ORDER}
    notes = []
    if own.file is not None:
        given, unusable = _given(own.file, seed)
        found = (messages for messages in given if kept.given(str(messages[-1]["content"])))
        for split in ORDER:
            wanted = round(own.file_share * limits[split])
            splits[split] = [{"messages": m, "number": i} for i, m in zip(range(1, wanted + 1), found)]
        used, repeated = sum(map(len, splits.values())), kept.dropped.total()
        notes.append(
            f"prompts from {own.file}: {used} used, {repeated} dropped as repetitions, {unusable} rows without a prompt"
        )
        kept.dropped.clear()
    missing = {split: limits[split] - len(splits[split]) for split in ORDER}
    if not own.writes:
        missing = {split: 0 if splits[split] else count for split, count in missing.items()}
    total = sum(missing.values())
    if not total:
        return splits, notes
    if samples is None:
        raise UserError(
            "data.source is target, which has to write its own prompts, and no target is named here: give target.model "
            "(a folder of an instruct model), or prompts with data.prompts.file and data.prompts.file_share 1"
        )
    written, accepted, work = 0, 0, current()
    work.update(name="prompts of the target", total=total)
    for split in ORDER:
        while missing[split]:
            if written >= max(100, own.tries * total):
                raise UserError(
                    f"data.source is target, and of {written} prompts that it wrote {accepted} can be used of {total} "
                    f"wanted ({_reasons(kept)}): use an instruction-tuned target, loosen the limits of data.prompts, "
                    "raise data.prompts.tries, or add prompts with data.prompts.file"
                )
            sample, written = next(samples), written + 1
            if kept.written(sample.text, sample.tokens, ended=sample.ended):
                message = {"role": "user", "content": (sample.opening + sample.text).strip()}
                splits[split].append({"messages": [message], "number": written})
                missing[split], accepted = missing[split] - 1, accepted + 1
                work.update(done=accepted)
    notes.append(
        f"prompts of the target: {written} written, {accepted} kept ({accepted / written:.0%}); "
        f"dropped: {_reasons(kept) or 'none'}"
    )
    return splits, notes


def _reasons(kept: PromptFilter) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in kept.dropped.most_common())


def _given(path: str, seed: int) -> tuple[list[list[dict[str, Any]]], int]:
    """The prompts of a file in the seed's order, and how many rows hold none."""
    found = [prompt_of(row) for row in read_rows(path)]
    prompts = [messages for messages in found if messages is not None]
    if not prompts:
        raise UserError(
            f"data.prompts.file {path!r} holds no prompts: a row needs a column instruction (and input), question, "
            "prompt, messages or turns, the first row has " + ", ".join(map(repr, read_rows(path)[0]))
        )
    Random(f"{seed}/prompts").shuffle(prompts)
    return prompts, len(found) - len(prompts)


def prompt_of(row: Row) -> list[dict[str, Any]] | None:
    """The turns before the first answer in a row of any of the usual shapes, or None if there are none."""
    chat = row.get("messages") or row.get("conversations")
    if isinstance(chat, list):
        return _first_question(chat)
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        text = turns[0]
    elif row.get("instruction"):
        text = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    else:
        text = row.get("question") or row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        return None
    return [{"role": "user", "content": text.strip()}]


def _first_question(chat: list[Any]) -> list[dict[str, Any]] | None:
    """A chat up to its first user's turn; ShareGPT's fields too."""
    before: list[dict[str, Any]] = []
    for turn in chat:
        if not isinstance(turn, dict):
            return None
        role, content = turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")
        if not isinstance(content, str) or not content.strip():
            return None
        before.append({"role": {"human": "user"}.get(str(role), str(role)), "content": content.strip()})
        if before[-1]["role"] == "user":
            return before
    return None


PROBE = "\ue000prompt\ue001"
"""Stands for the user's words while their place in a rendered chat is looked for; no text contains these characters."""


@dataclass(frozen=True)
class UserTurn:
    """The user's turn of a chat template."""

    text: str  # The template up to the place of the user's words
    before: list[int]  # Its ids
    # Tokens that end a prompt: the first special token that the template writes after it, and the model's
    ends: set[int]
    markers: frozenset[str]  # Texts of the template and special tokens, which no prompt may contain


def user_turn(chat: ChatFormat, ends: Collection[int]) -> UserTurn:
    """The user's turn, found by rendering a chat whose only words are a probe.

    Args:
        chat: Template and system message.
        ends: The model's end-of-text tokens.

    Raises:
        UserError: no template, none with a user's turn, or nothing before it that a model could continue.
    """
    tokenizer = chat.tokenizer
    if not tokenizer.chat_template:
        raise UserError(
            f"data.source is target, and the tokenizer {tokenizer.name_or_path!r} has no chat template, so the target "
            "cannot be asked for what a user says: choose an instruction-tuned target, give data.chat_template, or "
            "name a file with prompts as data.source with reference.responses.source target"
        )
    system = [] if chat.system is None else [{"role": "system", "content": chat.system}]
    try:
        text = chat.render([*system, {"role": "user", "content": PROBE}])
    except UnusableRow as error:
        raise UserError(
            f"data.source is target, and its chat template refuses a chat of one user's turn ({error.detail}): name a "
            "file with prompts as data.source with reference.responses.source target"
            + (", or leave data.system out" if system else "")
        ) from error
    before, found, after = text.partition(PROBE)
    before = before.rstrip(" ")
    if not found or not before.strip():
        raise UserError(
            "data.source is target, and its chat template "
            + ("writes nothing before a user's turn" if found else "does not write what the user says")
            + ", so the target cannot be asked for prompts: give another one with data.chat_template, or name a file "
            "with prompts as data.source with reference.responses.source target"
        )
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    tail = (token for token in plain_ids(tokenizer, [after])[0] if token in special)
    stops = {int(end) for end in ends} | set([*tail][:1])
    if not stops:
        raise UserError(
            "data.source is target, and neither the model nor its chat template has a token that ends a user's turn: "
            "set eos_token in its tokenizer_config.json"
        )
    texts = {before.rsplit("\n", 1)[-1].strip(), before.strip().rsplit("\n", 1)[-1].strip(), after.strip()}
    texts |= {str(tokenizer.decode([token])).strip() for token in special}
    markers = frozenset(text for text in texts if len(text) > 2)
    return UserTurn(before, written_ids(tokenizer, before), stops, markers)


@dataclass
class PromptSampler:
    """Samples number 0, 1, 2, ...; which ones they are depends on the seed and the number alone."""

    tokenizer: PreTrainedTokenizerBase  # The target's
    turn: UserTurn  # where the user's text stands
    settings: PromptSettings  # Sampling
    seed: int  # Of the samples
    file: ResponseFile  # Where they are kept
    model: Callable[[], PreTrainedModel]  # Loads the target; asked once, when a sample is missing
    told: Callable[[str], None]  # Called with a line of progress after every batch

    def __iter__(self) -> Iterator[Sample]:
        """All samples, those on disk first; the target writes further ones as long as there is a next."""
        size, chunk, model = GROUP * self.settings.batch_size, 0, None
        if ranks.is_first():
            self.file.open()
        while True:
            numbers = range(chunk * size, (chunk + 1) * size)
            if ranks.is_first():
                if not all(number in self.file.found for number in numbers):
                    if model is None:
                        model = self.model()
                        current().begin(current().done)
                    began = time.monotonic()
                    lines = list(self.file.fill(self._written(model, numbers), self.tokenizer))
                    speed = sum(len(line.ids) for line in lines) / (time.monotonic() - began)
                    self.told(f"{len(self.file.found)} prompts written ({speed:.0f} tokens/s)")
            else:
                ranks.wait_for(lambda last=numbers[-1]: self.file.complete(last + 1) or None, "the target's prompts")  # type: ignore[misc]
            yield from (self._sample(number) for number in numbers)
            chunk += 1

    def _written(self, model: PreTrainedModel, numbers: Collection[int]) -> Iterator[Response]:
        chosen = list(numbers)
        openings = map(self.settings.opening, chosen)
        texts = write_texts(
            model,
            [written_ids(self.tokenizer, self.turn.text + words) if words else self.turn.before for words in openings],
            LogitsWarper(self.settings.temperature, top_p=self.settings.top_p),
            budgets=self.settings.max_tokens + 1,
            stop_ids=self.turn.ends,
            draws=lambda i, count: uniform_draws(self.seed, 5, chosen[i], count=count),
            batch_size=self.settings.batch_size,
            progress=self._count(),
        )
        return (Response(number, text) for number, text in zip(chosen, texts))

    def _count(self) -> Callable[[int], None]:
        work, written = current(), len(self.file.found)

        def count(texts: int) -> None:
            nonlocal written
            written += texts
            work.detail = f"kept, {written} written"

        return count

    def _sample(self, number: int) -> Sample:
        ids = self.file.found[number].ids
        ended = bool(ids) and ids[-1] in self.turn.ends
        words = ids[:-1] if ended else ids
        text = self.tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return Sample(str(text), len(words), ended, self.settings.opening(number))
