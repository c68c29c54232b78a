"""The texts that drafts are trained on: the data set's responses, or the target's, written here or by an engine."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import pyarrow.compute
from datasets import Dataset, Features
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.core.draft import until_end
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.measure.suites import Row
from decode.models.open import files_of, stop_ids
from decode.models.tokens import REASONING, end_token, plain_ids
from decode.progress import current, working
from decode.writing import GROUP, uniform_draws, write_texts
from distill import ranks
from distill.config.base import Values
from distill.config.teacher import ResponseSettings
from distill.data.chat import IGNORE, ChatFormat, Example, Ids, Piece, Turn, joined, refuse_control_tokens
from distill.data.corpus import COLUMNS
from distill.data.dataset import Examples
from distill.data.messages import Messages, UnusableRow
from distill.data.tables import mapped_table
from distill.engine.servers import Engine, answer_ids, in_flight, request_seed
from distill.engine.states import StateFiles
from distill.files import files_state, fingerprint
from distill.kept import TEXT_IDS, Ints, Kept, Keys
from distill.run import Run

LEARNED = Features({name: COLUMNS[name] for name in ("input_ids", "labels")})


class Job(NamedTuple):
    """A prompt to be answered."""

    example: int  # its number; with the seed it decides the response
    ids: Ids  # its token ids
    budget: int  # longest response in tokens


Answer = Callable[[Iterable[Job]], Iterator[tuple[int, Ids]]]
"""Answers jobs in any order, each as soon as it is finished, by its number."""


class Arrivals(Protocol):
    """Takes the states of what a target has just written."""

    def put(self, example: Example, states: Tensor) -> None:
        """Take the states ``[tokens, layers, width]`` of all tokens of an example but the last."""

    def close(self) -> None:
        """Write what is left."""


# -- the examples of a run --------------------------------------------------------------------------------------------


def answered_texts(
    run: Run,
    target: PreTrainedModel | None = None,
    *,
    original: bool = False,
    arrivals: Callable[[str], Arrivals] | None = None,
) -> tuple[Dataset, Dataset, str]:
    """Train and validation examples, with the data set's responses or the target's; and their fingerprint.

    Args:
        run: Its target is finished, or given.
        target: The target, if it is open already.
        original: All examples, with the responses of the target as it is given.
        arrivals: Makes, of this fingerprint, what takes the states that an engine gives with its answers.
    """
    settings, record = run.settings, None if original else run.record("target")
    path = settings.target.model if record is None else run.target
    made_from: Values = {
        "target": (files_state([str(path)]) or str(path)) if record is None else record.fingerprint,
        "corpus": run.corpus.fingerprint,
        "examples": None if original else settings.teacher.examples,
        "quantization": settings.target.quantization,
        "dtype": settings.target.dtype,
        "responses": settings.teacher.responses.key() | {"served": settings.teacher.served and not original},
        "arguments": settings.teacher.arguments,
    }
    splits = {"train": run.corpus.train if original else run.examples, "validation": run.validation}
    if settings.teacher.responses.from_target:
        assert path is not None
        made_from |= {"seed": settings.seed, "max_length": settings.data.max_length}
        folder, take = "original" if original else "responses", arrivals and partial(arrivals, fingerprint(made_from))
        splits = _answered(run, splits, made_from, run.work / folder, path, target, take)
    return splits["train"], splits["validation"], fingerprint(made_from)


def _answered(
    run: Run,
    splits: dict[str, Dataset],
    made_from: Values,
    folder: Path,
    path: str | Path,
    target: PreTrainedModel | None,
    arrivals: Callable[[], Arrivals] | None,
) -> dict[str, Dataset]:
    """The splits' prompts with the responses of the target at a path, kept in a folder and mapped into memory."""
    teacher, data, tokenizer = run.settings.teacher, run.settings.data, run.tokenizer
    settings, served = teacher.responses, teacher.served and target is None
    ends = stop_ids(files_of(path, trust_remote_code=run.settings.target.trust_remote_code), tokenizer)
    chat = ChatFormat(tokenizer, data.system, data.template_args, ends) if run.corpus.chat else None

    @cache
    def opened() -> PreTrainedModel:
        return run.frozen if target is None else target

    took = None if arrivals is None else cache(arrivals)

    def writer(talks: Talks) -> Answer:
        if served:
            end, taken = ends_with(tokenizer, chat), None if took is None else Taken(talks, took(), run.states)
            return partial(answered_by_engine, run.engine, settings, run.settings.seed, ends, end, taken=taken)
        warp = LogitsWarper(settings.temperature, top_p=settings.top_p)
        return partial(answered_here, opened(), warp, settings.batch_size, run.settings.seed, ends)

    answered = {}
    for split, rows in splits.items():
        about = made_from | {"split": split, "prompts": len(rows)}
        title, place = f"the target's responses, {split}", folder / f"{split}-{fingerprint(about)[:16]}"
        file = place / "examples.arrow"
        if not ranks.exchange(file.exists())[0]:
            talks = Talks(rows, chat, Kept(TEXT_IDS, place), ends, settings.max_new_tokens, data.max_length)
            for turn in count():
                jobs = talks.jobs(turn)
                if not len(jobs.numbers):
                    break
                shown = f"{title}, turn {turn + 1}" if turn else title
                write_responses(run, jobs, talks.answers, settings, partial(writer, talks), shown, served)
            if ranks.is_first():
                mapped_table(file, LEARNED, talks.examples())
                talks.report(run.line, title, place)
            ranks.barrier()
        answered[split] = Dataset.from_file(str(file))
    return answered


