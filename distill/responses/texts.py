"""The texts that drafts are trained on: the data set's responses, or the target's."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from decode.models.loading import stop_ids
from decode.progress import working
from distill.data.batches import TokenDataset
from distill.data.context import StageContext
from distill.files import files_state, fingerprint
from distill.responses.server import answered_by_servers, answered_by_vllm
from distill.responses.store import Answer, answered_by_all, answered_here, make_jobs, response_rows

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
    seed, limit, own = context.settings.seed, context.settings.data.max_length, context.settings.target.dtype

    def writer() -> Answer:
        if settings.server.engine:
            return answered_by_vllm(settings, seed, ends, Path(path), limit, settings.dtype or own)
        if settings.server.urls:
            return answered_by_servers(settings, seed, tokenizer, ends)
        model = target if settings.dtype in (None, own) else context.open_target(path, settings.dtype)
        return answered_here(context.at_work(model), settings, seed, ends)

    answered = {}
    for split, rows in splits.items():
        jobs = make_jobs(rows, getattr(context.corpus, split)[: len(rows)], settings, limit)
        title = f"the target's responses, {split}"

        @contextmanager
        def shown(count: int, title: str = title, split: str = split, jobs: int = len(jobs)) -> Iterator[None]:
            with working(context.console, title, count), context.timed(f"{ANSWERS} {split}", count):
                yield
            context.line(f"{title}: {jobs}, {count} of them written now")

        written = answered_by_all(
            jobs, settings, context.run.work / folder, split, made_from | {"split": split, "prompts": len(rows)},
            writer=writer, tokenizer=tokenizer, around=shown,
        )  # fmt: skip
        answered[split] = response_rows([job.ids for job in jobs], written, ends)
    return answered
