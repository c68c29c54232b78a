"""Invariant 1 through real models: tiny random transformers in float64, with the real caches, positions and masks."""

from __future__ import annotations

import copy

import pytest
from enumeration import Experiment
from families import resembling
from plain_logits import after
from scripted import RandomTree
from transformers import PreTrainedModel

from decode.core.sampling import LogitsWarper
from decode.core.stop import StopRule
from decode.drafters.model import ModelDrafter
from decode.loop import Method
from decode.models.api import Model
from decode.models.fast import weights
from decode.models.fast.forward import fast_runner
from decode.models.fast.weights import HalfLinear, Linear, PackedLinear, half_scale
from decode.models.huggingface import HuggingFaceRunner

TOLERANCE = 1e-12
VOCAB = 8
PROMPT = [3, 1, 4, 1, 5, 1, 4]
WARP = LogitsWarper(temperature=1.3, top_k=2)  # two tokens a position: many rounds at little cost


def experiment(model: PreTrainedModel, runner: Model, *, tokens: int) -> Experiment:
    return Experiment(runner, WARP, PROMPT, tokens, forward=after(model))


CASES = [
    ("llama", fast_runner),
    ("mistral", fast_runner),
    ("mistral", HuggingFaceRunner),
    ("gpt_neox", fast_runner),
    ("gpt2", HuggingFaceRunner),
    ("gemma3", fast_runner),
]
IDS = [f"{family}-{runner.__name__}" for family, runner in CASES]


@pytest.mark.parametrize(("family", "runner"), CASES, ids=IDS)
def test_chains_and_trees_are_lossless_through_real_caches(family: str, runner: type[Model], double) -> None:
    target = double(family, vocab_size=VOCAB)
    chains = experiment(target, runner(target), tokens=3)
    drafter = ModelDrafter(runner(resembling(target, 0.2)), WARP, VOCAB)
    assert chains.bias(Method("model", drafter, StopRule(5))) < TOLERANCE
    assert {r.accepted for trace in chains.traces for r in trace} == {0, 1, 2}
    trees, accepted = experiment(target, runner(target), tokens=5), set()
    for seed in range(2):
        assert trees.bias(Method("tree", RandomTree(VOCAB, nodes=60, seed=seed), StopRule())) < TOLERANCE
        accepted |= {r.accepted for trace in trees.traces for r in trace}
    assert accepted >= {0, 1}  # the cache was gathered along paths


@pytest.mark.parametrize("kind", [PackedLinear, HalfLinear])
def test_packed_weights_and_those_in_float16_are_lossless(kind: type[Linear], tiny, monkeypatch) -> None:
    """In float32, which the kernels take: the bias is its rounding, measured against fresh forwards of the model."""
    monkeypatch.setattr(weights, "HALVED", 1)
    monkeypatch.setattr(weights, "PACKED", 1)
    target = tiny("llama", vocab_size=VOCAB)
    if kind is HalfLinear:
        target = copy.deepcopy(target).bfloat16().float()
        if half_scale(target.lm_head.weight) is None:
            pytest.skip("FBGEMM is for x86 processors")
    runner = fast_runner(target, pack="auto")
    drafter = ModelDrafter(fast_runner(resembling(target, 0.2), pack="auto", draft=kind is HalfLinear), WARP, VOCAB)
    for made in (runner, drafter.runner):
        assert isinstance(made.network.weights.head, kind)  # type: ignore[attr-defined]
    there = experiment(target, runner, tokens=3)
    assert there.bias(Method("model", drafter, StopRule(5))) < 1e-5
    assert {r.accepted for trace in there.traces for r in trace} >= {0, 1}
    trees = experiment(target, runner, tokens=5)
    assert trees.bias(Method("tree", RandomTree(VOCAB, 0), StopRule())) < 1e-5
