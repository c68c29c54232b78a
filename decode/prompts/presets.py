"""The one statement of how a row of each known data set becomes a prompt and a response.

Training data and prompt suites both read it, so what is measured is what was trained. Only GSM8K's template is
somebody else's: it is the one AdaSPEC trained with. HumanEval's prompt is the data set's own. All other templates
are ours; results under other templates are not comparable with results under these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from decode.core.errors import UserError

Row = Mapping[str, Any]


def _no_turns(row: Row) -> tuple[str, ...]:
    return ()


def _every_split(row: Row) -> str | None:
    return None


@dataclass(frozen=True)
class Preset:
    """One data set's templates, and where it lives."""

    columns: tuple[str, ...]
    """Columns that the templates read; a local file must have them."""
    prompt: Callable[[Row], str]
    response: Callable[[Row], str]
    """What the model should answer, as text to train on."""
    hub: str | None = None
    """Name on the Hugging Face Hub; None: built in, or local files only."""
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    """Our split (train, validation, test) to the Hub's."""
    kind: str = "pairs"
    """pairs or chat (a column ``messages``)."""
    scorer: str | None = None
    """Key of `decode.prompts.scorers.SCORERS`; None where answers have no simple measure."""
    key: str = ""
    """Column that names a row."""
    category: str = ""
    """Column that groups rows."""
    turns: Callable[[Row], tuple[str, ...]] = _no_turns
    """What the user says, turn by turn, where a row has several."""
    said: Callable[[Row], str] | None = None
    """What a user says to a chat model; None: the prompt."""
    groups: Mapping[str, str] = field(default_factory=dict)
    """Categories that are reported as one."""
    split_of: Callable[[Row], str | None] = _every_split
    """The official split of a row of a file that holds all splits; None where a file is one split."""


def held_out(prompt: str, fraction: float = 0.05) -> str:
    """The split (train, validation, test) of a row whose source has no such splits, by a hash of its prompt.

    ``fraction`` of all prompts validate, as many test, the rest train. Equal prompts are in one split.
    """
    place = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=6).digest(), "big") / 2**48
    return "validation" if place < fraction else "test" if place < 2 * fraction else "train"


def _gsm8k_prompt(row: Row) -> str:
    return f"{row['question']}\nAnswer the above question. First think step by step and then answer the final number.\n"


def _gsm8k_response(row: Row) -> str:
    return str(row["answer"]).replace("####", "The final answer is: ")


def _alpaca_prompt(row: Row) -> str:
    given = f"\n\nInput:\n{row['input']}" if row.get("input") else ""
    return f"Instruction:\n{row['instruction']}{given}\n\nResponse:\n"


def _alpaca_said(row: Row) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row.get("input") else str(row["instruction"])


