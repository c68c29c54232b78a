"""Prompt suites: what to ask a model, and how to score its answers.

A suite is named by a spec: ``arithmetic``, ``arithmetic:3`` (difficulty), ``open``, a preset such as ``gsm8k`` from
the Hugging Face Hub or ``gsm8k=PATH`` from a local file, ``mmlu:astronomy=PATH`` or ``spec_bench:qa=PATH`` for one
category, or ``prompts=PATH`` for prompts of your own (txt: a prompt a line; else a column prompt, turns or text).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from decode.core.errors import UserError
from decode.prompts.arithmetic import problems
from decode.prompts.files import Row, load_hub, read_rows
from decode.prompts.open_questions import QUESTIONS
from decode.prompts.presets import PRESETS, Preset, held_out
from decode.prompts.scorers import CODE_SCORERS, SCORERS

__all__ = ["Prompt", "Suite", "load_suite"]

NAMES = (*PRESETS, "open", "prompts")
DEFAULT_LIMIT = 100
"""Problems of the arithmetic suite, which has no end, where no limit is given."""

Score = Callable[["Prompt", str], float]


@dataclass(frozen=True)
class Prompt:
    """One prompt; ``reference`` is the expected answer, ``turns`` all user turns of a conversation (or empty)."""

    id: str
    text: str
    reference: str | None
    category: str = ""
    turns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suite:
    """Prompts of one spec; ``score`` maps an answer to 0..1, None where there is no measure (``note`` says why)."""

    name: str
    prompts: list[Prompt]
    score: Score | None
    note: str = ""


def load_suite(
    spec: str,
    *,
    limit: int | None = None,
    seed: int = 0,
    split: str = "test",
    allow_code_execution: bool = False,
) -> Suite:
    """Loads the prompts that a spec names.

    Args:
        spec: see the module's docstring.
        limit: prompts at most, a sample chosen by the seed and kept in order; None: all there are.
        seed: chooses the sample; for arithmetic, the problems.
        split: train, validation or test of sources that have several.
        allow_code_execution: whether answers to humaneval and mbpp may be run, in a limited process of their own.

    Raises:
        UserError: unknown suite or option, no file, rows or columns, or a Hub that does not answer.
    """
    name, option, path = _parse(spec)
    if limit is not None and limit < 1:
        raise UserError(f"the suite's limit is {limit}: give at least 1, or leave it out for all prompts")
    if name == "open":
        prompts = [Prompt(f"open/{place}", text, None) for place, text in enumerate(QUESTIONS)]
        return Suite(spec, _sample(prompts, limit, seed), None, "open questions have no right answer")
    if name == "arithmetic" and path is None:
        return _arithmetic(spec, option, limit or DEFAULT_LIMIT, seed, split)
    if name == "prompts":
        if path is None:
            raise UserError("the suite 'prompts' is a file of your own: --suite prompts=PATH")
        prompts = [_own_prompt(place, row) for place, row in enumerate(read_rows(path))]
        return Suite(spec, _sample(prompts, limit, seed), None, "prompts of your own have no scorer")
    preset = PRESETS[name]
    rows = _local(name, preset, path, split) if path is not None else _hub(name, preset, split)
    numbered = list(enumerate(rows))
    if option:
        numbered = _of_category(name, preset, numbered, option)
    numbered = _sample(numbered, limit, seed)
    if path is not None and Path(path).suffix.lower() == ".txt":
        prompts = [Prompt(f"{name}/{place}", row["text"], None) for place, row in numbered]
        return Suite(spec, prompts, None, "a txt file holds prompts without references")
    keys = {row.get(preset.key) for _, row in numbered}
    unique = None not in keys and len(keys) == len(numbered)
    named = {f"{name}/{row[preset.key] if unique else place}": row for place, row in numbered}
    prompts = [_prompt(identity, preset, row) for identity, row in named.items()]
    return Suite(spec, prompts, *_scorer(name, preset, named, allow_code_execution))


def _parse(spec: str) -> tuple[str, str, str | None]:
    """Name, option (or an empty string) and path (or None) of a spec."""
    head, equals, path = spec.partition("=")
    name, _, option = head.partition(":")
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown suite {name!r}: {guess}Suites: {', '.join(NAMES)}")
    if equals and not path:
        raise UserError(f"the suite {spec!r} names no file after '=': give --suite {name}=PATH")
    allowed = name == "arithmetic" or (name in PRESETS and PRESETS[name].category)
    if option and not allowed:
        raise UserError(f"the suite {name!r} has no option {option!r}: give --suite {name}")
    return name, option, path or None


def _arithmetic(spec: str, option: str, limit: int, seed: int, split: str) -> Suite:
    preset = PRESETS["arithmetic"]
    if option and not re.fullmatch("[123]", option):
        raise UserError(f"difficulty {option!r} of the suite {spec!r} is unknown: give arithmetic:1, :2 or :3")
    difficulty = int(option or 1)
    prompts = []
    for index, problem in enumerate(problems(seed, split, limit, difficulty)):
        row = {"question": problem.question, "answer": problem.solution}
        identity = f"arithmetic/{difficulty}/{seed}/{split}/{index}"
        category = f"{problem.steps} step{'s' * (problem.steps > 1)}"
        prompts.append(Prompt(identity, preset.prompt(row), preset.response(row), category))
    return Suite(spec, prompts, _by_reference(SCORERS["number"]))


def _local(name: str, preset: Preset, path: str, split: str) -> list[Row]:
    rows = read_rows(path)
    if Path(path).suffix.lower() == ".txt":
        return rows
    if missing := [column for column in preset.columns if column not in rows[0]]:
        raise UserError(
            f"{path}: the suite {name!r} reads the columns {', '.join(preset.columns)}, but {', '.join(missing)} is "
            f"missing from {', '.join(rows[0])}: rename the columns, or use --suite prompts={path}"
        )
    kept = [row for row in rows if preset.split_of(row) in (None, split)]
    if not kept:
        raise UserError(f"{path} has no row of the split {split!r} of {name}: give a file that has some")
    return kept


def _hub(name: str, preset: Preset, split: str) -> list[Row]:
    """One split's rows; those of a split that the Hub lacks are the share of its training rows held out for it."""
    hint = f"give a local file: --suite {name}=PATH"
    theirs = preset.splits.get(split, preset.splits.get("train"))
    if preset.hub is None:
        raise UserError(f"the suite {name!r} is not on the Hugging Face Hub: {hint}")
    if theirs is None:
        raise UserError(f"{name} has no split {split!r} on the Hub (it has {', '.join(preset.splits)}): {hint}")
    try:
        rows: Iterable[Row] = load_hub(preset.hub, preset.config, theirs)
    except UserError as error:
        raise UserError(f"suite {name!r}: {error}: --suite {name}=PATH") from error
    if theirs != preset.splits.get("train"):
        return list(rows)
    held = ((row, held_out(preset.prompt(row))) for row in rows)
    return [row for row, part in held if (part if part not in preset.splits else "train") == split]


