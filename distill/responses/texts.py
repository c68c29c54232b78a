"""The texts that drafts are trained on: the data set's responses or the target's, which are kept line by line."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.loading import DTYPES, stop_ids
from decode.models.writing import GROUP, uniform_draws, write_texts
from decode.progress import current, working
from decode.sampling import LogitsWarper
from distill import ranks
from distill.config.drafts import ResponseSettings
from distill.data.batches import TokenDataset
from distill.data.chat import IGNORE, ChatFormat, until_end
from distill.data.context import StageContext
from distill.data.response_file import Response, ResponseFile
from distill.files import files_state, fingerprint
from distill.responses.server import Answer, Job, answered_by_servers, answered_by_vllm

ANSWERS = "answers"  # name in `StageContext.measured`


def fixed_texts(
    context: StageContext, target: PreTrainedModel, ends: set[int]
) -> tuple[TokenDataset, TokenDataset, str]:
    """Train and validation examples, with the data set's responses or the target's; and their fingerprint."""
    settings, target_settings = context.settings, context.settings.target
    record = context.run.record("target")
    assert record is not None
    made_from: dict[str, Any] = {
        "target": record.fingerprint,
        "corpus": context.corpus.fingerprint,
        "examples": settings.teacher.examples,
        "quantization": target_settings.quantization,
        "dtype": target_settings.dtype,
    }
    splits = {"train": context.examples, "validation": context.validation}
    if settings.teacher.responses.from_target:
        made_from |= {"seed": settings.seed, "max_length": settings.data.max_length}
        made_from |= {"responses": settings.teacher.responses.key()}
        splits = _answered(context, target, ends, splits, made_from, context.run.target)
    splits = {split: replace(rows, signals={}, tokens={}) for split, rows in splits.items()}
    return splits["train"], splits["validation"], fingerprint(made_from)


def answered_by_target(context: StageContext) -> tuple[TokenDataset, TokenDataset]:
    """`fixed_texts` for callers that have not loaded the target."""
    model = context.open_target()
    return fixed_texts(context, model, stop_ids(model, context.corpus.tokenizer))[:2]


def answered_by_original(context: StageContext, model: PreTrainedModel) -> tuple[TokenDataset, TokenDataset]:
    """Train and validation examples with the responses of a given target, before anything is trained."""
    settings, given = context.settings, context.settings.target.model
    assert given is not None
    made_from = {
        "target": files_state([given]) or given,
        "dtype": settings.target.dtype,
        "corpus": context.corpus.fingerprint,
        "seed": settings.seed,
        "max_length": settings.data.max_length,
        "responses": settings.teacher.responses.written(),
    }
    splits = {"train": TokenDataset.of(context.corpus.train), "validation": context.validation}
    ends = stop_ids(model, context.corpus.tokenizer)
    splits = _answered(context, model, ends, splits, made_from, given, folder="original")
    return splits["train"], splits["validation"]


def _answered(
    context: StageContext,
    target: PreTrainedModel,
    ends: set[int],
    splits: dict[str, TokenDataset],
    made_from: dict[str, Any],
    path: str | Path,
    folder: str = "responses",
) -> dict[str, TokenDataset]:
    """The splits' prompts with the responses of the target at a path, kept in a folder of the run's work."""
    settings, tokenizer = context.settings.teacher.responses, context.corpus.tokenizer
    seed, limit = context.settings.seed, context.settings.data.max_length
    dtype = settings.dtype or context.settings.target.dtype

    def writer() -> Answer:
        if settings.server.engine:
            return answered_by_vllm(settings, seed, ends, Path(path), limit, dtype)
        if settings.server.urls:
            data, chat = context.settings.data, None
            if context.corpus.chat:
                chat = ChatFormat(tokenizer, data.system, data.template_args, sorted(ends))
            return answered_by_servers(settings, seed, tokenizer, ends, chat)
        model = target if target.dtype == DTYPES[dtype] else context.open_target(path, dtype)
        return answered_here(context.at_work(model), settings, seed, ends)

    answered = {}
    for split, rows in splits.items():
        prompts, longest = getattr(context.corpus, split)["prompt"], settings.max_new_tokens
        jobs = [
            Job(i, ids := rows.prompt(i), text, max(0, min(longest, limit - len(ids))))
            for i, text in zip(range(len(rows)), prompts)
        ]
        about = made_from | {"split": split, "prompts": len(rows)}
        file, title = context.run.work / folder / f"{split}.jsonl", f"the target's responses, {split}"
        written = answered_by_all(context, jobs, settings, file, about, writer, title)
        if empty := sum(job.budget > 0 and not ids for job, ids in zip(jobs, written)):
            context.line(f"{empty} of {len(jobs)} responses are empty, and nothing of them is learned")
        if 2 * empty > len(jobs):
            raise UserError(
                f"{title}: {empty} of {len(jobs)} are empty: raise teacher.responses.max_new_tokens, or start the "
                f"server without a reasoning parser; then delete {file} and run again"
            )
        answered[split] = response_rows([job.ids for job in jobs], written, ends)
    return answered


def answered_here(model: PreTrainedModel, settings: ResponseSettings, seed: int, stop_ids: Collection[int]) -> Answer:
    """Answers by the model itself, in the groups of prompts that `answered_by_all` makes, so that bits repeat.

    Args:
        model: The target.
        settings: Sampling and batch size.
        seed: With the example's number it decides the response.
        stop_ids: End-of-text tokens.
    """

    def answers(jobs: Sequence[Job]) -> Iterator[Response]:
        size = GROUP * settings.batch_size
        for group in (jobs[start : start + size] for start in range(0, len(jobs), size)):
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
            yield from ((job.example, text) for job, text in zip(group, texts))

    return answers


def answered_by_all(
    context: StageContext,
    jobs: Sequence[Job],
    settings: ResponseSettings,
    path: Path,
    made_from: dict[str, Any],
    writer: Callable[[], Answer],
    title: str,
) -> list[list[int]]:
    """The responses to prompts, which are kept on disk.

    Every process writes its share into a file of its own (a server or engine is asked by the first one alone), and
    continues when all responses are there, whichever process wrote them, in this run or an earlier one.

    Args:
        context: Console and tokenizer.
        jobs: The prompts.
        settings: Batch size and servers.
        path: The first process's file; those of the others are beside it.
        made_from: Everything that decides the responses.
        writer: Makes what writes those that are missing.
        title: Shown beside the progress.
    """
    rank, world = ranks.rank(), 1 if settings.server.answers else ranks.started()
    file = ResponseFile(path.with_stem(f"{path.stem}-{rank}") if rank else path, made_from)

    def known() -> dict[int, list[int]]:
        found = {job.example: list[int]() for job in jobs if not job.budget}
        for one in path.parent.glob(f"{path.stem}*.jsonl"):
            if not one.stem.endswith(".old"):
                found |= ResponseFile(one, made_from).read()
        return found

    def all_of_them() -> dict[int, list[int]] | None:
        found = known()
        return found if len(found) == len(jobs) else None

    if rank < world:
        file.open()
        found, size = known(), GROUP * settings.batch_size
        ordered = sorted(jobs, key=lambda job: (len(job.ids), job.example))  # those of similar length together
        groups = [ordered[start : start + size] for start in range(0, len(ordered), size)][rank::world]
        unfinished = [group for group in groups if any(job.example not in found for job in group)]
        asked = [job for group in unfinished for job in group]  # whole groups, so that bits are those of one process
        missing = [job for job in asked if job.example not in found]
        if missing:
            write = writer()(missing if settings.server.answers else asked)
            with working(context.console, title, len(missing)), context.timed(f"{ANSWERS} {path.stem}", len(missing)):
                for done, _ in enumerate(file.fill(write, context.corpus.tokenizer), 1):
                    current().update(done=max(current().done, done))  # a writer may have counted it already
            context.line(f"{title}: {len(jobs)}, {len(missing)} of them written now")
    found = ranks.wait_for(all_of_them, title)
    return [found[job.example] for job in jobs]


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
