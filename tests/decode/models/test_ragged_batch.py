"""A forward over several texts gives each the logits that it has alone."""

from __future__ import annotations

import random

import pytest
import torch
from families import FAST, VOCAB
from torch import Tensor
from transformers import PreTrainedModel

from decode.models.api import Read
from decode.models.fast import forward
from decode.models.fast.cache import PADDED, Row
from decode.models.fast.forward import FastRunner, fast_runner


def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def close(seen: Tensor, wanted: Tensor) -> bool:
    return seen.shape == wanted.shape and torch.allclose(seen, wanted, atol=1e-3, rtol=1e-4)  # logits vary by 3.4


def texts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(VOCAB) for _ in range(length)] for length in lengths]


def read(runner: FastRunner, caches: list[Row], texts: list[list[int]], counts: list[int], **options) -> list[Tensor]:
    """Each text's next `counts` tokens in one forward; the logits text by text."""
    feeds = [torch.tensor(text[cache.length : cache.length + n]) for cache, text, n in zip(caches, texts, counts)]
    return [out.logits for out in runner.forward(list(map(Read, caches, feeds)), **options)]


@pytest.mark.parametrize("tuned", [True, False])
@pytest.mark.parametrize("family", FAST)
@torch.inference_mode()
def test_texts_of_any_lengths_get_the_logits_that_each_has_alone(family: str, tuned: bool, tiny, monkeypatch) -> None:
    model = tiny(family)
    if not tuned:
        monkeypatch.setattr(forward, "tunable", lambda model: False)
    runner = fast_runner(model)
    texts = texts_of([9, 55, 14, 40])
    wanted = [logits_of(model, text) for text in texts]
    caches = [runner.new_cache() for _ in range(4)]
    for counts in ([3, PADDED + 9, 5, 1], [1, 1, 1, 1], [4, 2, 1, 7]):  # prompts, then a token each, then pieces
        starts = [cache.length for cache in caches]
        for start, n, seen, full in zip(starts, counts, read(runner, caches, texts, counts), wanted):
            assert close(seen, full[start : start + n])
    some, theirs = [caches[0], caches[2], caches[3]], [texts[0], texts[2], texts[3]]
    caches[2].truncate(4)
    for cache, text, seen in zip(some, theirs, read(runner, some, theirs, [1, 3, 2], last=1)):
        assert close(seen, logits_of(model, text[: cache.length])[-1:])
    (alone,) = read(runner, [caches[1]], [texts[1]], [2])  # one text among the others
    assert close(alone, wanted[1][PADDED + 12 : PADDED + 14])
