"""Responses written by the target: which prompts are answered, by whom, and the rows to train on."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.engines.launch import check_engine, opened
from decode.engines.settings import EngineSettings
from decode.models.tokens import continuation_ids, end_token
from decode.models.writing import GROUP, uniform_draws, write_texts
from decode.progress import current
from decode.sampling import LogitsWarper
from distill import ranks
from distill.config.drafts import ResponseSettings, ServerSettings
from distill.data.batches import TokenDataset
from distill.data.chat import IGNORE
from distill.data.response_file import Response, ResponseFile

Answer = Callable[[Sequence["Job"], Collection[int]], Iterator["Response"]]
"""Answers jobs in any order, each as soon as it is finished: those of the given examples, and others if it likes."""


@dataclass(frozen=True)
class Job:
    """A prompt to be answered."""

    example: int  # Its number in the split
    ids: list[int]  # Its token ids
    text: str  # The same as text
    budget: int  # Longest response in tokens
    messages: str = ""  # The turns of a chat before the response, as JSON; empty: the prompt is no chat


# -- prompts ----------------------------------------------------------------------------------------------------------


def make_jobs(
    rows: TokenDataset, split: Mapping[str, Sequence[str]], settings: ResponseSettings, limit: int
) -> list[Job]:
    """The prompts of a split: what comes before the first label, or a quarter of a block of plain text.

    Args:
        rows: The data set's own examples.
        split: Their columns ``prompt`` and ``messages`` (see `distill.data.Corpus`).
        settings: Says how long a response may be.
        limit: Longest prompt and response together, in tokens.
    """
    return [
        Job(i, ids := rows.prompt(i), text, max(0, min(settings.max_new_tokens, limit - len(ids))), messages)
        for i, text, messages in zip(range(len(rows)), split["prompt"], split["messages"])
    ]


def answered_here(model: PreTrainedModel, settings: ResponseSettings, seed: int, stop_ids: Collection[int]) -> Answer:
    """Answers by the model itself, in groups of equal prompts whatever is missing, so that bits repeat.

    Args:
        model: The target.
        settings: Sampling and batch size.
        seed: With the example's number it decides the response.
        stop_ids: End-of-text tokens.
    """
    warp = LogitsWarper(settings.temperature, top_p=settings.top_p)

    def answers(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
        for batch in batches(jobs, GROUP * settings.batch_size):
            if not any(job.example in missing for job in batch):
                continue
            texts = write_texts(
                model,
                [job.ids for job in batch],
                warp,
                budgets=[job.budget for job in batch],
                stop_ids=stop_ids,
                draws=lambda i, count, batch=batch: uniform_draws(seed, 0, batch[i].example, count=count),  # type: ignore[misc]
                batch_size=settings.batch_size,
                progress=current().advance,
            )
            yield from (Response(job.example, text) for job, text in zip(batch, texts))

    return answers


def answered_by_all(
    jobs: Sequence[Job],
    settings: ResponseSettings,
    folder: Path,
    name: str,
    made_from: dict[str, Any],
    *,
    writer: Callable[[], Answer],
    tokenizer: PreTrainedTokenizerBase,
    around: Callable[[int], AbstractContextManager[Any]],
) -> list[list[int]]:
    """The responses to prompts, which are kept in a folder.

    Every process writes its share into a file of its own (a server is asked by the first one alone), and goes on when
    all responses are there, whoever wrote them: another number of processes takes up what there is.

    Args:
        jobs: The prompts.
        settings: Batch size and servers.
        folder: Where responses are kept.
        name: Of the file, such as the split.
        made_from: Everything that decides the responses.
        writer: What writes those that are missing.
        tokenizer: For the texts in the file.
        around: What the writing of so many responses is done in.
    """
    rank, world = ranks.rank(), 1 if settings.server.answers else ranks.started()
    file = ResponseFile(folder / (f"{name}-{rank}.jsonl" if rank else f"{name}.jsonl"), made_from)

    def known() -> dict[int, Response]:
        found: dict[int, Response] = {}
        for path in sorted(folder.glob(f"{name}*.jsonl")):
            if not path.name.endswith(".old.jsonl"):
                found |= ResponseFile(path, made_from).read()
        return found

    if rank < world:
        file.open()
        if missing := own_examples(jobs, settings, rank, world) - known().keys():
            with around(len(missing)):
                for done, _ in enumerate(file.fill(writer()(jobs, missing), tokenizer), 1):
                    current().update(done=max(current().done, done))  # a writer may have counted it already

    def all_of_them() -> dict[int, Response] | None:
        found = known()
        return found if all(job.example in found for job in jobs) else None

    found = ranks.wait_for(all_of_them, f"the target's responses ({name})")
    return [found[job.example].ids for job in jobs]


def own_examples(jobs: Sequence[Job], settings: ResponseSettings, rank: int, world: int) -> set[int]:
    """The examples that one of several processes answers: whole groups, so that bits are those of a single process."""
    groups = batches(jobs, GROUP * settings.batch_size)
    return {job.example for group in groups[rank::world] for job in group}


def batches(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Jobs of similar length together."""
    ordered = sorted(jobs, key=lambda job: (len(job.ids), job.example))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


