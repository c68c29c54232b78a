"""Responses written by the target: the prompts that are answered, the files that keep them, the rows to train on."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.models.writing import GROUP, uniform_draws, write_texts
from decode.progress import current
from decode.sampling import LogitsWarper
from distill import ranks
from distill.config.drafts import ResponseSettings
from distill.data.batches import TokenDataset
from distill.data.chat import IGNORE, until_end
from distill.data.response_file import Response, ResponseFile

Answer = Callable[[Sequence["Job"], Collection[int]], Iterator[Response]]
"""Answers jobs in any order, each as soon as it is finished: those of the given examples, and possibly others."""


@dataclass(frozen=True)
class Job:
    """A prompt to be answered.

    Attributes:
        example: Its number in the split.
        ids: Its token ids.
        text: The same as text.
        budget: Longest response in tokens.
    """

    example: int
    ids: list[int]
    text: str
    budget: int


def make_jobs(
    rows: TokenDataset, split: Mapping[str, Sequence[str]], settings: ResponseSettings, limit: int
) -> list[Job]:
    """The prompts of a split: the ids before the first label, or a quarter of a block of plain text.

    Args:
        rows: The data set's own examples.
        split: Their column ``prompt``.
        settings: Longest response.
        limit: Longest prompt and response together, in tokens.
    """
    return [
        Job(i, ids := rows.prompt(i), text, max(0, min(settings.max_new_tokens, limit - len(ids))))
        for i, text in zip(range(len(rows)), split["prompt"])
    ]


def grouped(jobs: Sequence[Job], size: int) -> list[list[Job]]:
    """Jobs of similar length together."""
    ordered = sorted(jobs, key=lambda job: (len(job.ids), job.example))
    return [ordered[start : start + size] for start in range(0, len(ordered), size)]


def answered_here(model: PreTrainedModel, settings: ResponseSettings, seed: int, stop_ids: Collection[int]) -> Answer:
    """Answers by the model itself, in the same groups of prompts whichever are missing, so that bits repeat.

    Args:
        model: The target.
        settings: Sampling and batch size.
        seed: With the example's number it decides the response.
        stop_ids: End-of-text tokens.
    """

    def answers(jobs: Sequence[Job], missing: Collection[int]) -> Iterator[Response]:
        for group in grouped(jobs, GROUP * settings.batch_size):
            if not any(job.example in missing for job in group):
                continue
            texts = write_texts(
                model,
                [job.ids for job in group],
                LogitsWarper(settings.temperature, top_p=settings.top_p),
                budgets=[job.budget for job in group],
                stop_ids=stop_ids,
                draws=lambda i, count, group=group: uniform_draws(seed, 0, group[i].example, count=count),  # type: ignore[misc]
                batch_size=settings.batch_size,
                progress=current().advance,
            )
            yield from (Response(job.example, text) for job, text in zip(group, texts))

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

    Every process writes its share into a file of its own (a server or engine is asked by the first one alone), and
    continues when all responses are there, whichever process wrote them, in this run or an earlier one.

    Args:
        jobs: The prompts.
        settings: Batch size and servers.
        folder: Where responses are kept.
        name: Of the file, such as the split.
        made_from: Everything that decides the responses.
        writer: Makes what writes those that are missing.
        tokenizer: For the texts in the file.
        around: Given the number of missing responses, the context that they are written in.
    """
    rank, world = ranks.rank(), 1 if settings.server.answers else ranks.started()
    file = ResponseFile(folder / (f"{name}-{rank}.jsonl" if rank else f"{name}.jsonl"), made_from)

    def known() -> dict[int, Response]:
        paths = (path for path in sorted(folder.glob(f"{name}*.jsonl")) if not path.name.endswith(".old.jsonl"))
        return {example: one for path in paths for example, one in ResponseFile(path, made_from).read().items()}

    def all_of_them() -> dict[int, Response] | None:
        found = known()
        return found if all(job.example in found for job in jobs) else None

    if rank < world:
        file.open()
        groups = grouped(jobs, GROUP * settings.batch_size)  # whole groups, so that bits are those of a single process
        if missing := {job.example for group in groups[rank::world] for job in group} - known().keys():
            with around(len(missing)):
                for done, _ in enumerate(file.fill(writer()(jobs, missing), tokenizer), 1):
                    current().update(done=max(current().done, done))  # a writer may have counted it already
    found = ranks.wait_for(all_of_them, f"the target's responses ({name})")
    return [found[job.example].ids for job in jobs]


def response_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], ends: Collection[int]
) -> TokenDataset:
    """Examples whose labels are the responses up to their first end-of-text token, which is a label itself.

    Args:
        prompts: Token ids, no labels.
        responses: Token ids; one that was cut by its budget has no end-of-text token, and so none is learned.
        ends: Every end-of-text token. Padding may be one of them: it is added later, and never a label.
    """
    pairs = list(zip(prompts, responses, strict=True))
    labels = [[IGNORE] * len(prompt) + until_end(response, ends) for prompt, response in pairs]
    return TokenDataset.from_lists([[*prompt, *response] for prompt, response in pairs], labels)