def _of_category(name: str, preset: Preset, rows: list[tuple[int, Row]], wanted: str) -> list[tuple[int, Row]]:
    found = [(place, row) for place, row in rows if row.get(preset.category) == wanted]
    if not found:
        known = ", ".join(sorted({str(row.get(preset.category)) for _, row in rows}))
        raise UserError(f"the suite {name!r} has no {preset.category} {wanted!r}: choose one of {known}")
    return found


def _sample(items: list[Any], limit: int | None, seed: int) -> list[Any]:
    if limit is None or limit >= len(items):
        return items
    return [items[place] for place in sorted(Random(seed).sample(range(len(items)), limit))]


def _prompt(identity: str, preset: Preset, row: Row) -> Prompt:
    reference = preset.response(row) or None
    category = str(row.get(preset.category, "")) if preset.category else ""
    return Prompt(identity, preset.prompt(row), reference, category, preset.turns(row))


def _own_prompt(place: int, row: Row) -> Prompt:
    turns = tuple(row.get("turns") or ())
    text = row.get("prompt") or row.get("text") or (turns[0] if turns else None)
    if not isinstance(text, str):
        raise UserError(
            f"row {place} of the prompts has the columns {', '.join(row)}: it needs prompt, text or turns as text"
        )
    return Prompt(f"prompts/{row.get('id', place)}", text, row.get("reference"), str(row.get("category", "")), turns)


def _scorer(name: str, preset: Preset, rows: dict[str, Row], allow_code: bool) -> tuple[Score | None, str]:
    """The score of a preset's prompts, or None and the reason."""
    if preset.scorer is None:
        return None, f"{name} has no simple measure of an answer"
    if preset.scorer not in CODE_SCORERS:
        return _by_reference(SCORERS[preset.scorer]), ""
    if not allow_code:
        return None, f"answers to {name} are judged by running them: allow it with --allow-code-execution"
    score = CODE_SCORERS[preset.scorer]
    return (lambda prompt, output: score(rows[prompt.id], output)), ""


def _by_reference(score: Callable[[str, str], float]) -> Score:
    return lambda prompt, output: score(prompt.reference or "", output)
