"""Every architecture decodes as its own `generate` does, or is refused with a reason (docs/targets.md)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import pytest
import torch
from architectures import (
    ARCHITECTURES,
    DOCS,
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
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from decode.core.stop import StopRule
from decode.drafters.base import NoDrafter
from decode.errors import UserError
from decode.loop import Method, decode
from decode.methods import MethodInputs, build
from decode.models import huggingface
from decode.models.api import Model, Read
from decode.models.check import TOLERANCE, compare, open_runner, shorten_windows, twin_of
from decode.models.fast import layout
from decode.models.fast.forward import FastRunner, fast_runner
from decode.models.huggingface import HuggingFaceRunner

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
    """What generate writes; the longest of them reaches far past windows and chunks."""
    return [generate(model_of(name), prompt, NEW) for prompt in PROMPTS]


def assert_follows(runner: Model, text: list[int], ways: tuple[str, ...] = ("alternating", "tree")) -> None:
    for way in ways:
        assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, PROMPTS[0], NEW)


@pytest.mark.parametrize("name", SERVED)
def test_greedy_texts_are_those_of_generate(name: str) -> None:
    """One token at a time, by chains that are right, wrong, half right, and by trees with the right branch hidden."""
    model = model_of(name)
    runners = [open_runner(model)]
    if isinstance(runners[0], FastRunner):
        packed = open_runner(model, pack="on")
        packed.network.first_qkv = None  # as where they would take too much memory
        runners += [packed, open_runner(model, fast=False)]
    new = min(NEW, runners[0].limit + 1 - max(map(len, PROMPTS)))
    ways = ["empty", "alternating", "wrong"] + ["tree"] * (name not in NO_TREES)
    ways += ["overlong"] * (new == NEW)  # longrope's context ends at its boundary, behind which nothing may be read
    for runner in runners:
        for prompt, written in zip(PROMPTS, texts_of(name)):
            text = written[: len(prompt) + new]
            for way in ways:
                rounds = assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, prompt, new)
                assert (sum(r.accepted for r in rounds) > 3) == (way not in ("empty", "wrong"))
            if name not in NO_TREES:
                system = Method("random", RandomTree(VOCAB, nodes=20), StopRule())
                assert_decodes(runner, system, text, prompt, new)


def test_a_context_ends_where_longrope_would_rotate_all_keys_anew() -> None:
    model = model_of("Phi-3, rope longrope")
    runner = open_runner(model)
    assert (runner.limit, model.config.max_position_embeddings) == (16, 64)
    text = decode(runner, Method("", NoDrafter(), StopRule()), GREEDY, PROMPTS[0], max_new_tokens=NEW)
    assert (len(text.ids), text.finish) == (17, "context")


@pytest.mark.parametrize("name", SERVED)
def test_sixteen_bits_stay_close_to_fresh_forwards(name: str) -> None:
    model = build_architecture(name, dtype=torch.bfloat16)
    runner = open_runner(model)
    gaps = compare(model, runner)
    assert max(gaps.chain, gaps.tree) < TOLERANCE[torch.bfloat16]
    assert bool(runner.tree_refusal) == (name in NO_TREES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_rolled_back_is_refused_with_what_to_use_instead(name: str, dtype: torch.dtype) -> None:
    model = build_architecture(name, dtype=dtype)
    with pytest.raises(UserError) as refusal:
        open_runner(model)
    for fact in (type(model).__name__, "model.generate", "Llama"):
        assert fact in str(refusal.value)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["DeepSeek-V4", "DeepSeek-V3.2", "HY-V4", "Falcon-H1", "Gemma 4", "Bamba"])
def test_a_forward_interrupted_anywhere_leaves_nothing_behind(name: str) -> None:
    """Some layers have read the tokens then, one has read them in part, some have not."""
    model, ids = model_of(name), torch.tensor([(7 * i + i // 5) % VOCAB for i in range(24)])
    runner, wanted = open_runner(model), model(input_ids=ids[None], use_cache=False).logits[0]
    inner = [module for module in model.modules() if not list(module.children()) and list(module.parameters())]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for module in inner[::5]:
        text = runner.new_cache()
        runner.forward([Read(text, ids[:9])])
        hook = module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.forward([Read(text, ids[9:15])])
        hook.remove()
        text.truncate(9)
        torch.testing.assert_close(runner.forward([Read(text, ids[9:])]).logits, wanted[9:], atol=1e-3, rtol=1e-3)


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
        ("Gemma 3", "sliding_window", 128),
        ("Llama 4", "attention_chunk_size", 8192),
    ],
)
def test_a_tree_mask_without_the_window_is_noticed(
    name: str, field: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control of the check at opening: it reads past the end of a window of any length."""
    made = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def windowless(**given):
        if huggingface._SEEN.get() is not None:
            given["mask_function"] = lambda batch, head, q, kv: kv <= q
        return made(**given)

    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, "sdpa", windowless)
    model = build_architecture(name, **{field: window})
    runner = open_runner(model, fast=False)
    assert getattr(model.config, field) == window
    assert runner.tree_refusal == "a tree's branches get other logits than the texts they stand for"


