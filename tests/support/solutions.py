"""Solutions of word problems, checked."""

import re
from fractions import Fraction

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
