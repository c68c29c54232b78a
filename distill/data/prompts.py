"""Prompts without answers: those of a file and those that the target writes (Magpie), in three splits."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import NamedTuple
from unicodedata import category

import numpy as np
from datasets import Dataset

from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.incoming import ASKED, LeftOut, UnusableRow, asked_chat, sentences, usable
from decode.measure.suites import Row, iter_rows
from decode.models.tokens import added_ids, plain_ids, written_ids
from decode.progress import current
from decode.writing import GROUP
from distill.config.base import Values
from distill.config.data import DataSettings, PromptSettings
from distill.data.chat import ChatFormat
from distill.data.sources import plain_chat, plain_rows
from distill.data.writing import Job, Write, keep_texts
from distill.files import fingerprint
from distill.kept import TEXT_IDS, Kept

SHORTEST, LONGEST = 4, 160  # tokens of a prompt
BYTES = 3  # of a text count as a token at least: a vocabulary may have whole questions in scripts without spaces
START_WORDS = 10  # a prompt whose first words are those of an earlier one is dropped
TRIES = 8  # samples at most for each prompt wanted
BATCH = 64  # prompts written together
SAMPLING = LogitsWarper(1.0, top_p=0.95)  # Magpie samples broadly, and leaves out what is hardly ever said
ORDER = ("test", "validation", "train")  # prompts are dealt out in this order: more training ones change no other split
MORE = "data.prompts.openings gives other first words, data.prompts.file prompts of your own"
PROBE = "\ue000prompt\ue001"  # replaces the user's words while their place in a rendered chat is searched; in no text


# -- which prompts are kept -------------------------------------------------------------------------------------------


class Sample(NamedTuple):
    """What the target wrote as the user's turn."""

    text: str
    problem: str = ""  # why it is no prompt
    opening: str = ""  # given words before it


