"""Both runners give the model's own logits: chains, trees, rollback, growth, every family."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path

import pytest
import torch
from families import RUNNER_PATHS, VOCAB
from reading import Reader
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from decode.draft import Draft
from decode.errors import UserError
from decode.models import choose_runner
from decode.models import families as fast_architectures
from decode.models import fast_runner as fast_module
from decode.models.choose_runner import open_runner
from decode.models.huggingface_runner import HuggingFaceRunner

TEXT = [3, 7, 1, 9, 3, 7, 22, 4, 40, 0, 11]
WAYS = {"fast": {}, "ordinary": {"fast": False}, "packed": {"pack": "on"}}
"""How a runner is opened."""
KINDS = ("llama", "llama-mha", "mistral", "qwen2-sliding", "qwen3", "gemma3", "phi", "gpt_neox", "gpt2", "gemma2")
PATHS = [
    (family, way)
    for family, fast in RUNNER_PATHS
    if family in KINDS
    for way in (("fast", "packed") if fast else ("ordinary",))
]


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def close(seen: Tensor, wanted: Tensor, atol: float = 2e-4) -> bool:
    return seen.shape == wanted.shape and torch.allclose(seen, wanted, atol=atol, rtol=1e-4)


@pytest.mark.parametrize(("family", "way"), PATHS)
@torch.inference_mode()
def test_reading_in_pieces_gives_the_logits_of_one_forward(family: str, way: str, tiny) -> None:
    model = tiny(family)
    runner = Reader(open_runner(model, **WAYS[way]))
    wanted = logits_of(model, TEXT)
    assert runner.read(TEXT[:4], head=0).shape == (0, VOCAB)
    assert close(runner.read(TEXT[4:5]), wanted[4:5])
    assert close(runner.read(TEXT[5:9], head=2), wanted[7:9])
    assert close(runner.read(TEXT[9:]), wanted[9:])
    assert runner.length == len(TEXT)
    head = model.get_output_embeddings()
    projected = torch.nn.functional.linear(runner.out.hidden, head.weight, head.bias)
    if getattr(model.config, "final_logit_softcapping", None):
        cap = model.config.final_logit_softcapping
        projected = cap * torch.tanh(projected / cap)
    assert close(projected, wanted[9:])  # `hidden` is what the head saw
    runner.truncate(6)
    runner.truncate(50)
    assert runner.length == 6
    assert close(runner.read(TEXT[6:8]), wanted[6:8])


@pytest.mark.parametrize("family", [family for family, fast in RUNNER_PATHS if fast])
def test_the_models_own_weights_serve_as_well_as_copies_made_for_the_processor(
    family: str, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny(family))
    tuned = open_runner(model)
    monkeypatch.setattr(fast_module, "tunable", lambda model: False)
    plain = open_runner(model)
    assert (tuned.network.shape.tuned, plain.network.shape.tuned) == (True, False)
    ids, tree = torch.tensor(TEXT), random_tree(1)
    tuned, plain = Reader(tuned), Reader(plain)
    with torch.inference_mode():
        for runner in (tuned, plain):
            assert close(torch.cat([runner.read(ids[:7]), runner.read(ids[7:8])]), logits_of(model, TEXT[:8]))
            runner.truncate(7)
        feed = torch.cat([ids[7:8], tree.tokens])
        assert close(plain.read(feed, tree), tuned.read(feed, tree))


def random_tree(seed: int, nodes: int = 12) -> Draft:
    dice = random.Random(seed)
    return Draft.tree([dice.randrange(VOCAB) for _ in range(nodes)], [dice.randrange(-1, i) for i in range(nodes)])


@pytest.mark.parametrize(("family", "way"), PATHS)
@torch.inference_mode()
def test_every_node_of_a_tree_sees_its_own_path_and_nothing_else(family: str, way: str, tiny) -> None:
    model = tiny(family)
    reader = Reader(open_runner(model, **WAYS[way]))
    prompt = list(TEXT)
    for seed in range(3):
        reader.truncate(0)
        reader.read(prompt[:-1], head=0)
        tree = random_tree(seed)
        assert not tree.is_chain
        scored = reader.read(torch.cat([torch.tensor(prompt[-1:]), tree.tokens]), tree)
        for node in range(-1, len(tree)):
            text = tree.text_before(prompt, node)
            assert close(scored[node + 1], logits_of(model, text)[-1]), (seed, node)
        deepest = max(range(len(tree)), key=tree.depths().__getitem__)
        path = []
        while deepest >= 0:
            path.insert(0, deepest)
            deepest = tree.parents[deepest]
        base = len(prompt) - 1
        reader.cache.keep(base, [base, *(base + 1 + node for node in path)])
        text = [*tree.text_before(prompt, path[-1]), 5, 6]
        assert reader.length == len(text) - 2
        assert close(reader.read([5, 6]), logits_of(model, text)[-2:])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3", "gpt_neox", "phi"])
@torch.inference_mode()
def test_texts_longer_than_the_first_allocation_are_read_right(family: str, way: str, tiny) -> None:
    model = tiny(family, max_position_embeddings=1024)
    runner = Reader(open_runner(model, **WAYS[way]))
    ids = torch.arange(600) * 7919 % VOCAB
    wanted = logits_of(model, ids.tolist())
    seen = torch.cat([runner.read(ids[:250]), runner.read(ids[250:270]), runner.read(ids[270:])])
    assert close(seen, wanted, atol=1e-3)
    runner.truncate(100)
    runner.runner.reserve(capacity=700)
    assert close(runner.read(ids[100:400]), wanted[100:400], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_the_models_own_rounding_decides_what_its_forward_may_differ_by(
    dtype: torch.dtype, tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(tiny("llama")).to(dtype)
    wide = copy.deepcopy(model).float()
    ids = torch.arange(9) * 7919 + 1
    ids = torch.stack([ids, torch.cat([ids[:5], ids[5:] + 3])]) % VOCAB
    with torch.no_grad():
        own, exact = (m(input_ids=ids, use_cache=False).logits.float() for m in (model, wide))
    expected = float((own - exact).square().mean(-1).sqrt().max() / exact.std())
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    assert choose_runner.rounding(model, ids) == pytest.approx(expected, rel=1e-4)
    assert expected > 0
    assert all(v.dtype == dtype and torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert fast_architectures.supports(model)  # no hook stays

    assert type(open_runner(model)) is fast_module.FastRunner
    assert type(open_runner(model, fast=False)) is HuggingFaceRunner
    found = choose_runner.compare(model, open_runner(model))
    assert found.tolerance == pytest.approx(choose_runner.ROUNDINGS * expected, rel=1e-4)
    monkeypatch.setattr(fast_architectures, "norm", lambda module: torch.tanh)
    with pytest.warns(UserWarning, match="differs from LlamaForCausalLM"):
        assert type(open_runner(model)) is HuggingFaceRunner


@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-tied", "phi", "gpt_neox", "gpt2"])
def test_an_opened_model_can_still_be_run_saved_and_trained(family: str, tiny, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny(family))
    before, weights = logits_of(model, TEXT), {k: v.clone() for k, v in model.state_dict().items()}
    with torch.inference_mode():
        Reader(open_runner(model)).read(TEXT)
    assert torch.equal(before, logits_of(model, TEXT))
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())

    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(before, logits_of(again, TEXT))

    ids = torch.tensor([TEXT])
    model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    after = logits_of(model, TEXT)
    assert not torch.allclose(after, before, atol=1e-3)
    with torch.inference_mode():
        assert close(Reader(open_runner(model)).read(TEXT), after)


def test_weights_that_are_not_numbers_are_refused(tiny) -> None:
    model = copy.deepcopy(tiny("llama"))
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    with pytest.raises(UserError, match="not finite"):
        open_runner(model)


@torch.inference_mode()
def test_a_text_begins_clean_after_an_interrupted_forward(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("gpt2")
    runner = Reader(open_runner(model))

    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.transformer.h[1], "forward", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.read(TEXT)
    runner.truncate(0)
    assert close(runner.read(TEXT), logits_of(model, TEXT))


def test_a_tree_knows_its_depths_children_and_texts() -> None:
    tree = Draft.tree([5, 6, 7, 5], [-1, 0, -1, -1])
    assert tree.depths() == [1, 2, 1, 1]
    assert tree.children == [{5: 0, 7: 2}, {6: 1}, {}, {}, {}]  # of equal siblings the first counts
    assert tree.text_before([1, 2], 1) == [1, 2, 5, 6]
    assert tree.text_before([1, 2], -1) == [1, 2]
    assert Draft.chain(torch.tensor([4, 4])).is_chain
    assert Draft.empty().is_chain
    assert len(Draft.empty()) == 0
    with pytest.raises(ValueError, match="precede"):
        Draft.tree([1, 2], [1, -1])


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.text_before([], node)) for node in range(len(draft))}


def test_a_branch_joins_a_tree_where_they_agree_and_no_node_twice() -> None:
    tree = Draft.tree([5, 6, 7, 8], [-1, -1, 0, 2])
    assert paths(tree.with_branch([5, 7, 9])) == paths(tree) | {(5, 7, 9)}
    assert paths(tree.with_branch([6, 7])) == paths(tree) | {(6, 7)}
    assert paths(tree.with_branch([4, 5, 7])) == paths(tree) | {(4,), (4, 5), (4, 5, 7)}
    assert paths(tree.with_branch([5, 7, 8, 8])) == paths(tree) | {(5, 7, 8, 8)}
    for branch in ([5, 7, 9], [6, 7], [4, 5, 7], [5, 7, 8, 8], [3]):
        joined = tree.with_branch(branch)
        assert len(joined) == len(paths(joined)) == len(joined.tokens)
        assert all(parent < node for node, parent in enumerate(joined.parents))
        assert joined.parents[:4] == tree.parents  # the nodes of the tree keep their places
        assert torch.equal(joined.tokens[:4], tree.tokens)
    assert tree.with_branch([5, 7]) is tree  # it holds this one
