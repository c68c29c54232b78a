"""The texts that drafts are trained on: the data set's responses, or the target's, written here or by an engine."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path

from datasets import Dataset, Features
from transformers import PreTrainedModel

from decode.core.draft import until_end
from decode.core.sampling import LogitsWarper
from decode.errors import UserError
from decode.measure.suites import Row
from decode.models.open import files_of, stop_ids
from decode.models.texts import GROUP, uniform_draws, write_texts
from decode.models.tokens import REASONING, end_token, plain_ids
from decode.progress import current, working
from distill import ranks
from distill.config.base import Values
from distill.config.teacher import ResponseSettings
from distill.data.chat import (
    IGNORE,
    ChatFormat,
    Example,
    Ids,
    Piece,
    Turn,
    joined,
    prompt_part,
    refuse_control_tokens,
)
from distill.data.corpus import COLUMNS
from distill.data.messages import Messages, UnusableRow
from distill.data.prompts import TextFile
from distill.engine.servers import answer_ids, request_seed
from distill.files import files_state, fingerprint
from distill.run import Run


@dataclass(frozen=True)
class Job:
    """A prompt to be answered."""

    example: int  # its number; with the seed it decides the response
    ids: Ids  # its token ids
    budget: int  # longest response in tokens


Answer = Callable[[Sequence[Job]], Iterator[tuple[int, Ids]]]
"""Answers jobs in any order, each as soon as it is finished, by its number."""


# -- the examples of a run --------------------------------------------------------------------------------------------


def answered_texts(
    run: Run, target: PreTrainedModel | None = None, *, original: bool = False
) -> tuple[Dataset, Dataset, str]:
    """Train and validation examples, with the data set's responses or the target's; and their fingerprint.

    Args:
        run: Its target is finished, or given.
        target: The target, if it is open already.
        original: All examples, with the responses of the target as it is given.
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
        splits = _answered(run, splits, made_from, "original" if original else "responses", path, target)
    return splits["train"], splits["validation"], fingerprint(made_from)


def _answered(
    run: Run,
    splits: dict[str, Dataset],
    made_from: Values,
    folder: str,
    path: str | Path,
    target: PreTrainedModel | None,
) -> dict[str, Dataset]:
    """The splits' prompts with the responses of the target at a path, kept in a folder of the run's work."""
    teacher, data, tokenizer = run.settings.teacher, run.settings.data, run.tokenizer
    settings, served, longest = teacher.responses, teacher.served and target is None, data.max_length
    ends = stop_ids(files_of(path, trust_remote_code=run.settings.target.trust_remote_code), tokenizer)
    chat = ChatFormat(tokenizer, data.system, data.template_args, ends) if run.corpus.chat else None

    @cache
    def writer() -> Answer:
        if served:
            end = end_token(tokenizer) if chat is None else chat.answer_end()
            ask = run.states.answered if teacher.in_engine and teacher.engine.keep else run.engine.complete
            return partial(answered_by_engine, ask, run.engine.workers, settings, run.settings.seed, ends, end)
        model = run.at_work(run.open_target(path) if target is None else target)
        warp = LogitsWarper(settings.temperature, top_p=settings.top_p)
        return partial(answered_here, model, warp, settings.batch_size, run.settings.seed, ends)

    answered = {}
    for split, rows in splits.items():
        file, title = run.work / folder / f"{split}.jsonl", f"the target's responses, {split}"
        about = made_from | {"split": split, "prompts": len(rows)}
        talks = [_Talk(row, chat) for row in rows if not row["turn"]]
        answers = empty = 0
        for turn in count():
            asked = {number: talk for number, talk in enumerate(talks) if talk.places}
            if not asked:
                break
            jobs = [
                Job(turn * len(talks) + n, talk.ids, max(0, min(settings.max_new_tokens, longest - len(talk.ids))))
                for n, talk in asked.items()
            ]
            shown = f"{title}, turn {turn + 1}" if turn else title
            written = write_responses(run, jobs, settings, file, about, writer, shown, served)
            for talk, ids in zip(asked.values(), written):
                talk.answer(ids, ends, longest)
            answers += len(jobs)
            empty += sum(job.budget > 0 and not ids for job, ids in zip(jobs, written))
        for reason, chats in Counter(talk.lost for talk in talks if talk.lost).items():
            run.line(f"{title}: {chats} chats lose their later turns, {reason}")
        if empty:
            run.line(f"{empty} of {answers} responses are empty, and nothing of them is learned")
        if 2 * empty > answers:
            raise UserError(
                f"{title}: {empty} of {answers} are empty: look at what the target writes for these prompts "
                f"(python -m decode generate), then delete {file} and run again"
            )
        answered[split] = _dataset([example for talk in talks for example in joined(talk.pieces)])
    return answered


