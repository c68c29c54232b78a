"""Prompt suites: prompts to measure on, and a score of the answers where the data set has references.

A suite is named by a spec: ``arithmetic``, ``arithmetic:3`` (difficulty), ``open``, ``chat`` (96 prompts in the six
categories of Spec-Bench), a preset such as ``gsm8k`` from the Hugging Face Hub or ``gsm8k=PATH`` from a local file, or
just ``PATH``, a file whose columns identify the data set (``LABEL=PATH`` names it); ``chat:qa``,
``mmlu:astronomy=PATH`` or ``spec_bench:qa=PATH`` for one category; ``prompts=PATH`` for other prompts (txt: one prompt
per line; otherwise a column prompt, turns, text or question).
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS, READERS, Preset, Row, held_out, load_hub, read_rows
from decode.bench.scorers import SCORERS
from decode.errors import UserError

NAMES = (*PRESETS, "chat", "open", "prompts")
CHAT, OPEN = (Path(__file__).with_name(name) for name in ("chat_prompts.jsonl", "open_prompts.txt"))
"""Prompts written for this project: 16 in each of Spec-Bench's categories, in its format; and open questions."""
RECOGNISED = ("humaneval", "mbpp", "mmlu", "spec_bench", "ultrachat", "cnn_dailymail", "xsum", "gsm8k", "alpaca")
"""Presets that are recognised by the columns of a file, those with more specific columns first."""
OWN = ("prompt", "turns", "text", "question")  # columns that hold the prompt in a file of no preset
DEFAULT_LIMIT = 100  # problems of the arithmetic suite, which is unlimited, if no limit is given

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    id: str  # unique in the suite
    text: str  # for a model that continues text
    reference: str | None  # the expected answer
    category: str = ""  # results are also reported by category
    turns: tuple[str, ...] = ()  # the user's turns for a chat model; empty: the text is the only turn
    ids: tuple[int, ...] = ()  # token ids of the prompt, if they are known; text and turns are then for display only


Score = Callable[[Prompt, str], float]


@dataclass(frozen=True)
class Suite:
    """Prompts of one spec; ``score`` maps an answer to 0..1 and is None without a scorer (``note`` has the reason)."""

    name: str
    prompts: list[Prompt]
    score: Score | None
    note: str = ""


def load_suite(spec: str, *, limit: int | None = None, seed: int = 0, split: str = "test") -> Suite:
    """Load the prompts of a spec.

    Args:
        spec: see the module's docstring.
        limit: maximum number of prompts: a sample chosen by the seed, in the file's order, balanced over categories;
            None: all.
        seed: chooses the sample, and the problems of arithmetic.
        split: train, validation or test of sources that have several.

    Raises:
        UserError: unknown suite or option, no such file, rows or columns, or the Hub does not answer.
    """
    name, option, path = _parse(spec)
    if limit is not None and limit < 1:
        raise UserError(f"the suite's limit is {limit}: give at least 1, or leave it out for all prompts")
    if name == "arithmetic" and path is None:
        return _arithmetic(spec, option, limit or DEFAULT_LIMIT, seed, split)
    if name in ("prompts", "open") or (path and Path(path).suffix.lower() == ".txt"):
        if name == "prompts" and path is None:
            raise UserError("the suite 'prompts' is a file of your own: --suite prompts=PATH")
        prompts = [_own_prompt(place, row, name) for place, row in enumerate(read_rows(path or OPEN))]
        note = "its prompts have no references" if path else "open questions have no right answer"
        return Suite(spec, _sample(prompts, limit, seed, lambda prompt: prompt.category), None, note)
    preset = PRESETS["spec_bench" if name == "chat" else name]
    if name == "chat":
        rows = read_rows(path or CHAT)
    else:
        rows = _local(name, preset, path, split) if path is not None else _hub(name, preset, split)
    try:
        numbered = list(enumerate(rows))
        if option:
            numbered = [(n, row) for n, row in numbered if option in (row.get(preset.category), _category(preset, row))]
        if not numbered:
            known = {str(row.get(preset.category)) for row in rows} | {_category(preset, row) for row in rows}
            raise UserError(
                f"the suite {name!r} has no {preset.category} {option!r}: choose one of {', '.join(sorted(known))}"
            )
        numbered = _sample(numbered, limit, seed, lambda item: _category(preset, item[1]))
        keys = {row.get(preset.key) for _, row in numbered}
        unique = None not in keys and len(keys) == len(numbered)
        prompts = [_prompt(f"{name}/{row[preset.key] if unique else place}", preset, row) for place, row in numbered]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        cure = f"correct the file, or name the column of its prompts prompt and use --suite prompts={path}"
        raise UserError(
            f"the suite {spec!r} has rows that are not as those of {name} ({type(error).__name__}: {error}): "
            f"{cure if path else f'give a local file, --suite {name}=PATH'}"
        ) from error
    if preset.scorer is None:
        return Suite(spec, prompts, None, f"{name} has no scorer")
    return Suite(spec, prompts, _by_reference(preset.scorer))


