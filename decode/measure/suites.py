"""Prompt suites: rows of files and of the Hugging Face Hub as prompts, and scores of the answers to them.

A suite is named by a spec: ``arithmetic``, ``arithmetic:3`` (difficulty), ``open``, ``chat`` (96 prompts in the six
categories of Spec-Bench), a preset of ``datasets.yaml`` such as ``gsm8k`` from the Hub or ``gsm8k=PATH`` from a local
file; ``chat:qa``, ``mmlu:astronomy=PATH`` or ``spec_bench:qa=PATH`` for one category, ``spec_bench:multi-turn=PATH``
for MT-Bench's in it; ``prompts=PATH``, or just PATH, for other prompts (txt: one prompt per line; otherwise one of the
columns `decode.incoming.ASKED`).
"""

import csv
import hashlib
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template, TemplateError

from decode.errors import UserError, unknown
from decode.files import Fields
from decode.incoming import (
    ASKED,
    CHANGES,
    DECIDE,
    OTHER_TEXTS,
    SYSTEM,
    LeftOut,
    UnusableRow,
    arrow_batches,
    asked_chat,
    columnar_rows,
    row_chat,
    sentences,
    text_lines,
    usable,
)
from decode.measure.arithmetic import problems

Row = Fields

# -- rows of files and of the Hub -------------------------------------------------------------------------------------

FORMATS = (".csv", ".json", ".jsonl", ".parquet", ".arrow", ".txt")
"""File name suffixes of `iter_rows`. JSON and CSV are not read by ``datasets``, which changes values: in version 5 the
JSON text "2020-01-01" becomes a datetime, and the CSV text "1.50" becomes 1.5."""
csv.field_size_limit(2**31 - 1)  # a chat in one field may be long


def file_format(path: str | Path) -> str:
    """The suffix among `FORMATS` of a file, which may be compressed (rows.jsonl.gz); empty if it has none of them."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in FORMATS else ""


def _read(path: Path) -> Iterator[Any]:
    """The rows of a file of a known format."""
    match file_format(path):
        case ".parquet":
            import pyarrow.parquet

            yield from columnar_rows(pyarrow.parquet.ParquetFile(path).iter_batches())  # ArrowInvalid is a ValueError
        case ".arrow":
            yield from columnar_rows(arrow_batches(path))
        case ".csv":
            reader = csv.DictReader(text_lines(path, ""), strict=True)
            for row in reader:
                if None in row or len(row) < len(reader.fieldnames or ()):
                    raise ValueError(f"its {len(row)} fields are not the header's: quote fields with a comma inside")
                yield row
        case ".txt":
            yield from ({"text": line.rstrip("\r\n")} for line in text_lines(path) if line.strip())
        case ".json" if (text := "".join(text_lines(path))).lstrip().startswith("["):  # else as JSON Lines
            yield from json.loads(text)
        case _:
            yield from map(json.loads, filter(str.strip, text_lines(path)))


def iter_rows(path: str | Path) -> Iterator[Row]:
    """The rows of a local file of one of `FORMATS`; text formats may be compressed with gzip.

    Raises:
        UserError: no such file, an unknown suffix, a file that is unreadable or has no rows.
    """
    path, number = Path(path), 0
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}: check the path (it is relative to {Path.cwd()})")
    if not file_format(path):
        raise UserError(f"{path} ends in {path.suffix!r}: rows are read from {', '.join(FORMATS)}")
    try:
        for row in _read(path):
            if not isinstance(row, dict):
                raise ValueError("a row must be an object with named columns, such as {'question': '...'}")
            number += 1
            yield row
    except UserError:
        raise
    except (ValueError, TypeError, OSError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as {file_format(path)} near row {number + 1}: {error}") from error
    if not number:
        raise UserError(f"{path} has no rows: give a file with at least one")


def load_hub(name: str, config: str | None, split: str | None = None) -> Any:
    """Load a data set from the Hugging Face Hub (its branch, tag or commit behind an @) or its local cache.

    Returns:
        A ``DatasetDict``, or the ``Dataset`` of one split.

    Raises:
        UserError: not reachable and not cached, no such data set, configuration or split.
    """
    import datasets

    from decode.models.sources import hub_offline, pinned

    quiet_datasets()
    repository, revision = pinned(name)
    before, offline = datasets.config.HF_HUB_OFFLINE, not Path(repository).exists() and hub_offline()
    datasets.config.HF_HUB_OFFLINE = offline
    try:
        return datasets.load_dataset(repository, config, split=split, **revision)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error.__cause__ or error).split())
        if offline:
            reason = "it is not in the local cache, and the Hub is switched off (HF_HUB_OFFLINE) or does not answer"
        raise UserError(
            f"the data set {name!r} (configuration {config!r}, split {split!r}) cannot be loaded from the Hugging "
            f"Face Hub: {reason}. Check the name and the network, or give a local file"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def quiet_datasets() -> None:
    """Switch off the progress bars and messages of ``datasets``."""
    import datasets

    datasets.disable_progress_bars()
    for noisy in ("datasets", "huggingface_hub", "httpx", "fsspec"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def split_key(value: Any) -> str:
    """What keeps rows in one split: a prompt or another text, or a chat, whatever the order of its keys."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)


