"""What is kept of a target: found again by any number of processes, made once, refused where the disk is too small."""

import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from some_rows import everything, from_lists, some_rows
from torch import Tensor

from decode.errors import UserError
from distill import kept as kept_module
from distill import ranks
from distill.data.dataset import FEATURES, Batch, Examples
from distill.kept import Kept, by_tokens
from distill.signal import kept as signal_kept
from distill.signal.kept import keep_columns, size_of

SHAPES = {FEATURES: ((2,), "float32"), "sums": ((), "int64")}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch) -> None:
    monkeypatch.setattr(kept_module, "TEXTS", 4)
    monkeypatch.setattr(signal_kept, "TOKENS", 60)


class Counted:
    """Values that are functions of the ids alone; remembers of which texts, and stops after some batches."""

    def __init__(self, batches: int = 10**9) -> None:
        self.texts, self.batches, self.tokens = list[tuple[int, ...]](), batches, list[int]()

    def __call__(self, batch: Batch) -> dict[str, Tensor]:
        if len(self.tokens) == self.batches:
            raise KeyboardInterrupt
        ids = batch["input_ids"]
        self.tokens.append(ids.numel())
        self.texts += [tuple(row[row > 0].tolist()) for row in ids]
        labels = batch["labels"].roll(-1, 1)
        labels[:, -1] = -100
        return {FEATURES: torch.stack([ids.float(), ids.float() ** 0.5], -1), "sums": labels[labels != -100]}


def keep(folder: Path, examples: Examples, batches: int = 10**9) -> Counted:
    counted = Counted(batches)
    keep_columns(Kept(SHAPES, folder), [examples], counted)
    return counted


def complete(examples: Examples) -> bool:
    """Whether every text has the values that are computed of it."""
    batch = everything(examples)
    return all(torch.equal(batch[name], values) for name, values in Counted()(batch).items())


def check_kept(folder: Path, examples: Examples) -> None:
    """All that a later process needs of these examples is there."""
    assert not keep(folder, examples).texts
    assert complete(examples)


def test_a_text_of_two_sets_may_begin_a_shard_of_each(tmp_path) -> None:
    """The second shard would take the place of the first one, and other texts' values that of the first one's."""
    longest = list(range(2, 14))
    sets = [from_lists(ids, ids) for ids in ([longest, [14] * 5, [15] * 4], [longest, [16] * 6])]
    for _ in range(2):
        keep_columns(Kept(SHAPES, tmp_path), sets, Counted())
        assert all(map(complete, sets))


def as_one_of(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    monkeypatch.setattr(ranks, "world", lambda: world)
    monkeypatch.setattr(ranks, "barrier", lambda: None)
    monkeypatch.setattr(ranks, "exchange", lambda value: [value] * world)


def together(monkeypatch: pytest.MonkeyPatch, folder: Path, world: int, batches: int = 10**9) -> list[Counted]:
    """What each of several processes, which are threads here, computes; after so many batches each they are killed."""
    here, gate, counted = threading.local(), threading.Barrier(world), [Counted(batches) for _ in range(world)]

    def exchange(value: int) -> list[int]:
        gate.wait()
        return [value] * world

    def process(rank: int) -> None:
        here.rank = rank
        try:
            keep_columns(Kept(SHAPES, folder), [some_rows(40, empty=[3])], counted[rank])
        except (KeyboardInterrupt, threading.BrokenBarrierError):
            gate.abort()

    with monkeypatch.context() as patch, ThreadPoolExecutor(world) as pool:
        for name, value in {"rank": lambda: here.rank, "world": lambda: world, "exchange": exchange}.items():
            patch.setattr(ranks, name, value)
        patch.setattr(ranks, "barrier", gate.wait)
        list(pool.map(process, range(world)))
    return counted


@pytest.mark.parametrize(
    ("before", "after", "share"), [(1, 1, 0.5), (1, 2, 0.1), (2, 1, 0.9), (3, 2, 0.1), (3, 2, 0.5), (3, 2, 0.9)]
)
def test_after_a_kill_any_number_of_processes_repeats_less_than_a_shard_each(
    tmp_path, monkeypatch, before: int, after: int, share: float
) -> None:
    whole = sum(len(each.tokens) for each in together(monkeypatch, tmp_path / "whole", 1))
    killed = together(monkeypatch, tmp_path / "a", before, max(1, int(share * whole / before)))
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "a").glob("*")}
    assert files or share == 0.1
    others = together(monkeypatch, tmp_path / "a", after)
    computed = [text for each in [*killed, *others] for text in each.texts]
    assert 0 <= len(computed) - 40 <= 4 * before
    assert {path: path.stat().st_mtime_ns for path in files} == files  # finished files are not written again
    check_kept(tmp_path / "a", some_rows(40, empty=[3]))
    ours, theirs = (sorted(path.read_bytes() for path in (tmp_path / name).iterdir()) for name in ("a", "whole"))
    assert ours == theirs  # to the bit those of an undisturbed process