# -- rows -------------------------------------------------------------------------------------------------------------


def response_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], ends: Collection[int]
) -> TokenDataset:
    """Examples whose labels are the responses up to their first end-of-text token, which is a label itself.

    Args:
        prompts: Token ids, no labels.
        responses: Token ids; one that was cut by its budget has no end-of-text token, and so none is learned.
        ends: Every end-of-text token. Padding may be one of them: it is put on later, and never a label.
    """
    examples = [
        ([*prompt, *response], [IGNORE] * len(prompt) + until_end(response, ends))
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    return TokenDataset.from_lists([ids for ids, _ in examples], [labels for _, labels in examples])


def until_end(response: Sequence[int], ends: Collection[int]) -> list[int]:
    """Labels of a response: everything after the first end-of-text token is ignored."""
    stop = next((place + 1 for place, token in enumerate(response) if token in ends), len(response))
    return [*response[:stop], *[IGNORE] * (len(response) - stop)]


def encode_answer(
    tokenizer: PreTrainedTokenizerBase, text: str, *, ended: bool, ends: Collection[int], budget: int
) -> list[int]:
    """Token ids of a response that came as text; the end-of-text token that a server leaves out is put back."""
    ids = continuation_ids(tokenizer, [text])[0] if text else []
    if ended and not any(token in ends for token in ids):
        ids = [*ids, end_token(tokenizer)]
    return ids[:budget]


LOADING = 3600.0  # seconds: a large target from a cold disk


@contextmanager
def answering_engine(
    settings: ResponseSettings, target: str | Path, longest: int, dtype: str, say: Callable[[str], None] = print
) -> Iterator[Callable[[], ResponseSettings]]:
    """Yields a function that starts the engine when it is first called; the engine ends with the block.

    The function returns the settings with the engine's address, those for `answered_by_server`.

    Args:
        settings: Sampling and engine.
        target: The target's folder or name.
        longest: Tokens of the longest prompt with its response.
        dtype: Number format of the weights in the engine.
        say: Told that the engine starts.
    """
    with ExitStack() as started:

        @cache
        def start() -> ResponseSettings:
            name = settings.server.engine
            assert name is not None
            say(f"  {name} starts with {target} in {dtype}, and ends when the answers are written")
            server = started.enter_context(opened(name, _wanted(settings.server, str(target), longest, dtype), None))
            return replace(settings, server=replace(settings.server, urls=[f"{server.url}/v1"]))

        yield start


def check_answering_engine(settings: ResponseSettings) -> None:
    """Refuses an engine that is not installed.

    Raises:
        UserError: With the next step.
    """
    if settings.server.engine is not None:
        check_engine(settings.server.engine, _wanted(settings.server, "", 0, "auto"))


def _wanted(server: ServerSettings, target: str, context: int, dtype: str) -> EngineSettings:
    return EngineSettings(
        target, "", context=context, batch=server.concurrency, python=server.python, dtype=dtype, exact=False,
        arguments=server.arguments, python_option="reference.responses.server.python", seconds=LOADING,
    )  # fmt: skip
