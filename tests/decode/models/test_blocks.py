"""Block heads (DFlash, DSpark): their forward, and decoding that never changes the output's distribution."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from enumeration import Experiment, joint_bias
from families import build_architecture
from greedy import GREEDY, NEW, PROMPTS, assert_decodes, generate, together
from heads import make_block_head, plain_block, plain_scores, plain_visible
from plain_logits import after, response_logits
from reading import on_host, watched
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask
from transformers import AddedToken

from decode.core.draft import Drafts
from decode.core.sampling import LogitsWarper, TorchRng, argmax
from decode.core.stop import CostOptimal, Fixed, StopRule, max_probability, token_probability
from decode.drafters.model import BlockDrafter
from decode.drafters.trees import BlockTreeDrafter
from decode.errors import UserError
from decode.loop import Method, Text, run
from decode.measure.acceptance import as_drafted, offline_alphas
from decode.methods import MethodInputs, build
from decode.models.check import open_runner
from decode.models.fast.forward import fast_runner
from decode.models.heads.block import BlockHead, block_attention, seen_by_blocks
from decode.models.heads.block_config import block_config, default_layers, mask_token
from decode.models.heads.block_runner import BlockRunner
from decode.options import MethodOptions

SMALL = 8
PROMPT = [3, 1, 4, 1, 5, 1, 4]
KINDS = [("dflash", {}), ("dflash", {"from_anchor": True}), ("dspark", {}),
         ("dspark", {"draft_vocab": SMALL // 2}), ("dflash2", {}),
         ("dflash2", {"layers": 3, "window": 4, "is_causal": None, "conv_kernel_size": 3, "draft_vocab": SMALL // 2,
                      "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
         ("dflash", {"window": 5}), ("dspark", {"causal": True})]  # fmt: skip


@pytest.mark.parametrize(("window", "causal"), [(None, False), (3, False), (None, True), (4, True)])
def test_a_gpus_visibility_is_the_cpus_mask_and_vllms(window: int | None, causal: bool) -> None:
    anchors, slots, time = torch.tensor([[1, 3], [0, 4]]), 3, 5
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, n, 4, generator=generator) for n in (6, 11, 11))
    shape = anchors, slots, time, window, causal
    mask = create_mask(seen_by_blocks(*shape), 2, 1, 6, 11, device="cpu")
    for text, block in product(range(2), range(2)):
        p, rows = int(anchors[text, block]), slice(block * slots, (block + 1) * slots)
        seen = plain_visible(SimpleNamespace(window=window, causal=causal), p, slots)
        wanted = torch.zeros(slots, 11, dtype=torch.bool)
        wanted[:, :p], wanted[:, time + rows.start : time + rows.stop] = seen[:, :p], seen[:, p:]
        assert mask[text, 0, rows].equal(wanted)
    scores = (q @ k.mT / 2).masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(block_attention(*shape)(q, k, v), scores @ v)


@pytest.mark.parametrize(("dtype", "pack"), [(torch.float32, "on"), (torch.float64, "off")])
@pytest.mark.parametrize(("version", "shape"), KINDS)
def test_the_runner_drafts_what_the_plain_twin_says(
    version: str, shape: dict[str, Any], dtype: torch.dtype, pack: str, tiny
) -> None:
    target = tiny("llama", vocab_size=SMALL, dtype=dtype)
    head, texts = make_block_head(target, version, **shape), [PROMPT, [2, 7, 1, 3]]
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-5, "atol": 1e-6}
    runner = BlockRunner(head, target, pack)
    caches = [runner.new_cache() for _ in texts]
    with torch.inference_mode():
        for part in (slice(0, 2), slice(2, -1)):  # features come in pieces
            for cache, text in zip(caches, texts):
                states = target(input_ids=torch.tensor([text]), output_hidden_states=True).hidden_states
                cache.settle(torch.cat([states[layer][0] for layer in head.captured_layers], -1)[part])
            runner.draft(caches, [0, 0], [1, 2])  # a block leaves nothing in the cache
        drafts = [2, head.drafts]
        outputs = runner.draft(caches, [text[-1] for text in texts], drafts)
        alone = [(0, texts[1], n, runner.draft(caches[1:], texts[1][-1:], [n])) for n in (1, head.drafts)]
    for place, text, count, out in [*((i, *made, outputs) for i, made in enumerate(zip(texts, drafts))), *alone]:
        logits, hidden, *_ = plain_block(head, target, text, count)
        torch.testing.assert_close(out.logits[place, :count], logits, **close)
        torch.testing.assert_close(out.hidden[place, :count], hidden, **close)
        path, rows = list[int](), list[Tensor]()
        with torch.inference_mode():
            for slot in range(count):
                before = torch.tensor(path[-1:]) if path else None
                rows.append(runner.condition(out, slot, [place], before).logits)
                path += runner.target_ids(argmax(rows[-1])).tolist()
        torch.testing.assert_close(torch.cat(rows), plain_scores(head, target, text, path[:-1], count), **close)


@pytest.mark.parametrize(("version", "behind"), [("dflash", 0), ("dspark", 1)])
def test_the_last_slot_of_a_block_is_the_last_position_of_the_model(version: str, behind: int, tiny) -> None:
    target = tiny("llama", max_position_embeddings=12)
    head = make_block_head(target, version)
    runner = BlockRunner(head, target)
    assert [runner.remaining([0] * n) for n in (4, 11, 12)] == [head.drafts, 1 + behind, behind]
    last = runner.remaining([0] * 11)
    assert 11 - 1 + head.tokens(torch.tensor(0), last).shape[-1] == runner.limit == 12


def methods(head: BlockRunner, runner: Any, warp: LogitsWarper) -> dict[str, Method]:
    """Chains and trees, stopped by length and by what the head thinks of its tokens."""
    likeliest, drawn = (BlockDrafter(head, runner, warp, sample=sample) for sample in (False, True))
    stops = {"length": StopRule(3), "own": StopRule(3, token_probability, threshold=Fixed(0.3))}
    stops["cost"] = StopRule(3, max_probability, product=True, threshold=CostOptimal(0.3, every=1), refuse=True)
    found = {f"{name} {stop}": Method("", drafter, rule) for stop, rule in stops.items()
             for name, drafter in (("likeliest", likeliest), ("drawn", drawn))}  # fmt: skip
    tree = BlockTreeDrafter(head, runner, warp, width=2, nodes=5)
    return found | {"tree": Method("", tree, StopRule(3))}


@pytest.mark.parametrize(("version", "shape"), KINDS)
def test_block_heads_are_lossless(version: str, shape: dict[str, Any], double) -> None:
    target, warp = double("llama", vocab_size=SMALL), LogitsWarper(temperature=1.3, top_k=2)
    runner = fast_runner(target)
    head = BlockRunner(make_block_head(target, version, **shape), target)
    there = Experiment(runner, warp, PROMPT, 3, forward=after(target))
    cases = list(methods(head, runner, warp).items())
    for name, method in cases if shape is KINDS[2][1] else cases[KINDS.index((version, shape)) % 2 :: 2]:
        assert there.bias(method) < 1e-12, name
        assert sum(sum(r.drafted for r in trace) for trace in there.traces), name
        if shape is KINDS[2][1] and "cost" not in name:  # whose estimate learns from both texts
            with torch.inference_mode():
                assert joint_bias(runner, method, warp, [PROMPT, [2, 7]], 2) < 1e-12, name


@pytest.mark.parametrize(
    ("family", "version", "shape"), [*(("llama", *KINDS[i]) for i in (0, 2, 4)), ("gpt_neox", *KINDS[2])]
)
def test_greedy_text_is_that_of_generate(family: str, version: str, shape: dict[str, Any], tiny) -> None:
    target, prompts = tiny(family), [*PROMPTS, [5]]
    runner, head = open_runner(target), BlockRunner(make_block_head(target, version, **shape), target)
    wanted, options = [generate(target, prompt) for prompt in prompts], MethodOptions(draft_length=3, tree_nodes=7)
    for method in ("block", "block-tree", "hybrid", "cost-optimal"):
        inputs = MethodInputs(runner, GREEDY, head, options=options)
        for prompt, text in zip(prompts, wanted):
            assert_decodes(runner, build(method, inputs), text, prompt)
    system = build("block", MethodInputs(runner, GREEDY, head))
    found = together(runner, system, prompts, batch_size=2, max_new_tokens=NEW)
    assert [text.ids for text in found] == wanted


WINDOWED = {"window": 5, "is_causal": None, "layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    ("version", "shape"), [("dspark", {}), ("dflash2", WINDOWED), ("dflash2", WINDOWED | {"draft_vocab": 24})]
)
def test_every_round_drafts_each_slot_given_the_token_before(version: str, shape: Any, sample: bool, double) -> None:
    """Greedily or drawn from q, which a selector sets to 0 outside its candidates; a window's rows stay in the cache."""
    target = double("llama")
    module, warp, ids = make_block_head(target, version, **shape), LogitsWarper(0.8), list(PROMPTS[0])
    head, runner = BlockRunner(module, target), open_runner(target)
    options = MethodOptions(draft_length=3, sample_block=sample)
    method = build("block", MethodInputs(runner, warp, head, options=options))
    text, kept = Text(runner, method, warp, ids, max_new_tokens=12, rng=TorchRng(0)), module.draft_ids()
    proposed = list[Drafts]()
    watched(method.drafter, lambda _, drafts: proposed.append(drafts))  # rounds do not keep q
    for _ in run(runner, method, [text]):
        (draft,), q = on_host(proposed[-1]), proposed[-1].probs
        rows = plain_scores(module, target, ids, draft.ids[:-1], draft.depth) if draft.ids else ()
        for slot, (token, row) in enumerate(zip(draft.ids, rows, strict=True)):
            row = row[None]
            if kept is not None:
                row = row.new_full((1, len(target.lm_head.weight)), -torch.inf).index_copy(1, kept, row)
            if sample:
                torch.testing.assert_close(q[0, slot], warp(row)[0], rtol=1e-4, atol=1e-6)
                assert not module.candidates or int(q[0, slot].count_nonzero()) <= module.candidates
            else:
                assert (token, q) == (int(argmax(row)), None)
        ids = list(text.ids)
    assert len(ids) > 12


