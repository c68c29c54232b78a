"""Texts that the target writes once for the prompts of a split, on which any number of drafts are measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel

from decode.models.loading import stop_ids
from decode.progress import track
from distill.config.drafts import ResponseSettings
from distill.data.batches import TokenDataset
from distill.data.context import StageContext
from distill.data.response_file import ResponseFile
from distill.files import fingerprint
from distill.responses.store import answered_here, make_jobs

Text = tuple[list[int], int]


def target_texts(
    bench: StageContext,
    target: PreTrainedModel,
    split: Dataset,
    count: int,
    how: ResponseSettings,
    path: Path,
    made_from: dict[str, Any],
) -> tuple[list[Text], str]:
    """What the target answers to the first prompts of a split: (token ids, prompt length) of each; and a fingerprint.

    Args:
        bench: settings, data and console.
        target: the target.
        split: examples, whose prompts count.
        count: how many of them.
        how: sampling, length and batch size.
        path: file that keeps the texts.
        made_from: what they depend on beside that.
    """
    rows = TokenDataset.of(split, count)
    jobs = make_jobs(rows, split.select(range(len(rows))), how, bench.settings.data.max_length)
    made_from = made_from | {"how": how.written(), "prompts": len(jobs), "seed": bench.settings.seed}
    file = ResponseFile(path, made_from)
    file.open()
    writer = answered_here(target, how, bench.settings.seed, stop_ids(target, bench.corpus.tokenizer))
    missing, console = {job.example for job in jobs} - file.found.keys(), bench.console
    lines, left = file.fill(writer(jobs, missing), bench.corpus.tokenizer), len(missing)
    for _ in track(lines, f"texts of the target, {path.stem}", total=left, console=console):
        pass
    texts = [([*job.ids, *file.found[job.example].ids], len(job.ids)) for job in jobs]
    return texts, fingerprint(made_from)
