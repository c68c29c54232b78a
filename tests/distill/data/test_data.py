import csv
import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from solutions import check_solution

from decode.bench.datasets import PRESETS
from decode.errors import UserError
from distill.config.data import DataSettings
from distill.data.chat import IGNORE, prompt_part
from distill.data.corpus import load_corpus
from distill.data.sources import load_rows

SPLITS = ("train", "validation", "test")
SMALL = DataSettings(train_examples=60, validation_examples=15, test_examples=15)
PAIRS = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(200)]
FEW = {"train_examples": 10, "validation_examples": 3, "test_examples": 3}
STORIES = [
    {"text": f"Story {n}: once upon a time there were {n} pens, and {n + 1} children. The end."} for n in range(90)
]


def write(path, rows):
    """The rows in the format of the path's ending; returns the path as text."""
    path = str(path)
    if path.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.endswith(".csv"):
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        elif path.endswith(".json"):
            json.dump(rows, file)
        elif path.endswith(".txt"):
            file.write("\n\n".join(row["text"] for row in rows))
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(SMALL, seed=0)


def prompts(corpus, split):
    return set(getattr(corpus, split)["prompt"])


def test_arithmetic_needs_neither_files_nor_a_tokenizer(corpus):
    assert [len(getattr(corpus, split)) for split in SPLITS] == [60, 15, 15]
    assert corpus.train.column_names == ["input_ids", "labels", "prompt", "response"]
    for row in corpus.train:
        assert len(row["input_ids"]) == len(row["labels"])
        assert corpus.tokenizer.decode(row["input_ids"]) == row["prompt"] + row["response"] + "<|endoftext|>"
        labels = [label for label in row["labels"] if label != IGNORE]
        assert corpus.tokenizer.decode(labels) == row["response"] + "<|endoftext|>"
        assert prompt_part(row["input_ids"], row["labels"]) == corpus.tokenizer(row["prompt"])["input_ids"]
        check_solution(row["response"])


def test_the_same_settings_and_seed_give_the_same_corpus(corpus):
    again = load_corpus(SMALL, seed=0)
    assert again.fingerprint == corpus.fingerprint
    assert again.train["input_ids"][:] == corpus.train["input_ids"][:]
    assert load_corpus(SMALL, seed=1).fingerprint != corpus.fingerprint
    assert load_corpus(replace(SMALL, max_length=500), seed=0).fingerprint != corpus.fingerprint


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_every_local_format_of_pairs_is_read(tmp_path, ending):
    made = load_corpus(DataSettings(source=write(tmp_path / f"rows.{ending}", PAIRS)), seed=0)
    assert sum(len(getattr(made, split)) for split in SPLITS) == 200
    texts = {row["prompt"] + row["response"] for split in SPLITS for row in getattr(made, split)}
    assert texts == {f"{row['question']}\n{row['answer']}" for row in PAIRS}


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet", "txt"])
def test_every_local_format_of_text_is_read(tmp_path, ending):
    rows = STORIES * 8 if ending == "txt" else STORIES
    path = write(tmp_path / f"rows.{ending}", rows)
    made = load_corpus(DataSettings(source=path, max_length=32), seed=0)
    for split in SPLITS:
        rows = getattr(made, split)
        assert all(row["labels"] == row["input_ids"] and 16 < len(row["input_ids"]) <= 32 for row in rows)
        assert all(row["prompt"] and row["response"] for row in rows)


def test_a_folder_has_a_file_a_split(tmp_path):
    write(tmp_path / "train.jsonl", PAIRS[:100])
    write(tmp_path / "valid.csv", PAIRS[100:120])
    write(tmp_path / "test.parquet", PAIRS[120:])
    made = load_corpus(DataSettings(source=str(tmp_path)), seed=0)
    assert [len(getattr(made, split)) for split in SPLITS] == [100, 20, 80]


def test_rows_of_the_test_split_are_taken_out_of_training_and_reported(tmp_path):
    train, test = write(tmp_path / "train.jsonl", PAIRS), write(tmp_path / "test.jsonl", PAIRS[150:])
    made = load_corpus(DataSettings(source="gsm8k", train_file=train, test_file=test), seed=0)
    assert not prompts(made, "train") & prompts(made, "test")
    assert not prompts(made, "validation") & prompts(made, "test")
    assert len(made.train) + len(made.validation) == 150
    assert sum(int(note.split()[1]) for note in made.notes if "later split" in note) == 50


