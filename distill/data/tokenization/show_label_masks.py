"""Label masks made visible: refuses masks that teach nothing or everything, and prints an example in colour."""

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decode.core.errors import UserError
from decode.core.progress import output_console
from distill.data.tokenization.label_masks import IGNORE


def check_masks(rows: Dataset | Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, kind: str) -> None:
    """Checks that some tokens are labels, and that prompts are not.

    Raises:
        UserError: all tokens of all examples are masked, or (pairs and chat) none are; one example is shown.
    """
    if all(label == IGNORE for row in rows for label in row["labels"]):
        problem = "every token is masked, so there is nothing to learn"
    elif kind != "text" and all(label != IGNORE for row in rows for label in row["labels"]):
        problem = "no token is masked, so prompts would be learned as if they were answers"
    else:
        return
    shown = render(rows[0], tokenizer).plain
    raise UserError(
        f"label masks: {problem} in all {len(rows)} examples. The first ([[...]] is learned):\n{shown}\n"
        "Check data.kind, the templates and, for chats, the roles"
    )


def render(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> Text:
    """One example as text: what is masked dim, what is learned green in [[ ]], special tokens in reverse."""
    text = Text()
    learned = False
    special = set(tokenizer.all_special_ids)
    for ids, is_label, is_special in _runs(row["input_ids"], row["labels"], special):
        if is_label != learned:
            text.append("[[" if is_label else "]]", style="bold green")
            learned = is_label
        style = "green" if is_label else "dim"
        text.append(str(tokenizer.decode(ids)), style=f"{style} reverse" if is_special else style)
    if learned:
        text.append("]]", style="bold green")
    return text


def show(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, console: Console | None = None) -> None:
    """Prints one example with its mask, and how many of its tokens are learned."""
    console = console or output_console()
    learned = sum(label != IGNORE for label in row["labels"])
    console.print(render(row, tokenizer))
    console.print(f"{len(row['labels'])} tokens, {learned} of them learned (in [[ ]])", style="dim", markup=False)


def _runs(input_ids: Sequence[int], labels: Sequence[int], special: set[int]) -> list[tuple[list[int], bool, bool]]:
    """Neighbouring tokens of one sort: ids, whether they are labels, whether they are special tokens."""
    runs: list[tuple[list[int], bool, bool]] = []
    for token, label in zip(input_ids, labels, strict=True):
        sort = (label != IGNORE, token in special)
        if runs and runs[-1][1:] == sort:
            runs[-1][0].append(token)
        else:
            runs.append(([token], *sort))
    return runs
