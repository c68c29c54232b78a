"""Rows of files, folders and the Hub: read without guessing a value, split by a hash, refused with the next step."""

import hashlib
import json
import tempfile
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pairs import make_tokenizer
from some_rows import made_of, write_rows

from decode.errors import UserError
from decode.measure.suites import PRESETS, load_suite
from distill.config.data import DataSettings
from distill.data.chat import Turn, label, prompt_part
from distill.data.corpus import load_corpus, train_tokenizer
from distill.data.sources import SourceRows, load_rows

SPLITS = ("train", "validation", "test")
SMALL = DataSettings(train_examples=60, validation_examples=15, test_examples=15)
PAIRS = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(200)]
DIGESTS = ["2a25634ad63a74be", "9a30eb34421ad0cf"]  # of the texts of every split, in their order
STORIES = [
    {"text": f"Story {n}: once upon a time there were {n} pens, and {n + 1} children. The end."} for n in range(90)
]


def loaded(settings: DataSettings, seed: int = 0) -> SourceRows:
    return load_rows(settings, seed, Path(tempfile.mkdtemp(prefix="rows-")))


corpus_of = partial(load_corpus, seed=0, folder=None)


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_every_local_format_of_pairs_is_read_and_no_value_is_guessed(tmp_path, ending: str) -> None:
    rows = [*PAIRS, {"question": "When?", "answer": "2020-01-01"}, {"question": "Price?", "answer": "1.50"}]
    made = loaded(DataSettings(source=write_rows(tmp_path / f"rows.{ending}", rows)))
    texts = [row["prompt"] + row["response"] for split in SPLITS for row in made.splits[split]]
    assert sorted(texts) == sorted(f"{row['question']}\n{row['answer']}" for row in rows)


def test_rows_of_json_lines_need_not_agree_in_types(tmp_path) -> None:
    rows = [{"question": f"{n}?", "answer": n if n % 2 else "even", "extra": [n, {"a": n}][n % 2]} for n in range(60)]
    path = write_rows(tmp_path / "r.jsonl", rows)
    assert sum(map(len, loaded(DataSettings(source=path)).splits.values())) == 60
    Path(path).write_text('{"question": "a", "answer": "b"}\nno json\n')
    with pytest.raises(UserError, match="near row 2"):
        loaded(DataSettings(source=path))


@pytest.mark.parametrize("ending", ["jsonl", "txt"])
def test_plain_text_becomes_blocks_that_are_learned_whole(tmp_path, ending: str) -> None:
    path = write_rows(tmp_path / f"rows.{ending}", STORIES)
    made = corpus_of(DataSettings(source=path, max_length=32))
    for split in SPLITS:
        rows = getattr(made, split)
        assert all(row["labels"] == row["input_ids"] and 16 < len(row["input_ids"]) <= 32 for row in rows)
        joined = str(made.tokenizer.decode([token for row in rows for token in row["input_ids"]]))
        stories = joined.split("<|endoftext|>")[:-1]
        assert stories
        assert {"text": stories[0]} in STORIES
        assert all(story.startswith("Story ") and story.endswith("The end.") for story in stories)


def test_the_prompt_keeps_its_ids_where_the_response_would_merge_with_it() -> None:
    tokenizer = train_tokenizer(["How many pens are there?"] * 9, 300)
    (examples,) = label(tokenizer, [[Turn("How man", "y pens", ("y pens",))]], chat=False)
    assert isinstance(examples, list)
    example, alone = examples[0], tokenizer("How man")["input_ids"]
    assert tokenizer("How many pens")["input_ids"][: len(alone)] != alone
    assert example.input_ids[: len(alone)] == alone == prompt_part(example.input_ids, example.labels)
    assert tokenizer.decode(example.input_ids) == "How many pens<|endoftext|>"
    assert example.labels[len(alone) :] == example.input_ids[len(alone) :]


def test_files_are_named_one_by_one_or_by_a_pattern_and_a_folder_is_refused(tmp_path) -> None:
    for place, name in enumerate(["rows/a-1.jsonl", "rows/a-2.jsonl", "test.jsonl", "rows/README.md"]):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, PAIRS[10 * place : 10 * place + 10])
    files = {"train": str(tmp_path / "rows/a-?.jsonl"), "test": str(tmp_path / "test.jsonl")}
    by_pattern = DataSettings(source=str(tmp_path / "rows/a-*.jsonl"))
    for settings in (by_pattern, DataSettings(files=files)):
        settings.validate()
        rows = loaded(settings).splits
        assert sum(map(len, rows.values())) == (30 if settings.files else 20)
        assert not settings.files or len(rows["test"]) == 10
    with pytest.raises(UserError, match="is a folder: name its training files by a pattern"):
        loaded(DataSettings(source=str(tmp_path / "rows")))


@pytest.mark.parametrize("given", [{}, {"date_string": "1 May 2025"}])
def test_a_template_that_writes_the_date_of_the_day_is_named_with_it(tmp_path, given: dict[str, Any]) -> None:
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = "{{ date_string or strftime_now('%d %B %Y') }}\n" + str(tokenizer.chat_template)
    settings = replace(SMALL, source=write_rows(tmp_path / "r.jsonl", PAIRS), template_args=given, chat=True)
    notes = [note for note in corpus_of(settings, tokenizer=tokenizer).notes if "writes the date" in note]
    assert [date.today().strftime("texts hold %d %B %Y") in note for note in notes] == [True] * (not given)