def _parse(spec: str) -> tuple[str, str, str | None]:
    """Name, option (or an empty string) and path (or None) of a spec; the name of a suite wins over a file's."""
    head, equals, path = spec.partition("=")
    name, _, option = head.partition(":")
    if not equals and Path(spec).suffix.lower() in READERS:
        return _recognise(spec), "", spec
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.8 if path else 0.4)
        if path and not near:
            return _recognise(path), "", path
        guess = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(f"unknown suite {name!r}: {guess}Suites: {', '.join(NAMES)}, or the path of a file")
    if equals and not path:
        raise UserError(f"the suite {spec!r} names no file after '=': give --suite {name}=PATH")
    if option and not (name in ("arithmetic", "chat") or (name in PRESETS and PRESETS[name].category)):
        raise UserError(f"the suite {name!r} has no option {option!r}: give --suite {name}")
    return name, option, path or None


def _recognise(path: str) -> str:
    """The preset whose columns a file has, or ``prompts``."""
    row = read_rows(path)[0]
    for name in RECOGNISED:
        if all(column in row for column in PRESETS[name].columns) and (name != "gsm8k" or "####" in str(row["answer"])):
            return name
    if any(column in row for column in OWN):
        return "prompts"
    raise UserError(
        f"{path}: rows with the columns {', '.join(row)} are of no known data set: rename the column of the prompts to "
        f"prompt, or name the data set with --suite NAME={path}, NAME being one of {', '.join(RECOGNISED)}"
    )


def _arithmetic(spec: str, option: str, limit: int, seed: int, split: str) -> Suite:
    preset, prompts = PRESETS["arithmetic"], []
    if option and not re.fullmatch("[123]", option):
        raise UserError(f"difficulty {option!r} of the suite {spec!r} is unknown: give arithmetic:1, :2 or :3")
    difficulty = int(option or 1)
    for index, problem in enumerate(problems(seed, split, limit, difficulty)):
        row = {"question": problem.question, "answer": problem.solution}
        identity = f"arithmetic/{difficulty}/{seed}/{split}/{index}"
        category = f"{problem.steps} step{'s' * (problem.steps > 1)}"
        prompts.append(Prompt(identity, preset.prompt(row), preset.response(row), category))
    return Suite(spec, prompts, _by_reference("number"))


def _local(name: str, preset: Preset, path: str, split: str) -> list[Row]:
    rows = read_rows(path)
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
    """Rows of one split; for a split that the Hub lacks, the share of the training rows that is held out for it."""
    hint = f"give a local file: --suite {name}=PATH"
    theirs = preset.splits.get(split, preset.splits.get("train"))
    if preset.hub is None:
        raise UserError(f"the suite {name!r} is not on the Hugging Face Hub: {hint}")
    if theirs is None:
        raise UserError(f"{name} has no split {split!r} on the Hub (it has {', '.join(preset.splits)}): {hint}")
    try:
        rows: list[Row] = list(load_hub(preset.hub, preset.config, theirs))
    except UserError as error:
        raise UserError(f"suite {name!r}: {error}: --suite {name}=PATH") from error
    if theirs != preset.splits.get("train"):
        return rows
    held = ((row, held_out(preset.prompt(row))) for row in rows)
    return [row for row, part in held if (part if part not in preset.splits else "train") == split]


def _category(preset: Preset, row: Row) -> str:
    own = str(row.get(preset.category, "")) if preset.category else ""
    return preset.groups.get(own, own)


def _sample(items: list[T], limit: int | None, seed: int, category: Callable[[T], str]) -> list[T]:
    """At most ``limit`` items in their order; the numbers of two categories differ by at most one."""
    if limit is None or limit >= len(items):
        return items
    groups: dict[str, list[int]] = {}
    for place, item in enumerate(items):
        groups.setdefault(category(item), []).append(place)
    random = Random(seed)
    if len(groups) == 1:
        kept = random.sample(range(len(items)), limit)
    else:  # the first of every category, then the second ones, ...
        order = [(n, random.random(), p) for own in groups.values() for n, p in enumerate(random.sample(own, len(own)))]
        kept = [place for _, _, place in sorted(order)[:limit]]
    return [items[place] for place in sorted(kept)]


def _prompt(identity: str, preset: Preset, row: Row) -> Prompt:
    open_chat = preset.kind == "chat" and all(message["role"] != "assistant" for message in row["messages"])
    reference = None if open_chat else preset.response(row) or None
    turns = preset.turns(row) or ((preset.said(row),) if preset.said else ())
    return Prompt(identity, preset.prompt(row), reference, _category(preset, row), turns)


def _own_prompt(place: int, row: Row, suite: str) -> Prompt:
    turns = row.get("turns") or ()
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"row {place} of the prompts: turns is {turns!r}; give a list of texts, one for each turn")
    text = row.get("prompt") or row.get("text") or row.get("question") or (turns[0] if turns else None)
    if not isinstance(text, str):
        raise UserError(
            f"row {place} of the prompts has the columns {', '.join(row)}: it needs {', '.join(OWN[:-1])} or "
            f"{OWN[-1]} as text"
        )
    category = str(row.get("category", ""))
    return Prompt(f"{suite}/{row.get('id', place)}", text, row.get("reference"), category, tuple(turns))


def _by_reference(scorer: str) -> Score:
    return lambda prompt, output: SCORERS[scorer](prompt.reference or "", output)
