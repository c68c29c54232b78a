"""The texts that drafts are trained on: the data set's responses, or the target's, written here or by an engine."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from datasets import Dataset, Features, Value
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.draft import until_end
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.incoming import REASONING, UnusableRow, learned_turns
from decode.measure.suites import Row
from decode.models.open import files_of, stop_ids
from decode.models.tokens import end_token, plain_ids
from decode.options import in_turn
from decode.progress import working
from decode.writing import GROUP
from distill import ranks
from distill.data.chat import IGNORE, ChatFormat, Ids, prompt_part
from distill.data.corpus import COLUMNS
from distill.data.dataset import Examples
from distill.data.tables import mapped_table
from distill.data.writing import Check, Job, Write, first_checked, keep_texts, written_here
from distill.files import files_state, fingerprint, remove
from distill.fingerprints import inputs
from distill.kept import TEXT_IDS, Ints, Kept
from distill.run import Run

LEARNED = Features({name: COLUMNS[name] for name in ("input_ids", "labels")})
KEPT = Features(LEARNED | {"temperature": Value("float64")})
TURNS = Features(KEPT | {"chat": Value("string"), "number": Value("int64"), "finished": Value("bool")})
"""Columns of conversations after some turns: a prompt that is to be answered, or a ``finished`` example. ``chat`` has
messages and the template's variables as JSON where the assistant has several turns; with the seed ``number`` decides
the answer."""


ANSWERED = "examples.arrow"
"""The file of a split's examples, which is there once all of its answers are."""


class Arrivals(Protocol):
    """Takes the states of what a target has just written."""

    def put(self, input_ids: Ids, labels: Ids, states: Tensor) -> None:
        """Take the states ``[tokens, layers, width]`` of all tokens of an example but the last."""

    def close(self) -> None:
        """Write what is left."""


def answered_texts(
    run: Run,
    target: PreTrainedModel | None = None,
    *,
    original: bool = False,
    arrivals: Callable[[str], Arrivals] | None = None,
    check: Check | None = None,
) -> tuple[Dataset, Dataset, str]:
    """Train and validation examples, with the data set's responses or the target's; and their fingerprint.

    Args:
        run: Its target is finished, or given.
        target: The target, if it is open already.
        original: All examples, with the responses of the target as it is given.
        arrivals: Makes, of this fingerprint, what takes the states that an engine gives with its answers.
        check: Refuses the first answers of servers, before any is kept.
    """
    settings, record = run.settings, None if original else run.record("target")
    path, from_target = settings.target.model if record is None else run.target, settings.teacher.responses.from_target
    read = inputs(settings, {"frozen", "answers"} | ({"written", "seed"} if from_target else set()))
    if original:
        read |= {"teacher.examples": None}
    target_key = (files_state([str(path)]) or str(path)) if record is None else record.fingerprint
    key = ranks.exchange(fingerprint(target_key, run.corpus.fingerprint, read))[0]
    splits = {"train": run.corpus.train if original else run.examples, "validation": run.validation}
    if from_target:
        assert path is not None
        files = files_of(path, trust_remote_code=settings.target.trust_remote_code)
        arriving = None if arrivals is None else cache(partial(arrivals, key))
        for split, rows in splits.items():
            place = run.work / "responses" / f"{split}-{fingerprint(key, len(rows))[:16]}"
            talks = Conversations(run, stop_ids(files, run.tokenizer), target, arriving, check)
            splits[split] = talks.answered(rows, f"the target's responses, {split}", place)
    return splits["train"], splits["validation"], key


def examples_of(answers: Sequence[tuple[Ids, Ids]]) -> Examples:
    """The examples of prompts and their answers, which are their labels."""
    labels = [[IGNORE] * len(prompt) + answer for prompt, answer in answers]
    rows = {"input_ids": [[*prompt, *answer] for prompt, answer in answers], "labels": labels}
    return Examples.of(Dataset.from_dict(rows, features=LEARNED))


def ends_with(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat | None) -> int:
    """The id that ends an answer whose stop token an engine leaves out: the template's, if it writes prompts."""
    return end_token(tokenizer) if chat is None else chat.answer_end()


def _column(rows: Dataset, name: str) -> NDArray[Any]:
    return np.asarray(rows.select_columns(name).with_format("arrow")[:][name])


def _shared(path: Path, features: Features, rows: Iterable[Row]) -> Dataset:
    """A table that the first process writes and all map."""
    if ranks.is_first():
        mapped_table(path, features, rows)
    ranks.barrier()
    return Dataset.from_file(str(path))