def held_out(key: str, fraction: float = 0.05) -> str:
    """The split of a row whose source has no validation and test splits, by a hash of its `split_key`.

    ``fraction`` of all keys go to validation, as many to test, the rest to train; rows of equal keys share a split.
    """
    place = int.from_bytes(hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=6).digest(), "big") / 2**48
    return "validation" if place < fraction else "test" if place < 2 * fraction else "train"


# -- presets ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One prompt."""

    id: str  # unique in the suite where the data set's keys are
    text: str  # for a model that continues text
    reference: str | None  # the expected answer
    category: str = ""  # samples are balanced over these
    turns: tuple[str, ...] = ()  # the user's turns for a chat model; empty: the text is the only turn
    ids: tuple[int, ...] = ()  # token ids of the prompt, if they are known; text and turns are then for display only
    system: str = ""  # system message of its chat
    variables: Fields = field(default_factory=dict)  # of its chat template, such as tools

    @property
    def said(self) -> tuple[str, ...]:
        """The user's turns for a chat model."""
        return self.turns or (self.text,)


def by_category(prompts: Iterable[Prompt]) -> dict[str, list[int]]:
    """The places of the prompts of each category; empty where there are no two categories."""
    names = [prompt.category for prompt in prompts]
    several = {*names} if len({*names}) > 1 else ()
    return {name: [i for i, other in enumerate(names) if other == name] for name in sorted(several)}


@dataclass(frozen=True)
class Preset:
    """Templates of one data set and its place on the Hub; ``datasets.yaml`` documents each key."""

    columns: Sequence[str]
    prompt_template: str | None = None
    response_template: str = ""
    said_template: str = ""
    hub: str | None = None
    config: str | None = None
    file: str = ""
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    kind: str = "pairs"
    scorer: str = ""
    key: str = ""
    category: str = ""
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    last_keys: Mapping[str, int] = field(default_factory=dict)
    placeholder: str = ""

    def prompt(self, row: Row) -> str:
        """The text that a model continues; a ValueError for a row that does not fit the template."""
        return _filled(self.prompt_template or "", row)

    def response(self, row: Row) -> str:
        """The expected answer, as text to train on; raises as `prompt` does."""
        return _filled(self.response_template, row)

    def said(self, row: Row) -> str:
        """The user's turn for a chat model, empty where that is the prompt; raises as `prompt` does."""
        return _filled(self.said_template, row)

    def asked(self, row: Row) -> Fields:
        """The fields of a row's `Prompt` but its id; raises as `prompt` does.

        Raises:
            UnusableRow: No prompt, or a turn or a column that would change it and cannot be used.
        """
        text, columns = self.prompt(row), {name: row[name] for name in row if CHANGES.get(name) not in DECIDE}
        if text:
            turns = [{"role": "user", "content": self.said(row) or text}]
            messages, variables, _ = row_chat(columns, turns, {*self.columns, *OTHER_TEXTS})
        else:
            messages, variables, _ = asked_chat(columns)
        system = [turn["content"] for turn in messages[:1] if turn["role"] in SYSTEM]
        roles = [turn["role"] for turn in messages[len(system) :]]
        said = tuple(turn["content"] for turn in messages if turn["role"] == "user")
        if roles[:1] != ["user"] or not {*roles} <= {"user", "assistant"}:
            raise UnusableRow(f"whose prompt is neither a text nor a user's turns in {', '.join(ASKED)}")
        if self.placeholder and said[0].startswith(self.placeholder):
            raise ValueError(f"the prompt is not in the file; give {self.file}")
        return {
            "text": text or said[0],
            "reference": self.response(row) or None,
            "category": str(row.get(self.category, "")),
            "turns": said if self.said_template or not text or len(said) > 1 else (),
            "system": "".join(system),
            "variables": variables,
        }

    def split_of(self, row: Row) -> str | None:
        """The official split of a row, for files that hold all splits; None where a file is one split."""
        key = row.get(self.key)
        return next((split for split, last in self.last_keys.items() if isinstance(key, int) and key <= last), None)

    @property
    def score(self) -> Callable[[Prompt, str], float] | None:
        """A function from a prompt and an answer to 0..1, if the data set has a scorer."""
        scorer = SCORERS.get(self.scorer)
        return scorer and (lambda prompt, output: scorer(prompt.reference or "", output))


