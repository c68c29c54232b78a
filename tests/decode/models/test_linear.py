"""Products in every layout are those of plain weights; a layout is chosen by the size of a weight."""

from __future__ import annotations

import copy

import pytest
import torch
from families import VOCAB
from reading import Reader
from transformers import PreTrainedModel

from decode.models import check
from decode.models.check import open_draft_runner, open_runner
from decode.models.fast import forward, layout, weights
from decode.models.fast.forward import FastRunner
from decode.models.fast.weights import HalfLinear, Linear, Linears, PackedLinear, halvable
from decode.models.huggingface import HuggingFaceRunner

SHAPES = [(48, 32), (32, 48), (96, 576), (7, 5)]
ROWS = [(0,), (1,), (2,), (8,), (13,), (64,), (300,), (2, 3)]
X86 = pytest.mark.skipif(not halvable(torch.ones(1, 1)), reason="FBGEMM is for x86 processors")


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["packed", "padded", pytest.param("float16", marks=X86)])
@torch.inference_mode()
def test_products_are_those_of_plain_weights(kind: str, shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).half().float(), torch.randn(shape[0]) if biased else None
    make = HalfLinear if kind == "float16" else PackedLinear
    plain, made = Linear(weight, bias), make(weight, bias)
    if isinstance(made, PackedLinear):
        made.least = weights.FEW if kind == "padded" else 1
    assert made.rows == shape[0]
    assert made.bytes == weight.numel() * (2 if kind == "float16" else 4)
    for rows in ROWS:
        x, before = torch.randn(*rows, shape[1]), torch.randn(*rows, shape[0])
        kept = before.clone()
        torch.testing.assert_close(made(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(made.add_to(before, x), plain.add_to(before, x), rtol=1e-4, atol=1e-4)
        assert torch.equal(before, kept)  # states are read again after the sum


def test_a_layout_is_chosen_by_the_size_of_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HALVED", 4 * 4 * 3)
    monkeypatch.setattr(weights, "PACKED", 4 * 4 * 6)

    def kinds(*args, **options) -> list[type[Linear]]:
        make = Linears(*args, **options)
        return [type(make(torch.randn(rows, 4))) for rows in (6, 3, 2)]

    assert kinds("auto") == [PackedLinear, Linear, Linear]
    assert kinds("on") == [PackedLinear] * 3
    assert kinds("off", half=True) == [Linear] * 3
    if halvable(torch.ones(1, 1)):
        assert kinds("auto", half=True) == [HalfLinear, HalfLinear, Linear]
        assert kinds("on", half=True) == [HalfLinear] * 3
    make = Linears("auto")
    make(torch.randn(6, 4))
    assert make.sentence() == "weights: 0.0 MB packed"


def in_sixteen_bits(model: PreTrainedModel) -> PreTrainedModel:
    """The same with weights that 16 bits hold, in float32."""
    return copy.deepcopy(model).bfloat16().float()


@pytest.fixture(autouse=True)
def small_weights_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HALVED", 1)
    monkeypatch.setattr(weights, "PACKED", 1)


@X86
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@torch.inference_mode()
def test_a_target_published_in_sixteen_bits_is_read_in_sixteen_with_its_own_results(family: str, tiny) -> None:
    model, ids = in_sixteen_bits(tiny(family)), torch.arange(9) % VOCAB
    runner = open_runner(model, pack="auto")
    assert isinstance(runner, FastRunner)
    assert isinstance(runner.network.weights.head, HalfLinear)
    assert isinstance(runner.network.layers[0].qkv, HalfLinear)
    logits = model(input_ids=ids[None]).logits[0]
    torch.testing.assert_close(Reader(runner).read(ids), logits, rtol=1e-5, atol=1e-5 * float(logits.std()))
    assert runner.weight_bytes < 0.6 * open_runner(model).weight_bytes
    other = open_runner(tiny(family), pack="auto")  # float16 does not hold these
    assert isinstance(other, FastRunner)
    assert isinstance(other.network.weights.head, PackedLinear)


@X86
def test_a_large_target_is_read_in_sixteen_bits_where_memory_has_room(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "COPIED", 0)
    model, ids = in_sixteen_bits(tiny("llama")), torch.arange(9) % VOCAB
    runner = open_runner(model, pack="auto")
    assert isinstance(runner, FastRunner)
    assert isinstance(runner.network.layers[0].qkv, HalfLinear)
    with torch.inference_mode():
        torch.testing.assert_close(Reader(runner).read(ids), model(input_ids=ids[None]).logits[0], rtol=1e-4, atol=1e-4)
    others = [open_runner(tiny("llama"), pack="auto"), open_draft_runner(model, model, pack="auto")]
    monkeypatch.setattr(forward, "free_memory", lambda device: 0.0)
    for plain in (*others, open_runner(model, pack="auto")):
        assert isinstance(plain, FastRunner)
        assert type(plain.network.layers[0].qkv) is Linear


@X86
@torch.inference_mode()
def test_a_draft_is_rounded_to_sixteen_bits(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, ids = tiny("llama"), torch.arange(9) % VOCAB
    rounded = open_draft_runner(draft, tiny("llama", seed=2), pack="auto")
    assert isinstance(rounded, FastRunner)
    assert isinstance(rounded.network.layers[0].down, HalfLinear)
    expected = draft(input_ids=ids[None]).logits[0]
    gap = (Reader(rounded).read(ids) - expected).square().mean(-1).sqrt().max() / expected.std()
    assert 1e-5 < gap < 0.01
    with monkeypatch.context() as patch:
        patch.setattr(check, "ROUNDED", 1e-6)
        with pytest.warns(UserWarning, match="using the ordinary model call"):
            assert isinstance(open_draft_runner(draft, draft, pack="auto"), HuggingFaceRunner)
