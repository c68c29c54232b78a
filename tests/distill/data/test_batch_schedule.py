"""Batches: what is in them, and an order that is a pure function of seed and step."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from distill.data.batches import Batch, TokenDataset, label_mask
from distill.data.chat import IGNORE
from distill.data.loader import EvalBatches, Schedule, TrainLoader


def dataset() -> Dataset:
    return Dataset.from_dict(
        {
            "input_ids": [[5, 6, 7], [8, 9], [10, 11, 12, 13]],
            "labels": [[IGNORE, 6, 7], [8, 9], [IGNORE, IGNORE, 12, 13]],
        }
    )


def test_rows_count_labels_that_can_be_predicted() -> None:
    rows = TokenDataset.of(dataset())
    assert len(rows) == 3
    assert rows.lengths.tolist() == [3, 2, 4]
    assert rows.label_offsets.tolist() == [0, 2, 3, 5]  # the first token of a text has nothing to be predicted from
    assert rows.label_count == 5
    assert rows.labels_of(np.array([0, 2, 2])) == 6
    assert len(TokenDataset.of(dataset(), limit=2)) == 2


def test_a_batch_is_padded_on_the_right_and_its_signals_are_in_the_order_of_its_labels() -> None:
    rows = TokenDataset.of(dataset())
    rows.signals["value"] = np.arange(5, dtype=np.float32)
    batch = rows.batch(np.array([2, 0]))
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13], [5, 6, 7, 0]]
    assert batch["labels"].tolist() == [[IGNORE, IGNORE, 12, 13], [IGNORE, 6, 7, IGNORE]]
    assert batch["value"].tolist() == [3.0, 4.0, 0.0, 1.0]
    assert int(label_mask(batch["labels"]).sum()) == len(batch["value"])


@pytest.mark.parametrize("bucket", [1, 4])
def test_every_example_is_seen_equally_often_across_epochs(bucket: int) -> None:
    schedule = Schedule(np.arange(20), batch_size=6, bucket=bucket, seed=3)
    seen = np.concatenate([schedule.batch(step) for step in range(40)])  # 240 = 12 epochs
    assert np.bincount(seen, minlength=20).tolist() == [12] * 20


def test_a_batch_depends_on_seed_and_step_only() -> None:
    forwards, backwards = (Schedule(np.arange(17), batch_size=4, bucket=3, seed=1) for _ in range(2))
    wanted = [forwards.batch(step).tolist() for step in range(12)]
    assert [backwards.batch(step).tolist() for step in reversed(range(12))] == wanted[::-1]
    assert [Schedule(np.arange(17), 4, 3, seed=2).batch(step).tolist() for step in range(12)] != wanted


def test_buckets_put_examples_of_like_length_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 400)

    def padding(bucket: int) -> float:
        batches = [lengths[Schedule(lengths, 10, bucket).batch(step)] for step in range(40)]
        return sum(int(batch.max() * len(batch) - batch.sum()) for batch in batches)

    assert padding(20) < padding(1) / 4


@pytest.mark.parametrize("row_length", [None, 9])
def test_processes_that_make_batches_ahead_make_the_same_and_the_place_is_that_of_what_was_drawn(
    row_length: int | None,
) -> None:
    rows = TokenDataset.of(dataset())
    rows.signals["value"] = np.arange(5, dtype=np.float32)
    schedule = Schedule(rows.lengths, batch_size=3, seed=0)

    def loader(workers: int) -> TrainLoader:
        return TrainLoader(rows, schedule, 6, micros=2, look_ahead=True, row_length=row_length, workers=workers)

    def content(batches: Iterable[Batch]) -> list[Any]:
        return [
            [
                {name: values.tolist() for name, values in part.items() if name != "step"}
                for part in (batch, *step.ahead)
            ]
            + [step.counts.tolist(), step.part]
            for batch in batches
            if (step := batch["step"])
        ]

    alone, before = loader(0), loader(2)
    whole, drawn = content(alone), content(islice(before, 4))
    again = loader(2)
    again.load_state_dict(before.state_dict())
    assert drawn + content(again) == whole
    assert before.drawn == 4
    assert (again.seen.tokens + before.seen.tokens, again.seen.places + before.seen.places) == (
        alone.seen.tokens,
        alone.seen.places,
    )


def test_evaluation_sees_every_example_once() -> None:
    rows = TokenDataset.of(dataset())
    batches = EvalBatches(rows, batch_size=2)
    assert sorted(int(i) for part in batches.indices() for i in part) == [0, 1, 2]
    assert len(batches) == len(list(batches)) == 2
