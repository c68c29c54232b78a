"""EAGLE: heads through their fast forward, chains and trees that never change the output's distribution."""

import math
from collections import defaultdict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from enumeration import Experiment, joint_bias
from families import CONTEXT
from greedy import GREEDY, NEW, PROMPTS, assert_decodes, generate
from heads import check_chain_attention, make_block_head, make_head
from plain_logits import after, head_logits
from reading import Drafting, Reader, paths, watched
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from decode.core.draft import Draft
from decode.core.lengths import DraftLengths, RoundCosts
from decode.core.sampling import LogitsWarper, TorchRng
from decode.core.stop import MeanOfRejected, StopRule, negative_entropy
from decode.drafters import model
from decode.drafters.base import Drafter
from decode.drafters.hybrid import HybridDrafter
from decode.drafters.model import BlockDrafter, FeatureDrafter, ModelDrafter
from decode.drafters.trees import FeatureTreeDrafter
from decode.errors import UserError
from decode.loop import Method, Text, decode_texts, run
from decode.methods import MethodInputs, build
from decode.models import api
from decode.models.api import Model
from decode.models.check import open_runner
from decode.models.fast.forward import FastForward, fast_runner
from decode.models.heads import block_runner
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.eagle import default_captured_layers
from decode.models.heads.files import head_kind, load_head, save_head
from decode.models.heads.runner import DraftHeadRunner, HeadRunner, in_target
from decode.models.huggingface import HuggingFaceRunner
from decode.options import MethodOptions

SMALL = 8
PROMPT = [3, 1, 4, 1, 5, 1, 4]


def as_runner(target: PreTrainedModel, version: int, pack: str = "off") -> HeadRunner:
    return HeadRunner(make_head(target, version), target, pack)


def begin(drafter: Drafter, target: Model, ids: list[int], **prompt: Any) -> Drafting:
    source = Reader(target)
    source.read(ids[:-1], head=0, capture=drafter.capture)
    source.cache.close()
    return Drafting(drafter, ids, captured=source.out.captured, **prompt)


def drafted(drafter: Drafter, target: Model, ids: list[int], window: int, max_depth: int = 10) -> Draft:
    with torch.inference_mode():
        return begin(drafter, target, ids).propose(ids, StopRule(window), max_depth)


