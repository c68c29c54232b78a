"""Prompt suites: prompts to measure on, and a score of the answers where the data set has references.

A suite is named by a spec: ``arithmetic``, ``arithmetic:3`` (difficulty), ``open``, ``chat`` (96 prompts in the six
categories of Spec-Bench), a preset such as ``gsm8k`` from the Hugging Face Hub (``GSM8K`` and ``openai/gsm8k`` are the
same) or ``gsm8k=PATH`` from a local file, or just ``PATH``, a file whose columns identify the data set (``LABEL=PATH``
names it); ``chat:qa``, ``mmlu:astronomy=PATH`` or ``spec_bench:qa=PATH`` for one category; ``prompts=PATH`` for other
prompts (txt: one prompt per line; otherwise a column prompt, turns, text or question).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from random import Random

from decode.bench.arithmetic import problems
from decode.bench.datasets import PRESETS, Preset, Row, file_format, held_out, load_hub, read_rows
from decode.errors import UserError, unknown

NAMES = (*PRESETS, "chat", "open", "prompts")
CHAT, OPEN = (Path(__file__).with_name(name) for name in ("chat_prompts.jsonl", "open_prompts.txt"))
"""Prompts written for this project: 16 in each of Spec-Bench's categories, in its format; and open questions."""
RECOGNISED = [name for name in PRESETS if name not in ("arithmetic", "mt_bench")]
RECOGNISED.sort(key=lambda name: -len(PRESETS[name].columns))
"""Presets that are recognised by the columns of a file, those with more specific columns first."""
OWN = ("prompt", "text", "question", "turns")  # columns that hold the prompt in a file of no preset
HUB = {preset.hub: name for name, preset in PRESETS.items() if preset.hub}
SPELLINGS = {re.sub("[-_ ]", "", known.lower()): name for known, name in [*zip(NAMES, NAMES), *HUB.items()]}
"""Suites by their names and the Hub's, in lower case without hyphens: MT-Bench is mt_bench."""
DEFAULT_LIMIT = 100  # problems of the arithmetic suite, which is unlimited, if no limit is given


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
    preset = PRESETS.get("spec_bench" if name == "chat" else name)
    if preset is None or (path and file_format(path) == ".txt"):
        prompts = [_own_prompt(f"{name}/{place}", row) for place, row in enumerate(read_rows(path or OPEN))]
        kept = _sample([prompt.category for prompt in prompts], limit, seed)
        return Suite(spec, [prompts[place] for place in kept], None, "its prompts have no references")
    note = "" if preset.scorer else f"{name} has no scorer"
    if name == "arithmetic" and path is None:
        difficulty, option = option or "1", ""
        rows: list[Row] = []
        for index, made in enumerate(problems(seed, split, limit or DEFAULT_LIMIT, int(difficulty))):
            about = {
                "id": f"{difficulty}/{seed}/{split}/{index}",
                "steps": f"{made.steps} step{'s' * (made.steps > 1)}",
            }
            rows.append(about | {"question": made.question, "answer": made.solution})
        prompts = _prompts(name, preset, rows, option, None, seed)
    else:
        if option in preset.configs:
            preset, option = replace(preset, config=option), ""
        rows = read_rows(CHAT) if name == "chat" and not path else _rows(name, preset, path, split)
        whole = [row for row in rows if not preset.placeholder or preset.placeholder not in str(row)]
        if lost := len(rows) - len(whole):
            note = (
                f"{lost} of {len(rows)} rows are left out, which hold a placeholder instead of their text: fill them "
                f"with the data set's own prepare.py, and give its file with --suite {name}=PATH"
            )
        if not whole:
            raise UserError(f"the suite {spec!r} has no prompt: {note}")
        try:
            prompts = _prompts(name, preset, whole, option, limit, seed)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"the suite {spec!r} has rows that are not as those of {name} ({type(error).__name__}: {error}): "
                f"correct the file, or name the column of its prompts prompt and use --suite prompts=PATH"
            ) from error
    scorer = SCORERS.get(preset.scorer or "")
    return Suite(spec, prompts, scorer and (lambda prompt, output: scorer(prompt.reference or "", output)), note)


