"""Sources read as streams: no further than wanted examples need, with the examples that a whole source would give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from decode.bench.datasets import PRESETS
from decode.errors import UserError
from distill.config.data import DataSettings
from distill.data.corpus import Corpus, load_corpus
from distill.data.sources import SPLITS, load_rows

PAIRS = [{"question": f"What is {n} plus {n}?", "answer": f"It is {2 * n}."} for n in range(200)]
FEW = {"train_examples": 10, "validation_examples": 3, "test_examples": 3}


def written(path: Path, rows: list[dict[str, str]], after: str = "") -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + after)
    return str(path)


def examples(corpus: Corpus) -> list[object]:
    return [getattr(corpus, split)[:] for split in SPLITS]


def test_a_stream_is_read_no_further_than_it_may_be_needed(tmp_path: Path) -> None:
    long = written(tmp_path / "long.jsonl", PAIRS[:64], after="no json\n")  # 4 (10 + 3 + 3) rows are enough
    short = written(tmp_path / "short.jsonl", PAIRS[:64])
    streamed, whole = (
        load_corpus(DataSettings(source=path, streaming=path == long, **FEW), seed=1) for path in (long, short)
    )
    assert examples(streamed) == examples(whole)
    assert len(streamed.train) == 10
    with pytest.raises(UserError, match="line 65"):
        load_corpus(DataSettings(source=long, **FEW), seed=1)


@pytest.mark.parametrize("limit", [10, "all"])
def test_a_data_set_of_the_hub_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | str) -> None:
    """The Hub's libraries read a local folder in the place of a repository, and take it for one that answers."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    written(tmp_path / "hub" / "train.jsonl", PAIRS[:150])
    written(tmp_path / "hub" / "test.jsonl", PAIRS[150:])
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", lambda *_, **__: None)
    monkeypatch.setitem(PRESETS, "gsm8k", replace(PRESETS["gsm8k"], hub=str(tmp_path / "hub"), config=None))
    settings = DataSettings(source="gsm8k", streaming=True, **FEW | {"train_examples": limit})  # type: ignore[arg-type]
    rows = load_rows(settings, seed=0)
    assert [row["number"] for row in rows.splits["test"]] == list(range(1, 51))
    assert len(rows.splits["train"]) + len(rows.splits["validation"]) == (64 if limit == 10 else 150)