@pytest.mark.parametrize(("version", "block"), [("dflash", 5), ("dspark", 4), ("dflash2", 5)])
def test_offline_acceptance_of_every_slot_is_that_of_its_own_distribution(version: str, block: int, double) -> None:
    """In blocks of every length, whose slots see each other; of drawn tokens, and of the likeliest by p of these."""
    target = double("llama", vocab_size=SMALL)
    head, ids, start = make_block_head(target, version, block=block), [*PROMPT, 5, 6, 2, 7], len(PROMPT)
    both = offline_alphas(target, {"": head}, [(ids, start)], LogitsWarper(1.0), depth=3, likeliest=True)
    found, certain = both[""], as_drafted(both, "", head)
    p = response_logits(target, ids, start).softmax(-1)
    lengths = {head.drafts: found} | found[0].shorter
    assert sorted(lengths) == list(range(1, head.drafts + 1))
    for (count, by_depth), row in product(lengths.items(), (0, 3)):
        for i, alpha in enumerate(by_depth):
            anchor = start + row - i - 1
            if anchor < 0:
                assert alpha.texts[0][row] == 0
                continue
            rows = plain_scores(head, target, ids[: anchor + 1], ids[anchor + 1 : anchor + 1 + i], count)
            q = rows[i].softmax(-1)
            assert alpha.texts[0][row] == pytest.approx(torch.minimum(p[row], q).sum().item(), rel=1e-6)
            likeliest, drafted = certain[0].shorter.get(count, certain)[i], int(q.argmax())
            assert likeliest.texts[0][row] == pytest.approx(p[row, drafted].item(), rel=1e-6)
            assert likeliest.kept[0][row] == (drafted == ids[start + row])