def _parse(spec: str) -> tuple[str, str, str | None]:
    """Name, option (or an empty string) and path (or None) of a spec; the name of a suite wins over a file's."""
    head, equals, path = spec.partition("=")
    name, _, option = head.partition(":")
    name = SPELLINGS.get(re.sub("[-_ ]", "", name.lower()), name)
    if not equals and file_format(spec):
        return _recognise(spec), "", spec
    if path and name not in NAMES:
        return _recognise(path), "", path
    if name not in NAMES:
        raise UserError(f"{unknown('suite', name, NAMES)}, or give the path of a file")
    if (equals or name == "prompts") and not path:
        raise UserError(f"the suite {spec!r} names no file: give --suite {name}=PATH")
    if name == "arithmetic" and option not in ("", "1", "2", "3"):
        raise UserError(f"difficulty {option!r} of the suite {spec!r} is unknown: give arithmetic:1, :2 or :3")
    if option and not (name in ("arithmetic", "chat") or (name in PRESETS and PRESETS[name].category)):
        raise UserError(f"the suite {name!r} has no option {option!r}: give --suite {name}")
    return name, option, path or None


def _recognise(path: str) -> str:
    """The preset whose columns a file has, or ``prompts``."""
    rows = read_rows(path)
    row = rows[0]
    for name in RECOGNISED:
        if all(column in row for column in PRESETS[name].columns) and (name != "gsm8k" or "####" in str(row["answer"])):
            of_mt_bench = name == "spec_bench" and {row.get("category") for row in rows} <= PRESETS[name].groups.keys()
            return "mt_bench" if of_mt_bench else name
    if "category" in row and isinstance(row.get("prompt"), list):  # MT-Bench's copy on the Hub
        return "mt_bench"
    if any(column in row for column in OWN):
        return "prompts"
    nearest = max(RECOGNISED, key=lambda name: len(row.keys() & PRESETS[name].columns))
    raise UserError(
        f"{path}: rows with the columns {', '.join(row)} are of no known data set (the nearest, {nearest}, has "
        f"{', '.join(PRESETS[nearest].columns)}): rename the column of the prompts to prompt, or name the data set "
        f"with --suite NAME={path}, NAME being one of {', '.join(RECOGNISED)}"
    )


def _rows(name: str, preset: Preset, path: str | None, split: str) -> list[Row]:
    """Rows of one split; for a split that the Hub lacks, the share of the training rows that is held out for it."""
    if path is not None:
        rows = read_rows(path)
        if missing := [column for column in preset.columns if column not in rows[0]]:
            raise UserError(
                f"{path}: the suite {name!r} reads the columns {', '.join(preset.columns)}, but {', '.join(missing)} "
                f"is missing from {', '.join(rows[0])}: rename the columns, or use --suite prompts={path}"
            )
        if not (kept := [row for row in rows if preset.split_of(row) in (None, split)]):
            raise UserError(f"{path} has no row of the split {split!r} of {name}: give a file that has some")
        return kept
    theirs = preset.splits.get(split, preset.splits.get("train"))
    if preset.hub is None or theirs is None:
        has = ", ".join(preset.splits) or "none"
        file = preset.file and f", a copy of {preset.file}"
        raise UserError(f"{name} has no split {split!r} on the Hub (it has {has}): give --suite {name}=PATH{file}")
    try:
        rows = list(load_hub(preset.hub, preset.config, theirs))
    except UserError as error:
        raise UserError(f"suite {name!r}: {error}: --suite {name}=PATH") from error
    if theirs != preset.splits.get("train"):
        return rows
    held = ((row, held_out(row["messages"] if preset.kind == "chat" else preset.prompt(row))) for row in rows)
    return [row for row, part in held if (part if part not in preset.splits else "train") == split]


