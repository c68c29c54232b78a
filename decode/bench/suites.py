"""Prompt suites: what to ask a model, and how to score its answers.

A suite is named by a spec: ``arithmetic``, ``arithmetic:3`` (difficulty), ``open``, ``chat`` (96 prompts in the six
categories of Spec-Bench), a preset such as ``gsm8k`` from the Hugging Face Hub or ``gsm8k=PATH`` from a local file, or
just ``PATH``, whose columns say what it is (``LABEL=PATH`` gives it a name); ``chat:qa``, ``mmlu:astronomy=PATH`` or
``spec_bench:qa=PATH`` for one category; ``prompts=PATH`` for prompts of your own (txt: a prompt a line; else a column
prompt, turns, text or question).
"""

import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS, READERS, Preset, Row, held_out, load_hub, read_rows
from decode.bench.scorers import CODE_SCORERS, SCORERS
from decode.errors import UserError

__all__ = ["Prompt", "Suite", "load_suite"]

NAMES = (*PRESETS, "chat", "open", "prompts")
BUNDLED = Path(__file__).with_name("chat_prompts.jsonl")
"""The suite ``chat``, in Spec-Bench's format: written for this project, 16 prompts in each of six categories."""
OPEN = Path(__file__).with_name("open_prompts.txt")
"""Open questions without a right answer, written for this project: long, free text to measure speed on."""
RECOGNISED = ("humaneval", "mbpp", "mmlu", "spec_bench", "ultrachat", "cnn_dailymail", "xsum", "gsm8k", "alpaca")
"""Presets that a file is recognised as by its columns, the more particular ones first."""
DEFAULT_LIMIT = 100  # problems of the arithmetic suite, which has no end, where no limit is given

T = TypeVar("T")
Score = Callable[["Prompt", str], float]


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    id: str  # of the prompt in its suite
    text: str  # for a model that continues text
    reference: str | None  # the expected answer
    category: str = ""  # what the results are grouped by
    turns: tuple[str, ...] = ()  # what a user says to a chat model, turn by turn; empty: the text
    # the prompt as token ids, where they are known; text and turns are then only for the reader
    ids: tuple[int, ...] = ()


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
        limit: prompts at most, a sample chosen by the seed and kept in order, evenly from the categories where there
            are several; None: all there are.
        seed: chooses the sample; for arithmetic, the problems.
        split: train, validation or test of sources that have several.
        allow_code_execution: whether answers to humaneval and mbpp may be run, in a limited process of their own.

    Raises:
        UserError: unknown suite or option, no file, rows or columns, or a Hub that does not answer.
    """
    name, option, path = _parse(spec)
    if limit is not None and limit < 1:
        raise UserError(f"the suite's limit is {limit}: give at least 1, or leave it out for all prompts")
    if name == "open" and path is None:
        prompts = [Prompt(f"open/{place}", row["text"], None) for place, row in enumerate(read_rows(OPEN))]
        return Suite(spec, _sample(prompts, limit, seed), None, "open questions have no right answer")
    if name == "arithmetic" and path is None:
        return _arithmetic(spec, option, limit or DEFAULT_LIMIT, seed, split)
    if name in ("prompts", "open"):
        if path is None:
            raise UserError("the suite 'prompts' is a file of your own: --suite prompts=PATH")
        prompts = [_own_prompt(place, row) for place, row in enumerate(read_rows(path))]
        kept = _sample(prompts, limit, seed, lambda prompt: prompt.category)
        return Suite(spec, kept, None, "prompts of your own have no scorer")
    preset = PRESETS["spec_bench" if name == "chat" else name]
    with _told_of_rows(spec, name, path):
        if name == "chat":
            rows = read_rows(path or BUNDLED)
        else:
            rows = _local(name, preset, path, split) if path is not None else _hub(name, preset, split)
        numbered = list(enumerate(rows))
        if option:
            numbered = _of_category(name, preset, numbered, option)
        numbered = _sample(numbered, limit, seed, lambda item: _category(preset, item[1]))
        if path is not None and Path(path).suffix.lower() == ".txt":
            prompts = [Prompt(f"{name}/{place}", row["text"], None) for place, row in numbered]
            return Suite(spec, prompts, None, "a txt file holds prompts without references")
        keys = {row.get(preset.key) for _, row in numbered}
        unique = None not in keys and len(keys) == len(numbered)
        named = {f"{name}/{row[preset.key] if unique else place}": row for place, row in numbered}
        prompts = [_prompt(identity, preset, row) for identity, row in named.items()]
        return Suite(spec, prompts, *_scorer(name, preset, named, allow_code_execution))


@contextmanager
def _told_of_rows(spec: str, name: str, path: str | None) -> Iterator[None]:
    """Inside, a row that does not fit its data set is a mistake that the user is told of."""
    try:
        yield
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        cure = f"mend the file, or name the column of its prompts prompt and use --suite prompts={path}"
        raise UserError(
            f"the suite {spec!r} has rows that are not as those of {name} ({type(error).__name__}: {error}): "
            f"{cure if path else f'give a local file, --suite {name}=PATH'}"
        ) from error


def _parse(spec: str) -> tuple[str, str, str | None]:
    """Name, option (or an empty string) and path (or None) of a spec."""
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
    allowed = name in ("arithmetic", "chat") or (name in PRESETS and PRESETS[name].category)
    if option and not allowed:
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
        f"prompt, or say what the file is with --suite NAME={path}, NAME being one of {', '.join(RECOGNISED)}"
    )


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


def _category(preset: Preset, row: Row) -> str:
    own = str(row.get(preset.category, "")) if preset.category else ""
    return preset.groups.get(own, own)


def _of_category(name: str, preset: Preset, rows: list[tuple[int, Row]], wanted: str) -> list[tuple[int, Row]]:
    found = [(n, row) for n, row in rows if wanted in (row.get(preset.category), _category(preset, row))]
    if not found:
        known = sorted({str(row.get(preset.category)) for _, row in rows} | {_category(preset, row) for _, row in rows})
        raise UserError(f"the suite {name!r} has no {preset.category} {wanted!r}: choose one of {', '.join(known)}")
    return found


def _sample(items: list[T], limit: int | None, seed: int, category: Callable[[T], str] = lambda item: "") -> list[T]:
    """At most ``limit`` items in their order: of every category as many, but for one."""
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
    asks = preset.kind == "chat" and all(message["role"] != "assistant" for message in row["messages"])
    reference = None if asks else preset.response(row) or None
    turns = preset.turns(row) or ((preset.said(row),) if preset.said else ())
    return Prompt(identity, preset.prompt(row), reference, _category(preset, row), turns)


OWN = ("prompt", "turns", "text", "question")  # columns that a prompt of one's own is read from


def _own_prompt(place: int, row: Row) -> Prompt:
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
    return Prompt(f"prompts/{row.get('id', place)}", text, row.get("reference"), category, tuple(turns))


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
