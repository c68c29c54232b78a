"""Built-in word problems in GSM8K's format, generated from a seed, without network or files.

A problem has a question, a solution whose calculations carry GSM8K's marks (``12+5 = <<12+5=17>>17``) and a
last line ``#### answer``. Names, things and numbers of the question come back in the solution: a draft model
finds easy words and hard digits in the same text. The wordings are in ``arithmetic_problems.yaml``.

The split of a problem is a hash of its question's text, so no question is in two splits, whatever the seed.
"""

import hashlib
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

import yaml

from decode.errors import UserError

SPLITS = ("train", "train", "validation", "test")
"""The split of a question is ``SPLITS[hash % 4]``: half of all questions are for training."""

CALCULATION = re.compile(r"\[(\w+)([-+*/])(\w+)=(\w)\]")
CHOICE = re.compile(r"\(([^()]+\|[^()]+)\)")
DERIVED = re.compile(r"(\w)=(\w+)([-+*/])(\w+)")


T = TypeVar("T")
Sum = tuple[str, str, str, str]  # name of the result, left operand, operator, right operand


Range = tuple[int, int]


@dataclass(frozen=True)
class Size:
    """Numbers of one difficulty: ranges (inclusive), largest result, largest factor and quotient, steps asked."""

    tiny: Range
    small: Range
    big: Range
    limit: int
    factor: int
    steps: tuple[int, ...]

    def result(self, op: str, left: int, right: int) -> int | None:
        """``left op right`` where it fits this difficulty (and is a plural), otherwise None."""
        result = apply(op, left, right)
        if result is None or not 2 <= result <= self.limit:
            return None
        factors = {"*": max(left, right), "/": max(result, right)}.get(op, 0)
        return result if factors <= self.factor else None


SIZES = {
    1: Size(tiny=(2, 5), small=(2, 9), big=(5, 15), limit=99, factor=10, steps=(1, 1, 1, 1, 2)),
    2: Size(tiny=(2, 12), small=(2, 12), big=(12, 90), limit=999, factor=100, steps=(2, 2, 2, 3)),
    3: Size(tiny=(3, 15), small=(3, 15), big=(25, 400), limit=9999, factor=1000, steps=(2, 3, 3, 4, 4)),
}


@dataclass(frozen=True)
class Problem:
    """One word problem; ``solution`` ends with the line ``#### answer``."""

    question: str
    solution: str
    answer: int
    steps: int


@dataclass(frozen=True)
class _Scene:
    """A scene ready for filling: the wordings of its question, its draws and sums taken apart."""

    questions: list[str]
    solution: str
    draws: list[tuple[str, str]]
    sums: list[Sum]


@dataclass(frozen=True)
class _Event:
    """One step of a story, from the running total ``t`` by ``n`` to ``u``; ``by``: the values of ``n``, if few."""

    op: str
    question: str
    solution: str
    by: list[int]


@dataclass(frozen=True)
class _Words:
    """The tables of ``arithmetic_problems.yaml``, read once."""

    people: list[tuple[str, dict[str, str]]]
    items: list[str]
    containers: list[str]
    places: list[str]
    days: list[str]
    openings: list[list[str]]
    events: list[_Event]
    closings: list[list[str]]
    scenes: dict[int, list[_Scene]]


def apply(op: str, left: int, right: int) -> int | None:
    """``left op right`` for ``+ - * /``; None where the result is not a positive whole number."""
    if op == "+":
        result = left + right
    elif op == "-":
        result = left - right
    elif op == "*":
        result = left * right
    elif right == 0 or left % right:
        return None
    else:
        result = left // right
    return result if result > 0 else None


def problem(seed: int, split: str, index: int, difficulty: int = 1) -> Problem:
    """The problem number ``index`` of a split: a pure function of its arguments.

    Args:
        seed: chooses the sequence of problems.
        split: ``train``, ``validation`` or ``test``.
        index: position in the sequence, from 0.
        difficulty: 1 (one or two calculations, results below 100), 2 (two or three, below 1000) or
            3 (two to four, below 10000).

    Raises:
        UserError: unknown split or difficulty.
    """
    if split not in SPLITS:
        raise UserError(f"split {split!r} is unknown: choose train, validation or test")
    if difficulty not in SIZES:
        raise UserError(f"difficulty {difficulty!r} is unknown: choose 1 (easy), 2 or 3 (hard)")
    key = hashlib.blake2b(f"{seed}/{split}/{index}/{difficulty}".encode(), digest_size=8).digest()
    rng = Random(int.from_bytes(key, "big"))
    size = SIZES[difficulty]
    while True:
        steps = _choice(rng, size.steps)
        made = (_fill_scene if rng.random() < 0.6 else _fill_story)(rng, size, steps)
        if made is not None and split_of(made[0]) == split:
            question, solution, answer = made
            return Problem(question, f"{solution}\n#### {answer}", answer, steps)


def problems(seed: int, split: str, count: int, difficulty: int = 1) -> Iterator[Problem]:
    """The first ``count`` problems of a split."""
    return (problem(seed, split, index, difficulty) for index in range(count))