def ends_with(tokenizer: PreTrainedTokenizerBase, chat: ChatFormat | None) -> int:
    """The id that ends an answer whose stop token an engine leaves out: the template's, if it writes prompts."""
    return end_token(tokenizer) if chat is None else chat.answer_end()


class Jobs(NamedTuple):
    """Prompts that are to be answered, each made when it is asked for."""

    numbers: Ints
    lengths: Ints  # tokens of each prompt
    job: Callable[[int], Job]  # by its number

    @classmethod
    def of(cls, jobs: Sequence[Job]) -> "Jobs":
        """Jobs that are in memory, numbered from 0."""
        lengths = np.array([len(job.ids) if job.budget else -1 for job in jobs], np.int64)
        return cls(np.flatnonzero(lengths >= 0), lengths[lengths >= 0], jobs.__getitem__)


class Talks:
    """The conversations of a split, whose turns of the assistant the target answers one after another.

    A conversation is made when it is needed, of its row and of the answers so far.
    """

    def __init__(
        self, rows: Dataset, chat: ChatFormat | None, answers: Kept, ends: Collection[int], most: int, longest: int
    ) -> None:
        turns = np.asarray(_column(rows, "turn"))
        self.rows, self.chat, self.answers, self.ends = rows, chat, answers, ends
        self.most, self.longest = most, longest
        self.prompts, self.first = Examples.of(rows), np.flatnonzero(turns == 0)
        self.lost, self.asked, self.empty = Counter[str](), 0, 0

    def talk(self, number: int, turns: int | None = None) -> "_Talk":
        """A conversation after as many answers (None: after all)."""
        row = int(self.first[number])
        talk = _Talk(self.rows[row]["chat"] if self.chat is not None else "", self.prompts.prompt(row), self.chat)
        turn = 0
        while talk.places and turn != turns:
            ids = self.answers.text(turn * len(self.first) + number) if self.budget(talk) else []
            talk.answer(ids, self.ends, self.longest)
            turn += 1
        return talk

    def budget(self, talk: "_Talk") -> int:
        """The longest answer to the next prompt in tokens."""
        return max(0, min(self.most, self.longest - len(talk.ids)))

    def jobs(self, turn: int) -> Jobs:
        """The prompts of a turn."""
        count, several = len(self.first), np.arange(len(self.first))
        if turn:
            several = several[np.asarray(pyarrow.compute.not_equal(_column(self.rows, "chat"), ""))[self.first]]
        lengths = np.full(len(several), -1)
        for place, number in enumerate(several.tolist()):
            talk = self.talk(number, turn)
            lengths[place] = len(talk.ids) if talk.places and self.budget(talk) else -1
        chosen = lengths >= 0
        return Jobs(turn * count + several[chosen], lengths[chosen], self.job)

    def job(self, number: int) -> Job:
        """The prompt of a number."""
        turn, place = divmod(number, len(self.first))
        talk = self.talk(place, turn)
        return Job(number, talk.ids, self.budget(talk))

    def finished(self, number: int, ids: Ids) -> Example | None:
        """The example that an answer completes; None if there are turns to come."""
        turn, place = divmod(number, len(self.first))
        talk = self.talk(place, turn)
        talk.answer(ids, self.ends, self.longest)
        return None if talk.places else joined(talk.pieces)[-1]

    def examples(self) -> Iterator[Row]:
        """The examples of all conversations."""
        for number in range(len(self.first)):
            talk = self.talk(number)
            self.lost[talk.lost] += 1
            self.asked += len(talk.pieces)
            self.empty += sum(not piece.answer and len(piece.prompt) < self.longest for piece in talk.pieces)
            yield from (_learned(example) for example in joined(talk.pieces))

    def report(self, say: Callable[[str], None], title: str, place: Path) -> None:
        """Tell what is lost, and refuse responses most of which are empty."""
        for reason, chats in self.lost.items():
            if reason:
                say(f"{title}: {chats} chats lose their later turns, {reason}")
        if self.empty:
            say(f"{self.empty} of {self.asked} responses are empty, and nothing of them is learned")
        if 2 * self.empty > self.asked:
            (place / "examples.arrow").unlink()
            raise UserError(
                f"{title}: {self.empty} of {self.asked} are empty: look at what the target writes for these prompts "
                f"(python -m decode generate), then delete {place} and run again"
            )


