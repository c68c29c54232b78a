"""Rows as they occur in other people's data, each with the outcome that it must have."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers_of_kinds import CHAT_TEMPLATES, with_start

from decode.errors import UserError
from decode.models.tokens import start_ids
from distill.config.data import DataSettings
from distill.data.chat import IGNORE
from distill.data.corpus import Corpus, load_corpus

ROWS = [json.loads(line) for line in (Path(__file__).parent / "awkward_rows.jsonl").read_text().splitlines()]


def learned(corpus: Corpus, row: dict[str, Any]) -> list[str]:
    texts = []
    before = IGNORE
    for label in row["labels"]:
        if label != IGNORE:
            texts += [[]] if before == IGNORE else []
            texts[-1].append(label)
        before = label
    return [corpus.tokenizer.decode(ids) for ids in texts]


def load(tmp_path: Path, rows: list[dict[str, Any]], template: str | None, **settings: Any) -> Corpus:
    """The corpus of these rows and of forty good ones behind them."""
    chat = "messages" in rows[0]
    turns = [[{"role": "user", "content": f"good {n}"}, {"role": "assistant", "content": "fine"}] for n in range(40)]
    good = [{"messages": t} if chat else {"question": f"good {n}", "answer": "fine"} for n, t in enumerate(turns)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *good]))
    given = DataSettings(source=str(path), **settings)
    return load_corpus(given, seed=0, folder=None, tokenizer=with_start(template))


def others(corpus: Corpus) -> list[dict[str, Any]]:
    splits = (corpus.train, corpus.validation, corpus.test)
    return [row for split in splits for row in split if "good" not in row["prompt"]]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case["name"])
def test_a_row_has_the_outcome_that_it_must_have(case: dict[str, Any], tmp_path) -> None:
    corpus = load(tmp_path, [case["row"]], case["template"])
    notes = [note for note in corpus.notes if "row 1" in note]
    if case["outcome"] != "kept":
        assert others(corpus) == []
        assert len(notes) == 1
        assert f"1 row {case['outcome']}" in notes[0]
        return
    assert [case.get("note", "nothing is noted") in note for note in notes] == [True] * ("note" in case)
    examples = others(corpus)
    assert [learned(corpus, example) for example in examples] == case.get("examples", [case.get("learned")])
    example = examples[0]
    written = CHAT_TEMPLATES[case["template"]].startswith("{{ bos_token }}") if case["template"] else True
    said = example["prompt"].count("<user><s>")
    starts = start_ids(corpus.tokenizer) if written else []  # a chat begins as its template says
    assert example["input_ids"][: len(starts)] == starts
    assert example["input_ids"].count(1) == len(starts) + said
    if "prompt" in case:
        assert example["prompt"] == case["prompt"]


PAIR = {"question": "1+1?", "answer": "2"}


@pytest.mark.parametrize(
    ("template", "settings", "prompt"),
    [
        ("plain", {}, "<user>1+1?<assistant>"),
        ("plain", {"chat": False}, "1+1?\n"),
        (None, {}, "1+1?\n"),
        (
            "thinking",
            {"system": "Be brief", "template_args": {"enable_thinking": False}},
            "<system>Be brief<user>1+1?<assistant><think></think>",
        ),
    ],
)
def test_pairs_follow_the_chat_template(tmp_path, template: str | None, settings, prompt: str) -> None:
    corpus = load(tmp_path, [PAIR], template, **settings)
    assert [row["prompt"] for row in others(corpus)] == [prompt]
    assert any("chat template" in note for note in corpus.notes) == prompt.startswith("<")
    with pytest.raises(UserError, match=r"has no chat template.*data\.chat_template"):
        load(tmp_path, [PAIR], None, chat=True)
