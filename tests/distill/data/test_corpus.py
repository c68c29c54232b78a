"""The tokenised corpus, kept on disk; batches, in an order that is a pure function of seed and step."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from some_rows import add_column, from_lists, write_rows
from torch.utils.data import DataLoader

from decode.measure.arithmetic import problems
from decode.measure.suites import SCORERS
from decode.models.tokens import prompt_ids
from distill import ranks
from distill.config.data import DataSettings
from distill.data import corpus as corpus_module
from distill.data.chat import IGNORE
from distill.data.corpus import Corpus, load_corpus, train_tokenizer
from distill.data.dataset import Batch, Examples, From, Schedule, TrainingBatches, label_mask

ROWS = [{"question": f"What is {n} plus {n}?" + " Say it." * (n % 7), "answer": f"It is {2 * n}."} for n in range(90)]
TEXTS = [f"{p.question}\n{p.solution}" for p in problems(0, "train", 300)]
STRANGE = "Zażółć 漢字 🙂 a  b\t\r\n 12 345. <|endoftext|> don't , . x\x00\u200b\n\n  end "
LETTERS = train_tokenizer(["some other text"] * 3, 280)
"""A token is about a letter, so a third of the rows are longer than 70."""


def written(folder: Path) -> DataSettings:
    return DataSettings(source=write_rows(folder / "rows.jsonl", ROWS))


def rows_of(corpus: Corpus) -> list[Any]:
    return [getattr(corpus, split)[:] for split in ("train", "validation", "test")]


def test_a_later_process_reads_what_the_first_has_made(tmp_path, monkeypatch) -> None:
    settings, folder = written(tmp_path), tmp_path / "corpus"
    first = load_corpus(settings, seed=0, folder=folder)
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(corpus_module, "_make", lambda *_: pytest.fail("it is made again"))
    second = load_corpus(settings, seed=0, folder=folder)
    assert rows_of(first) == rows_of(second)
    assert second.train.cache_files  # mapped into memory, which every process shares
    assert (first.fingerprint, first.notes) == (second.fingerprint, second.notes)
    assert first.tokenizer("12 pens")["input_ids"] == second.tokenizer("12 pens")["input_ids"]
    for text, whole in (("2 + 2?", "2 + 2?\n"), ("2 + 2?\n4", "2 + 2?\n4")):  # a shell leaves the line end out
        assert prompt_ids(second.tokenizer, text) == second.tokenizer(whole)["input_ids"]
    assert prompt_ids(LETTERS, "2 + 2?") == LETTERS("2 + 2?")["input_ids"]


def test_answers_are_kept_when_only_the_test_examples_change(tmp_path) -> None:
    """They are known by the corpus's fingerprint."""
    settings = written(tmp_path)
    sizes = ({"test_examples": 2}, {"test_examples": 3}, {"test_examples": 2, "max_length": 60})
    keys = [load_corpus(replace(settings, **size), seed=0, folder=None).fingerprint for size in sizes]
    assert keys[0] == keys[1] != keys[2]


def test_a_corpus_made_from_something_else_or_cut_short_is_made_again(tmp_path) -> None:
    settings, folder = written(tmp_path), tmp_path / "corpus"

    def load(settings: DataSettings, seed: int = 0) -> tuple[int, list[Any]]:
        rows = rows_of(load_corpus(settings, seed=seed, folder=folder))
        return next((folder / "train").glob("*.arrow")).stat().st_ino, rows

    number, rows = load(settings)
    assert load(replace(settings, loader_workers=2)) == (number, rows)
    file = next((folder / "train").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-9])
    for changed, seed, alike in (
        (settings, 0, True),
        (replace(settings, max_length=255), 0, True),
        (settings, 5, False),
    ):
        before = number
        number, others = load(changed, seed)
        assert number != before
        assert (others == rows) == alike
    write_rows(Path(settings.source), ROWS[:80])
    assert load(settings, 5)[1] != others


def test_several_processes_tokenise_as_a_single_one(tmp_path, monkeypatch) -> None:
    settings = replace(written(tmp_path), max_length=70, train_examples=20)
    alone = load_corpus(settings, seed=0, folder=None, tokenizer=LETTERS)
    monkeypatch.setattr(corpus_module, "A_PROCESS", 40)
    together = load_corpus(settings, seed=0, folder=None, tokenizer=LETTERS)
    assert rows_of(alone) == rows_of(together)
    assert (alone.notes, alone.fingerprint) == (together.notes, together.fingerprint)
    assert any("longer than data.max_length (70 tokens) dropped" in note for note in alone.notes)