class Conversations:
    """The conversations of a split, whose turns of the assistant the target answers one after another.

    Args:
        run: The run.
        ends: Ids that end the target's texts.
        target: The target, if it is open already.
        arrivals: Makes what takes the states that an engine gives with its answers.
        check: Refuses the first answers of servers.
    """

    def __init__(
        self, run: Run, ends: Sequence[int], target: PreTrainedModel | None, arrivals: Callable[[], Arrivals] | None,
        check: Check | None,
    ) -> None:  # fmt: skip
        data, teacher = run.settings.data, run.settings.teacher
        self.run, self.ends, self.target, self.arrivals, self.check = run, ends, target, arrivals, check
        self.chat = ChatFormat(run.tokenizer, data.system, data.args(), ends) if run.corpus.chat else None
        self.settings, self.longest = teacher.responses, data.max_length
        self.served = teacher.served and target is None
        self.count, self.empty, self.asked, self.lost = 0, 0, 0, Counter[str]()

    def answered(self, rows: Dataset, title: str, place: Path) -> Dataset:
        """The examples of a split, made of its prompts, or from a folder in which they are kept.

        Raises:
            UserError: Most answers are empty.
        """
        file, answers = place / ANSWERED, Kept(TEXT_IDS, place)
        if ranks.exchange(file.exists())[0]:
            return Dataset.from_file(str(file))
        turns = [_shared(place / "turn-0.arrow", TURNS, self.first(rows))]
        while not _column(turns[-1], "finished").all():
            self.write(turns[-1], answers, f"{title}, turn {len(turns)}" if len(turns) > 1 else title)
            turns.append(_shared(place / f"turn-{len(turns)}.arrow", TURNS, self.following(turns[-1], answers)))
        for reason, chats in self.lost.items():
            if reason:
                self.run.line(f"{title}: {chats} chats are cut before a later turn, {reason}")
        self.empty, self.asked = ranks.exchange((self.empty, self.asked))[0]  # counted by the first process
        if self.empty:
            self.run.line(f"{self.empty} of {self.asked} responses are empty, and nothing of them is learned")
        if 2 * self.empty > self.asked:
            raise UserError(
                f"{title}: {self.empty} of {self.asked} are empty: look at what the target writes for these prompts "
                f"(draftsmith decode generate), then delete {place} and run again"
            )
        finished = (turn.select(np.flatnonzero(_column(turn, "finished"))).select_columns([*KEPT]) for turn in turns)
        made = _shared(file, KEPT, (row for turn in finished for row in turn))
        for number in range(len(turns)) if ranks.is_first() else ():
            remove(place / f"turn-{number}.arrow")
        return made

    def write(self, turn: Dataset, answers: Kept, title: str) -> None:
        """Have the prompts of a turn answered that are not yet."""
        texts, size = Examples.of(turn), None if self.served else GROUP * self.settings.batch_size
        budgets = np.clip(self.longest - texts.lengths, 0, self.settings.max_new_tokens)
        budgets[_column(turn, "finished")] = 0
        numbers, own = _column(turn, "number"), _column(turn, "temperature")
        for temperature in np.unique(own).tolist():
            writer, asked = partial(self.writer, turn, temperature), np.where(own == temperature, budgets, 0)
            write_answers(self.run, answers, texts, numbers, asked, writer, title, size)

    def writer(self, turn: Dataset, temperature: float) -> Write:
        """What answers the prompts of a turn that have this temperature."""
        warp = LogitsWarper(temperature, top_p=self.settings.top_p)
        seed, run = self.run.settings.seed, self.run
        if not self.served:
            model = run.frozen if self.target is None else self.target
            return partial(written_here, model, warp, self.ends, (seed, 0), self.settings.batch_size)
        states = run.states if run.settings.teacher.in_engine else None  # which are compared before a text is written
        write = partial(run.servers(run.tokenizer, self.ends, ends_with(run.tokenizer, self.chat)).write, warp)
        if self.arrivals is None:
            return partial(first_checked, write, self.check)
        arrivals, numbers = self.arrivals(), _column(turn, "number")

        def take(job: Job, ids: Ids, states: Tensor) -> None:
            row = turn[int(np.flatnonzero(numbers == job.number)[0])]
            for made in self.after(row, ids)[0]:
                if made["finished"] and len(states) == len(made["input_ids"]) - 1:
                    arrivals.put(made["input_ids"], made["labels"], states)

        def write_and_take(jobs: Iterable[Job]) -> Iterator[tuple[int, Ids]]:
            try:
                yield from write(jobs, files=states, take=take)
            finally:
                arrivals.close()

        return partial(first_checked, write_and_take, self.check)

    def first(self, rows: Dataset) -> Iterator[Row]:
        """The first prompts, of the corpus's rows."""
        begun = np.flatnonzero(_column(rows, "turn") == 0)
        self.count = len(begun)
        for number, row in enumerate(rows.select_columns(["input_ids", "labels", "chat"]).select(begun)):
            prompt = prompt_part(row["input_ids"], row["labels"])
            unlearned = {"input_ids": prompt, "labels": [IGNORE] * len(prompt)}
            temperature = in_turn(self.settings.temperature, number)
            yield row | unlearned | {"number": number, "finished": False, "temperature": temperature}

    def following(self, turn: Dataset, answers: Kept) -> Iterator[Row]:
        """What the answers make of the prompts of a turn."""
        for row in turn.select(np.flatnonzero(~_column(turn, "finished"))):
            ids = answers.get("ids", row["number"]).tolist() if len(row["input_ids"]) < self.longest else []
            made, lost = self.after(row, ids)
            self.asked += 1
            self.empty += not ids and len(row["input_ids"]) < self.longest
            self.lost[lost] += 1
            yield from made

    def after(self, row: Row, ids: Ids) -> tuple[list[Row], str]:
        """What an answer makes of a prompt: the example, or the next prompt; both where this does not continue it.

        The history of the next prompt is what the target answered. Returned with them is why later turns are lost.
        """
        answer = until_end(ids, self.ends)
        learned = {"input_ids": row["input_ids"] + answer, "labels": row["labels"] + answer}
        example, number = row | learned | {"finished": True}, row["number"] + self.count
        messages, variables = json.loads(row["chat"] or "[[], {}]")
        place, *later = learned_turns(messages)[row["number"] // self.count :] or [0]
        if not later or self.chat is None:
            return [example], ""
        tokenizer = self.chat.tokenizer
        text = str(tokenizer.decode(answer[:-1] if answer and answer[-1] in self.ends else answer))
        thought, closed, content = text.rpartition("</think>")
        messages[place] = {"role": "assistant", "content": content.strip() if closed else text}
        if closed:
            messages[place][REASONING[0]] = thought.removeprefix("<think>").strip()
        try:
            if any(message["role"] == "tool" for message in messages[place : later[0]]):
                raise UnusableRow("because a tool's recorded result does not fit the call that the target wrote")
            if not content.strip():
                raise UnusableRow("because an answer is empty")
            chat = replace(self.chat, template_args=variables)
            (prompt,) = plain_ids(tokenizer, [chat.ask(chat.prepared(messages[: later[0]]))])
            if len(prompt) >= self.longest:
                raise UnusableRow(f"because they are longer than data.max_length ({self.longest} tokens)")
        except UnusableRow as error:
            return [example], error.reason
        labels, length = [IGNORE] * len(prompt), len(example["input_ids"])
        following = row | {"input_ids": prompt, "labels": labels, "number": number}
        following["chat"] = json.dumps([messages, variables], ensure_ascii=False)
        if prompt[:length] != example["input_ids"]:
            return [example, following], ""
        labels[:length] = example["labels"]
        return [following], ""


def write_answers(
    run: Run,
    answers: Kept,
    texts: Examples,
    numbers: Ints,
    budgets: Ints,
    writer: Callable[[], Write],
    title: str,
    size: int | None,
) -> None:
    """Has prompts answered that are not yet, into ``answers`` by their numbers.

    Args:
        run: Shows the progress.
        answers: Where they are kept.
        texts: The prompts; those of similar length are written together.
        numbers: Of each.
        budgets: Longest answer of each in tokens; 0: it is not answered.
        writer: Makes what writes those that are missing.
        title: Of the progress.
        size: Prompts that a process writes together, whole groups, so that bits are those of one process. None: an
            engine answers, which the first process alone asks.
    """
    order = np.lexsort((numbers, texts.lengths))
    order = order[budgets[order] > 0]
    keys = numbers[order].astype(np.uint64)
    missing = answers.find(keys) < 0
    groups = [order[missing]]
    if size is not None:
        parts = (slice(start, start + size) for start in range(0, len(order), size))
        groups = [order[part] for part in parts if missing[part].any()]
    share = answers.share(groups, alone=size is None)
    if missing.any() and share:
        with working(run.console, title, int(missing.sum())):
            write = writer()
            for group in share:
                jobs = (Job(int(numbers[row]), texts.text(row)[0].tolist(), int(budgets[row])) for row in group)
                keep_texts(answers, jobs, write)
    answers.join(keys)
    if missing.any():
        run.line(f"{title}: {len(order)} ({missing.sum()} new)")
