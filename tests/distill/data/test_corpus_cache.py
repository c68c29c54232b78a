"""The tokenised corpus: the same from several processes, kept on disk, made again when anything of it has changed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_run import bench, tiny_settings

from decode.errors import UserError
from distill import ranks
from distill.config.data import DataSettings
from distill.data.corpus import Corpus, load_corpus
from distill.data.tokenizer import train_tokenizer

ROWS = [{"question": f"What is {n} plus {n}?" + " Say it." * (n % 7), "answer": f"It is {2 * n}."} for n in range(90)]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every making of a corpus."""
    made: list[Any] = []

    def counted(*given: Any, **named: Any) -> Corpus:
        made.append(given)
        return load_corpus(*given, **named)

    monkeypatch.setattr("distill.data.context.load_corpus", counted)
    return made


def rows_of(corpus: Corpus) -> list[Any]:
    return [getattr(corpus, split)[:] for split in ("train", "validation", "test")]


def test_a_later_process_reads_what_the_first_has_made_or_says_that_its_data_are_others(
    tmp_path: Path, loads: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_settings(tmp_path, data=written(tmp_path))
    first = bench(settings)[0].corpus
    monkeypatch.setattr(ranks, "is_first", lambda: False)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr("distill.data.corpus.PATIENCE", 0.3)
    second = bench(settings)[0].corpus
    assert len(loads) == 1
    assert rows_of(first) == rows_of(second)
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer("12 pens")["input_ids"] == second.tokenizer("12 pens")["input_ids"]
    settings.data.max_length = 100
    with pytest.raises(UserError, match=r"process 1 has other data than process 0, which made .*corpus"):
        _ = bench(settings)[0].corpus


def written(folder: Path) -> DataSettings:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return DataSettings(source=str(path), tokenizer_vocab_size=280)


LETTERS = train_tokenizer(["some other text"] * 3, 280)
"""A token is about a letter, so a third of the rows are longer than 70."""


def test_several_processes_make_the_same_examples_and_notes_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(written(tmp_path), max_length=70, train_examples=20)
    one = load_corpus(settings, seed=0, tokenizer=LETTERS)
    monkeypatch.setattr("distill.data.corpus.A_PROCESS", 40)
    two = load_corpus(settings, seed=0, tokenizer=LETTERS)
    assert rows_of(one) == rows_of(two)
    assert one.notes == two.notes
    assert any("longer than data.max_length (70 tokens) dropped" in note for note in one.notes)
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("change", ["seed", "max_length", "a file altered", "a file cut short", "loader_workers"])
def test_a_corpus_made_from_something_else_or_damaged_is_made_again(
    tmp_path: Path, loads: list[Any], change: str
) -> None:
    settings = tiny_settings(tmp_path)
    wanted = rows_of(bench(settings)[0].corpus)
    file = next((tmp_path / "tiny" / "work" / "corpus" / "train").glob("*.arrow"))
    content = file.read_bytes()
    if change == "seed":
        settings.seed = 5
    elif change == "max_length":
        settings.data.max_length = 255
    elif change == "loader_workers":
        settings.data.loader_workers = 2
    else:
        half = len(content) // 2
        file.write_bytes(content[:half] + (b"" if "cut" in change else b"?" + content[half + 1 :]))
    again = rows_of(bench(settings)[0].corpus)
    assert len(loads) == (1 if change == "loader_workers" else 2)
    assert (again == wanted) == (change != "seed")


def test_an_example_is_shown_without_leaving_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from distill.pipeline import show_example

    show_example(tiny_settings(tmp_path))
    assert "learned" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
