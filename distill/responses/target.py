"""The texts that drafts are trained on: the data set's responses, or those that the target writes, here or by servers.

The package openai is imported where it is used: that takes two seconds, which most runs do not need.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, Features
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.loading import stop_ids_of
from decode.models.tokens import REASONING, end_token, plain_ids
from decode.models.writing import GROUP, uniform_draws, write_texts
from decode.progress import current, working
from decode.sampling import LogitsWarper
from distill import ranks
from distill.config import ResponseSettings, ServerSettings
from distill.data.chat import IGNORE, ChatFormat, Example, Piece, Turn, joined, prompt_part, until_end
from distill.data.corpus import COLUMNS
from distill.data.messages import UnusableRow
from distill.data.prompts import TextFile
from distill.files import files_state, fingerprint
from distill.run import Run

if TYPE_CHECKING:
    import openai

KEPT = "What is finished is kept: run the same command again to continue"
WHERE = "teacher.responses.server"
TIMEOUT, RETRIES = 300.0, 6  # seconds of a request; the client waits 0.5, 1, 2, ... seconds between two of them


@dataclass(frozen=True)
class Job:
    """A prompt to be answered.

    Attributes:
        example: Its number; with the seed it decides the response.
        ids: Its token ids.
        budget: Longest response in tokens.
    """

    example: int
    ids: list[int]
    budget: int


Answer = Callable[[Sequence[Job]], Iterator[tuple[int, list[int]]]]
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
    made_from: dict[str, Any] = {
        "target": (files_state([str(path)]) or str(path)) if record is None else record.fingerprint,
        "corpus": run.corpus.fingerprint,
        "examples": None if original else settings.teacher.examples,
        "quantization": settings.target.quantization,
        "dtype": settings.target.dtype,
        "responses": settings.teacher.responses.key(),
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
    made_from: dict[str, Any],
    folder: str,
    path: str | Path,
    target: PreTrainedModel | None,
) -> dict[str, Dataset]:
    """The splits' prompts with the responses of the target at a path, kept in a folder of the run's work."""
    settings, data, tokenizer = run.settings.teacher.responses, run.settings.data, run.tokenizer
    ends = stop_ids_of(path, tokenizer, run.settings.target.trust_remote_code)
    chat = ChatFormat(tokenizer, data.system, data.template_args, ends) if run.corpus.chat else None

    @cache
    def writer() -> Answer:
        if settings.server.answers:
            end = end_token(tokenizer) if chat is None else chat.answer_end()
            return answered_by_servers(settings, run.settings.seed, ends, end)
        model = run.open_target(path) if target is None else target
        return answered_here(run.at_work(model), settings, run.settings.seed, ends)

    answered = {}
    for split, rows in splits.items():
        file, title = run.work / folder / f"{split}.jsonl", f"the target's responses, {split}"
        about = made_from | {"split": split, "prompts": len(rows)}
        talks, budgets, empty = _talks(rows, chat), list[int](), 0
        for turn in count():
            if not (asked := {number: talk for number, talk in enumerate(talks) if talk.place is not None}):
                break
            jobs = []
            for number, talk in asked.items():
                budget = max(0, min(settings.max_new_tokens, data.max_length - len(talk.ids)))
                jobs.append(Job(turn * len(talks) + number, talk.ids, budget))
            shown = f"{title}, turn {turn + 1}" if turn else title
            written = write_responses(run, jobs, settings, file, about, writer, shown)
            for talk, ids in zip(asked.values(), written):
                talk.answer(ids, ends, chat, data.max_length)
            budgets += [job.budget for job in jobs]
            empty += sum(job.budget > 0 and not ids for job, ids in zip(jobs, written))
        for reason, chats in Counter(talk.lost for talk in talks if talk.lost).items():
            first = next(talk.first for talk in talks if talk.lost == reason)
            run.line(f"{title}: {chats} chats lose their later turns, {reason} (the first is example {first})")
        if empty:
            run.line(f"{empty} of {len(budgets)} responses are empty, and nothing of them is learned")
        if 2 * empty > len(budgets):
            raise UserError(
                f"{title}: {empty} of {len(budgets)} are empty: look at what the target writes for these prompts "
                f"(python -m decode generate), then delete {file} and run again"
            )
        answered[split] = _dataset([example for talk in talks for example in joined(talk.pieces)])
    return answered


@dataclass
class _Talk:
    """A conversation, or a single prompt, whose turns of the assistant the target answers one after another.

    Attributes:
        first: Number of the example that it begins with.
        messages: All turns, of which the target's take the place of the assistant's.
        tools: Descriptions of the tools.
        ids: Of the prompt of the next answer.
        text: The same as text.
        place: The turn that is answered next; None: none.
        pieces: Prompts with answers.
        lost: Why later turns are not answered.
    """

    first: int
    messages: list[dict[str, Any]]
    tools: Any
    ids: list[int]
    text: str
    place: int | None = None
    pieces: list[Piece] = field(default_factory=list)
    lost: str = ""

    def __post_init__(self) -> None:
        self.place = self._next(0)

    def _next(self, start: int) -> int | None:
        turns = range(start, len(self.messages))
        return next((place for place in turns if self.messages[place]["role"] == "assistant"), None)

    def answer(self, ids: list[int], ends: Collection[int], chat: ChatFormat | None, limit: int) -> None:
        """Takes an answer, and makes the prompt of the next one, whose history is what the target answered."""
        assert self.place is not None
        ids = [token for token in until_end(ids, ends) if token != IGNORE]
        self.pieces.append(Piece(self.ids, ids, Turn(self.text, "")))
        answered, self.place = self.place, self._next(self.place + 1)
        if self.place is None or chat is None:
            return
        text = str(chat.tokenizer.decode(ids[:-1] if ids and ids[-1] in ends else ids))
        thought, closed, said = text.rpartition("</think>")
        self.messages[answered] = {"role": "assistant", "content": said.strip() if closed else text}
        if closed:
            self.messages[answered][REASONING[0]] = thought.removeprefix("<think>").strip()
        try:
            if any(message["role"] == "tool" for message in self.messages[answered : self.place]):
                raise UnusableRow("because a tool's result belongs to another call")
            if not said.strip():
                raise UnusableRow("because an answer is empty")
            self.text = chat.ask(self.messages[: self.place], self.tools)
            (self.ids,) = plain_ids(chat.tokenizer, [self.text])
            if len(self.ids) >= limit:
                raise UnusableRow(f"because they are longer than data.max_length ({limit} tokens)")
        except UnusableRow as error:
            self.place, self.lost = None, error.reason


def _talks(rows: Dataset, chat: ChatFormat | None) -> list[_Talk]:
    """What is to be answered: the prompts of examples, and conversations, each of which may be several examples."""
    talks = list[_Talk]()
    for number, row in enumerate(rows):
        if not row["turn"]:
            messages, tools = json.loads(row["chat"]) if row["chat"] else ([{"role": "assistant"}], None)
            messages = chat.prepared(messages) if chat and row["chat"] else messages
            talks.append(_Talk(number, messages, tools, prompt_part(row["input_ids"], row["labels"]), row["prompt"]))
    return talks


def response_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], ends: Collection[int]
) -> Dataset:
    """Examples (``input_ids``, ``labels``) whose labels are the responses up to and with their first end token.

    Args:
        prompts: Token ids, no labels.
        responses: Token ids; one that was cut by its budget has no end-of-text token, and so none is learned.
        ends: Every end-of-text token. Padding may be one of them: it is added later, and never a label.
    """
    pairs = zip(prompts, responses, strict=True)
    return _dataset(
        [Example([*ids, *text], [IGNORE] * len(ids) + until_end(text, ends), "", "") for ids, text in pairs]
    )


def _dataset(examples: Sequence[Example]) -> Dataset:
    columns = {name: [getattr(example, name) for example in examples] for name in ("input_ids", "labels")}
    return Dataset.from_dict(columns, features=Features({name: COLUMNS[name] for name in columns}))


# -- writing, and what is kept of it ----------------------------------------------------------------------------------


def write_responses(
    run: Run,
    jobs: Sequence[Job],
    settings: ResponseSettings,
    path: Path,
    made_from: dict[str, Any],
    writer: Callable[[], Answer],
    title: str,
) -> list[list[int]]:
    """The responses to prompts, which are kept on disk.

    Every process writes its share into a file of its own (servers are asked by the first one alone), and all read all
    of them when they are there.

    Args:
        run: Console and tokenizer.
        jobs: The prompts.
        settings: Batch size and servers.
        path: The first process's file; those of the others are beside it.
        made_from: Everything that decides the responses.
        writer: Makes what writes those that are missing.
        title: Shown beside the progress.
    """
    rank, world = ranks.rank(), 1 if settings.server.answers else ranks.world()

    def known() -> dict[int, list[int]]:
        texts = {job.example: list[int]() for job in jobs if not job.budget}
        for file in sorted(path.parent.glob(f"{path.stem}*.jsonl")):
            texts |= TextFile(file, made_from).read()
        return texts

    if rank < world:
        file = TextFile(path.with_stem(f"{path.stem}-{rank}") if rank else path, made_from)
        file.open()
        texts, size = known(), GROUP * settings.batch_size
        ordered = sorted(jobs, key=lambda job: (len(job.ids), job.example))  # those of similar length together
        groups = [ordered[start : start + size] for start in range(0, len(ordered), size)][rank::world]
        unfinished = [group for group in groups if any(job.example not in texts for job in group)]
        asked = [job for group in unfinished for job in group]  # whole groups, so that bits are those of one process
        missing = [job for job in asked if job.example not in texts]
        if missing:
            answers = writer()(missing if settings.server.answers else asked)
            with working(run.console, title, len(missing)):
                for done, _ in enumerate(file.add(answers, run.tokenizer), 1):
                    current().update(done=max(current().done, done))  # a writer may have counted it already
            run.line(f"{title}: {len(jobs)}, {len(missing)} of them written now")
    ranks.barrier()
    texts = known()
    return [texts[job.example] for job in jobs]


def answered_here(
    model: PreTrainedModel,
    settings: ResponseSettings,
    seed: int,
    stop_ids: Collection[int],
    warp: LogitsWarper | None = None,
) -> Answer:
    """Answers by the model itself, in the groups of prompts that `write_responses` makes, so that bits repeat.

    Args:
        model: The target.
        settings: Sampling and batch size.
        seed: With the number of a job it decides the response.
        stop_ids: End-of-text tokens.
        warp: How logits become probabilities; None: by the settings' temperature and top_p.
    """
    warp = warp or LogitsWarper(settings.temperature, top_p=settings.top_p)

    def answers(jobs: Sequence[Job]) -> Iterator[tuple[int, list[int]]]:
        size = GROUP * settings.batch_size
        for group in (jobs[start : start + size] for start in range(0, len(jobs), size)):
            texts = write_texts(
                model,
                [job.ids for job in group],
                warp,
                budgets=[job.budget for job in group],
                stop_ids=stop_ids,
                draws=lambda i, count, group=group: uniform_draws(seed, 0, group[i].example, count=count),  # type: ignore[misc]
                batch_size=settings.batch_size,
                progress=current().advance,
            )
            yield from ((job.example, text) for job, text in zip(group, texts))

    return answers


# -- servers ----------------------------------------------------------------------------------------------------------


def open_client(url: str, **options: Any) -> tuple[openai.OpenAI, str]:
    """A client that retries failed requests itself, and the target's name on the server.

    Raises:
        UserError: The server does not answer, or serves no model.
    """
    import openai

    key = os.environ.get("OPENAI_API_KEY") or "none"
    how: dict[str, Any] = {"timeout": TIMEOUT, "max_retries": RETRIES} | options
    client = openai.OpenAI(base_url=url, api_key=key, **how)
    try:
        names = [model.id for model in client.models.list().data]
    except openai.OpenAIError as error:
        raise _refused(url, error) from error
    if not names:
        raise UserError(f"{url} serves no model: start it with the target")
    return client, names[0]


def _refused(url: str, error: Exception) -> UserError:
    """The error of a request that failed after all retries."""
    import openai

    advice = f"check the server and {WHERE}"
    if isinstance(error, openai.AuthenticationError | openai.PermissionDeniedError):
        advice = "put its key into the environment variable OPENAI_API_KEY"
    elif isinstance(error, openai.APIConnectionError):
        advice = (
            f"start it with the target, such as by `vllm serve`, or leave {WHERE} out to have responses written here"
        )
    return UserError(f"{url} failed: {type(error).__name__}: {error.__cause__ or error}: {advice}. {KEPT}")


def _complete(url: str, client: openai.OpenAI, ids: list[int], **how: Any) -> tuple[list[int], str | None]:
    """The token ids with which a server continues others, and why it stopped."""
    import openai

    try:
        choice = client.completions.create(prompt=ids, **how).choices[0]
    except (openai.OpenAIError, IndexError, TypeError) as error:
        raise _refused(url, error) from error
    tokens = (choice.model_extra or {}).get("token_ids")
    if not isinstance(tokens, list):
        raise UserError(
            f"{url} returned no token ids, which are what is learned: serve the target by a vLLM (0.10.2 or later) or "
            f"SGLang (of August 2026 or later) that knows return_token_ids, or leave {WHERE} out"
        )
    return tokens, choice.finish_reason


def check_servers(server: ServerSettings) -> None:
    """Refuses a server that does not answer, or not with token ids.

    Raises:
        UserError: With the next step.
    """
    for url in server.urls:
        client, model = open_client(url, timeout=30, max_retries=0)
        with client:
            _complete(url, client, [1], model=model, max_tokens=1, extra_body={"return_token_ids": True})


def answered_by_servers(settings: ResponseSettings, seed: int, ends: Sequence[int], end: int) -> Answer:
    """Answers by the servers of ``settings.server``, which share the prompts evenly; each as soon as it comes.

    Args:
        settings: Sampling and servers.
        seed: Sent with every request, different for each; its effect depends on the server.
        ends: End-of-text tokens.
        end: The one that answers end with, which a server may leave out.
    """
    server, extra = settings.server, {"return_token_ids": True, "stop_token_ids": sorted(ends)}

    def ask(job: Job, url: str, client: openai.OpenAI, model: str) -> tuple[int, list[int]]:
        how: dict[str, Any] = {"model": model, "max_tokens": job.budget, "extra_body": extra}
        how |= {"temperature": settings.temperature, "top_p": settings.top_p}
        how["seed"] = (seed * 1_000_003 + job.example) % (1 << 31)
        ids, reason = _complete(url, client, job.ids, **how)
        if reason == "stop" and ids and not any(token in ends for token in ids):
            ids = [*ids, end]
        return job.example, ids[: job.budget]

    def answers(jobs: Sequence[Job]) -> Iterator[tuple[int, list[int]]]:
        clients = [(url, *open_client(url)) for url in server.urls]
        pool = ThreadPoolExecutor(server.concurrency * len(clients))
        try:
            futures = [pool.submit(ask, job, *clients[number % len(clients)]) for number, job in enumerate(jobs)]
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for _, client, _ in clients:
                client.close()

    return answers
