"""Built-in word problems in GSM8K's format, generated from a seed, without network or files.

A problem has a question, a solution whose calculations carry GSM8K's marks (``12+5 = <<12+5=17>>17``) and a last line
``#### answer``. Names, things and numbers of the question occur again in the solution, so that one text has tokens
that are easy for a draft model (words) and hard ones (digits). ``arithmetic.yaml`` holds the wordings.

The split of a problem is a hash of its question's text, so no question is in two splits, whatever the seed.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeVar

import yaml

from decode.errors import choose
from decode.files import Fields

SPLITS = ("train", "train", "validation", "test")
"""The split of a question is ``SPLITS[hash % 4]``: half of all questions are for training."""

T = TypeVar("T")


@dataclass(frozen=True)
class Problem:
    """One word problem; ``solution`` ends with the line ``#### answer``."""

    question: str
    solution: str
    answer: int
    steps: int


def problem(seed: int, split: str, index: int, difficulty: int | str) -> Problem:
    """The problem number ``index``, from 0, of a split's sequence, which the seed chooses: a pure function of these.

    Difficulty 1 has one or two calculations and results below 100, 2 two or three below 1000, 3 two to four below
    10000.

    Raises:
        UserError: unknown split or difficulty.
    """
    choose("split", split, dict.fromkeys(SPLITS))
    size = choose("difficulty", str(difficulty), tables()["sizes"])
    key = hashlib.blake2b(f"{seed}/{split}/{index}/{difficulty}".encode(), digest_size=8).digest()
    rng = Random(int.from_bytes(key, "big"))
    while True:
        steps = _choice(rng, size["steps"])
        filled = (_fill_scene if rng.random() < 0.6 else _fill_story)(rng, size, steps)
        if filled is not None and split_of(filled[0]) == split:
            question, solution, answer = filled
            return Problem(question, f"{solution}\n#### {answer}", answer, steps)


def problems(seed: int, split: str, count: int, difficulty: int | str = 1) -> Iterator[Problem]:
    """The first ``count`` problems of a split."""
    return (problem(seed, split, index, difficulty) for index in range(count))


def split_of(question: str) -> str:
    """The split of a question."""
    return SPLITS[hashlib.blake2b(question.encode(), digest_size=1).digest()[0] % len(SPLITS)]


def _choice(rng: Random, items: Sequence[T]) -> T:
    return items[int(rng.random() * len(items))]


def _draw(rng: Random, ends: Sequence[int]) -> int:
    """A number of a range whose ends belong to it."""
    return _choice(rng, range(ends[0], ends[1] + 1))


def _result(size: Fields, op: str, left: int, right: int) -> int | None:
    """``left op right`` if it is a whole number in the range of a difficulty and at least 2 (a plural), else None."""
    if op == "/":
        result = left // right if left % right == 0 else 0
    else:
        result = {"+": left + right, "-": left - right, "*": left * right}[op]
    factor = max(result if op == "/" else left, right) if op in "*/" else 0
    return result if 2 <= result <= size["limit"] and factor <= size["factor"] else None


def _cast(rng: Random) -> Fields:
    """Values of all words that a template may contain."""
    words = tables()
    (a, who), (b, _), (c, _) = rng.sample(list(words["people"].items()), 3)
    one, other = rng.sample(words["items"], 2)
    day, day2 = rng.sample(words["days"], 2)
    box, place = _choice(rng, words["containers"]), _choice(rng, words["places"])
    cast = {"a": a, "b": b, "c": c, "one": one, "x": one + "s", "y": other + "s", "box": box, "place": place}
    return cast | words["pronouns"][who] | {"day": day, "day2": day2}


def _fill_scene(rng: Random, size: Fields, steps: int) -> tuple[str, str, int] | None:
    """Question, solution and answer of a whole scene; None if a number does not fit the difficulty."""
    scene, name = _choice(rng, tables()["scenes"][steps]), ""
    values: Fields = {name: _draw(rng, size[kind]) for name, kind in scene["draws"].items()}
    for name, left, op, right in scene["sums"]:
        values[name] = _result(size, op, values.get(left, left), values.get(right, right))
        if values[name] is None:
            return None
    fill = _cast(rng) | values
    return _choice(rng, scene["questions"]).format_map(fill), scene["solution"].format_map(fill), values[name]


def _fill_story(rng: Random, size: Fields, steps: int) -> tuple[str, str, int] | None:
    """Question, solution and answer of an opening, ``steps`` events and a closing; None as in `_fill_scene`."""
    words, fill = tables(), _cast(rng)
    fill["t"] = _draw(rng, size["big"])
    opening, closing = _choice(rng, words["openings"]), _choice(rng, words["closings"])
    texts = [[text.format_map(fill) for text in opening]]
    events, people = rng.sample(words["events"], steps), rng.sample(list(words["people"]), steps)
    for (op, *wordings, by), person in zip(events, people):
        n = _choice(rng, by) if by else _draw(rng, size["small"])
        result = _result(size, op, fill["t"], n)
        if result is None or person == fill["a"]:
            return None
        fill |= {"n": n, "u": result, "b": person}
        texts.append([text.format_map(fill) for text in wordings])
        fill["t"] = result
    texts.append([text.format_map(fill) for text in closing])
    questions, solutions = zip(*texts)
    return " ".join(questions), "\n".join(solutions), fill["t"]


@cache
def tables() -> Fields:
    """The tables of ``arithmetic.yaml``."""
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