def test_the_processes_have_like_shares_of_the_tokens_and_no_batch_more_than_the_limit(tmp_path, monkeypatch) -> None:
    lengths = np.random.default_rng(0).lognormal(4, 0.8, 2000).astype(int) + 5
    monkeypatch.setattr(kept_module, "TEXTS", 32)
    batches, shares = list(by_tokens(lengths, 1000)), []
    for rank in range(8):
        as_one_of(monkeypatch, rank, 8)
        shares.append(sum(int(lengths[batch].sum()) for batch in Kept(SHAPES, tmp_path).share(batches)))
    assert max(shares) < 1.1 * sum(shares) / 8
    assert sorted(np.concatenate(batches).tolist()) == list(range(2000))
    assert all(len(batch) == 1 or len(batch) * lengths[batch].max() <= 1000 for batch in batches)
    assert len(batches) < 1.5 * lengths.sum() / 1000


def test_texts_without_labels_alone_in_a_shard_have_no_values(tmp_path) -> None:
    keep(tmp_path, some_rows(3, empty=[0, 1, 2]))
    check_kept(tmp_path, some_rows(3, empty=[0, 1, 2]))


def test_a_shard_ends_before_the_bytes_that_it_may_hold(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(signal_kept, "BYTES", 250)
    keep(tmp_path, examples := some_rows(20))
    assert len(list(tmp_path.iterdir())) > 5
    assert complete(examples)


def test_a_file_that_is_cut_short_and_one_of_other_columns_are_made_again(tmp_path) -> None:
    keep(tmp_path, some_rows(4))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    for broken in (content[:-40], content[:17], b""):
        path.write_bytes(broken)
        examples = some_rows(4)
        assert len(keep(tmp_path, examples).texts) == 4
        assert complete(examples)
    more = SHAPES | {"more": ((), "int64")}
    counted = Counted()
    keep_columns(Kept(more, tmp_path), [some_rows(4)], lambda batch: (made := counted(batch)) | {"more": made["sums"]})
    assert len(counted.texts) == 4
    check_kept(tmp_path, some_rows(4))


def test_the_room_for_what_all_processes_will_write_is_asked_for_once(tmp_path, monkeypatch) -> None:
    size = size_of(some_rows(40), SHAPES)
    as_one_of(monkeypatch, 3, 8)
    for free, enough in ((size - 1, False), (size, True)):  # an eighth is what this process writes
        usage = shutil.disk_usage(tmp_path)._replace(free=free)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
            patch.setattr(Kept, "join", lambda self, keys: None)
            words = r"needs 0.00 GB and 0.00 GB are free there: free some space, such as .*, use fewer"
            with nullcontext() if enough else pytest.raises(UserError, match=words):
                keep(tmp_path / "a", some_rows(40))
    as_one_of(monkeypatch, 0, 1)
    keep(tmp_path / "a", some_rows(40))
    stored = sum(path.stat().st_size for path in (tmp_path / "a").iterdir())
    assert size < stored < size + 10 * 1000  # the headers of ten files


def test_a_full_disk_and_values_that_are_not_finite_leave_nothing(tmp_path) -> None:
    def infinite(batch: Batch) -> dict[str, Tensor]:
        return {name: values * torch.inf for name, values in Counted()(batch).items()}

    with pytest.raises(UserError, match=r"features is not finite in a batch of examples \[\d+, "):
        keep_columns(Kept(SHAPES, tmp_path / "a"), [some_rows(20)], infinite)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, unlimited[1]))  # as a disk that another one fills meanwhile
        with pytest.raises(OSError, match=r"'.*/[0-9a-f]{16}.safetensors'"):
            keep(tmp_path / "a", some_rows(20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert not list((tmp_path / "a").iterdir())


def test_processes_that_see_other_folders_are_refused(tmp_path, monkeypatch) -> None:
    as_one_of(monkeypatch, 0, 2)
    monkeypatch.setattr(ranks, "SEEN", 0.0)
    with pytest.raises(UserError, match="is not seen alike by all processes"):  # the other one's shards are not there
        keep(tmp_path, some_rows(40))


def test_a_shard_that_a_shared_disk_shows_late_is_waited_for(tmp_path, monkeypatch) -> None:
    rows = some_rows(40)
    keep(tmp_path / "other", rows)
    as_one_of(monkeypatch, 0, 2)
    late = Kept(SHAPES, tmp_path / "here")
    monkeypatch.setattr("time.sleep", lambda _: shutil.copytree(tmp_path / "other", late.folder))
    late.join(rows.keys)
    assert (late.find(rows.keys) >= 0).all()


def test_more_than_two_to_the_31_numbers_fit_into_a_shard(tmp_path) -> None:
    """The file is sparse: its numbers are read at the far end of what Arrow's lists could not hold."""
    path, count = tmp_path / "0000000000000001.safetensors", (1 << 31) + 1000
    header = (
        f'{{"keys":{{"dtype":"U64","shape":[2],"data_offsets":[0,16]}},'
        f'"x.ends":{{"dtype":"I64","shape":[2],"data_offsets":[16,32]}},'
        f'"x":{{"dtype":"U8","shape":[{count}],"data_offsets":[32,{32 + count}]}}}}'
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(np.array([1, 2], np.uint64).tobytes() + np.array([count - 3, count], np.int64).tobytes())
        file.seek(8 + len(header) + 32 + count - 3)
        file.write(bytes([7, 8, 9]))
    try:
        kept = Kept({"x": ((), "uint8")}, tmp_path)
        assert kept.get("x", 2).tolist() == [7, 8, 9]
    finally:
        os.remove(path)
