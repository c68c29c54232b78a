"""Prompts without answers: those that the target writes (Magpie) and those of a file, in three splits."""

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
from distill.data.chat import SHAREGPT, ChatFormat, UnusableRow
from distill.data.response_file import Response, ResponseFile

WORD = re.compile(r"\w+")
Triple = tuple[str, ...]
ORDER = ("test", "validation", "train")  # prompts are dealt out in this order: more training ones change no other split
MIN_TOKENS = 4  # shortest prompt
ASCII_LETTERS = 0.9  # smallest share of ASCII letters, a cheap rule for English
START_WORDS = 10  # a prompt whose first words are those of an earlier one is a near duplicate
OVERLAP = 0.6  # and so is one with this share of its word trigrams in one earlier prompt
TRIES = 8  # samples at most for each prompt wanted
SAMPLING = LogitsWarper(1.0, top_p=0.95)  # Magpie samples broadly, and leaves out what is hardly ever said
PROBE = "\ue000prompt\ue001"  # replaces the user's words while their place in a rendered chat is searched; in no text
INSTEAD = "name a file with prompts as data.source with teacher.responses.source target"


class PromptFilter:
    """Keeps prompts that are new and usable, and counts why the others were dropped.

    Args:
        settings: Limits.
        markers: Texts of the chat template that no prompt may contain.

    Attributes:
        kept: Number of prompts kept so far.
        dropped: Number of prompts dropped for each reason.
    """

    def __init__(self, settings: PromptSettings, markers: Collection[str] = ()) -> None:
        self.settings, self.markers = settings, tuple(markers)
        self.kept, self.dropped = 0, Counter[str]()
        self._texts, self._starts = set[str](), set[Triple]()
        self._triples: list[set[Triple]] = []
        self._places: dict[Triple, list[int]] = defaultdict(list)

    def written(self, text: str, tokens: int, *, ended: bool) -> bool:
        """Whether a prompt that the target wrote is kept.

        Args:
            text: Without the end token.
            tokens: Its length.
            ended: Whether it ended before the limit.
        """
        settings = self.settings
        letters = [character for character in text if character.isalpha()]
        if not ended:
            reason = f"unfinished after {settings.max_tokens} tokens"
        elif tokens < MIN_TOKENS or not text.strip():
            reason = f"shorter than {MIN_TOKENS} tokens"
        elif "\ufffd" in text:
            reason = "broken characters"
        elif any(marker in text for marker in self.markers):
            reason = "template markers inside"
        elif sum(map(str.isascii, letters)) < ASCII_LETTERS * max(1, len(letters)):
            reason = f"less than {ASCII_LETTERS:.0%} ASCII letters"
        else:
            return self.is_new(text)
        self.dropped[reason] += 1
        return False

    def is_new(self, text: str) -> bool:
        """Whether a prompt repeats none that was kept, nearly or exactly; it is then kept itself."""
        words = WORD.findall(text.lower())
        whole, start = " ".join(words) or text, tuple(words[:START_WORDS])
        triples = {tuple(words[at : at + 3]) for at in range(len(words) - 2)}
        needed, near = math.ceil(OVERLAP * len(triples)), False
        if needed:  # an earlier prompt with that many of the triples has one of the rarest (all - needed + 1) of them
            rare = sorted(triples, key=lambda triple: (len(self._places.get(triple, ())), triple))
            places = {place for triple in rare[: len(triples) - needed + 1] for place in self._places.get(triple, ())}
            near = any(len(triples & self._triples[place]) >= needed for place in places)
        if whole in self._texts or start in self._starts or near:
            self.dropped["repeated" if whole in self._texts else "nearly repeated"] += 1
            return False
        self.kept += 1
        self._texts.add(whole)
        if len(start) == START_WORDS:
            self._starts.add(start)
        for triple in triples:
            self._places[triple].append(len(self._triples))
        self._triples.append(triples)
        return True

    def reasons(self) -> str:
        """The reasons for dropping prompts, each with its count."""
        return ", ".join(f"{count} {reason}" for reason, count in self.dropped.most_common())


@dataclass(frozen=True)
class Sample:
    """What the target wrote as the user's turn.

    Attributes:
        text: Without the end token.
        tokens: Its length.
        ended: Whether it ended before the limit.
        opening: The given words before it.
    """

    text: str
    tokens: int
    ended: bool
    opening: str = ""


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
    limits = {"train": settings.train_limit or 0, "validation": settings.validation_examples}
    limits["test"] = settings.test_examples
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
        found = (messages for messages in given if kept.is_new(str(messages[-1]["content"])))
        for split in ORDER:
            wanted = range(1, round(own.file_share * limits[split]) + 1)
            splits[split] = [{"messages": messages, "number": i} for i, messages in zip(wanted, found)]
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
    for split in ORDER:
        while missing[split]:
            if written >= max(100, TRIES * total):
                raise UserError(
                    f"data.source is target, and of {written} prompts that it wrote {accepted} can be used of {total} "
                    f"wanted ({kept.reasons()}): use an instruction-tuned target, loosen the limits of data.prompts, "
                    "or add prompts with data.prompts.file"
                )
            sample, written = next(samples), written + 1
            if kept.written(sample.text, sample.tokens, ended=sample.ended):
                message = {"role": "user", "content": (sample.opening + sample.text).strip()}
                splits[split].append({"messages": [message], "number": written})
                missing[split], accepted = missing[split] - 1, accepted + 1
                work.update(done=accepted)
    notes.append(
        f"prompts of the target: {written} written, {accepted} kept ({accepted / written:.0%}); "
        f"dropped: {kept.reasons() or 'none'}"
    )
    return splits, notes


