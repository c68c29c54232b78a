"""LayerSkip's recipe: its schedules by their formulas, on families whose layers can be found."""

import math
from typing import Any

import pytest
import torch
from families import build_tiny, in_double
from torch import Tensor
from transformers import PreTrainedModel

from distill.config.models import LayerSkipSettings, TrainingSettings
from distill.data.dataset import label_mask
from distill.losses.chunked import next_token_loss
from distill.networks.layers import final_norm
from distill.networks.layerskip import LayerSkip, dropout_rates, exit_weights, exits_on
from distill.networks.lm_head import LMHead
from distill.networks.models import checkpoint_layers
from distill.training.modules import CausalLMModule

ON = LayerSkipSettings(enabled=True)
BATCH = {
    "input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]),
    "labels": torch.tensor([[-100, -100, 4, 1, 5, 9], [-100, 6, 5, 3, 5, 8]]),
}


def module_of(model: PreTrainedModel, **settings: Any) -> tuple[CausalLMModule, LayerSkip]:
    recipe = LayerSkip(model, LayerSkipSettings(enabled=True, **settings), 100, scratch=False)
    return CausalLMModule(model, TrainingSettings(steps=100), 100, layerskip=recipe).train(), recipe


def test_dropout_rates_exits_and_weights_are_the_papers() -> None:
    rates = dropout_rates(5, 0, 100, 0.2, scratch=False)
    assert [rates[0], rates[2], rates[-1]] == pytest.approx([0, 0.2 * (math.sqrt(2) - 1), 0.2])
    assert dropout_rates(5, 0, 100, 0.2, scratch=True) == [0] * 5
    assert dropout_rates(5, 99, 100, 0.2, scratch=True) == pytest.approx(rates)
    assert [exits_on(ON, 5, step) for step in range(5)] == [[0], [1], [2], [3], [0]]
    assert [exits_on(LayerSkipSettings(rotation=2), 5, step) for step in range(3)] == [[0, 2], [1, 3], [0, 2]]
    assert [exits_on(LayerSkipSettings(rotation=6), 5, step) for step in (3, 4, 5, 6)] == [[3], [], [], [0]]
    assert exit_weights(LayerSkipSettings(early_exit_scale=0.5), 2) == (0.25, 0.5)
    assert exit_weights(ON, 0)[1] == 1.0


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "gpt2", "gemma2"])
def test_the_loss_is_the_weighted_sum_of_the_exits_losses(family: str) -> None:
    none = {f"{name}_pdrop": 0.0 for name in ("attn", "embd", "resid")} | {"n_layer": 3}
    model = in_double(build_tiny(family, **none if family == "gpt2" else {"num_hidden_layers": 3}))
    module, recipe = module_of(model, dropout=0.0, early_exit_scale=0.5)
    mask = label_mask(BATCH["labels"])
    labels, head = BATCH["labels"].roll(-1, 1)[mask], LMHead(model)
    out = model.base_model(BATCH["input_ids"], use_cache=False, output_hidden_states=True)
    losses = [next_token_loss(final_norm(model)(out.hidden_states[e + 1][mask]), head, labels) for e in (0, 1)]
    last = next_token_loss(out.last_hidden_state[mask], head, labels)
    for step in range(3):
        recipe.begin(step)
        torch.testing.assert_close(module(BATCH)[0], (last + 0.5 * losses[step % 2]) / 1.5, atol=0, rtol=1e-6)


def test_a_layer_is_dropped_for_single_samples_and_never_in_evaluation() -> None:
    model = in_double(build_tiny("llama", num_hidden_layers=2))
    skip = LayerSkip(model, LayerSkipSettings(dropout=0.5, early_exit_scale=0.0), 10, scratch=False)
    kinds = set()
    with torch.no_grad():
        plain = model.eval()(BATCH["input_ids"], output_hidden_states=True)
        without = model.get_output_embeddings()(model.model.norm(plain.hidden_states[1]))
        skip.begin(5)
        torch.testing.assert_close(model(BATCH["input_ids"]).logits, plain.logits)
        model.train()
        for seed in range(12):
            torch.manual_seed(seed)
            skip.begin(5)
            logits = model(BATCH["input_ids"]).logits
            for row in range(2):
                dropped = torch.allclose(logits[row], without[row], atol=1e-4)
                assert dropped or torch.allclose(logits[row], plain.logits[row], atol=1e-4)
                kinds.add((row, dropped))
    assert kinds == {(0, True), (1, True), (0, False), (1, False)}
    skip.remove()
    torch.testing.assert_close(model(BATCH["input_ids"]).logits, plain.logits)


def test_gradient_checkpointing_drops_the_same_layers_again() -> None:
    model = in_double(build_tiny("llama", num_hidden_layers=3))
    module, recipe = module_of(model, dropout=0.6)

    def gradients(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        recipe.begin(1)
        return list(torch.autograd.grad(module(BATCH)[0], list(model.parameters()), materialize_grads=True))

    expected = [gradients(seed) for seed in range(4)]
    checkpoint_layers(model)
    for seed, before in enumerate(expected):
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(gradients(seed), before, strict=True))


def test_checkpoints_are_compared_by_the_loss_of_the_recipe_over_the_same_exits() -> None:
    module, recipe = module_of(build_tiny("llama", num_hidden_layers=3), dropout=0.5)
    assert module.monitor == "validation_recipe_loss"
    module.eval()
    totals = []
    for step in range(2):  # what the last training step trained and dropped makes no difference
        recipe.begin(step)
        recipe.watch()
        total, last, _ = module(BATCH)
        totals.append(total)
    assert totals[0] == totals[1] != last