@pytest.mark.parametrize("version", ["dspark", "dflash2"])
@pytest.mark.parametrize("name", ["Granite", "Gemma 2"])
def test_what_a_target_does_behind_its_output_head_is_done_to_a_block_s_logits(name: str, version: str) -> None:
    changes, finish = {
        "Granite": ({"logits_scaling": 3.0}, lambda x: x / 3),
        "Gemma 2": ({"final_logit_softcapping": 2.0}, lambda x: 2 * (x / 2).tanh()),
    }[name]
    target, tokens = build_architecture(name, **changes), torch.tensor(PROMPTS[:1])
    head, ids = make_block_head(target, version), PROMPTS[0]
    runner, row = BlockRunner(head, target), plain_scores(head, target, ids, [], head.drafts)
    with torch.inference_mode():
        states, cache = target(input_ids=tokens, output_hidden_states=True).hidden_states, runner.new_cache()
        features = torch.cat([states[layer] for layer in head.captured_layers], -1)
        cache.settle(features[0, :-1])
        out = runner.draft([cache], ids[-1:], [head.drafts])
        drafted = runner.condition(out, 0, [0], tokens[:, -1]).logits
        forced = head.teacher_forced(target, tokens, features, head.drafts)[0][:, -1]
    wanted = torch.where(row.isfinite(), finish(row), row)
    for made in (drafted, forced):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-4)