def prompt_of(row: Row) -> list[dict[str, Any]] | None:
    """The turns of a row up to the first question, or None if it has none; rows may have any of the usual shapes."""
    chat = row.get("messages") or row.get("conversations")
    if not isinstance(chat, list):
        texts = [row.get("instruction"), row.get("input")] if row.get("instruction") else []
        turns = row.get("turns")
        first = turns[0] if isinstance(turns, list) and turns else row.get("question") or row.get("prompt")
        text = "\n\n".join(str(text) for text in texts if text) or first
        chat = [{"role": "user", "content": text}]
    before: list[dict[str, Any]] = []
    for turn in chat:
        turn = turn if isinstance(turn, dict) else {}
        role, content = str(turn.get("role") or turn.get("from")), turn.get("content") or turn.get("value")
        if not isinstance(content, str) or not content.strip():
            return None
        before.append({"role": SHAREGPT.get(role, role), "content": content.strip()})
        if before[-1]["role"] == "user":
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


def user_turn(chat: ChatFormat, ends: Collection[int]) -> UserTurn:
    """The user's turn, found by rendering a chat whose only words are a probe.

    Args:
        chat: Template and system message.
        ends: The model's end-of-text tokens.

    Raises:
        UserError: No template, none with a user's turn, or nothing before it that a model could continue.
    """
    tokenizer, problem, text = chat.tokenizer, "", ""
    if not tokenizer.chat_template:
        problem = f"the tokenizer {tokenizer.name_or_path!r} has no chat template"
    else:
        try:
            text = chat.render(chat.with_system([{"role": "user", "content": PROBE}]))
        except UnusableRow as error:
            problem = f"its chat template refuses a chat of one user's turn ({error.detail})"
            problem += ", leave data.system out" if chat.system is not None else ""
    before, found, after = text.partition(PROBE)
    before = before.rstrip(" ")
    if not problem and not found:
        problem = "its chat template does not write what the user says"
    elif not problem and not before.strip():
        problem = "its chat template writes nothing before a user's turn"
    if problem:
        raise UserError(
            f"data.source is target, so the target has to write what a user says, and {problem}: choose an "
            f"instruction-tuned target, give another template with data.chat_template, or {INSTEAD}"
        )
    special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
    tail = [token for token in plain_ids(tokenizer, [after])[0] if token in special]
    stops = {int(end) for end in ends} | set(tail[:1])
    if not stops:
        raise UserError(
            "data.source is target, and neither the model nor its chat template has a token that ends a user's turn: "
            "set eos_token in its tokenizer_config.json"
        )
    texts = {before.rsplit("\n", 1)[-1].strip(), before.strip().rsplit("\n", 1)[-1].strip(), after.strip()}
    texts |= {str(tokenizer.decode([token])).strip() for token in special}
    return UserTurn(before, written_ids(tokenizer, before), stops, frozenset(text for text in texts if len(text) > 2))


@dataclass
class PromptSampler:
    """Samples number 0, 1, 2, ...; each depends on the seed and its number alone.

    Attributes:
        tokenizer: The target's.
        turn: Where the user's text is.
        settings: Sampling.
        seed: Of the samples.
        file: Where they are kept.
        model: Loads the target; called once, when a sample is missing.
        say: Called with a line of progress after every batch.
    """

    tokenizer: PreTrainedTokenizerBase
    turn: UserTurn
    settings: PromptSettings
    seed: int
    file: ResponseFile
    model: Callable[[], PreTrainedModel]
    say: Callable[[str], None]

    def __iter__(self) -> Iterator[Sample]:
        """All samples, those on disk first; the target writes further ones as long as there is a next."""
        size, start, model, file = GROUP * self.settings.batch_size, 0, None, self.file
        if ranks.is_first():
            file.open()
        while True:
            numbers = range(start, start + size)
            if not ranks.is_first():
                ranks.wait_for(lambda count=numbers[-1] + 1: len(file.read()) >= count or None, "the target's prompts")  # type: ignore[misc]
            elif not all(number in file.found for number in numbers):
                if model is None:
                    model = self.model()
                    current().begin(current().done)
                began = time.monotonic()
                lines = list(file.fill(self._written(model, numbers), self.tokenizer))
                speed = sum(len(line.ids) for line in lines) / (time.monotonic() - began)
                self.say(f"{len(file.found)} prompts written ({speed:.0f} tokens/s)")
            for number in numbers:
                ids = file.found[number].ids
                ended = bool(ids) and ids[-1] in self.turn.ends
                words = ids[:-1] if ended else ids
                text = self.tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                yield Sample(str(text), len(words), ended, self.settings.opening(number))
            start += size

    def _written(self, model: PreTrainedModel, numbers: range) -> Iterator[Response]:
        openings, written = map(self.settings.opening, numbers), len(self.file.found)

        def progress(texts: int) -> None:
            nonlocal written
            written += texts
            current().detail = f"kept, {written} written"

        texts = write_texts(
            model,
            [written_ids(self.tokenizer, self.turn.text + words) if words else self.turn.before for words in openings],
            SAMPLING,
            budgets=self.settings.max_tokens + 1,
            stop_ids=self.turn.ends,
            draws=lambda i, count: uniform_draws(self.seed, 5, numbers[i], count=count),
            batch_size=self.settings.batch_size,
            progress=progress,
        )
        return (Response(number, text) for number, text in zip(numbers, texts))