def _column(rows: Dataset, name: str) -> pyarrow.ChunkedArray:
    return rows.select_columns(name).with_format("arrow")[:][name]


def _learned(example: Example) -> Row:
    return {"input_ids": example.input_ids, "labels": example.labels}


class _Talk:
    """A conversation, or a single prompt.

    Attributes:
        messages: All turns, of which the target's take the place of the assistant's.
        places: The turns that are still to be answered.
        text: The prompt of the next one, where an answer stands before it; its token ids are ``ids``.
        pieces: Prompts with answers.
        lost: Why later turns are not answered.
    """

    def __init__(self, content: str, prompt: Ids, chat: ChatFormat | None) -> None:
        messages, self.tools = json.loads(content or '[[{"role": "assistant"}], null]')
        self.chat = chat if content else None
        self.messages: Messages = messages if self.chat is None else self.chat.prepared(messages)
        self.places = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.text, self.ids = "", prompt
        self.pieces, self.lost = list[Piece](), ""

    def answer(self, ids: Ids, ends: Collection[int], limit: int) -> None:
        """Takes an answer, and makes the prompt of the next one, whose history is what the target answered."""
        ids, place = until_end(ids, ends), self.places.pop(0)
        self.pieces.append(Piece(self.ids, ids, Turn(self.text, "")))
        if not self.places or self.chat is None:
            return
        text = str(self.chat.tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids))
        thought, closed, said = text.rpartition("</think>")
        self.messages[place] = {"role": "assistant", "content": said.strip() if closed else text}
        if closed:
            self.messages[place][REASONING[0]] = thought.removeprefix("<think>").strip()
        try:
            since = self.messages[place : self.places[0]]
            if any(message["role"] == "tool" for message in since):
                raise UnusableRow("because a tool's result belongs to another call")
            if not said.strip():
                raise UnusableRow("because an answer is empty")
            refuse_control_tokens(self.chat.tokenizer, since)
            self.text = self.chat.ask(self.messages[: self.places[0]], self.tools)
            (self.ids,) = plain_ids(self.chat.tokenizer, [self.text])
            if len(self.ids) >= limit:
                raise UnusableRow(f"because they are longer than data.max_length ({limit} tokens)")
        except UnusableRow as error:
            self.places, self.lost = [], error.reason


def response_rows(prompts: Sequence[Ids], responses: Sequence[Ids], ends: Collection[int]) -> Dataset:
    """Examples (``input_ids``, ``labels``) whose labels are the responses up to and with their first end token.

    Args:
        prompts: Token ids, no labels.
        responses: Token ids; one that was cut by its budget has no end-of-text token, and so none is learned.
        ends: Every end-of-text token. Padding may be one of them: it is added later, and never a label.
    """
    answers = [until_end(response, ends) for response in responses]
    return Dataset.from_dict(
        {
            "input_ids": [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)],
            "labels": [[IGNORE] * len(prompt) + answer for prompt, answer in zip(prompts, answers)],
        },
        features=LEARNED,
    )