def _prompts(name: str, preset: Preset, rows: Sequence[Row], option: str, limit: int | None, seed: int) -> list[Prompt]:
    """The prompts of a preset's rows: of one category or all, and at most ``limit`` of them."""
    categories = [str(row.get(preset.category, "")) if preset.category else "" for row in rows]
    groups = [preset.groups.get(category, category) for category in categories]
    places = [n for n in range(len(rows)) if not option or option in (categories[n], groups[n])]
    if not places:
        known = ", ".join(sorted({*categories, *groups}))
        raise UserError(f"the suite {name!r} has no {preset.category} {option!r}: choose one of {known}")
    places = [places[n] for n in _sample([groups[n] for n in places], limit, seed)]
    keys = [rows[n].get(preset.key) for n in places]
    unique, prompts = None not in keys and len(set(keys)) == len(keys), []
    for place, key in zip(places, keys):
        row = rows[place]
        unanswered = preset.kind == "chat" and all(message["role"] != "assistant" for message in row["messages"])
        reference = None if unanswered else preset.response(row) or None
        turns = preset.turns(row) or ((preset.said(row),) if preset.said else ())
        prompts.append(
            Prompt(f"{name}/{key if unique else place}", preset.prompt(row), reference, groups[place], turns)
        )
    return prompts


def _sample(categories: Sequence[str], limit: int | None, seed: int) -> list[int]:
    """The places of at most ``limit`` items, ascending; the numbers of two categories differ by at most one."""
    if limit is None or limit >= len(categories):
        return list(range(len(categories)))
    groups: dict[str, list[int]] = {}
    for place, category in enumerate(categories):
        groups.setdefault(category, []).append(place)
    random = Random(seed)
    if len(groups) == 1:
        return sorted(random.sample(range(len(categories)), limit))
    # the first of every category, then the second ones, ...
    order = [(n, random.random(), p) for own in groups.values() for n, p in enumerate(random.sample(own, len(own)))]
    return sorted(place for _, _, place in sorted(order)[:limit])


def _own_prompt(name: str, row: Row) -> Prompt:
    turns = row.get("turns") or []
    text = next((row[column] for column in OWN[:-1] if row.get(column)), turns[0] if turns else None)
    if not isinstance(text, str) or not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(
            f"{name}: a row of the prompts needs {', '.join(OWN[:-1])} as text, or turns as a list of texts; it has "
            f"the columns {', '.join(row)}"
        )
    return Prompt(name, text, row.get("reference"), str(row.get("category", "")), tuple(turns))


# -- scores of an answer against a reference text ---------------------------------------------------------------------

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
FINAL = re.compile(r"####|the final answer is:?", re.IGNORECASE)


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` or ``The final answer is:``, otherwise the last number of the text."""
    marks = list(FINAL.finditer(text))
    found = NUMBER.search(text[marks[-1].end() :] if marks else "")
    numbers = [found.group()] if found else NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", numbers[-1])) if numbers else None


def number_score(reference: str, output: str) -> float:
    """1.0 if both texts end in the same number (3.0 equals 3)."""
    wanted = final_number(reference)
    return float(wanted is not None and final_number(output) == wanted)


def letter_score(reference: str, output: str) -> float:
    """1.0 if the chosen letter is the reference's: a stated answer, otherwise the first A to D that stands alone."""

    def letter(text: str) -> str | None:
        stated = re.search(r"(?i:answer(?:\s+is)?)\s*:?\s*\(?([A-D]\b|[a-d](?=[).,:;!]|\s*(?:\n|$)))", text)
        found = stated or re.search(r"(?<![\w'])([A-D])(?![\w'])", text)
        return found.group(1).upper() if found else None

    wanted = letter(reference)
    return float(wanted is not None and letter(output) == wanted)


def rouge_score(reference: str, output: str) -> float:
    """ROUGE-L F1 over lower-case words and numbers of the whole text, without stemming.

    Lin (2004), "ROUGE: A Package for Automatic Evaluation of Summaries".
    """
    wanted, given = (re.findall(r"[a-z0-9]+", text.lower()) for text in (reference, output))
    row = [0] * (len(given) + 1)  # of the table of longest common subsequences
    for word in wanted:
        diagonal = 0
        for place, other in enumerate(given, 1):
            above = row[place]
            row[place] = diagonal + 1 if word == other else max(above, row[place - 1])
            diagonal = above
    return 2 * row[-1] / (len(wanted) + len(given)) if row[-1] else 0.0


SCORERS: dict[str, Callable[[str, str], float]] = {
    "number": number_score,
    "letter": letter_score,
    "rouge": rouge_score,
}
"""Scorers by the name that a preset gives: (reference, output) to 0..1."""