def split_of(question: str) -> str:
    """The only split in which this question may stand."""
    return SPLITS[hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % len(SPLITS)]


def _choice(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _between(rng: Random, bounds: Range) -> int:
    return bounds[0] + int(rng.random() * (bounds[1] - bounds[0] + 1))


def _cast(rng: Random) -> dict[str, str]:
    """Who and what a problem is about: every word that a template may ask for."""
    words = _words()
    (a, pronouns), (b, _), (c, _) = rng.sample(words.people, 3)
    one, other = rng.sample(words.items, 2)
    day, day2 = rng.sample(words.days, 2)
    box, place = _choice(rng, words.containers), _choice(rng, words.places)
    cast = {"a": a, "b": b, "c": c, "one": one, "x": one + "s", "y": other + "s", "box": box, "place": place}
    return cast | pronouns | {"day": day, "day2": day2}


def _fill_scene(rng: Random, size: Size, steps: int) -> tuple[str, str, int] | None:
    """Question, solution and answer of a whole scene; None where a number does not fit the difficulty."""
    scene = _choice(rng, _words().scenes[steps])
    values: dict[str, int] = {}
    for name, kind in scene.draws:
        values[name] = _between(rng, {"tiny": size.tiny, "big": size.big}.get(kind, size.small))
    for name, left, op, right in scene.sums:
        result = size.result(op, _value(left, values), _value(right, values))
        if result is None:
            return None
        values[name] = result
    fill = _cast(rng) | values
    return _choice(rng, scene.questions).format_map(fill), scene.solution.format_map(fill), values[name]


def _fill_story(rng: Random, size: Size, steps: int) -> tuple[str, str, int] | None:
    """Question, solution and answer of an opening, ``steps`` events and a closing; None as above."""
    words = _words()
    fill: dict[str, str | int] = {**_cast(rng)}
    total = _between(rng, size.big)
    opening, closing = _choice(rng, words.openings), _choice(rng, words.closings)
    texts = [[text.format_map(fill | {"t": total}) for text in opening]]
    for event, person in zip(rng.sample(words.events, steps), rng.sample(words.people, steps), strict=True):
        n = _choice(rng, event.by) if event.by else _between(rng, size.small)
        result = size.result(event.op, total, n)
        if result is None or person[0] == fill["a"]:
            return None
        fill |= {"t": total, "n": n, "u": result, "b": person[0]}
        texts.append([event.question.format_map(fill), event.solution.format_map(fill)])
        total = result
    texts.append([text.format_map(fill | {"t": total}) for text in closing])
    return " ".join(text for text, _ in texts), "\n".join(text for _, text in texts), total


def _value(name: str, values: dict[str, int]) -> int:
    return int(name) if name.isdigit() else values[name]


@cache
def _words() -> _Words:
    """Reads the tables; each wording that a choice allows is a row of its own."""
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    scenes: dict[int, list[_Scene]] = {}
    for block in tables["scenes"].strip().split("\n\n"):
        steps, scene = _read_scene(*block.split("\n", 2))
        scenes.setdefault(steps, []).append(scene)
    return _Words(
        people=[(name, tables[who]) for who in ("she", "he") for name in tables[f"names_{who}"].split()],
        openings=_rows(tables["openings"]),
        events=[_read_event(*row) for row in _rows(tables["events"])],
        closings=_rows(tables["closings"]),
        scenes=scenes,
        **{key: tables[key].split() for key in ("items", "containers", "places", "days")},
    )


def _rows(table: str) -> list[list[str]]:
    return [row.split(" | ") for line in table.strip().splitlines() for row in _wordings(line)]


def _read_event(question: str, solution: str, by: str = "") -> _Event:
    op = CALCULATION.findall(solution)[0][1]
    return _Event(op, question, _marked(solution), [int(n) for n in by.split()])


def _read_scene(draw: str, question: str, solution: str) -> tuple[int, _Scene]:
    """The number of calculations that are asked for, and the scene."""
    draws, sums = [], []
    for item in draw.split():
        if derived := DERIVED.fullmatch(item):
            name, left, op, right = derived.groups()
            sums.append((name, left, op, right))
        else:
            name, _, kind = item.partition(":")
            draws.append((name, kind))
    asked = [(result, left, op, right) for left, op, right, result in CALCULATION.findall(solution)]
    return len(asked), _Scene(_wordings(question), _marked(solution), draws, sums + asked)


def _wordings(text: str) -> list[str]:
    """Every text that the choices ``(one|two)`` allow."""
    pieces = [piece.split("|") if place % 2 else [piece] for place, piece in enumerate(CHOICE.split(text))]
    return ["".join(chosen) for chosen in itertools.product(*pieces)]


def _marked(solution: str) -> str:
    """``[n+m=r]`` as a format string for ``12+5 = <<12+5=17>>17``."""

    def mark(match: re.Match[str]) -> str:
        left, op, right, result = (v if v.isdigit() or v in "+-*/" else f"{{{v}}}" for v in match.groups())
        return f"{left}{op}{right} = <<{left}{op}{right}={result}>>{result}"

    return CALCULATION.sub(mark, solution)