def problem_of(text: str, tokens: int, ended: bool, markers: Collection[str] = ()) -> str:
    """Why a text that the target wrote as the user's turn is no prompt; empty if it is one.

    It has so many ``tokens``, without the end token if it ``ended``, and may contain none of the template's
    ``markers``.
    """
    reasons = {
        f"unfinished after {LONGEST} tokens": not ended,
        f"shorter than {SHORTEST} tokens": max(tokens, len(text.encode()) // BYTES) < SHORTEST or not text.strip(),
        "broken characters": "\ufffd" in text,
        "template markers inside": any(marker in text for marker in markers),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def prompt_rows(
    settings: DataSettings,
    seed: int,
    samples: Iterator[Sample] | None,
    say: Callable[[str], object] = lambda line: None,
) -> tuple[dict[str, Dataset], list[str]]:
    """The prompts of each split as chats of one user's turn, and notes about them; no prompt is there twice.

    Prompts of a file come first, each split having its share of them; the target writes those that are missing.

    Args:
        settings: Number and source of the prompts.
        seed: Order of the file's rows.
        samples: What the target writes; None: no target is named.
        say: Called after the first samples with what is dropped of them, and the settings that change it.

    Raises:
        UserError: Too few of the samples can be used, or a file without prompts.
    """
    limits = {split: settings.limits[split] for split in ORDER}
    notes, path, dropped, seen = list[str](), settings.prompts.file, Counter[str](), set[str]()
    rows: dict[str, list[Row]] = {split: [] for split in ORDER}

    def keeps(text: str, problem: str = "") -> bool:
        """Whether a prompt has no problem, and neither the words nor the first ten words of one that was kept."""
        words = "".join(c if c.isalnum() or category(c)[0] == "M" else " " for c in text.lower()).split()
        keys = {" ".join(words) or text, *[" ".join(words[:START_WORDS]) + " ..."] * (len(words) >= START_WORDS)}
        if problem := problem or "repeated" * bool(keys & seen):
            dropped[problem] += 1
        else:
            seen.update(keys)
        return not problem

    def reasons() -> str:
        return ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "none"

    if path is not None:
        read, left_out = list(iter_rows(path)), LeftOut()
        given = [row for _, row in usable(read, left_out, prompt_of)]
        notes += sentences("data.prompts.file", left_out)
        if not given:
            raise UserError(
                f"data.prompts.file {path!r} holds no prompts: a row needs one of the columns {', '.join(ASKED)}, the "
                f"first row has {', '.join(map(repr, read[0]))}"
            )
        Random(f"{seed}/prompts").shuffle(given)
        new = [row for row in given if keeps(json.loads(row["messages"])[-1]["content"])]
        share, numbered = min(1.0, len(new) / sum(limits.values())), iter(enumerate(new, 1))
        for split, limit in limits.items():
            rows[split] = [row | {"number": number} for number, row in islice(numbered, round(share * limit))]
        used = sum(map(len, rows.values()))
        notes.append(f"data.prompts.file: {used} used, {dropped.total()} dropped as repetitions")
        dropped.clear()
    if missing := [split for split, limit in limits.items() for _ in range(limit - len(rows[split]))]:
        if samples is None:
            raise UserError(
                f"data.source is target, which has to write {len(missing)} prompts, and no target is named: give "
                "target.model (a folder of an instruct model), or more prompts with data.prompts.file"
            )
        written, sampled, work = 0, enumerate(samples, 1), current()
        work.update(name="prompts of the target", total=len(missing))
        for accepted, split in enumerate(missing):
            work.update(done=accepted)
            for written, sample in sampled:
                kept = keeps(sample.text, sample.problem)
                if written == BATCH and dropped:
                    say(f"{reasons()} of the first {BATCH} prompts of the target are dropped ({MORE})")
                if kept:
                    break
                if written >= max(100, TRIES * len(missing)):
                    raise UserError(
                        f"data.source is target, and of {written} prompts that it wrote {accepted} can be used of "
                        f"{len(missing)} wanted ({reasons()}): use an instruction-tuned target, or another setting "
                        f"({MORE})"
                    )
            asked = [{"role": "user", "content": (sample.opening + sample.text).strip()}]
            rows[split].append(plain_chat(asked, {}, "") | {"number": written})
        share = len(missing) / written
        notes.append(f"prompts of the target: {written} written, {share:.0%} kept; dropped: {reasons()}")
    return {split: plain_rows(rows[split]) for split in ORDER}, notes


def prompt_of(row: Row) -> Row:
    """The turns of a row up to the first question in the plain shape; rows may have any of the usual ones.

    Raises:
        UnusableRow: No question, or see `decode.incoming.row_chat`.
    """
    messages, variables, note = asked_chat(row)
    asked = next((place for place, turn in enumerate(messages, 1) if turn["role"] == "user"), 0)
    if not asked:
        raise UnusableRow("without a prompt", note)
    return plain_chat([turn | {"content": turn["content"].strip()} for turn in messages[:asked]], variables, note)


# -- what the target writes -------------------------------------------------------------------------------------------


def user_turn(chat: ChatFormat) -> tuple[str, set[int], set[str]]:
    """The user's turn, seen by rendering a chat whose only words are a probe.

    Args:
        chat: Template, system message and the ends of the model's texts.

    Returns:
        The template up to the user's words; the tokens that end a prompt, which are the first special one that the
        template writes after it, and the model's; the template's texts and special tokens, which no prompt may contain.

    Raises:
        UserError: No template, or none that writes something before a user's turn for the model to continue.
    """
    tokenizer, problem = chat.tokenizer, "its chat template writes no user's turn that it could continue"
    try:
        written = chat.render(chat.prepared([{"role": "user", "content": PROBE}]))
    except UserError as error:
        written, problem = "", f"{error} (data.system {chat.system!r})"
    before, probe, after = written.partition(PROBE)
    before = before.rstrip(" ")
    if not probe or not before.strip():
        raise UserError(
            f"data.source is target, so the target has to write what a user says, and {problem}: choose an "
            "instruction-tuned target, give another template with data.chat_template, or name a file with prompts as "
            "data.source with teacher.responses.source target"
        )
    special = added_ids(tokenizer)
    tail = [token for token in plain_ids(tokenizer, [after])[0] if token in special]
    stops = {*chat.ends, tokenizer.eos_token_id, *tail[:1]} - {None}
    texts = [before.rsplit("\n", 1)[-1], before.strip().rsplit("\n", 1)[-1], after]
    texts += tokenizer.batch_decode([[token] for token in special])
    return before, stops, {text.strip() for text in texts if len(text.strip()) > 2}


@dataclass(frozen=True)
class PromptWriter:
    """The target, as far as it writes prompts."""

    made_from: Values  # the target's files and number format
    path: Path  # folder of the samples
    writer: Callable[
        [Collection[int]], Write
    ]  # makes what writes up to these end tokens; called if a sample is missing
    say: Callable[[str], None]  # called with a line of progress after every batch
    together: int | None  # samples that are asked for together; None: as many as are fastest

    def samples(self, chat: ChatFormat, settings: PromptSettings, seed: int) -> Iterator[Sample]:
        """Samples number 0, 1, 2, ..., each a function of the seed and its number."""
        (before, ends, markers), tokenizer, write = user_turn(chat), chat.tokenizer, None
        together = self.together or GROUP * BATCH
        key = fingerprint(self.made_from, {"before": before, "ends": sorted(ends), "seed": seed}, settings.openings)
        kept = Kept(TEXT_IDS, self.path / key[:16])
        for start in count(step=together):
            numbers = range(start, start + together)
            if kept.find(np.array(numbers, np.uint64)).min() < 0:
                if write is None:
                    self.say("the target writes prompts")
                    write = self.writer(ends)
                    current().begin(current().done)
                texts = (before + settings.opening(number) for number in numbers)
                jobs = (Job(number, written_ids(tokenizer, text), LONGEST + 1) for number, text in zip(numbers, texts))
                keep_texts(kept, jobs, write)
                self.say(f"{len(kept)} prompts written")
            for number in numbers:
                ids = kept.get("ids", number).tolist()
                ended = bool(ids) and ids[-1] in ends
                words = ids[:-1] if ended else ids
                text = str(tokenizer.decode(words, skip_special_tokens=False, clean_up_tokenization_spaces=False))
                yield Sample(text, problem_of(text, len(words), ended, markers), settings.opening(number))