def test_the_split_of_a_row_depends_neither_on_the_seed_nor_on_the_order(tmp_path):
    one, other = write(tmp_path / "a.jsonl", PAIRS), write(tmp_path / "b.jsonl", PAIRS[::-1])
    first = load_corpus(DataSettings(source=one), seed=0)
    second = load_corpus(DataSettings(source=other), seed=5)
    for split in SPLITS:
        assert prompts(first, split) == prompts(second, split)


def test_overlong_examples_are_dropped_or_cut_and_counted(tmp_path):
    rows = [row | {"answer": row["answer"] + " and so on" * (40 if n % 2 else 0)} for n, row in enumerate(PAIRS)]
    settings = DataSettings(source=write(tmp_path / "r.jsonl", rows), max_length=64, tokenizer_vocab_size=300)
    dropped, cut = (load_corpus(replace(settings, overlong=how), seed=0) for how in ("drop", "cut"))
    assert all(len(ids) <= 64 for ids in dropped.train["input_ids"])
    assert any("64 tokens) dropped" in note for note in dropped.notes)
    assert len(cut.train) > 1.8 * len(dropped.train)
    assert any("64 tokens) cut at the end" in note for note in cut.notes)
    longest = max(cut.train, key=lambda row: len(row["input_ids"]))
    assert len(longest["input_ids"]) == 64
    assert longest["input_ids"][-1] != cut.tokenizer.eos_token_id


def test_mbpp_rows_keep_their_official_splits(tmp_path):
    row = {"text": "Add", "code": "def add(a, b): return a + b", "test_list": ["assert add(1, 1) == 2"]}
    rows = [row | {"task_id": n, "text": f"Add {n}"} for n in (1, 10, 11, 510, 511, 600, 601, 974)]
    settings = DataSettings(source="mbpp", train_file=write(tmp_path / "m.jsonl", rows))
    splits = load_rows(settings, seed=0).splits
    found = {split: [row["prompt"].split("\n")[1] for row in splits[split]] for split in SPLITS}
    assert found == {
        "train": ["Add 601", "Add 974"],
        "validation": ["Add 511", "Add 600"],
        "test": ["Add 11", "Add 510"],
    }


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"train_file": "missing.jsonl"}, "data.train_file: there is no file"),
        ({"prompt_template": "{question}"}, "go together"),
        ({"difficulty": 9}, "difficulty 9"),
        ({"source": "missing.jsonl"}, "there is no file 'missing.jsonl'"),
        ({"source": "spec_bench"}, "data.train_file"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(change, said):
    with pytest.raises(UserError, match=said):
        load_corpus(replace(SMALL, **change), seed=0)


def test_without_the_hub_the_error_names_the_local_alternative_and_a_preset_is_no_folder_of_its_name(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "train.jsonl", PAIRS)
    for source in ("gsm8k", "somebody/something"):
        with pytest.raises(UserError, match=r"HF_HUB_OFFLINE.*data\.train_file"):
            load_corpus(DataSettings(source=source), seed=0)
    assert len(load_rows(DataSettings(source="./gsm8k"), seed=0).splits["train"])


def test_a_stream_is_read_no_further_than_it_may_be_needed(tmp_path):
    long, short = write(tmp_path / "long.jsonl", PAIRS[:64]), write(tmp_path / "short.jsonl", PAIRS[:64])
    with open(long, "a") as file:
        file.write("no json\n")  # 4 (10 + 3 + 3) rows are enough
    streamed, whole = (
        load_corpus(DataSettings(source=path, streaming=path == long, **FEW), seed=1) for path in (long, short)
    )
    assert [getattr(streamed, split)[:] for split in SPLITS] == [getattr(whole, split)[:] for split in SPLITS]
    assert len(streamed.train) == 10
    with pytest.raises(UserError, match="row 65"):
        load_corpus(DataSettings(source=long, **FEW), seed=1)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_is_split_and_sampled_or_streamed(tmp_path, monkeypatch, streaming):
    """The Hub's libraries read a local folder in the place of a repository, and take it for one that answers."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "train.jsonl", PAIRS[:150])
    write(tmp_path / "hub" / "test.jsonl", PAIRS[150:])
    monkeypatch.setitem(PRESETS, "gsm8k", replace(PRESETS["gsm8k"], hub=str(tmp_path / "hub"), config=None))
    for limit, read in (("all", 150), (10, 64)):
        settings = DataSettings(source="gsm8k", streaming=streaming, **FEW | {"train_examples": limit})
        rows = load_rows(settings, seed=0)
        assert [row["number"] for row in rows.splits["test"]] == list(range(1, 51))
        assert len(rows.splits["train"]) + len(rows.splits["validation"]) == read
    assert len(load_corpus(settings, seed=0).train) == 10
