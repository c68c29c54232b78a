"""Every architecture decodes as its own `generate` does, or is refused with a reason (docs/targets.md)."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    DOCS,
    FLOAT32,
    GENERATED,
    NO_TREES,
    RECURRENT,
    REFUSED,
    Opened,
    build_architecture,
    opened,
    table,
)
from families import VOCAB
from greedy import GREEDY, PROMPTS, assert_decodes, generate
from peft import LoraConfig, get_peft_model
from reading import Reader
from scripted import Oracle, RandomTree
from transformers import PreTrainedModel

from decode.drafters.base import NoDrafter
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import MethodInputs, build
from decode.models import families as fast_architectures
from decode.models import fast_forward
from decode.models import huggingface_runner as huggingface_module
from decode.models import huggingface_runner as tree_masks
from decode.models.choose_runner import compare, open_runner
from decode.models.families import supports
from decode.models.fast_runner import FastRunner, fast_runner
from decode.models.huggingface_runner import HuggingFaceRunner
from decode.stopping import StopRule

SERVED = [name for name in ARCHITECTURES if name not in REFUSED]
TREES = [name for name in SERVED if name not in NO_TREES]
NEW = 20


@cache
def model_of(name: str) -> PreTrainedModel:
    return build_architecture(name)


@cache
def opened_of(name: str) -> Opened:
    return opened(name, model_of(name))


@cache
def texts_of(name: str) -> list[list[int]]:
    """What generate writes; the longest of them reaches far past windows, chunks and longrope's boundary."""
    return [generate(model_of(name), prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("name", SERVED)
def test_greedy_texts_are_those_of_generate(name: str) -> None:
    """One token at a time, by chains that are right, wrong, half right, and by trees with the right branch hidden."""
    model = model_of(name)
    runners = [open_runner(model)]
    if isinstance(runners[0], FastRunner):
        packed = open_runner(model, pack="on")
        packed.network.first_qkv = None  # as where they would take too much memory
        runners += [packed, open_runner(model, fast=False)]
    ways = ["empty", "alternating", "wrong", "overlong"] + ["tree"] * (name not in NO_TREES)
    for runner in runners:
        for prompt, text in zip(PROMPTS, texts_of(name)):
            for way in ways:
                trace = assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, prompt, NEW)
                assert (sum(trace.accepted) > 3) == (way not in ("empty", "wrong"))
            if name not in NO_TREES:
                system = Method("random", RandomTree(VOCAB, nodes=20), StopRule())
                assert_decodes(runner, system, text, prompt, NEW)


@pytest.mark.parametrize("name", [name for name in SERVED if name not in FLOAT32])
def test_sixteen_bits_stay_close_to_fresh_forwards(name: str) -> None:
    model = build_architecture(name, dtype=torch.bfloat16)
    runner = open_runner(model)
    found = compare(model, runner)
    assert found.chain < found.tolerance
    assert found.tree < found.tolerance
    assert runner.supports_trees == (name not in NO_TREES)


@pytest.mark.parametrize("name", sorted(FLOAT32))
def test_sixteen_bits_are_refused_where_the_models_own_forward_fails_in_them(name: str) -> None:
    model = build_architecture(name, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        model(input_ids=torch.tensor([PROMPTS[1]]), use_cache=False)
    with pytest.raises(UserError, match=r"its forward fails here .*dtype"):
        open_runner(model)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_rolled_back_is_refused_with_what_to_use_instead(name: str) -> None:
    model = model_of(name)
    with pytest.raises(UserError) as refusal:
        open_runner(model)
    for fact in (type(model).__name__, "model.generate", "Llama"):
        assert fact in str(refusal.value)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "DeepSeek-V4", "Falcon-H1", "Gemma 4", "RWKV"])
