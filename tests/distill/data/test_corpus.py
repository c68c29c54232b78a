"""The tokenised corpus: the same from several processes, kept on disk, made again when anything of it has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decode.bench.arithmetic import problems
from decode.errors import UserError
from distill import ranks
from distill.config import DataSettings
from distill.data import corpus as corpus_module
from distill.data.corpus import Corpus, load_corpus, train_tokenizer

ROWS = [{"question": f"What is {n} plus {n}?" + " Say it." * (n % 7), "answer": f"It is {2 * n}."} for n in range(90)]
TEXTS = [f"{p.question}\n{p.solution}" for p in problems(0, "train", 300)]
STRANGE = "Zażółć 漢字 🙂 a  b\t\r\n 12 345. <|endoftext|> don't , . x\x00\u200b\n\n  end "
LETTERS = train_tokenizer(["some other text"] * 3, 280)
"""A token is about a letter, so a third of the rows are longer than 70."""


def written(folder: Path) -> DataSettings:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return DataSettings(source=str(path))


def rows_of(corpus: Corpus) -> list[Any]:
    return [getattr(corpus, split)[:] for split in ("train", "validation", "test")]


@pytest.fixture
def makings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that a corpus was made in."""
    made, make = list[Path](), corpus_module._make

    def counted(folder: Path, *rest: Any) -> None:
        made.append(folder)
        make(folder, *rest)

    monkeypatch.setattr(corpus_module, "_make", counted)
    return made


def test_a_later_process_reads_what_the_first_has_made_or_says_that_its_data_are_others(
    tmp_path: Path, makings: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, folder = written(tmp_path), tmp_path / "corpus"
    first = load_corpus(settings, seed=0, folder=folder)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    second = load_corpus(settings, seed=0, folder=folder)
    assert rows_of(first) == rows_of(second)
    assert (first.fingerprint, first.notes) == (second.fingerprint, second.notes)
    assert first.tokenizer("12 pens")["input_ids"] == second.tokenizer("12 pens")["input_ids"]
    with pytest.raises(UserError, match=r"process 1 has other data than process 0, which made .*corpus"):
        load_corpus(settings, seed=1, folder=folder)
    assert len(makings) == 1


@pytest.mark.parametrize("change", ["seed", "max_length", "rows", "a file cut short", "loader_workers", "nothing"])
def test_a_corpus_made_from_something_else_or_cut_short_is_made_again(
    tmp_path: Path, makings: list[Path], change: str
) -> None:
    settings, folder, seed = written(tmp_path), tmp_path / "corpus", 0
    before = rows_of(load_corpus(settings, seed=0, folder=folder))
    if change == "seed":
        seed = 5
    elif change in ("max_length", "loader_workers"):
        setattr(settings, change, 255)
    elif change == "rows":
        Path(settings.source).write_text("".join(json.dumps(row) + "\n" for row in ROWS[:80]))
    elif change != "nothing":
        file = next((folder / "train").glob("*.arrow"))
        file.write_bytes(file.read_bytes()[:-9])
    after = rows_of(load_corpus(settings, seed=seed, folder=folder))
    assert len(makings) == (1 if change in ("loader_workers", "nothing") else 2)
    assert (after == before) == (change not in ("seed", "rows"))


def test_several_processes_tokenise_the_same_examples_and_notes_as_a_single_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(written(tmp_path), max_length=70, train_examples=20)
    alone = load_corpus(settings, seed=0, folder=None, tokenizer=LETTERS)
    monkeypatch.setattr(corpus_module, "A_PROCESS", 40)
    together = load_corpus(settings, seed=0, folder=None, tokenizer=LETTERS)
    assert rows_of(alone) == rows_of(together)
    assert (alone.notes, alone.fingerprint) == (together.notes, together.fingerprint)
    assert any("longer than data.max_length (70 tokens) dropped" in note for note in alone.notes)


def test_a_trained_tokenizer_changes_no_text_and_has_a_token_for_every_digit() -> None:
    tokenizer = train_tokenizer(TEXTS, 600)
    for text in (STRANGE, "", " ", "\n", *TEXTS[:5]):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    pieces = [tokenizer.decode([token]) for token in tokenizer("12+305 = 317")["input_ids"]]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("12305317")
    assert len(tokenizer) == 600
    assert len(train_tokenizer(["aa aa"], 600)) == 259
