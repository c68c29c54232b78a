"""Sources read as streams: no further than wanted examples need, with the examples that a whole source would give."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from decode.bench.datasets import PRESETS
from decode.errors import UserError
from distill.config.data import DataSettings
from distill.data.corpus import Corpus, load_corpus
from distill.data.sources import SPLITS, RowFile, load_rows

PAIRS = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(200)]
FEW = {"train_examples": 10, "validation_examples": 3, "test_examples": 3, "validation_fraction": 0.2}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def written(path: Path, rows: list[dict[str, str]], after: str = "") -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows) + after)
    return str(path)


def examples(corpus: Corpus) -> list[object]:
    return [getattr(corpus, split)[:] for split in SPLITS]


def test_a_stream_is_read_no_further_than_it_may_be_needed(tmp_path: Path, cache: Path) -> None:
    long = written(tmp_path / "long.jsonl", PAIRS[:64], after="no json\n")  # 4 (10 + 3 + 3) rows are enough
    rows = load_rows(DataSettings(source=long, streaming=True, **FEW), seed=0)
    assert all(isinstance(rows.splits[split], RowFile) for split in SPLITS)
    assert sum(len(rows.splits[split]) for split in SPLITS) == 64
    short = written(tmp_path / "short.jsonl", PAIRS[:64])
    streamed, whole = (
        load_corpus(DataSettings(source=path, streaming=path == long, **FEW), seed=1) for path in (long, short)
    )
    assert examples(streamed) == examples(whole)
    assert len(streamed.train) == 10
    assert not list(cache.iterdir())  # its files have no names any more
    with pytest.raises(UserError, match="line 65"):
        load_corpus(DataSettings(source=long, **FEW), seed=1)


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_all_examples_of_a_stream_are_those_of_the_whole_source(tmp_path: Path, ending: str) -> None:
    settings = DataSettings(source=written(tmp_path / f"rows.{ending}", PAIRS), train_examples="all", max_length=32)
    streamed, whole = (load_corpus(replace(settings, streaming=streaming), seed=0) for streaming in (True, False))
    assert examples(streamed) == examples(whole)
    assert sum(len(getattr(whole, split)) for split in SPLITS) > 190


def test_memory_does_not_grow_with_the_texts_of_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Python, numpy and Arrow hold at most, apart from mapped files: a few numbers a row, and no text."""
    monkeypatch.setattr("distill.data.example_table.STREAMED", 200)
    monkeypatch.setattr("distill.data.sources.BATCH", 100)
    peaks = []
    for count in (400, 2000):
        rows = [{"question": f"{n} " + "why " * 400, "answer": "so " * 400} for n in range(count)]
        settings = DataSettings(
            source=written(tmp_path / f"{count}.jsonl", rows), train_examples="all", max_length=16, overlong="cut",
            streaming=True, tokenizer_vocab_size=300, workers=1, text_column="text",
        )  # fmt: skip
        del rows
        tracemalloc.start()
        load_rows(settings, seed=0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert (peaks[1] - peaks[0]) / 1600 < 100, peaks


@pytest.mark.parametrize("limit", [10, "all"])
def test_a_data_set_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str) -> None:
    """The Hub's libraries read a local folder in the place of a repository, and take it for one that answers."""
    (tmp_path / "hub").mkdir()
    written(tmp_path / "hub" / "train.jsonl", PAIRS[:150])
    written(tmp_path / "hub" / "test.jsonl", PAIRS[150:])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setitem(PRESETS, "gsm8k", replace(PRESETS["gsm8k"], hub=str(tmp_path / "hub"), config=None))
    settings = DataSettings(source="gsm8k", streaming=True, **FEW | {"train_examples": limit})  # type: ignore[arg-type]
    rows = load_rows(settings, seed=0)
    assert [row["number"] for row in rows.splits["test"]] == list(range(1, 51))
    read = len(rows.splits["train"]) + len(rows.splits["validation"])
    assert read == (64 if limit == 10 else 150)
    assert len(load_corpus(settings, seed=0).train) == (10 if limit == 10 else len(rows.splits["train"]))
