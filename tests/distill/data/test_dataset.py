"""Batches: what is in them, and an order that is a pure function of seed and step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from some_rows import add_column, from_lists
from torch.utils.data import DataLoader

from distill.data.chat import IGNORE
from distill.data.dataset import Batch, Examples, From, Schedule, TrainingBatches, label_mask


def examples() -> Examples:
    labels = [[IGNORE, 6, 7], [8, 9], [IGNORE, IGNORE, 12, 13]]
    made = from_lists([[5, 6, 7], [8, 9], [10, 11, 12, 13]], labels)
    return add_column(made, "value", np.arange(5, dtype=np.float32))


def test_labels_that_can_be_predicted_are_counted() -> None:
    rows = examples()
    assert rows.lengths.tolist() == [3, 2, 4]
    assert rows.label_offsets.tolist() == [0, 2, 3, 5]  # the first token of a text has nothing to be predicted from
    assert rows.label_count == 5
    assert rows.labels_of(np.array([0, 2, 2])) == 6
    assert [rows.prompt(i) for i in range(3)] == [[5], [8], [10, 11]]


def test_a_batch_is_padded_on_the_right_and_its_columns_are_in_the_order_of_its_labels() -> None:
    batch = examples().batch(np.array([2, 0]))
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


def test_a_batch_depends_on_seed_and_step_only() -> None:
    forwards, backwards = (Schedule(np.arange(17), batch_size=4, bucket=3, seed=1) for _ in range(2))
    expected = [forwards.batch(step).tolist() for step in range(12)]
    assert [backwards.batch(step).tolist() for step in reversed(range(12))] == expected[::-1]
    assert [Schedule(np.arange(17), 4, 3, seed=2).batch(step).tolist() for step in range(12)] != expected


def test_buckets_put_examples_of_like_length_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 400)

    def padding(bucket: int) -> float:
        batches = [lengths[Schedule(lengths, 10, bucket).batch(step)] for step in range(40)]
        return sum(int(batch.max() * len(batch) - batch.sum()) for batch in batches)

    assert padding(20) < padding(1) / 4


def test_a_steps_parts_weigh_their_share_of_its_labels_and_an_empty_part_weighs_nothing() -> None:
    rows = from_lists(
        [[1, 2, 3], [4, 5], [6, 7, 8], [9, 1]], [[IGNORE, 2, 3], [IGNORE] * 2, [IGNORE, 7, 8], [IGNORE] * 2]
    )
    batches = [
        TrainingBatches(rows, Schedule(rows.lengths, 4), 1, rank=rank, world=2, micros=2)[micro]
        for rank in range(2)
        for micro in range(2)
    ]
    means = [float((batch["labels"] != IGNORE).sum()) and 1.0 for batch in batches]
    assert sum(batch["weight"] * mean for batch, mean in zip(batches, means)) / 4 == pytest.approx(1.0)
    assert sorted(batch["part"] for batch in batches) == [0, 1, 2, 3]
    assert sorted(batch["weight"] for batch in batches) == [0.0, 0.0, 2.0, 2.0]


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