# -- writing, and what is kept of it ----------------------------------------------------------------------------------


def write_responses(
    run: Run,
    jobs: Jobs,
    answers: Kept,
    settings: ResponseSettings,
    writer: Callable[[], Answer],
    title: str,
    served: bool,
) -> None:
    """Has the prompts answered that are not yet, into ``answers`` by their numbers.

    Every process writes its share (an engine is asked by the first one alone). ``writer`` makes what writes those that
    are missing. ``served``: an engine answers.
    """
    size = GROUP * settings.batch_size
    order = jobs.numbers[np.lexsort((jobs.numbers, jobs.lengths))]  # those of similar length together
    groups: list[Keys] = [order[start : start + size].astype(np.uint64) for start in range(0, len(order), size)]
    missing = int((answers.find(jobs.numbers.astype(np.uint64)) < 0).sum())
    share = answers.share(groups, 0, alone=served)
    if share:
        with working(run.console, title, missing):
            answer = writer()
            chosen = [groups[number] for number in share]
            if served:
                together = np.concatenate(chosen)
                chosen = [together[answers.find(together) < 0]]
            try:
                for group in chosen:  # whole groups, so that bits are those of one process
                    for number, ids in answer(map(jobs.job, map(int, group))):
                        answers.put(number, {"ids": np.array(ids, np.int32)})
            finally:
                answers.flush()
    answers.join(order.astype(np.uint64))
    if missing:
        run.line(f"{title}: {len(order)}, {missing} of them written now")


def answered_here(
    model: PreTrainedModel,
    warp: LogitsWarper,
    batch_size: int,
    seed: int,
    stop_ids: Collection[int],
    jobs: Iterable[Job],
) -> Iterator[tuple[int, Ids]]:
    """Answers by the model itself, all jobs together: see `Answer`. Seed and number of a job decide the response."""
    together = list(jobs)
    texts = write_texts(
        model,
        [job.ids for job in together],
        warp,
        budgets=[job.budget for job in together],
        stop_ids=stop_ids,
        draws=lambda i, count: uniform_draws(seed, 0, together[i].example, count=count),
        batch_size=batch_size,
        progress=current().advance,
    )
    return zip((job.example for job in together), texts)


# -- an engine ---------------------------------------------------------------------------------------------------------


class Taken(NamedTuple):
    """Hands the states of finished examples on."""

    talks: Talks
    arrivals: Arrivals
    files: StateFiles

    def __call__(self, job: Job, ids: Ids, states: Tensor) -> None:
        """Take an answer's states, of all tokens but the last."""
        if (example := self.talks.finished(job.example, ids)) and len(states) == len(example.input_ids) - 1:
            self.arrivals.put(example, states)


def answered_by_engine(
    engine: Engine,
    settings: ResponseSettings,
    seed: int,
    ends: Sequence[int],
    end: int,
    jobs: Iterable[Job],
    *,
    taken: Taken | None = None,
) -> Iterator[tuple[int, Ids]]:
    """Answers by an engine, each as soon as it comes: see `Answer`.

    A seed, whose effect depends on the engine, is sent with every request. Answers end with ``end``, which an engine
    may leave out. With ``taken`` the engine gives the states of what it writes too, which are taken as they come: no
    more of them are there than requests may be in flight.
    """
    how: Values = {"temperature": settings.temperature, "top_p": settings.top_p, "stop_token_ids": sorted(ends)}

    def answer(job: Job) -> tuple[int, Ids]:
        request = how | {"max_tokens": job.budget, "seed": request_seed(seed, job.example)}
        if taken is None:
            given, states = engine.complete(job.example, job.ids, **request), None
        else:
            given, states = taken.files.ask(job.example, job.ids, **request)
        ids = answer_ids(given)
        if given.get("finish_reason") == "stop" and ids and not any(token in ends for token in ids):
            ids = [*ids, end]
        ids = ids[: job.budget]
        if taken is not None and states is not None:
            taken(job, ids, states)
        return job.example, ids

    try:
        for number, ids in in_flight(answer, jobs, engine.workers):
            current().advance()
            yield number, ids
    finally:
        if taken is not None:
            taken.arrivals.close()
