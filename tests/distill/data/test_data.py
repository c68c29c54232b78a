import csv
import hashlib
import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from solutions import check_solution

from decode.bench.datasets import PRESETS
from decode.errors import UserError
from distill.config.data import DataSettings
from distill.data.chat import IGNORE, prompt_part
from distill.data.corpus import load_corpus
from distill.data.sources import _raw_rows, _shape, load_rows

SPLITS = ("train", "validation", "test")
SMALL = DataSettings(train_examples=60, validation_examples=15, test_examples=15)
PAIRS = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(200)]
DIGESTS = ["2a25634ad63a74be", "9a30eb34421ad0cf"]  # of the texts of every split, in their order
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


def layout(folder, *names):
    """A folder of files with these names, each with rows of its own; the source that reads it."""
    for place, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, PAIRS[10 * place : 10 * place + 10])
    return DataSettings(source=str(folder))


@pytest.mark.parametrize(
    ("names", "sizes"),
    [
        (["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"], [20]),
        (["data/test-00000-of-00001.parquet", "data/train-00000-of-00001.parquet", "extra.csv"], [10, 10]),
        (["default/train/0000.parquet", "default/train/0001.parquet", "default/validation/0000.parquet"], [20, 10]),
        (["gsm8k_train.jsonl", "gsm8k_dev.jsonl", "gsm8k_test.jsonl"], [10, 10, 10]),
        (["rows-1.jsonl", "rows-2.jsonl", "rows-10.jsonl"], [30]),
        ([f"train-0000{n}-of-00002-{n}09b74b3ef9c3b5a.parquet" for n in range(2)], [20]),
        (["test_1_of_2.csv", "test_2_of_2.csv", "train.jsonl"], [20, 10]),
    ],
)
def test_a_folder_as_people_have_them_is_read_by_its_names(tmp_path, names, sizes):
    notes = []
    found = _raw_rows(layout(tmp_path, *names), 0, notes)
    assert sorted(map(len, found.values()), reverse=True) == sorted(sizes, reverse=True)
    assert all("extra.csv" in note for note in notes)


def test_a_folder_that_datasets_saved_is_read(tmp_path):
    Dataset.from_list(PAIRS).save_to_disk(tmp_path / "one", num_shards=2)
    DatasetDict(train=Dataset.from_list(PAIRS), test=Dataset.from_list(PAIRS[:9])).save_to_disk(tmp_path / "two")
    assert _raw_rows(DataSettings(source=str(tmp_path / "one")), 0, []) == {"train": PAIRS}
    assert _raw_rows(DataSettings(source=str(tmp_path / "two")), 0, []) == {"train": PAIRS, "test": PAIRS[:9]}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["en/train.jsonl", "de/train.jsonl"], r"2 sets of train rows .*de/train.jsonl, .*en/train.jsonl"),
        (["train.jsonl", "train.csv"], "2 sets of train rows"),
        (["train.jsonl", "val.jsonl", "dev.jsonl"], "2 sets of validation rows"),
        (["one.jsonl", "other.jsonl"], r"0 sets of train rows .*one.jsonl, .*other.jsonl.*one file named train"),
    ],
)
def test_a_folder_that_can_be_read_in_two_ways_is_refused(tmp_path, names, said):
    with pytest.raises(UserError, match=said):
        load_rows(layout(tmp_path, *names), 0)


ASK, SAY = [{"role": "user", "content": "Why?"}], [{"role": "assistant", "content": "So."}]
SHARE = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "So."}]


