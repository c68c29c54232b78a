"""Scores of an answer against a reference text: final number, chosen letter, ROUGE-L."""

import re
from collections.abc import Callable
from decimal import Decimal

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