@pytest.mark.parametrize(("version", "pack"), [(1, "off"), (3, "on")])
def test_a_level_of_a_tree_gives_each_path_what_its_chain_would(version: int, pack: str, tiny) -> None:
    target, ids = tiny("llama"), PROMPTS[0]
    runner, source = as_runner(target, version, pack), Reader(open_runner(target))
    source.read(ids[:-1], head=0, capture=runner.head.captured_layers)
    head, paths, chains = Reader(runner), [[4, 5], [4, 6], [9, 5]], []

    def restart() -> None:
        head.truncate(0)
        head.cache.settle(source.out.captured)
        head.read(ids, head=1)

    for path in paths:
        restart()
        chains.append(torch.cat([head.read([token], head=1) for token in path])[-1])
    restart()
    with torch.inference_mode():
        cache, states = head.cache, head.out.hidden[None, -1:].expand(1, 2, -1)
        first = runner.read_level([cache], torch.tensor([[4, 9]]), states, torch.eye(2)[None].bool(), 0)
        above = torch.tensor([[1, 0], [1, 0], [0, 1]])
        seen = torch.cat([above, torch.eye(3)], 1)[None].bool()
        level = runner.read_level([cache], torch.tensor([[5, 6, 5]]), first.hidden[None, [0, 0, 1]], seen, 1)
    rows = in_target(level.logits, runner.columns, runner.vocab_size)
    torch.testing.assert_close(rows, torch.stack(chains), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("threshold", [0.0, 0.05])
def test_a_tree_holds_the_likeliest_nodes_below_the_likeliest_of_each_level(threshold: float, tiny) -> None:
    target, numbers = tiny("llama"), torch.Generator().manual_seed(0)
    scores = -torch.randint(1, 16, (20, 3), generator=numbers).sort(-1).values / 4  # exact, and often equal
    ids, limits, least = torch.randint(0, 20, (20, 3), generator=numbers), [1, 4, 3, 5], math.log(threshold or 1e-300)
    shape = {"width": 3, "nodes": 7, "threshold": threshold}
    drafter = FeatureTreeDrafter(as_runner(target, 3), open_runner(target), GREEDY, **shape)

    def plain(first: int, limit: int) -> list[tuple[int, ...]]:
        nodes, above = [], [(0.0, (first,))]
        for _ in range(limit):
            level = [
                (score + scores[path[-1], i].item(), (*path, ids[path[-1], i].item()))
                for score, path in above
                for i in range(3)
            ]
            nodes += level
            above = sorted(level, key=lambda node: -node[0])[:3]
        return [path[1:] for score, path in sorted(nodes, key=lambda node: -node[0])[:7] if score >= least]

    first = torch.tensor([[3], [8], [12], [17]])
    grown = drafter.grow((scores[first], ids[first]), lambda level, at, x: (scores[x], ids[x]), limits, 3)
    for tree, token, limit in zip(grown, first[:, 0].tolist(), limits):
        assert sorted(paths(tree)) == sorted(plain(token, limit))
    assert grown[0].depth == 1
    assert max(tree.depth for tree in grown) > 2


TREES = [
    FeatureDrafter,
    lambda *made: HybridDrafter(FeatureDrafter(*made), match=2, length=4),
    lambda *made: HybridDrafter(FeatureTreeDrafter(*made, width=2, nodes=4), match=6, branch=3),
]


@pytest.mark.parametrize(("family", "fast", "version"), [("llama", True, 3), ("gpt2", False, 1)])
def test_feature_heads_draft_for_texts_together_what_changes_none(family, fast, version, tiny, count_forwards) -> None:
    target = tiny(family)
    runner, head = open_runner(target, fast=fast), as_runner(target, version)
    prompts = [*PROMPTS, [5], [2, 40, 7], [8] * (CONTEXT - 6)]
    end = generate(target, prompts[0], 16)[9]
    wanted = [generate(target, p, min(16, CONTEXT + 1 - len(p)), eos_token_id=end) for p in prompts]
    assert len({len(text) - len(prompt) for text, prompt in zip(wanted, prompts)}) > 2  # they end at different times
    for make, warp in product(TREES, (GREEDY, LogitsWarper(1.0)) if family == "llama" else (GREEDY,)):
        system = Method("", make(head, runner, warp), StopRule(4))

        def texts(*numbers: int, size: int, system: Method = system, warp: LogitsWarper = warp) -> list[Any]:
            rngs, some = [TorchRng(i) for i in numbers], [prompts[i] for i in numbers]
            count_forwards.clear()
            options = {"batch_size": size, "max_new_tokens": 16, "stop_ids": {end}}
            return decode_texts(runner, system, warp, some, rngs=rngs, **options)

        alone = [texts(i, size=1)[0] for i in range(len(prompts))]
        found = texts(*range(len(prompts)), size=3)
        assert [text.ids for text in found] == [text.ids for text in alone]
        drafted = ([[r.drafted for r in text.rounds] for text in some] for some in (found, alone))
        assert next(drafted) == next(drafted)
        assert head.network.cache.tensor.shape[1] == 1
        if warp is GREEDY:
            assert [text.ids for text in alone] == wanted
            assert sum(sum(r.drafted for r in text.rounds) for text in alone) > 40
        if fast and warp is GREEDY:  # three texts that draft alike take the forwards of one, but for their prompts'
            texts(1, size=1)
            single = len(count_forwards)
            texts(1, 1, 1, size=3)
            assert 8 < single <= len(count_forwards) <= single + 2 * 2


def test_what_followed_a_short_match_is_a_branch_of_the_heads_tree(tiny) -> None:
    target = tiny("llama")
    runner, head = open_runner(target), as_runner(target, 3)
    prompt = [4, 5, 6, 20, 21, 9, 5, 6]
    trees = []
    for branch in (0, 2):
        tree = FeatureTreeDrafter(head, runner, GREEDY, width=2, nodes=3)
        drafter = HybridDrafter(tree, match=4, branch=branch)
        trees.append(drafted(drafter, runner, prompt, 2, 5))
    without, beside = (set(paths(draft)) for draft in trees)
    assert len(without) == 3
    assert beside == without | {(20,), (20, 21)}
    for width, nodes, wanted in ((1, 60, 4), (4, 40, 40)):  # a chain of four levels, and a tree
        tree = drafted(FeatureTreeDrafter(head, runner, GREEDY, width=width, nodes=nodes), runner, prompt, 4)
        assert len(set(paths(tree))) == len(tree) == wanted

    assert isinstance(build("vanilla", MethodInputs(runner, GREEDY, head)).drafter, FeatureDrafter)
    for method, branch in (("hybrid", 0), ("hybrid-tree", 2)):  # a head's chain stays one: not every target reads trees
        made = build(method, MethodInputs(runner, GREEDY, head, options=MethodOptions(copy_branch=2)))
        assert isinstance(made.drafter, HybridDrafter)
        assert made.drafter.branch == branch


def test_a_head_that_was_passed_over_for_copies_drafts_what_a_fresh_one_does(tiny) -> None:
    target = tiny("llama")
    runner, head = open_runner(target), as_runner(target, 3)
    asked = []

    def look(requests: Any, drafts: Any) -> None:
        ids = requests[0].ids
        if drafts.lengths[0]:
            fresh = head_logits(head.head, target, [*ids, 0], len(ids))[0]
            assert int(fresh.argmax()) == int(drafts.tokens[0, 0])
            asked.append(len(ids))

    prompt = PROMPTS[0] + generate(target, PROMPTS[0])  # so that parts of what follows stood there before
    wanted = generate(target, prompt)
    hybrid = HybridDrafter(watched(FeatureDrafter(head, runner, GREEDY), look), match=2, length=4)
    trace = assert_decodes(runner, Method("hybrid", hybrid, StopRule(4)), wanted, prompt)
    assert 2 < len(asked) < len(trace) - 2


@pytest.mark.parametrize(
    ("family", "make", "version"),
    [("llama", fast_runner, 3), ("qwen3", fast_runner, 1), ("gpt_neox", HuggingFaceRunner, 3)],
)
def test_feature_heads_are_lossless(family: str, make: Callable[..., Model], version: int, double) -> None:
    target = double(family, vocab_size=SMALL)
    warp = LogitsWarper(temperature=1.3, top_k=2)
    runner, head = make(target), as_runner(target, version)
    there = Experiment(runner, warp, PROMPT, 3, forward=after(target))
    chain, tree = FeatureDrafter(head, runner, warp), FeatureTreeDrafter(head, runner, warp, width=2, nodes=5)
    pruned = FeatureTreeDrafter(head, runner, warp, width=3, threshold=0.03)
    hybrids = [HybridDrafter(drafter, match=2, length=3) for drafter in (chain, tree)]
    for drafter in (chain, tree, pruned, *hybrids, HybridDrafter(tree, match=3, branch=2)):
        assert there.bias(Method("", drafter, StopRule(3))) < 1e-12
        assert {r.accepted for trace in there.traces for r in trace} >= {0, 1}
        if family == "llama":
            with torch.inference_mode():
                assert joint_bias(runner, Method("", drafter, StopRule(3)), warp, [PROMPT, [2, 7]], 2) < 1e-12
    entropy = StopRule(20, negative_entropy, threshold=MeanOfRejected())
    assert there.bias(Method("", FeatureDrafter(head, runner, warp), entropy)) < 1e-12


@pytest.mark.parametrize("version", [1, 3])
def test_a_saved_head_drafts_identically(version, tiny, tmp_path) -> None:
    target = tiny("llama")
    head, ids = make_head(target, version), PROMPTS[1]
    save_head(head, tmp_path)
    assert head_kind(tmp_path)
    assert not head_kind(tmp_path / "absent")
    again = load_head(tmp_path, target)
    assert head_logits(again, target, ids, 3, 2).equal(head_logits(head, target, ids, 3, 2))
    file = tmp_path / "model.safetensors"
    if version == 3:  # of the tables of its vocabulary the mask follows from the other one
        state = load_file(file)
        drafted = state.pop("t2d").nonzero()[:, 0]
        save_file(state, file)
        assert load_head(tmp_path, target).draft_ids().equal(drafted)
    head.fc.weight.data[0, 0] = math.nan
    save_head(head, tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path} .*its weights are not finite"):
        load_head(tmp_path, target)


def test_three_different_states_are_captured_whatever_the_depth() -> None:
    assert all(len(set(default_captured_layers(layers))) == 3 for layers in range(3, 40))
    assert default_captured_layers(2) == (0, 1)
    assert default_captured_layers(32) == (2, 16, 29)
    assert default_captured_layers(4) == (1, 2, 3)
    with pytest.raises(UserError, match="1 layer"):
        default_captured_layers(1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_attention_to_a_text_and_a_chain_is_one_softmax_over_both(dtype: torch.dtype) -> None:
    check_chain_attention(dtype=dtype)


def test_what_attention_keeps_for_its_gradients_grows_with_the_length_alone() -> None:
    assert check_chain_attention(160) <= 2 * check_chain_attention(80)


def test_a_head_keeps_no_features_of_a_text_that_outgrew_its_context(tiny, recwarn) -> None:
    target = tiny("llama")
    head = make_head(target, 3)
    head.config.max_position_embeddings = len(PROMPT) + 2
    runner = open_runner(target)
    system = Method("eagle", FeatureDrafter(HeadRunner(head, target), runner, GREEDY), StopRule(2))
    for prompt in (PROMPT, PROMPT * 2):
        sequence, wanted = Text(runner, system, GREEDY, prompt, max_new_tokens=NEW), generate(target, prompt)
        for _ in run(runner, system, [sequence]):
            if len(sequence.ids) > len(PROMPT) + 4:
                assert len(sequence.state.cache.unread) == 0
        assert sequence.ids == wanted
    told = [str(warning.message) for warning in recwarn if "drafted" in str(warning.message)]
    assert told == [f"after {len(PROMPT) + 2} tokens nothing is drafted: the context of the EAGLE-3 head holds no more"]
    trace = assert_decodes(runner, system, generate(target, PROMPT[:3]), PROMPT[:3])
    assert sum(r.drafted for r in trace) > 0


def runners(target: PreTrainedModel) -> list[tuple[DraftHeadRunner, Callable[..., Drafter]]]:
    made = [(as_runner(target, version), FeatureDrafter) for version in (1, 3)]
    return [*made, (BlockRunner(make_block_head(target, "dflash"), target), BlockDrafter)]


def test_features_that_wait_while_nothing_is_drafted_are_bounded(tiny, monkeypatch) -> None:
    target, ids = tiny("llama", num_hidden_layers=6), PROMPTS[1] * 5
    runner = open_runner(target)
    monkeypatch.setattr(model, "PIECE", 8)
    monkeypatch.setattr(api, "PIECE", 8)
    monkeypatch.setattr(block_runner, "PIECE", 8)
    for head, make in runners(target):
        costs = RoundCosts({1: {0: 1.0, 1: 9.0, 3: 20.0}})  # nothing but a round now and then is drafted
        system = Method("", make(head, runner, GREEDY), StopRule(3), lengths=DraftLengths(costs, 3))
        text, waiting = Text(runner, system, GREEDY, ids, max_new_tokens=12), list[int]()
        for _, r in run(runner, system, [text]):
            waiting.append(len(text.state.cache.unread) * (not r.drafted))
        assert 0 < max(waiting) <= 8 + 1
        assert text.ids == generate(target, ids, 12)


def test_a_long_text_is_read_in_pieces_also_where_the_first_rounds_have_no_draft(tiny, monkeypatch) -> None:
    target, ids = tiny("llama", num_hidden_layers=6), PROMPTS[1] * 5
    runner, place = open_runner(target), FastForward.place
    counts = defaultdict(list)

    def placed(self: FastForward, new: Any) -> Any:
        counts[self].append(new[0].count)
        return place(self, new)

    for head, make in [*runners(target), (fast_runner(tiny("llama", seed=4)), None)]:
        drafter = ModelDrafter(head, GREEDY, head.vocab_size) if make is None else make(head, runner, GREEDY)
        wanted = drafted(drafter, runner, ids, 3)
        with monkeypatch.context() as patch, torch.inference_mode():
            for module in (api, model, block_runner):
                patch.setattr(module, "PIECE", 8)
            patch.setattr(ModelDrafter, "together", 8)
            patch.setattr(FastForward, "place", placed)
            for defer in (False, True):
                assert begin(drafter, runner, ids, defer_prefill=defer).propose(ids, StopRule(3), 10).ids == wanted.ids
        assert max(counts[head.network]) == 8


@pytest.mark.parametrize("length", [237, 247])
def test_a_tree_whose_level_fills_the_cache_to_its_last_slot_goes_on(length: int, tiny) -> None:
    target = tiny("llama", max_position_embeddings=512)
    runner, prompt = open_runner(target), [(7 * i + i // 9) % 40 for i in range(length)]
    method = build("eagle-tree", MethodInputs(runner, GREEDY, as_runner(target, 3)))
    assert_decodes(runner, method, generate(target, prompt, 256 - length), prompt, 256 - length)
