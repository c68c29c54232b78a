import time
from pathlib import Path

import pytest

from decode.bench import scorers as sandbox
from decode.bench.scorers import (
    final_number,
    humaneval_program,
    humaneval_score,
    letter_score,
    mbpp_score,
    number_score,
    rouge_score,
    runs_cleanly,
)
from decode.errors import UserError

HUMANEVAL = {
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n',
    "entry_point": "total",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
MBPP = {"test_list": ["assert double(2) == 4"], "test_setup_code": "import math"}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5+5=10\n#### 10", "10"),
        ("The final answer is: $1,234.50.", "1234.5"),
        ("The final answer is:  -7\n\nWait, 8.", "-7"),
        ("#### 3 and then #### 4", "4"),
        ("It costs 12 dollars, or 13.", "13"),
        ("half: .5", "0.5"),
        ("the final answer is 20%", "20"),
        ("no digits", None),
    ],
)
def test_the_final_number_is_found(text, number):
    found = final_number(text)
    assert found is None if number is None else found == final_number(number)


def test_numbers_are_compared_by_value():
    assert number_score("#### 3", "The final answer is: 3.00") == 1.0
    assert number_score("#### 3", "The final answer is: 30") == 0.0
    assert number_score("#### 3", "none") == 0.0
    assert number_score("none", "none") == 0.0


@pytest.mark.parametrize(
    ("output", "score"),
    [(" B", 1), ("B. four", 1), ("(B)", 1), ("The answer is B", 1), ("A careful look: the answer is (B)", 1),
     ("The answer is a bee, so B", 1), ("The answer is b.", 1), ("Answer: b\nSince A", 1),
     (" C", 0), ("Because", 0), ("", 0)],
)  # fmt: skip
def test_the_chosen_letter_counts(output, score):
    assert letter_score(" B", output) == score


def test_rouge_agrees_with_values_worked_out_by_hand():
    assert rouge_score("The cat sat on the mat.", "the cat lay on a mat") == pytest.approx(4 / 6)
    assert rouge_score("b a", "a b") == pytest.approx(1 / 2)
    assert rouge_score("same words", "Same words!") == 1.0
    assert rouge_score("", "anything") == 0.0


@pytest.mark.parametrize(
    "answer",
    [
        "    return sum(xs)\n",
        "    return sum(xs)\n\n\nprint(total([1]))\nassert False\n",
        "Sure:\n```python\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```\nDone.",
        "def total(xs):\n    return sum(xs)\n",
    ],
)
def test_right_answers_to_humaneval_pass_however_they_are_given(answer):
    assert humaneval_score(HUMANEVAL, answer) == 1.0


@pytest.mark.parametrize("answer", ["    return 3\n", "    return sum(xs\n", "", "    import sys; sys.exit(0)\n"])
def test_wrong_answers_to_humaneval_fail(answer):
    assert humaneval_score(HUMANEVAL, answer) == 0.0


def test_a_continuation_ends_where_its_indentation_does():
    program = humaneval_program(HUMANEVAL, "    x = 1\n\n    return x\nprint('more')\n")
    assert "return x" in program
    assert "more" not in program


def test_mbpp_answers_run_with_their_setup_and_tests():
    assert mbpp_score(MBPP, "def double(n):\n    return math.floor(2 * n)\n") == 1.0
    assert mbpp_score(MBPP, 'def double(n):\n    return 2 * n\n"""\nNext task\nassert False') == 1.0
    assert mbpp_score(MBPP, "def double(n):\n    return n\n") == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(2**30)",
        "x = []\nwhile True: x.append('x' * 2**20)",
        "with open('file', 'w') as file: file.write('text')",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "raise ValueError",
        "def broken(:",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_programs_that_loop_grow_write_or_leave_early_do_not_count(program):
    assert not runs_cleanly(program, seconds=1, memory_mib=256)


def read_if_there(path):
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="processes are looked up in /proc")
def test_a_program_in_an_endless_loop_is_stopped_with_its_children():
    mark = f"draftsmith-child-{time.time_ns()}"
    loop = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', '{mark}'])"
    assert not runs_cleanly(loop, seconds=1)
    alive = [path for path in Path("/proc").glob("[0-9]*/cmdline") if mark in read_if_there(path)]
    for _ in range(100):  # a killed process may take a moment to go
        alive = [path for path in alive if mark in read_if_there(path)]
        time.sleep(0.05 if alive else 0)
    assert not alive


def test_output_and_noise_do_not_disturb_the_verdict():
    assert runs_cleanly("print('x' * 10**6)\nimport sys\nsys.stderr.write('noise')\nsys.stdin.read()")


def test_a_program_has_no_environment_and_starts_in_an_empty_folder():
    assert runs_cleanly("import os\nassert os.listdir('.') == []\nassert 'HOME' not in os.environ")


def test_systems_without_resource_limits_are_told_so(monkeypatch):
    monkeypatch.setattr(sandbox.os, "name", "nt")
    with pytest.raises(UserError, match="Linux, macOS or WSL"):
        runs_cleanly("pass")