def test_a_forward_interrupted_anywhere_leaves_nothing_behind(name: str) -> None:
    """Some layers have read the tokens then, one has read them in part (keys, but not its indexer's), some have not."""
    model, ids = model_of(name), torch.tensor([(7 * i + i // 5) % VOCAB for i in range(24)])
    runner, wanted = open_runner(model), model(input_ids=ids[None], use_cache=False).logits[0]
    inner = [module for module in model.modules() if not list(module.children()) and list(module.parameters())]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for module in inner[::5]:
        cache = runner.new_cache()
        runner.forward([cache], [ids[:9]])
        hook = module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.forward([cache], [ids[9:15]])
        hook.remove()
        cache.truncate(9)
        torch.testing.assert_close(runner.forward([cache], [ids[9:]]).logits, wanted[9:], atol=1e-3, rtol=1e-3)


def test_encoder_decoders_are_refused() -> None:
    model = copy.deepcopy(model_of("BART decoder"))
    model.config.is_encoder_decoder = True
    with pytest.raises(UserError, match="encoder–decoder"):
        open_runner(model)


@pytest.mark.parametrize("name", sorted(NO_TREES))
def test_methods_that_draft_trees_refuse_targets_that_read_none(name: str) -> None:
    runner = open_runner(model_of(name))
    with pytest.raises(UserError, match="cannot verify token trees: it"):
        build("lookahead", MethodInputs(runner, GREEDY))
    with pytest.raises(UserError, match="token trees"):
        decode(runner, Method("", RandomTree(VOCAB), StopRule()), GREEDY, PROMPTS[0])


@pytest.mark.parametrize(
    ("name", "field", "window"),
    [
        ("Mistral", "sliding_window", 6),
        ("Phi-3", "sliding_window", 6),
        ("Gemma 3", "sliding_window", 6),
        ("Gemma 3", "sliding_window", 128),
        ("Llama 4", "attention_chunk_size", 8),
        ("Llama 4", "attention_chunk_size", 8192),
    ],
)
def test_a_tree_mask_without_the_window_is_noticed(
    name: str, field: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the check at opening: it reads past the end of a window of any length."""

    def everything(*given, **options):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(tree_masks, "ALL_MASK_ATTENTION_FUNCTIONS", Windowless())
        return original(*given, **options)

    class Windowless(dict):
        def __setitem__(self, key: str, make) -> None:  # type: ignore[no-untyped-def]
            def whole(*, mask_function, **rest):  # type: ignore[no-untyped-def]
                return make(mask_function=lambda batch, head, q, kv: kv <= q, **rest)

            super().__setitem__(key, whole)
            masks[key] = whole

        def __delitem__(self, key: str) -> None:
            del masks[key]

    original, masks = tree_masks.masks_of_tree, tree_masks.ALL_MASK_ATTENTION_FUNCTIONS
    monkeypatch.setattr(huggingface_module, "masks_of_tree", everything)
    model = build_architecture(name, **{field: window})
    runner = open_runner(model, fast=False)
    assert getattr(model.config, field) == window
    assert runner.tree_refusal == "a tree's branches get other logits than the texts they stand for"


@pytest.mark.parametrize("name", ["Mistral", "Gemma 3"])
def test_long_prompts_are_read_past_a_window_of_128_as_generate_does(name: str) -> None:
    model = build_architecture(name, sliding_window=128, max_position_embeddings=400)
    prompt = [(7 * i + i // 9) % VOCAB for i in range(300)]
    text = generate(model, prompt, NEW)
    quick = open_runner(model)
    assert isinstance(quick, FastRunner)
    for runner in (quick, open_runner(model, fast=False)):
        for way in ("alternating", "tree"):
            assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, prompt, NEW)


def test_a_fast_forward_without_its_window_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the weights' window is read at every forward, so the check at opening can shorten it."""
    model = build_architecture("Mistral", sliding_window=128)
    made = fast_runner(model)
    vars(made.network.weights.kinds[0])["window"] = None
    assert compare(model, made).chain > 0.1


def test_adapters_decode_as_they_generate_and_leave_the_base_alone() -> None:
    base = copy.deepcopy(model_of("Llama"))
    plain = texts_of("Llama")[0]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    adapted.eval()
    text = generate(adapted, PROMPTS[0], NEW)
    assert text != plain
    for model in (adapted, adapted.get_base_model()):
        runner = open_runner(model)
        assert not supports(model)  # an adapter may be too small for the check at opening to notice
        for way in ("alternating", "tree"):
            assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, PROMPTS[0], NEW)
    merged = adapted.merge_and_unload()
    assert isinstance(open_runner(merged), FastRunner)
    assert_decodes(open_runner(merged), Method("", NoDrafter(), StopRule()), text, PROMPTS[0], NEW)


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Phi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opening_a_model_leaves_its_parameters_where_they_are(name: str, dtype: torch.dtype) -> None:
    model = build_architecture(name, dtype=dtype)
    before = {key: weight.data_ptr() for key, weight in model.named_parameters()}
    assert isinstance(open_runner(model), FastRunner)
    assert before == {key: weight.data_ptr() for key, weight in model.named_parameters()}


@pytest.mark.parametrize("name", ["Llama", "Llama, biases"])
def test_a_large_models_projections_are_fused_in_its_own_memory_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_architectures, "COPIED", 0)
    model = build_architecture(name)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    runner = open_runner(model)
    assert isinstance(runner, FastRunner)
    for _ in range(2):  # a second runner takes the weights that the first one has fused
        again = open_runner(model)
        for one, other, block in zip(runner.network.layers, again.network.layers, model.model.layers, strict=True):
            for name, part in (("qkv", block.self_attn.q_proj), ("up", block.mlp.gate_proj)):
                fused = getattr(one, name).weight
                assert fused.data_ptr() == getattr(other, name).weight.data_ptr() == part.weight.data_ptr()
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())
    ids = torch.tensor(PROMPTS[0])
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0]
        for each in (runner, again):
            torch.testing.assert_close(Reader(each).read(ids), wanted, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("name", "known"), [("Llama", True), ("Qwen3", True), ("Phi", False)])
