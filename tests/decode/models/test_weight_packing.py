"""Packed weights give the products of plain ones, for every number of rows, and are chosen by what is measured."""

from __future__ import annotations

import pytest
import torch
from families import VOCAB

from decode.core.errors import UserError
from decode.models.loading.choose_runner import open_runner
from decode.models.runners import fast_architectures
from decode.models.runners import weight_packing as packing
from decode.models.runners.fast_runner import FastRunner, fast_runner
from decode.models.runners.layer_subset import LayerSubset
from decode.models.runners.weight_packing import Linear, Linears, PackedLinear, measure, packable


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (96, 576), (7, 5)], ids=str)
@pytest.mark.parametrize("least", [1, packing.FEW])
@torch.inference_mode()
def test_products_are_those_of_plain_weights(least: int, shape: tuple[int, int], biased: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape), torch.randn(shape[0]) if biased else None
    plain, packed = Linear(weight, bias), PackedLinear(weight, bias, least)
    assert (packed.rows, packed.weight.numel()) == (shape[0], weight.numel())
    for rows in [(0,), (1,), (2,), (8,), (13,), (64,), (300,), (2, 3)]:
        x, before = torch.randn(*rows, shape[1]), torch.randn(*rows, shape[0])
        kept = before.clone()
        torch.testing.assert_close(packed(x), plain(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed.add_to(before, x), plain.add_to(before, x), rtol=1e-4, atol=1e-4)
        assert torch.equal(before, kept)  # states are read again behind the sum


def test_rows_of_states_that_are_not_contiguous_are_read_right() -> None:
    weight = torch.randn(6, 4)
    x = torch.randn(4, 9).t()[::2]
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.t(), rtol=1e-4, atol=1e-4)


def test_what_the_kernels_do_not_take_stays_plain() -> None:
    weight = torch.randn(6, 4, dtype=torch.float64)
    assert not packable(weight)
    assert type(Linears("on")(weight)) is Linear
    assert type(Linears("off")(weight.float())) is Linear


def test_the_faster_way_is_chosen_for_each_shape_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(plain, weight, layers):  # type: ignore[no-untyped-def]
        asked.append(tuple(weight.shape))
        return [[1.0, 1.4, 1.2], [4.0, 1.0, 1.0]] if weight.shape[0] == 6 else [[1.0, 1.5, 1.6], [2.0, 2.0, 2.0]]

    monkeypatch.setattr(packing, "measure", measured)
    monkeypatch.setattr(packing, "_MEASURED", {})
    make = Linears("auto", 2)
    kinds = [type(make(torch.randn(rows, 4))) for rows in (6, 3, 6, 3)]
    assert kinds == [PackedLinear, Linear, PackedLinear, Linear]
    assert [Linears("on", 2)(torch.randn(rows, 4)).least for rows in (6, 3)] == [packing.FEW, 1]  # type: ignore[attr-defined]
    again = Linears("auto", 2)
    assert [type(again(torch.randn(rows, 4))) for rows in (6, 3)] == kinds[:2]
    assert asked == [(6, 4), (3, 4)]  # another model of these shapes is laid out in the same way
    assert make.packed == 2 * 6 * 4 * 4
    sentence = make.sentence()
    assert "6×4 packed (0.8 and 4.0)" in sentence
    assert "3×4 plain (0.7 and 1.0)" in sentence


def test_the_measurement_compares_all_ways() -> None:
    calls = []

    class Counted(Linear):
        def __call__(self, x):  # type: ignore[no-untyped-def]
            calls.append(len(x))
            return super().__call__(x)

    seconds = measure(Counted, torch.randn(6, 4), 2)
    assert set(calls) == set(packing.ROWS)
    assert len(seconds) == len(packing.ROWS)
    assert all(len(times) == 3 and min(times) > 0 for times in seconds)


def test_an_unknown_mode_is_refused(tiny) -> None:
    with pytest.raises(UserError, match="pack is 'yes'; choose one of auto, on, off"):
        open_runner(tiny("llama"), pack="yes")


@torch.inference_mode()
def test_layer_subsets_and_early_exits_of_a_packed_model_draft_the_same(tiny) -> None:
    model, ids = tiny("llama"), torch.arange(9) % VOCAB
    for subset in (LayerSubset(1), LayerSubset.skipping(2, [0], [1])):
        rows = [open_runner(model, pack=pack).read_subset(ids, subset) for pack in ("off", "on")]
        torch.testing.assert_close(rows[1], rows[0], rtol=1e-4, atol=2e-4)
    exits = [fast_runner(model, pack=pack).first_layers(1) for pack in ("off", "on")]
    assert isinstance(exits[1].forward.weights.head, PackedLinear)
    torch.testing.assert_close(exits[1].read(ids), exits[0].read(ids), rtol=1e-4, atol=2e-4)


def test_a_large_model_is_packed_where_that_is_asked_for(tiny, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(fast_architectures, "COPIED", 0)
    model = tiny("llama")
    before = {key: weight.data_ptr() for key, weight in model.named_parameters()}
    runner = open_runner(model, pack="on")
    assert isinstance(runner, FastRunner)
    assert isinstance(runner.forward.layers[0].qkv, PackedLinear)
    assert before == {key: weight.data_ptr() for key, weight in model.named_parameters()}
