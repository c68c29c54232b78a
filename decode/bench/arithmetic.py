"""Built-in word problems in GSM8K's format, generated from a seed, without network or files.

A problem has a question, a solution whose calculations carry GSM8K's marks (``12+5 = <<12+5=17>>17``) and a last line
``#### answer``. Names, things and numbers of the question occur again in the solution, so that one text has tokens
that are easy for a draft model (words) and hard ones (digits). ``arithmetic.yaml`` holds the wordings.

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
from typing import Any, TypeVar

import yaml

from decode.errors import UserError

SPLITS = ("train", "train", "validation", "test")
"""The split of a question is ``SPLITS[hash % 4]``: half of all questions are for training."""

CALCULATION = re.compile(r"\[(\w+)([-+*/])(\w+)=(\w)\]")
CHOICE = re.compile(r"\(([^()]+\|[^()]+)\)")
DERIVED = re.compile(r"(\w)=(\w+)([-+*/])(\w+)")

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """Numbers of one difficulty: ranges (inclusive), largest result, largest factor and quotient, steps to choose."""

    tiny: tuple[int, int]
    small: tuple[int, int]
    big: tuple[int, int]
    limit: int
    factor: int
    steps: tuple[int, ...]

    def result(self, op: str, left: int, right: int) -> int | None:
        """``left op right`` if it is in this difficulty's range and at least 2 (a plural), otherwise None."""
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


def apply(op: str, left: int, right: int) -> int | None:
    """``left op right`` for ``+ - * /``; None if the result is not a positive whole number."""
    if op == "/":
        result = left // right if right and left % right == 0 else 0
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[op]
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
    """The split of a question."""
    return SPLITS[hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % len(SPLITS)]


def _choice(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _between(rng: Random, bounds: tuple[int, int]) -> int:
    return bounds[0] + int(rng.random() * (bounds[1] - bounds[0] + 1))


def _cast(rng: Random) -> dict[str, Any]:
    """Values of all words that a template may contain."""
    words = _words()
    (a, pronouns), (b, _), (c, _) = rng.sample(words["people"], 3)
    one, other = rng.sample(words["items"], 2)
    day, day2 = rng.sample(words["days"], 2)
    box, place = _choice(rng, words["containers"]), _choice(rng, words["places"])
    cast = {"a": a, "b": b, "c": c, "one": one, "x": one + "s", "y": other + "s", "box": box, "place": place}
    return cast | pronouns | {"day": day, "day2": day2}


def _fill_scene(rng: Random, size: Size, steps: int) -> tuple[str, str, int] | None:
    """Question, solution and answer of a whole scene; None if a number does not fit the difficulty."""
    questions, solution, draws, sums = _choice(rng, _words()["scenes"][steps])
    values: dict[str, int] = {}
    for name, kind in draws:
        values[name] = _between(rng, {"tiny": size.tiny, "big": size.big}.get(kind, size.small))
    for name, left, op, right in sums:
        a, b = (int(operand) if operand.isdigit() else values[operand] for operand in (left, right))
        result = size.result(op, a, b)
        if result is None:
            return None
        values[name] = result
    fill = _cast(rng) | values
    return _choice(rng, questions).format_map(fill), solution.format_map(fill), values[name]


def _fill_story(rng: Random, size: Size, steps: int) -> tuple[str, str, int] | None:
    """Question, solution and answer of an opening, ``steps`` events and a closing; None as in `_fill_scene`."""
    words, fill = _words(), _cast(rng)
    total = _between(rng, size.big)
    opening, closing = _choice(rng, words["openings"]), _choice(rng, words["closings"])
    texts = [[text.format_map(fill | {"t": total}) for text in opening]]
    events, people = rng.sample(words["events"], steps), rng.sample(words["people"], steps)
    for (op, question, solution, by), (person, _) in zip(events, people):
        n = _choice(rng, by) if by else _between(rng, size.small)
        result = size.result(op, total, n)
        if result is None or person == fill["a"]:
            return None
        fill |= {"t": total, "n": n, "u": result, "b": person}
        texts.append([question.format_map(fill), solution.format_map(fill)])
        total = result
    texts.append([text.format_map(fill | {"t": total}) for text in closing])
    return " ".join(text for text, _ in texts), "\n".join(text for _, text in texts), total


@cache
def _words() -> dict[str, Any]:
    """The tables of ``arithmetic.yaml``; every text that the choices ``(one|two)`` of a wording allow is one.

    Returns:
        ``people`` (name, pronouns); ``items``, ``containers``, ``places`` and ``days``; ``openings`` and ``closings``
        (question, solution); ``events`` (operation, question, solution, the only values of ``n``); ``scenes`` by number
        of calculations: (questions, solution, draws (name, range), calculations (name, left, operation, right)).
    """
    tables = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))

    def wordings(text: str) -> list[str]:
        pieces = [piece.split("|") if place % 2 else [piece] for place, piece in enumerate(CHOICE.split(text))]
        return ["".join(chosen) for chosen in itertools.product(*pieces)]

    words = {key: tables[key].split() for key in ("items", "containers", "places", "days")}
    words["people"] = [(name, tables[who]) for who in ("she", "he") for name in tables[f"names_{who}"].split()]
    for table in ("openings", "closings", "events"):
        words[table] = [row.split(" | ") for line in tables[table].strip().splitlines() for row in wordings(line)]
    words["events"] = [
        (CALCULATION.findall(text)[0][1], question, _marked(text), [int(n) for n in "".join(by).split()])
        for question, text, *by in words["events"]
    ]
    scenes: dict[int, list[Any]] = {}
    for block in tables["scenes"].strip().split("\n\n"):
        numbers, question, solution = block.split("\n", 2)
        draws = [item.partition(":")[::2] for item in numbers.split() if not DERIVED.fullmatch(item)]
        asked = [(result, left, op, right) for left, op, right, result in CALCULATION.findall(solution)]
        scene = wordings(question), _marked(solution), draws, DERIVED.findall(numbers) + asked
        scenes.setdefault(len(asked), []).append(scene)
    return words | {"scenes": scenes}


def _marked(solution: str) -> str:
    """Turn ``[n+m=r]`` into a format string for ``12+5 = <<12+5=17>>17``."""

    def mark(match: re.Match[str]) -> str:
        left, op, right, result = (v if v.isdigit() or v in "+-*/" else f"{{{v}}}" for v in match.groups())
        return f"{left}{op}{right} = <<{left}{op}{right}={result}>>{result}"

    return CALCULATION.sub(mark, solution)
