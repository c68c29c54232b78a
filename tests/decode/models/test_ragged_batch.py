"""A forward over several texts gives each the logits that it has alone."""

from __future__ import annotations

import random

import pytest
import torch
from families import RUNNER_PATHS, VOCAB
from reading import draws_named
from torch import Tensor
from transformers import PreTrainedModel

from decode.draft import Draft
from decode.models import fast_runner as fast_module
from decode.models import writing as batched_generation
from decode.models.fast_runner import FastRunner, fast_runner
from decode.models.ragged_batch import Row
from decode.models.writing import write_texts
from decode.sampling import LogitsWarper

FAST = [family for family, fast in RUNNER_PATHS if fast]


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def close(seen: Tensor, wanted: Tensor) -> bool:
    return seen.shape == wanted.shape and torch.allclose(seen, wanted, atol=2e-4, rtol=1e-4)


def texts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(length)] for length in lengths]


def read(runner: FastRunner, caches: list[Row], texts: list[list[int]], counts: list[int], **options) -> list[Tensor]:  # type: ignore[no-untyped-def]
    """Each text's next `counts` tokens in one forward; the logits text by text."""
    feeds = [torch.tensor(text[cache.length : cache.length + n]) for cache, text, n in zip(caches, texts, counts)]
    return [out.logits for out in runner.forward(caches, feeds, **options).split(counts)]


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("family", FAST)
@torch.inference_mode()
def test_texts_of_any_lengths_get_the_logits_that_each_has_alone(
    family: str, tuned: bool, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    if not tuned:
        monkeypatch.setattr(fast_module, "tunable", lambda model: False)
    runner = fast_runner(model)
    texts = texts_of([9, 50, 14, 40])
    wanted = [logits_of(model, text) for text in texts]
    caches = [runner.new_cache() for _ in range(4)]
    for counts in ([3, 36, 5, 1], [1, 1, 1, 1], [4, 2, 1, 7]):  # prompts, then a token each, then pieces
        starts = [cache.length for cache in caches]
        for start, n, seen, whole in zip(starts, counts, read(runner, caches, texts, counts), wanted):
            assert close(seen, whole[start : start + n])
    some, own = [caches[0], caches[2], caches[3]], [texts[0], texts[2], texts[3]]
    caches[2].truncate(4)
    for cache, text, seen in zip(some, own, read(runner, some, own, [1, 3, 2], last=1)):
        assert close(seen, logits_of(model, text[: cache.length])[-1:])
    (alone,) = read(runner, [caches[1]], [texts[1]], [2])  # one text among the others
    assert close(alone, wanted[1][39:41])


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "phi"])
@torch.inference_mode()
def test_a_tree_of_one_text_is_read_beside_chains_of_others(family: str, tiny) -> None:
    model = tiny(family)
    runner = fast_runner(model)
    caches, texts = [runner.new_cache() for _ in range(3)], texts_of([7, 9, 12])
    read(runner, caches, texts, [6, 8, 11])
    tree = Draft.tree([5, 9, 5, 30, 31, 7], [-1, -1, 0, 1, 3, 0])
    feeds = [torch.tensor(ids) for ids in ([texts[0][-1], 8, 4], [texts[1][-1], *tree.ids], texts[2][-1:])]
    seen = [out.logits for out in runner.forward(caches, feeds, [None, tree, None]).split([3, 7, 1])]
    assert close(seen[0], logits_of(model, [*texts[0], 8, 4])[-3:])
    assert close(seen[2], logits_of(model, texts[2])[-1:])
    for node in range(-1, len(tree)):
        assert close(seen[1][node + 1], logits_of(model, tree.text_before(texts[1], node))[-1])
    caches[1].keep(8, [8, 10, 12, 13])  # the pending token and the nodes 1, 3, 4
    text = [*texts[1], 9, 30, 31, 2]
    assert close(read(runner, [caches[1]], [text], [1])[0], logits_of(model, text)[-1:])


@torch.inference_mode()
def test_a_closed_text_leaves_the_others_as_they_are_and_the_last_one_gives_the_memory_back(tiny) -> None:
    model = tiny("llama")
    runner = fast_runner(model)
    caches, texts = [runner.new_cache() for _ in range(4)], texts_of([5, 6, 7, 8])
    read(runner, caches, texts, [4, 5, 6, 7])
    caches[1].close()
    left, own = [caches[0], caches[3], caches[2]], [texts[0], texts[3], texts[2]]
    for seen, text in zip(read(runner, left, own, [1, 1, 1]), own):
        assert close(seen, logits_of(model, text)[-1:])
    assert [caches[i].row for i in (0, 2, 3)] == [0, 2, 1]  # the last row moved into the free one
    again = runner.new_cache()
    again.close()
    caches[0].close()
    caches[3].close()
    caches[3].close()
    assert runner.network.cache.tensor.shape[1] == 1
    text = [*texts[2], 9]
    assert close(read(runner, [caches[2]], [text], [1])[0], logits_of(model, text)[-1:])


@torch.inference_mode()
def test_the_cache_grows_with_the_longest_text(tiny) -> None:
    model = tiny("llama", max_position_embeddings=1024)
    runner = fast_runner(model)
    caches, texts = [runner.new_cache() for _ in range(3)], texts_of([600, 3, 400])
    first = read(runner, caches, texts, [200, 1, 100])
    assert runner.network.cache.capacity == 256
    seen = read(runner, caches, texts, [400, 2, 300])
    assert 600 <= runner.network.cache.capacity < 1024
    for a, b, text in zip(first, seen, texts):
        assert close(torch.cat([a, b]), logits_of(model, text))


@pytest.mark.parametrize("warp", [LogitsWarper(0.0), LogitsWarper(1.0)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch_size", [1, 2, 7, 16])
def test_a_text_depends_neither_on_its_neighbours_nor_on_when_it_is_begun(
    tiny, warp: LogitsWarper, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr(batched_generation, "PROMPT_TOKENS", 30)
    prompts = texts_of([3, 40, 8, 1, 25, 13, 13, 2, 60, 5, 9])
    budgets = [min(20, 64 - len(prompt)) for prompt in prompts]

    def write(numbers: list[int], size: int | None) -> list[list[int]]:
        return write_texts(
            model, [prompts[i] for i in numbers], warp, budgets=[budgets[i] for i in numbers], stop_ids={7, 11},
            draws=lambda i, count: draws_named(5)(numbers[i], count), batch_size=size,
        )  # fmt: skip

    alone = [write([i], None)[0] for i in range(len(prompts))]
    assert len({len(text) for text in alone}) > 2  # they end at different times
    assert write(list(range(len(prompts))), batch_size) == alone
    assert write([8, 2, 0], 2) == [alone[8], alone[2], alone[0]]