def test_a_small_models_first_layer_is_looked_up_by_token(name: str, known: bool, monkeypatch) -> None:
    ids, model = torch.tensor(PROMPTS[0]), model_of(name)
    looking = open_runner(model)
    monkeypatch.setattr(fast_forward, "LOOKED_UP", 0)
    computing = open_runner(model)
    assert isinstance(looking, FastRunner)
    assert isinstance(computing, FastRunner)
    assert (looking.network.first_qkv is not None) == known  # Phi's MLP reads what attention reads
    assert computing.network.first_qkv is None
    torch.testing.assert_close(Reader(looking).read(ids), Reader(computing).read(ids), atol=1e-5, rtol=1e-5)


def test_hooks_are_not_left_out_by_the_fast_forward() -> None:
    model = copy.deepcopy(model_of("Llama"))
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 0.5)
    text = generate(model, PROMPTS[0], NEW)
    assert text != texts_of("Llama")[0]
    runner = open_runner(model)
    assert type(runner) is HuggingFaceRunner
    assert_decodes(runner, Method("", Oracle(text, "tree", VOCAB), StopRule()), text, PROMPTS[0], NEW)


@pytest.mark.parametrize("setting", ["attn_logit_softcapping", "final_logit_softcapping"])
def test_soft_caps_take_the_ordinary_call(setting: str) -> None:
    model = build_architecture("Gemma 3", **{setting: 5.0})
    runner = open_runner(model)
    assert type(runner) is HuggingFaceRunner
    text = generate(model, PROMPTS[0], NEW)
    assert_decodes(runner, Method("", Oracle(text, "alternating", VOCAB), StopRule()), text, PROMPTS[0], NEW)


@pytest.mark.parametrize("fast", [True, False])
def test_longrope_texts_are_those_of_fresh_forwards_on_both_sides_of_the_boundary(fast: bool) -> None:
    """Llama's own generate keeps keys of the short rotation behind the boundary; a fresh forward does not."""
    rope = ARCHITECTURES["Phi-3, rope longrope"][1]["rope_parameters"]
    model = build_architecture("Llama", rope_parameters=dict(rope))
    runner = open_runner(model, fast=fast)
    text = list(PROMPTS[0])
    with torch.inference_mode():
        for _ in range(NEW):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        rows = Reader(runner).read(text)
        for end in (15, 16, 17, 20):
            fresh = model(input_ids=torch.tensor([text[:end]]), use_cache=False).logits[0, -1]
            assert torch.allclose(rows[end - 1], fresh, atol=1e-3)
    for way in ("empty", "alternating", "overlong"):
        assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, PROMPTS[0], NEW)


def test_the_documented_tables_are_what_opening_the_models_says() -> None:
    made = GENERATED + table([opened_of(name) for name in ARCHITECTURES])
    again = "docs/targets.md is out of date: run python tests/support/architectures.py"
    assert DOCS.read_text(encoding="utf-8").endswith(made), again
    for name in ARCHITECTURES:
        assert (opened_of(name).group == "Refused") == (name in REFUSED), name
        assert (opened_of(name).group == "Recurrent and hybrid") == (name in RECURRENT), name
        assert (opened_of(name).cells.get("trees") == ("yes", "")) == (name in TREES), name