def _filled(template: str, row: Fields) -> str:
    try:
        return _template(template).render(row, columns=row)
    except (TemplateError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


@cache
def _template(source: str) -> Template:
    def innermost(value: Any) -> str:  # the first text of a list that a data set nests to any depth
        while isinstance(value, list):
            value = value[0] if value else ""
        return str(value or "")

    def plain(value: Any) -> Any:
        if isinstance(value, list | dict):
            raise ValueError(f"a {type(value).__name__} where a text is expected: {str(value)[:60]}")
        return value

    environment = Environment(keep_trailing_newline=True, undefined=StrictUndefined, finalize=plain)
    environment.filters["innermost"] = innermost
    return environment.from_string(source)


PRESETS = {
    name: Preset(**entry)
    for name, entry in yaml.safe_load(Path(__file__).with_name("datasets.yaml").read_text(encoding="utf-8")).items()
}
"""All known data sets by their names in ``data.source`` and ``--suite``."""

# -- suites -----------------------------------------------------------------------------------------------------------

OTHER = Preset(["prompt"], response_template="{{ reference | default('') | innermost }}", category="category")
SHIPPED = {"chat": Path(__file__).with_name("chat_prompts.jsonl"), "open": Path(__file__).with_name("open_prompts.txt")}
"""Prompts written for this project: 16 in each of Spec-Bench's categories, in its format; and open questions."""
BESIDES = {"chat": PRESETS["spec_bench"], "open": OTHER, "prompts": OTHER}
"""The presets of suites that are no data sets."""
DEFAULT_LIMIT = 100  # problems of the arithmetic suite, which is unlimited, if no limit is given


@dataclass(frozen=True)
class Suite:
    """Prompts of one spec; ``score`` maps an answer to 0..1 and is None without a scorer."""

    name: str
    prompts: list[Prompt]
    score: Callable[[Prompt, str], float] | None


def load_suite(spec: str, *, limit: int | None = None, seed: int = 0, split: str = "test") -> Suite:
    """Load the prompts of a spec (see the module's docstring), of a split where its source has several.

    The seed chooses the problems of arithmetic, else at most `limit` prompts, balanced over categories, in the file's
    order.

    Raises:
        UserError: unknown suite or option, no such file, rows or columns, or the Hub does not answer.
    """
    if "=" not in spec and file_format(spec):  # the name of a suite wins over a file's
        spec = f"prompts={spec}"
    head, _, path = spec.partition("=")
    name, _, option = head.partition(":")
    if name not in (presets := PRESETS | BESIDES):
        raise UserError(f"{unknown('suite', name, presets)}, or give a file's prompts with --suite prompts=PATH")
    if spec in ("prompts", f"{head}="):
        raise UserError(f"the suite {spec!r} names no file: give --suite {name}=PATH")
    preset = OTHER if file_format(path) == ".txt" else presets[name]
    if name == "arithmetic" and not path:
        generated = problems(seed, split, limit or DEFAULT_LIMIT, option or 1)
        rows = [{"question": p.question, "answer": p.solution, "steps": f"calculations: {p.steps}"} for p in generated]
        name, option = f"{name}/{option or 1}/{seed}/{split}", ""
    else:
        rows = _rows(name, preset, path or SHIPPED.get(name), split)
    try:
        prompts = _prompts(name, preset, rows, option, limit, seed)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"the suite {spec!r} has rows with {', '.join(rows[0])} that are not as those of {name}, which need "
            f"{', '.join(preset.columns)} ({error}): correct it, or name the column of its "
            "prompts prompt and use --suite prompts=PATH"
        ) from error
    return Suite(spec, prompts, preset.score)