@pytest.mark.parametrize(("dtype", "chosen"), [(torch.float32, 2), (torch.bfloat16, 512)])
def test_the_check_chooses_few_keys_where_rounding_does_not_choose_others(dtype: torch.dtype, chosen: int) -> None:
    model = build_architecture("DeepSeek-V4", dtype=dtype, index_topk=512)
    twin = twin_of(model)
    shorten_windows(twin, HuggingFaceRunner(model))
    for each, number in ((twin, chosen), (model, 512)):
        assert [part.index_topk for part in each.modules() if hasattr(part, "index_topk")] == [number]


@pytest.mark.parametrize(("name", "fast"), [("Mistral", True), ("Mistral", False), ("DeepSeek-V4", False)])
def test_opening_leaves_the_settings_of_the_callers_model_alone(name: str, fast: bool, monkeypatch: Any) -> None:
    model = build_architecture(name, **({"sliding_window": 128} if name == "Mistral" else {"index_topk": 512}))

    def settings() -> list[Any]:
        parts = [getattr(part, "index_topk", None) for part in model.modules()]
        return [model.config.to_dict(), model.config.get_text_config().to_dict(), parts]

    before, during = settings(), []
    forward = type(model).forward

    @wraps(forward)
    def watched(self: Any, *given: Any, **named: Any) -> Any:
        during.append((settings() == before, self.config.to_dict() == before[0]))
        return forward(self, *given, **named)

    monkeypatch.setattr(type(model), "forward", watched)
    open_runner(model, fast=fast)
    assert all(same for same, _ in during)
    assert name != "Mistral" or not any(as_opened for _, as_opened in during)  # the check did shorten a window


def test_a_fast_forward_without_its_window_is_not_used() -> None:
    """Negative control: the weights' window is read at every forward, so the check at opening can shorten it."""
    model = build_architecture("Mistral", sliding_window=128)
    made = fast_runner(model)
    vars(made.network.weights.kinds[0])["window"] = None
    assert compare(model, made).chain > 0.1


def test_adapters_decode_as_they_generate_and_leave_the_base_alone() -> None:
    base = copy.deepcopy(model_of("Llama"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    adapted.eval()
    text = generate(adapted, PROMPTS[0], NEW)
    assert text != texts_of("Llama")[0]
    for model in (adapted, adapted.get_base_model()):
        assert not layout.supports(model)  # an adapter may be too small for the check at opening to notice
        assert_follows(open_runner(model), text)
    merged = open_runner(adapted.merge_and_unload())
    assert isinstance(merged, FastRunner)
    assert_follows(merged, text)


@pytest.mark.parametrize("name", ["Llama", "Llama, biases"])
def test_a_large_models_projections_are_fused_in_its_own_memory_once(name: str, monkeypatch) -> None:
    monkeypatch.setattr(layout, "COPIED", 0)
    model = build_architecture(name)
    weights = {key: weight.clone() for key, weight in model.state_dict().items()}
    ids = torch.tensor(PROMPTS[0])
    with torch.inference_mode():
        wanted = model(input_ids=ids[None]).logits[0]
    first = open_runner(model)
    for runner in (first, open_runner(model)):  # a second runner takes the weights that the first one has fused
        for layer, other, block in zip(runner.network.layers, first.network.layers, model.model.layers, strict=True):
            for name, part in (("qkv", block.self_attn.q_proj), ("up", block.mlp.gate_proj)):
                fused = getattr(layer, name).weight
                assert fused.data_ptr() == getattr(other, name).weight.data_ptr() == part.weight.data_ptr()
        torch.testing.assert_close(Reader(runner).read(ids), wanted, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(weight, weights[key]) for key, weight in model.state_dict().items())


def _hooked(model: PreTrainedModel) -> None:
    model.model.layers[0].register_forward_hook(lambda module, args, output: output * 0.5)


@pytest.mark.parametrize(
    ("name", "changes", "change"),
    [
        ("Llama", {}, _hooked),
        ("Gemma 3", {"attn_logit_softcapping": 5.0}, None),
        ("Gemma 3", {"final_logit_softcapping": 5.0}, None),
    ],
)
def test_hooks_and_soft_caps_take_the_ordinary_call(
    name: str, changes: dict[str, float], change: Callable[[PreTrainedModel], None] | None
) -> None:
    model = build_architecture(name, **changes)
    if change is not None:
        change(model)
    text = generate(model, PROMPTS[0], NEW)
    runner = open_runner(model)
    assert type(runner) is HuggingFaceRunner
    assert_follows(runner, text)


def test_the_documented_tables_are_what_opening_the_models_says() -> None:
    made = GENERATED + table([opened_of(name) for name in ARCHITECTURES])
    again = "docs/targets.md is out of date: run python tests/support/architectures.py"
    assert DOCS.read_text(encoding="utf-8").endswith(made), again
    for name in ARCHITECTURES:
        assert (opened_of(name).group == "Refused") == (name in REFUSED), name
        assert (opened_of(name).group == "Recurrent and hybrid") == (name in RECURRENT), name
        assert (opened_of(name).cells.get("trees") == ("yes", "")) == (name in TREES), name
