"""Progressive stacking: shallow at first, copied once, the whole model in every checkpoint and evaluation."""

from pathlib import Path

import pytest
import torch
from families import build_tiny
from safetensors.torch import load_file
from tiny_run import killed, run_tiny, tiny_settings

from decode.errors import UserError
from decode.models.families import decoder_layers
from distill.config.training import LayerSkipSettings, StackingSettings, TrainingSettings
from distill.models.layers import LayerSkip, ProgressiveStacking
from distill.modules import CausalLMModule

IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
BATCH = {"input_ids": IDS, "labels": IDS}


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "qwen3"])
def test_the_first_layers_are_trained_alone_and_then_copied(family: str) -> None:
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": 5}
    model = build_tiny(family, **depth)
    stacking = ProgressiveStacking(model, StackingSettings(layers=2, share=0.5), steps=10)
    layers, before = decoder_layers(model), {name: weight.clone() for name, weight in model.state_dict().items()}
    whole = model.base_model(IDS, output_hidden_states=True, use_cache=False)
    with stacking.training(4) as running:
        short = model.base_model(IDS, output_hidden_states=True, use_cache=False)
    assert running == 2
    assert len(short.hidden_states) == 3
    torch.testing.assert_close(short.hidden_states[1], whole.hidden_states[1])
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    with stacking.training(5) as running:
        assert running == 5
    for number, source in ((2, 0), (3, 1), (4, 0)):
        for copied, original in zip(layers[number].parameters(), layers[source].parameters()):
            assert torch.equal(copied, original)
            assert copied is not original
    with torch.no_grad():
        next(layers[4].parameters()).zero_()
    with stacking.training(6):
        assert not next(layers[4].parameters()).any(), "the copies are made once"


def test_layerskip_trains_the_exits_of_the_layers_that_run() -> None:
    model = build_tiny("llama", num_hidden_layers=4)
    recipe = LayerSkip(model, LayerSkipSettings(enabled=True, dropout=0.0), 10, scratch=True)
    stacking = ProgressiveStacking(model, StackingSettings(layers=2, share=0.5), 10)
    module = CausalLMModule(model, TrainingSettings(steps=10), 10, layerskip=recipe, stacking=stacking).train()
    for step, trained in ((0, [0]), (1, [0]), (5, [2]), (6, [0])):
        with stacking.training(step) as layers:
            recipe.begin(step, layers)
            assert recipe.exits == trained
            module(BATCH)[0].backward()
        unused = [weight for layer in decoder_layers(model)[2:] for weight in layer.parameters() if weight.grad is None]
        assert bool(unused) == (step < 5)


def test_a_run_killed_while_shallow_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    def settings(folder: Path):
        made = tiny_settings(folder)
        made.target.stacking = StackingSettings(layers=1, share=0.6)  # of 12 steps: copied at 7
        return made

    with killed("initial", 1):
        run_tiny(settings(tmp_path / "whole"))
    with killed("target", 6):
        run_tiny(settings(tmp_path / "again"))
    with killed("initial", 1):
        run_tiny(settings(tmp_path / "again"))
    one, other = (load_file(tmp_path / name / "tiny/target/model.safetensors") for name in ("whole", "again"))
    assert one.keys() == other.keys()
    assert any("layers.1." in name for name in one)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_model_without_layers_above_is_refused() -> None:
    with pytest.raises(UserError, match=r"stacking.layers is 2 and the target has 2 layers: wanted at most 1"):
        ProgressiveStacking(build_tiny("llama"), StackingSettings(layers=2), 10)
