"""How good an answer is: final number, letter, ROUGE, and whether generated code passes its tests (pass@1)."""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from decode.errors import UserError

HARNESS = """
import json, os, resource, sys
seconds, memory, secret, program = json.load(sys.stdin)
answer = os.dup(1)
nowhere = os.open(os.devnull, os.O_RDWR)
for stream in (0, 1, 2):
    os.dup2(nowhere, stream)
limits = {"CPU": seconds, "AS": memory, "FSIZE": 0, "CORE": 0, "NPROC": 0, "NOFILE": 64}
for name, value in limits.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
exec(compile(program, "<generated>", "exec"), {"__name__": "__main__"})
os.write(answer, secret.encode())
"""
"""The child: limits first, then the program; only a program that runs to its end gets the secret written."""


def runs_cleanly(program: str, seconds: int = 5, memory_mib: int = 512) -> bool:
    """Whether a program runs to its end without an error.

    It starts in an empty temporary folder, can write no byte to any file, and has no environment variables. Its own
    output is thrown away.

    Args:
        program: Python source; a failing test in it should raise.
        seconds: limit of CPU time, and of wall time with one second more.
        memory_mib: limit of the address space.

    Raises:
        UserError: the operating system has no such limits (Windows).
    """
    if os.name != "posix":
        raise UserError("generated code runs under POSIX resource limits only: use Linux, macOS or WSL")
    secret = secrets.token_hex(16)
    task = json.dumps([seconds, memory_mib * 2**20, secret, program])
    with tempfile.TemporaryDirectory() as folder:
        child = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", HARNESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(task, timeout=seconds + 1)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
    return output == secret


Row = Mapping[str, Any]

NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
FINAL = re.compile(r"####|the final answer is:?", re.IGNORECASE)
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


def final_number(text: str) -> Decimal | None:
    """The number after the last ``####`` or ``The final answer is:``, otherwise the last number of the text."""
    marks = list(FINAL.finditer(text))
    after = text[marks[-1].end() :] if marks else ""
    found = NUMBER.search(after)
    numbers = [found.group()] if found else NUMBER.findall(text)
    return Decimal(re.sub("[$,]", "", numbers[-1])) if numbers else None


def number_score(reference: str, output: str) -> float:
    """1.0 where both texts end in the same number (3.0 and 3 are the same)."""
    wanted = final_number(reference)
    return float(wanted is not None and final_number(output) == wanted)


def letter_score(reference: str, output: str) -> float:
    """1.0 where the chosen letter is the reference's: the first A to D that stands alone."""
    wanted, chosen = _letter(reference), _letter(output)
    return float(wanted is not None and chosen == wanted)


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


def humaneval_program(row: Row, output: str) -> str:
    """HumanEval's prompt, the answer's function body and the tests as one program.

    An answer in a code fence is taken out of it. An answer that defines the function itself replaces the prompt's
    beginning of it; otherwise it continues the prompt and ends where the indentation does.
    """
    code, name = _unfenced(output), row["entry_point"]
    if re.search(rf"^def {name}\(", code, re.MULTILINE):
        before = row["prompt"][: row["prompt"].rindex(f"def {name}")]
        solution = before + code
    else:
        solution = row["prompt"] + _indented(code)
    return f"{solution}\n{row['test']}\ncheck({name})\n"


def mbpp_program(row: Row, output: str) -> str:
    """MBPP's answer (up to the next docstring at the margin) and its tests as one program."""
    code = re.split(r'^"""', _unfenced(output), maxsplit=1, flags=re.MULTILINE)[0]
    return "\n".join([row.get("test_setup_code") or "", code, *row["test_list"]])


def humaneval_score(row: Row, output: str) -> float:
    """1.0 where the answer passes the row's tests: pass@1 as a mean over rows. Runs the code."""
    return float(runs_cleanly(humaneval_program(row, output)))


def mbpp_score(row: Row, output: str) -> float:
    """As `humaneval_score`, for MBPP."""
    return float(runs_cleanly(mbpp_program(row, output)))


SCORERS: dict[str, Callable[[str, str], float]] = {
    "number": number_score,
    "letter": letter_score,
    "rouge": rouge_score,
}
"""Scores of an output against a reference text."""

CODE_SCORERS: dict[str, Callable[[Row, str], float]] = {"humaneval": humaneval_score, "mbpp": mbpp_score}
"""Scores that run the output as code against a row's tests."""


def _letter(text: str) -> str | None:
    stated = re.search(r"(?i:answer(?:\s+is)?)\s*:?\s*\(?([A-D]\b|[a-d](?=[).,:;!]|\s*(?:\n|$)))", text)
    found = stated or re.search(r"(?<![\w'])([A-D])(?![\w'])", text)
    return found.group(1).upper() if found else None


def _unfenced(output: str) -> str:
    fenced = FENCE.search(output)
    return fenced.group(1) if fenced else output


def _indented(code: str) -> str:
    """The lines up to the first that is neither indented nor empty."""
    kept = []
    for line in code.split("\n"):
        if line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept)