class _Talk:
    """A conversation, or a single prompt, whose turns of the assistant the target answers one after another.

    Attributes:
        messages: All turns, of which the target's take the place of the assistant's.
        places: The turns that are still to be answered.
        text: The prompt of the next one, whose token ids are ``ids``.
        pieces: Prompts with answers.
        lost: Why later turns are not answered.
    """

    def __init__(self, row: Row, chat: ChatFormat | None) -> None:
        messages, self.tools = json.loads(row["chat"] or '[[{"role": "assistant"}], null]')
        self.chat = chat if row["chat"] else None
        self.messages: Messages = messages if self.chat is None else self.chat.prepared(messages)
        self.places = [place for place, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.text, self.ids = row["prompt"], prompt_part(row["input_ids"], row["labels"])
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
    examples = []
    for prompt, response in zip(prompts, responses, strict=True):
        answer = until_end(response, ends)
        examples.append(Example([*prompt, *answer], [IGNORE] * len(prompt) + answer, "", ""))
    return _dataset(examples)


def _dataset(examples: Sequence[Example]) -> Dataset:
    columns = {name: [getattr(example, name) for example in examples] for name in ("input_ids", "labels")}
    return Dataset.from_dict(columns, features=Features({name: COLUMNS[name] for name in columns}))


# -- writing, and what is kept of it ----------------------------------------------------------------------------------


def write_responses(
    run: Run,
    jobs: Sequence[Job],
    settings: ResponseSettings,
    path: Path,
    made_from: Values,
    writer: Callable[[], Answer],
    title: str,
    served: bool,
) -> list[Ids]:
    """The responses to prompts, which are kept on disk.

    Every process writes its share into a file of its own (an engine is asked by the first one alone), and all read all
    of them when they are there. ``made_from`` is everything that decides them, ``path`` the first process's file,
    ``writer`` makes what writes those that are missing. ``served``: an engine answers.
    """
    rank, world = ranks.rank(), 1 if served else ranks.world()

    def known() -> dict[int, Ids]:
        texts = {job.example: Ids() for job in jobs if not job.budget}
        for file in sorted(path.parent.glob(f"{path.stem}*.jsonl")):
            texts |= TextFile(file, made_from).read()
        return texts

    if rank < world:
        file = TextFile(path.with_stem(f"{path.stem}-{rank}") if rank else path, made_from)
        file.open(run.line)
        texts, size = known(), GROUP * settings.batch_size
        ordered = sorted(jobs, key=lambda job: (len(job.ids), job.example))  # those of similar length together
        groups = [ordered[start : start + size] for start in range(0, len(ordered), size)][rank::world]
        unfinished = [group for group in groups if any(job.example not in texts for job in group)]
        if missing := [job for group in unfinished for job in group if job.example not in texts]:
            with working(run.console, title, len(missing)):
                answer = writer()
                for group in [missing] if served else unfinished:  # whole groups, so that bits are those of one process
                    file.add(answer(group), run.tokenizer)
            run.line(f"{title}: {len(jobs)}, {len(missing)} of them written now")
    ranks.barrier()
    texts = known()
    return [texts[job.example] for job in jobs]


def answered_here(
    model: PreTrainedModel,
    warp: LogitsWarper,
    batch_size: int,
    seed: int,
    stop_ids: Collection[int],
    jobs: Sequence[Job],
) -> Iterator[tuple[int, Ids]]:
    """Answers by the model itself, all jobs together: see `Answer`. Seed and number of a job decide the response."""
    texts = write_texts(
        model,
        [job.ids for job in jobs],
        warp,
        budgets=[job.budget for job in jobs],
        stop_ids=stop_ids,
        draws=lambda i, count: uniform_draws(seed, 0, jobs[i].example, count=count),
        batch_size=batch_size,
        progress=current().advance,
    )
    return zip((job.example for job in jobs), texts)


# -- an engine ---------------------------------------------------------------------------------------------------------


def answered_by_engine(
    ask: Callable[..., Values],
    workers: int,
    settings: ResponseSettings,
    seed: int,
    ends: Sequence[int],
    end: int,
    jobs: Sequence[Job],
) -> Iterator[tuple[int, Ids]]:
    """Answers by an engine, each as soon as it comes: see `Answer`.

    ``ask`` is `distill.engine.servers.Engine.complete`, or what keeps the states of what it answers too. A seed, whose
    effect depends on the engine, is sent with every request. Answers end with ``end``, which an engine may leave out.
    """
    how: Values = {"temperature": settings.temperature, "top_p": settings.top_p, "stop_token_ids": sorted(ends)}

    def answer(job: Job) -> tuple[int, Ids]:
        given = ask(job.example, job.ids, max_tokens=job.budget, seed=request_seed(seed, job.example), **how)
        ids = answer_ids(given)
        if given.get("finish_reason") == "stop" and ids and not any(token in ends for token in ids):
            ids = [*ids, end]
        return job.example, ids[: job.budget]

    pool = ThreadPoolExecutor(workers)
    try:
        for future in as_completed([pool.submit(answer, job) for job in jobs]):
            current().advance()
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