def _mbpp_said(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return f"{row['text']}\nThe code has to pass these tests:\n```python\n{tests}\n```"


def _mbpp_prompt(row: Row) -> str:
    tests = "\n".join(row["test_list"])
    return f'"""\n{row["text"]}\n{tests}\n"""\n'


def _mbpp_split(row: Row) -> str | None:
    """Splits of the MBPP paper by ``task_id``; 1..10 are examples for prompts and belong to none of ours."""
    for last, split in ((10, "prompt"), (510, "test"), (600, "validation"), (974, "train")):
        if row["task_id"] <= last:
            return split
    return None


def _mmlu_prompt(row: Row) -> str:
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
    return f"{row['question']}\n{choices}\nAnswer:"


def _summary_prompt(column: str, wish: str) -> Callable[[Row], str]:
    return lambda row: f"Article:\n{row[column]}\n\n{wish}:\n"


def _turns(row: Row) -> tuple[str, ...]:
    """Turns of MT-Bench and Spec-Bench, which the Hub's copy of MT-Bench calls ``prompt``."""
    turns = row.get("turns") or row.get("prompt")
    if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
        raise UserError(f"a row needs its turns as a list of texts in the column turns; its columns: {', '.join(row)}")
    return tuple(turns)


def _reference(row: Row) -> str:
    """The first reference answer, however deep a data set nests it; empty where there is none."""
    value = row.get("reference")
    while isinstance(value, list):
        value = value[0] if value else ""
    return str(value or "")


def _user_turns(row: Row) -> tuple[str, ...]:
    return tuple(message["content"] for message in row["messages"] if message["role"] == "user")


MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
"""MT-Bench's categories, which are one of Spec-Bench's six."""

PRESETS: dict[str, Preset] = {
    "arithmetic": Preset(
        columns=("question", "answer"),
        prompt=lambda row: f"{row['question']}\n",
        response=lambda row: str(row["answer"]),
        scorer="number",
    ),
    "gsm8k": Preset(
        columns=("question", "answer"),
        prompt=_gsm8k_prompt,
        response=_gsm8k_response,
        hub="openai/gsm8k",
        config="main",
        scorer="number",
    ),
    "alpaca": Preset(
        columns=("instruction", "output"),
        prompt=_alpaca_prompt,
        response=lambda row: str(row["output"]),
        said=_alpaca_said,
        hub="tatsu-lab/alpaca",
        splits={"train": "train"},
        scorer="rouge",
    ),
    "mbpp": Preset(
        columns=("text", "code", "test_list", "task_id"),
        prompt=_mbpp_prompt,
        response=lambda row: str(row["code"]).replace("\r\n", "\n"),
        said=_mbpp_said,
        hub="google-research-datasets/mbpp",
        config="full",
        splits={"train": "train", "validation": "validation", "test": "test"},
        scorer="mbpp",
        key="task_id",
        split_of=_mbpp_split,
    ),
    "humaneval": Preset(
        columns=("prompt", "canonical_solution", "test", "entry_point"),
        prompt=lambda row: str(row["prompt"]),
        response=lambda row: str(row["canonical_solution"]),
        said=lambda row: f"Complete this Python function:\n```python\n{row['prompt'].rstrip()}\n```",
        hub="openai/openai_humaneval",
        splits={"test": "test"},
        scorer="humaneval",
        key="task_id",
    ),
    "cnn_dailymail": Preset(
        columns=("article", "highlights"),
        prompt=_summary_prompt("article", "Summary"),
        response=lambda row: str(row["highlights"]),
        hub="abisee/cnn_dailymail",
        config="3.0.0",
        splits={"train": "train", "validation": "validation", "test": "test"},
        scorer="rouge",
        key="id",
    ),
    "xsum": Preset(
        columns=("document", "summary"),
        prompt=_summary_prompt("document", "Summary in one sentence"),
        response=lambda row: str(row["summary"]),
        hub="EdinburghNLP/xsum",
        splits={"train": "train", "validation": "validation", "test": "test"},
        scorer="rouge",
        key="id",
    ),
    "ultrachat": Preset(
        columns=("messages",),
        prompt=lambda row: _user_turns(row)[0],
        response=lambda row: next(m["content"] for m in row["messages"] if m["role"] == "assistant"),
        hub="HuggingFaceH4/ultrachat_200k",
        splits={"train": "train_sft", "test": "test_sft"},
        kind="chat",
        key="prompt_id",
        turns=_user_turns,
    ),
    "mmlu": Preset(
        columns=("question", "choices", "answer"),
        prompt=_mmlu_prompt,
        response=lambda row: f" {'ABCD'[int(row['answer'])]}",
        hub="cais/mmlu",
        config="all",
        splits={"train": "auxiliary_train", "validation": "validation", "test": "test"},
        scorer="letter",
        category="subject",
    ),
    "mt_bench": Preset(
        columns=("category",),
        prompt=lambda row: _turns(row)[0],
        response=_reference,
        hub="HuggingFaceH4/mt_bench_prompts",
        splits={"test": "train"},
        category="category",
        turns=_turns,
    ),
    "spec_bench": Preset(
        columns=("category", "turns"),
        prompt=lambda row: _turns(row)[0],
        response=_reference,
        splits={},
        key="question_id",
        category="category",
        turns=_turns,
        groups=dict.fromkeys(MT_BENCH, "multi-turn"),
    ),
}
"""Every known data set by its name in ``data.source`` and ``--suite``."""