def test_rows_stay_in_their_splits_and_notes_tell_what_is_not_read(tmp_path) -> None:
    digests, files = [], [write_rows(tmp_path / "a.jsonl", PAIRS), write_rows(tmp_path / "b.jsonl", PAIRS[::-1])]
    for settings in (SMALL, DataSettings(source=files[0])):
        splits = loaded(settings).splits
        texts = [[row["prompt"], row["response"]] for split in SPLITS for row in splits[split]]
        digests.append(hashlib.sha256(json.dumps([*map(len, splits.values()), texts]).encode()).hexdigest()[:16])
    assert digests == DIGESTS
    first, second = (loaded(DataSettings(source=path), seed=seed) for seed, path in enumerate(files))
    assert all(sorted(first.splits[split]["prompt"]) == sorted(second.splits[split]["prompt"]) for split in SPLITS)
    rows = [row | {"topic": "It is.", "answer": row["answer"] if n else float("nan")} for n, row in enumerate(PAIRS)]
    notes = loaded(DataSettings(source=write_rows(tmp_path / "r.jsonl", rows))).notes
    assert notes == ["columns that are not read: 'topic'", "train: 1 row without the column answer dropped (row 1)"]


def test_chats_that_begin_alike_are_spread_over_the_splits_and_equal_ones_share_one(tmp_path) -> None:
    rows = [("Hi", f"answer {n % 200}") for n in range(400)] + [(f"prompt {n}", "answer") for n in range(60)]
    made = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]} for p, a in rows]
    found = loaded(DataSettings(source=write_rows(tmp_path / "r.jsonl", made)))
    sizes = {split: len(rows) for split, rows in found.splits.items()}
    assert sum(sizes.values()) == 460
    assert all(46 <= sizes[split] <= 140 for split in ("validation", "test"))  # a fifth, see conftest.py
    texts = {split: {json.dumps({**row, "number": 0}) for row in rows} for split, rows in found.splits.items()}
    assert len(set.union(*texts.values())) == sum(map(len, texts.values())) == 260
    assert not found.notes


def test_a_suite_asks_no_chat_that_training_on_the_same_data_set_learns(tmp_path, monkeypatch) -> None:
    """Both compute the split that the Hub lacks, also of texts that are not ASCII."""
    turns = [[{"role": "user", "content": f"Où est {n} ?"}, {"role": "assistant", "content": "Là"}] for n in range(400)]
    (tmp_path / "hub").mkdir()
    write_rows(tmp_path / "hub/train.jsonl", [{"messages": chat} for chat in turns])
    published = replace(PRESETS["ultrachat"], hub=str(tmp_path / "hub"), splits={"train": "train"})
    monkeypatch.setitem(PRESETS, "ultrachat", published)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = loaded(DataSettings(source="ultrachat")).splits["validation"]
    asked = {prompt.text for prompt in load_suite("ultrachat", split="validation").prompts}
    assert asked
    assert asked <= {json.loads(row["messages"])[0]["content"] for row in rows}


def test_overlong_examples_are_cut_where_that_is_asked_for() -> None:
    row, tokenizer = {"question": "Why?", "answer": "So" + " and so on" * 40}, make_tokenizer()
    for how, done, lengths in (("drop", "dropped", []), ("cut", "cut at the end", [40])):
        examples, notes = made_of(row, tokenizer, chat=False, max_length=40, overlong=how)
        assert notes == [(f"longer than data.max_length (40 tokens) {done}", "")]
        assert [len(example.input_ids) for example in examples] == lengths
        assert tokenizer.eos_token_id not in [example.labels[-1] for example in examples]


def test_without_the_hub_the_local_alternative_is_named(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    write_rows(tmp_path / "gsm8k" / "train.jsonl", PAIRS)
    for source in ("gsm8k", "somebody/something"):
        with pytest.raises(UserError, match=r"HF_HUB_OFFLINE.*data\.files"):
            loaded(DataSettings(source=source))
    assert len(loaded(DataSettings(source="./gsm8k/*.jsonl")).splits["train"])


def test_a_hub_data_set_is_split_and_sampled_or_refused(tmp_path, monkeypatch) -> None:
    """The Hub's libraries read a local folder in the place of a repository."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which an earlier test may have found
    (hub := tmp_path / "hub").mkdir()
    write_rows(hub / "train.jsonl", PAIRS[:150])
    write_rows(hub / "test.jsonl", PAIRS[150:])
    monkeypatch.setitem(PRESETS, "gsm8k", replace(PRESETS["gsm8k"], hub=str(hub), config=None))
    few = DataSettings(source="gsm8k", train_examples=10, validation_examples=3, test_examples=3)
    for settings, read in ((replace(few, train_examples="all"), 150), (few, 64)):
        rows = loaded(settings)
        assert len(rows.splits["train"]) + len(rows.splits["validation"]) == read
    assert len(corpus_of(few).train) == 10
    write_rows(hub / "train-2.jsonl", [{"prompt": "a", "response": "b"}])
    with pytest.raises(UserError, match=r"column names don't match.*hf download.*--local-dir"):
        loaded(few)
