"""Rows of prompts without answers: those that the target writes and those of a file, in three splits."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from decode.core.errors import UserError
from decode.core.progress import current
from decode.prompts.dataset_files import Row, read_rows
from distill.config.data import DataSettings
from distill.data.own_prompts.prompt_filter import PromptFilter

ORDER = ("test", "validation", "train")
"""Splits in the order in which prompts are dealt out, so that more training examples leave the others as they are."""


@dataclass(frozen=True)
class Sample:
    """What the target wrote as the user's turn."""

    text: str  # Without the end token
    tokens: int  # Its length
    ended: bool  # Whether it ended by itself
    opening: str = ""  # The given words before it


def prompt_rows(
    settings: DataSettings, seed: int, samples: Iterator[Sample] | None, markers: frozenset[str] = frozenset()
) -> tuple[dict[str, list[Row]], list[str]]:
    """The prompts of each split as chats of one user's turn, and what is to be said of them.

    No prompt repeats another one, nearly or exactly, in its own split or across splits.

    Args:
        settings: How many, from where, and which are kept.
        seed: Order of the file's rows.
        samples: What the target writes, as long as it is asked; None: nothing.
        markers: Texts of the chat template that no prompt may contain.

    Raises:
        UserError: too few of the samples can be used, or a file without prompts.
    """
    own = settings.prompts
    limits = {"train": settings.train_limit or 0, "validation": settings.validation_examples}
    limits["test"] = settings.test_examples
    kept = PromptFilter(own, markers)
    splits: dict[str, list[Row]] = {split: [] for split in ORDER}
    notes = []
    if own.file is not None:
        given, unusable = _given(own.file, seed)
        found = (messages for messages in given if kept.given(str(messages[-1]["content"])))
        for split in ORDER:
            wanted = round(own.file_share * limits[split])
            splits[split] = [{"messages": m, "number": i} for i, m in zip(range(1, wanted + 1), found)]
        used, repeated = sum(map(len, splits.values())), kept.dropped.total()
        notes.append(
            f"prompts from {own.file}: {used} used, {repeated} dropped as repetitions, {unusable} rows without a prompt"
        )
        kept.dropped.clear()
    missing = {split: limits[split] - len(splits[split]) for split in ORDER}
    if not own.writes:
        missing = {split: 0 if splits[split] else count for split, count in missing.items()}
    total = sum(missing.values())
    if not total:
        return splits, notes
    if samples is None:
        raise UserError(
            "data.source is target, which has to write its own prompts, and no target is named here: give target.model "
            "(a folder of an instruct model), or prompts with data.prompts.file and data.prompts.file_share 1"
        )
    written, accepted, work = 0, 0, current()
    work.update(name="prompts of the target", total=total)
    for split in ORDER:
        while missing[split]:
            if written >= max(100, own.tries * total):
                raise UserError(
                    f"data.source is target, and of {written} prompts that it wrote {accepted} can be used of {total} "
                    f"wanted ({_reasons(kept)}): use an instruction-tuned target, loosen the limits of data.prompts, "
                    "raise data.prompts.tries, or add prompts with data.prompts.file"
                )
            sample, written = next(samples), written + 1
            if kept.written(sample.text, sample.tokens, ended=sample.ended):
                message = {"role": "user", "content": (sample.opening + sample.text).strip()}
                splits[split].append({"messages": [message], "number": written})
                missing[split], accepted = missing[split] - 1, accepted + 1
                work.update(done=accepted)
    notes.append(
        f"prompts of the target: {written} written, {accepted} kept ({accepted / written:.0%}); "
        f"dropped: {_reasons(kept) or 'none'}"
    )
    return splits, notes


def _reasons(kept: PromptFilter) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in kept.dropped.most_common())


def _given(path: str, seed: int) -> tuple[list[list[dict[str, Any]]], int]:
    """The prompts of a file in the seed's order, and how many rows hold none."""
    found = [prompt_of(row) for row in read_rows(path)]
    prompts = [messages for messages in found if messages is not None]
    if not prompts:
        raise UserError(
            f"data.prompts.file {path!r} holds no prompts: a row needs a column instruction (and input), question, "
            "prompt, messages or turns, the first row has " + ", ".join(map(repr, read_rows(path)[0]))
        )
    Random(f"{seed}/prompts").shuffle(prompts)
    return prompts, len(found) - len(prompts)


def prompt_of(row: Row) -> list[dict[str, Any]] | None:
    """The turns before the first answer in a row of any of the usual shapes, or None if there are none."""
    chat = row.get("messages") or row.get("conversations")
    if isinstance(chat, list):
        return _first_question(chat)
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        text = turns[0]
    elif row.get("instruction"):
        text = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
    else:
        text = row.get("question") or row.get("prompt")
    if not isinstance(text, str) or not text.strip():
        return None
    return [{"role": "user", "content": text.strip()}]


def _first_question(chat: list[Any]) -> list[dict[str, Any]] | None:
    """A chat up to its first user's turn; ShareGPT's fields too."""
    before: list[dict[str, Any]] = []
    for turn in chat:
        if not isinstance(turn, dict):
            return None
        role, content = turn.get("role") or turn.get("from"), turn.get("content") or turn.get("value")
        if not isinstance(content, str) or not content.strip():
            return None
        before.append({"role": {"human": "user"}.get(str(role), str(role)), "content": content.strip()})
        if before[-1]["role"] == "user":
            return before
    return None
