import hashlib
import re
from fractions import Fraction

import pytest

from decode.errors import UserError
from decode.measure.arithmetic import problem, problems, split_of, tables

SPLITS = ("train", "validation", "test")
MARK = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


def check_solution(solution):
    """The answer, after every calculator mark and the last line of a solution were verified."""
    marks = MARK.findall(solution)
    if not marks or solution.count("<<") != len(marks):
        raise ValueError(f"no calculator marks, or marks that cannot be read, in {solution!r}")
    for left, op, right, result, copied in marks:
        a, b = Fraction(left), Fraction(right)
        value = a / b if op == "/" else {"+": a + b, "-": a - b, "*": a * b}[op]
        if value != int(result) or result != copied:
            raise ValueError(f"{left}{op}{right} is not {result} (then {copied}) in {solution!r}")
    answer = solution.rpartition("\n#### ")[2]
    if answer != marks[-1][3]:
        raise ValueError(f"the answer {answer!r} is not the last result {marks[-1][3]!r} in {solution!r}")
    return int(answer)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_problems_are_right_complete_and_of_their_difficulty(difficulty):
    size = tables()["sizes"][str(difficulty)]
    for split in SPLITS:
        made = list(problems(7, split, 700, difficulty))
        for one in made:
            assert check_solution(one.solution) == one.answer
            assert one.solution.count("<<") == one.steps
            assert one.solution.endswith(f"\n#### {one.answer}")
            assert split_of(one.question) == split
            assert one.question.endswith("?")
            assert not re.search(r"[{}\[\]|()]|  ", one.question + one.solution)
        results = [int(r) for one in made for r in re.findall(r"=(\d+)>>", one.solution)]
        assert min(results) >= 2
        assert max(results) <= size["limit"]
        assert {one.steps for one in made} == set(size["steps"])


def test_the_problems_of_a_seed_never_change():
    again = [problem(3, "test", index, 2) for index in (5, 0, 9)]
    assert [list(problems(3, "test", 10, 2))[index] for index in (5, 0, 9)] == again
    digest = hashlib.sha256()
    for seed, split, difficulty in ((0, "train", 1), (7, "validation", 2), (7, "test", 3)):
        digest.update("".join(repr(vars(one)) for one in problems(seed, split, 200, difficulty)).encode())
    assert digest.hexdigest() == "842d6c5558d6199c2e9a081078a0b411e4f5560c0bcf2eb30790b72661fd61db"


@pytest.mark.parametrize(("split", "difficulty", "said"), [("dev", 1, "'dev'"), ("train", 4, "difficulty '4'")])
def test_an_unknown_split_or_difficulty_is_named(split, difficulty, said):
    with pytest.raises(UserError, match=said):
        problem(0, split, 0, difficulty)