@pytest.mark.parametrize(
    "row",
    [
        {"id": "1", "conversations": SHARE},
        {"messages": json.dumps(ASK + SAY), "source": "x"},
        {"prompt": ASK, "completion": SAY},
        {"prompt": ASK, "chosen": SAY, "rejected": ASK},
        {"prompt": json.dumps(ASK), "chosen": json.dumps(SAY), "rejected": json.dumps(SAY)},
        {"prompt": "Why?", "chosen": ASK + SAY, "rejected": ASK + SAY},
        {"prompt": ASK, "chosen": ASK + SAY, "rejected": ASK + SAY},
        {"dialog": ASK + SAY, "id": 3},
        {"prompt": "Why?", "completion": "So."},
        {"prompt": "Why?", "chosen": "So.", "rejected": "No."},
        {"instruction": "Why?", "input": "", "output": "So."},
        {"question": "Why?", "answer": "So.", "history": ASK + SAY},
    ],
)
def test_the_usual_columns_are_found(row):
    kind, shape, _ = _shape(DataSettings(), None, [row])
    made = shape(row)
    if kind == "chat":
        assert [message["content"] for message in made["messages"]] == ["Why?", "So."]
    else:
        assert "Why?" in made["prompt"]
        assert made["response"] == "So."


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"title": "a", "body": "b"}, r"columns 'title', 'body'.*--data.prompt_template '{COLUMN}'"),
        ({"chosen": "Human: a", "rejected": "b"}, "columns 'chosen', 'rejected'"),
        ({"question": ["a", "b"], "answer": "c"}, "20 rows whose column question is a list, not a text dropped"),
        ({"instruction": ["a", "b"], "output": "c"}, "a list where a text is expected"),
    ],
)
def test_columns_that_are_not_known_are_named_with_the_next_step(tmp_path, row, said):
    with pytest.raises(UserError, match=said):
        load_rows(DataSettings(source=write(tmp_path / "r.jsonl", [row] * 20)), 0)


def test_columns_that_are_not_read_and_missing_values_are_told(tmp_path):
    rows = [row | {"context": "It is.", "answer": row["answer"] if n else float("nan")} for n, row in enumerate(PAIRS)]
    notes = load_rows(DataSettings(source=write(tmp_path / "r.jsonl", rows)), 0).notes
    assert notes == ["columns that are not read: 'context'", "train: 1 row without the column answer dropped (row 1)"]


def test_the_examples_of_the_quickstart_and_the_splits_of_pairs_stay_as_they_are(tmp_path):
    sources = (SMALL, DataSettings(source=write(tmp_path / "a.jsonl", PAIRS)))
    digests = []
    for settings in sources:
        splits = load_rows(settings, 0).splits
        texts = [[row["prompt"], row["response"]] for split in SPLITS for row in splits[split]]
        digests.append(hashlib.sha256(json.dumps([*map(len, splits.values()), texts]).encode()).hexdigest()[:16])
    assert digests == DIGESTS


@pytest.mark.parametrize("kind", ["chat", "pairs"])
def test_rows_that_begin_alike_are_spread_over_the_splits_and_equal_rows_share_one(tmp_path, kind):
    rows = [("Hi", f"answer {n % 200}") for n in range(400)] + [(f"prompt {n}", "answer") for n in range(60)]
    if kind == "pairs":
        made = [{"prompt": prompt, "response": answer} for prompt, answer in rows]
    else:
        made = [{"messages": [{"role": "user", "content": p}, {"role": "assistant", "content": a}]} for p, a in rows]
    loaded = load_rows(DataSettings(source=write(tmp_path / "r.jsonl", made)), 0)
    sizes = {split: len(rows) for split, rows in loaded.splits.items()}
    assert sum(sizes.values()) == 460
    assert all(46 <= sizes[split] <= 140 for split in ("validation", "test"))  # a fifth, see conftest.py
    texts = {split: {json.dumps({**row, "number": 0}) for row in rows} for split, rows in loaded.splits.items()}
    assert len(set.union(*texts.values())) == sum(map(len, texts.values())) == 260
    assert [note for note in loaded.notes if "400 rows have the prompt 'Hi'" in note] == loaded.notes
    assert len(loaded.notes) == (kind == "pairs")


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
        ({"difficulty": 9}, "difficulty '9'"),
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
    """The Hub's libraries read a local folder in the place of a repository."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
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


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_data_set_whose_files_disagree_is_refused_with_the_next_step(tmp_path, monkeypatch, streaming):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # which an earlier test may have found
    (tmp_path / "hub").mkdir()
    write(tmp_path / "hub" / "train-1.jsonl", PAIRS[:50])
    write(tmp_path / "hub" / "train-2.jsonl", [{"prompt": "a", "response": "b"}])
    monkeypatch.setitem(PRESETS, "gsm8k", replace(PRESETS["gsm8k"], hub=str(tmp_path / "hub"), config=None))
    with pytest.raises(UserError, match=r"column names don't match.*hf download.*--local-dir") as error:
        load_rows(DataSettings(source="gsm8k", streaming=streaming), 0)
    assert "\n" not in str(error.value)