def _rows(name: str, preset: Preset, path: str | Path | None, split: str) -> list[Row]:
    """Rows of one split; for a split that the Hub lacks, the share of the training rows that is held out for it."""
    if path:
        rows = [row for row in iter_rows(path) if preset.split_of(row) in (None, split)]
        if not rows:
            raise UserError(f"{path} has no row of the split {split!r} of {name}: give a file that has some")
        return rows
    theirs = preset.splits.get(split, preset.splits.get("train"))
    if preset.hub is None or theirs is None:
        file = preset.file and f", a copy of {preset.file}"
        has = ", ".join(preset.splits) or "none"
        raise UserError(f"{name} has no split {split!r} on the Hub (it has {has}): give --suite {name}=PATH{file}")
    try:
        rows = list(load_hub(preset.hub, preset.config, theirs))
    except UserError as error:
        raise UserError(f"suite {name!r}: {error}: --suite {name}=PATH") from error
    if theirs != preset.splits.get("train"):
        return rows
    keys = (split_key(row["messages"] if preset.kind == "chat" else preset.prompt(row)) for row in rows)
    parts = map(held_out, keys)
    return [row for row, part in zip(rows, parts) if (part if part not in preset.splits else "train") == split]


def _prompts(name: str, preset: Preset, rows: Sequence[Row], option: str, limit: int | None, seed: int) -> list[Prompt]:
    """The prompts of a preset's rows: of one category or all, and at most ``limit`` of them.

    They are chosen by the seed; the numbers of two categories differ by at most one.
    """
    left_out = LeftOut()
    made = [
        Prompt(id=f"{name}/{rows[number - 1].get(preset.key, number - 1)}", **fields)
        for number, fields in usable(rows, left_out, preset.asked)
    ]
    notes = sentences(f"suite {name}", left_out)
    if not made:
        raise ValueError("; ".join(notes))
    for note in notes:
        print(note, file=sys.stderr)
    group = {category: name for name, several in preset.groups.items() for category in several}
    chosen = [prompt for prompt in made if option in ("", prompt.category, group.get(prompt.category))]
    if not chosen:
        categories = ", ".join(sorted({*preset.groups, *(prompt.category for prompt in made)}))
        raise UserError(
            f"the suite {name!r} has no {preset.category or 'option'} {option!r}: choose one of {categories}"
        )
    if not option:
        chosen = [replace(prompt, category=group.get(prompt.category, prompt.category)) for prompt in chosen]
    counts = Counter[str]()

    def turn(place: int) -> int:  # the first of every category, then the second ones, …
        counts[chosen[place].category] += 1
        return counts[chosen[place].category]

    order = sorted(Random(seed).sample(range(len(chosen)), len(chosen)), key=turn)
    return [chosen[place] for place in sorted(order[:limit])]


# -- scores of an answer against a reference text ---------------------------------------------------------------------

NUMBER = re.compile(r"(?:(?<![\d.)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")  # the hyphen of a range is no sign
FINAL = re.compile(r"####|the final answer is:?", re.IGNORECASE)


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` or ``The final answer is:``, otherwise the last number of the text."""
    marks = list(FINAL.finditer(text))
    after = NUMBER.search(text[marks[-1].end() :] if marks else "")
    numbers = [after.group()] if after else NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", numbers[-1])) if numbers else None


def chosen_letter(text: str) -> str | None:
    """The letter of a stated answer, otherwise the first A to D that stands alone."""
    stated = re.search(r"(?i:answer(?:\s+is)?)\s*:?\s*\(?([A-D]\b|[a-d](?=[).,:;!]|\s*(?:\n|$)))", text)
    chosen = stated or re.search(r"(?<![\w'])([A-D])(?![\w'])", text)
    return chosen.group(1).upper() if chosen else None


def same_answer(read: Callable[[str], Any], reference: str, output: str) -> float:
    """1.0 if the same answer is read in both texts (the number 3.0 equals 3)."""
    wanted = read(reference)
    return float(wanted is not None and read(output) == wanted)


SCORERS: dict[str, Callable[[str, str], float]] = {
    "number": partial(same_answer, final_number),
    "letter": partial(same_answer, chosen_letter),
}
"""Scorers by the name that a preset gives: (reference, output) to 0..1."""