def test_every_row_of_a_file_is_an_example_or_listed_as_dropped_with_its_reason(tmp_path) -> None:
    """Rows are left out as they are read, for being in a later split too, and as they are tokenised."""
    bad = [{"question": "A row without an answer"}, {"question": "\ud800", "answer": "A lone surrogate"}, ROWS[1]]
    files = {"test": write_rows(tmp_path / "test.jsonl", [*bad, *ROWS[4:6]])}
    settings = replace(written(tmp_path), files=files, max_length=70)
    made = load_corpus(settings, seed=0, folder=tmp_path / "corpus", tokenizer=LETTERS)
    dropped = [json.loads(line) for line in (tmp_path / "corpus/dropped.jsonl").read_text().splitlines()]
    tests = [row for row in dropped if row["split"] == "test"]
    assert len(made.test) + len(tests) == len(bad) + 2
    assert len(made.train) + len(made.validation) + len(dropped) - len(tests) == len(ROWS)
    assert [row["row"] for row in dropped if "later split" in row["reason"]] == [2, 5, 6]
    assert {"split": "test", "row": 2, "reason": "with a lone surrogate", "detail": ""} in dropped
    assert any(row["reason"].startswith("longer than data.max_length") for row in dropped)


def test_a_trained_tokenizer_changes_no_text_and_has_a_token_for_every_digit() -> None:
    tokenizer = train_tokenizer(TEXTS, 600)
    for text in (STRANGE, "", " ", "\n", *TEXTS[:5]):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    pieces = [tokenizer.decode([token]) for token in tokenizer("12+305 = 317")["input_ids"]]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == list("12305317")
    assert len(tokenizer) == 600
    assert len(train_tokenizer(["aa aa"], 600)) == 259


def test_answers_to_test_prompts_are_scored_against_the_reference(monkeypatch) -> None:
    monkeypatch.setitem(SCORERS, "number", lambda reference, output: float((reference, output) == ("#### 4", "four")))
    prompt, ids = (LETTERS(text)["input_ids"] for text in ("2+2?", "#### 4"))
    rows = {"input_ids": [[*prompt, *ids, LETTERS.eos_token_id]], "labels": [[-100] * len(prompt) + [*ids, 0]]}
    corpus = SimpleNamespace(test=Dataset.from_dict(rows), tokenizer=LETTERS)
    suite = corpus_module.test_suite(corpus, "gsm8k", 3)
    assert suite.prompts[0].ids == tuple(prompt)
    assert suite.prompts[0].text == "2+2?"
    assert suite.score is not None
    assert suite.score(suite.prompts[0], "four") == 1
    assert corpus_module.test_suite(corpus, "alpaca", 3).score is None


def examples() -> Examples:
    labels = [[IGNORE, 6, 7], [8, 9], [IGNORE, IGNORE, 12, 13]]
    made = from_lists([[5, 6, 7], [8, 9], [10, 11, 12, 13]], labels)
    return add_column(made, "value", np.arange(5, dtype=np.float32))


def test_labels_that_can_be_predicted_are_counted_and_a_batch_s_columns_are_in_their_order() -> None:
    rows = examples()
    assert rows.lengths.tolist() == [3, 2, 4]
    assert rows.label_counts.tolist() == [2, 1, 2]  # the first token of a text has nothing to be predicted from
    assert rows.labels_of(np.array([0, 2, 2])) == 6
    assert [rows.prompt(i) for i in range(3)] == [[5], [8], [10, 11]]
    batch = rows.batch(np.array([2, 0]))
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13], [5, 6, 7, 0]]
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, 12, 13], [IGNORE, 6, 7, IGNORE]]
    assert batch["value"].flatten().tolist() == [3.0, 4.0, 0.0, 1.0]
    assert int(label_mask(batch["labels"]).sum()) == 4


@pytest.mark.parametrize(("bucket", "size"), [(1, 6), (4, 6), (16, 16), (3, 7)])
def test_an_example_occurs_once_in_every_epoch(bucket: int, size: int) -> None:
    """Fault 4: several epochs were sorted together, and a batch held an example four times."""
    schedule = Schedule(np.arange(20), batch_size=size, bucket=bucket, seed=3)
    seen = np.concatenate([schedule.batch(step) for step in range(40)])
    for epoch in range(len(seen) // 20):
        assert sorted(seen[20 * epoch : 20 * epoch + 20]) == list(range(20))
    other = Schedule(np.arange(20), batch_size=size, seed=4)
    assert other.batch(0).tolist() != Schedule(np.arange(20), batch_size=size, seed=3).batch(0).tolist()


def test_buckets_put_examples_of_like_length_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 400)

    def padding(bucket: int) -> float:
        batches = [lengths[Schedule(lengths, 10, bucket).batch(step)] for step in range(40)]
        return sum(int(batch.max() * len(batch) - batch.sum()) for batch in batches)

    assert padding(20) < padding(1) / 4


def test_processes_that_make_batches_ahead_make_the_same_from_any_step_on() -> None:
    rows = examples()
    batches = TrainingBatches(rows, Schedule(rows.lengths, 3, seed=0), 6, micros=2)

    def content(loader: DataLoader[Batch]) -> list[Any]:
        return [{n: v.tolist() if torch.is_tensor(v) else v for n, v in batch.items()} for batch in loader]

    def loader(first: int, workers: int) -> DataLoader[Batch]:
        context = "fork" if workers else None
        return DataLoader(batches, None, sampler=From(first, 12), num_workers=workers, multiprocessing_context=context)

    undisturbed = content(loader(0, 0))
    assert content(loader(0, 2)) == undisturbed
    assert content(loader(4, 2)) == undisturbed[4:]