def test_what_does_not_fit_is_refused(tiny) -> None:
    config = tiny("llama").config
    layers = config.num_hidden_layers
    for wrong in ([layers - 1], [0, 0], [2, 1], [-1]):
        with pytest.raises(UserError, match="target layers"):
            block_config(config, "dflash", layers=1, block=4, mask_id=0, target_layers=wrong)
    with pytest.raises(UserError, match="a window of 3 tokens is shorter than a block of 4 slots"):
        BlockHead(block_config(config, "dflash", layers=1, block=4, mask_id=0, window=3))
    assert default_layers(36, 5) == (1, 9, 17, 25, 33)
    assert default_layers(30, 5) == (1, 8, 14, 20, 27)


def test_the_mask_is_a_token_that_no_text_holds() -> None:
    def mask(*tokens: str, rows: int | None = None, special: tuple[str, ...] = (), **ids: int) -> int:
        names = ["<pad>", "<eos>", *tokens]
        added = {i: AddedToken(token, special=token in special) for i, token in enumerate(names)}
        vocabulary: Any = SimpleNamespace(
            **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None, "mask_token_id": None} | ids,
            all_special_tokens=("<pad>", "<eos>", "<|reserved_5|>"),
            added_tokens_decoder=added,
            chat_template="<turn>{{ messages }}",
            get_vocab=lambda: {token: i for i, token in reversed([*enumerate(names)])},  # in no order of ids
        )
        return mask_token(vocabulary, rows or len(names))

    assert mask("a", "<|reserved_5|>", "ÿ") == 3
    assert mask("a", "<|reserved_5|>", "<unused>", rows=9) == 3  # the first, and no row behind
    assert mask("a", "[unused1]", "ÿ") == 3
    assert mask("a", "<|reserved_5|>", mask_token_id=2) == 2
    assert mask("a", "<|reserved_5|>", "ÿ", mask_token_id=0, bos_token_id=3) == 4  # what begins a text, or fills it up
    assert mask("a", "b", rows=6) == 4  # a row of the embedding behind the ids
    assert mask("a", "ÿ") == 3
    assert mask("a", "<0xFF>") == 3
    assert (
        mask("<repo>", "<file>", "a", "<turn>", special=("<eos>", "<repo>", "<file>", "<turn>")) == 3
    )  # as of SmolLM2
    with pytest.raises(UserError, match="add a special token"):
        mask("a", "reserved", "<turn>", special=("<turn>",))  # a word of texts, and a token of the template
