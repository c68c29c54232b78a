"""LayerSkip's recipe: its schedules by their formulas, on families whose layers can be found."""

from __future__ import annotations

import math

import pytest
import torch
from families import build_tiny, in_double
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.families import final_norm
from distill.config import LayerSkipSettings, TrainingSettings
from distill.data.dataset import label_mask
from distill.layerskip import LayerSkip, dropout_rates, exit_weights, exits_on
from distill.lm_head import LMHead
from distill.losses.chunked import next_token_loss
from distill.models import checkpoint_layers
from distill.modules import CausalLMModule

ON = LayerSkipSettings(enabled=True)
BATCH = {
    "input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]),
    "labels": torch.tensor([[-100, -100, 4, 1, 5, 9], [-100, 6, 5, 3, 5, 8]]),
}


def module_of(model: PreTrainedModel, settings: LayerSkipSettings) -> CausalLMModule:
    recipe = LayerSkip(model, settings, 100, scratch=False)
    return CausalLMModule(model, TrainingSettings(steps=100), 100, layerskip=recipe).train()


def loss_at(module: CausalLMModule, step: int) -> Tensor:
    """The training loss of a step, without a trainer."""
    assert module.layerskip is not None
    module.layerskip.begin(step)
    return module(BATCH)[0]


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
    model = in_double(build_tiny(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3}))
    module = module_of(model, LayerSkipSettings(enabled=True, dropout=0.0, early_exit_scale=0.5))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    mask = label_mask(BATCH["labels"])
    labels, head = BATCH["labels"].roll(-1, 1)[mask], LMHead(model)
    out = model.base_model(BATCH["input_ids"], use_cache=False, output_hidden_states=True)
    losses = [next_token_loss(final_norm(model)(out.hidden_states[e + 1][mask]), head, labels) for e in (0, 1)]
    last = next_token_loss(out.last_hidden_state[mask], head, labels)
    for step, early in ((0, losses[0]), (1, losses[1]), (2, losses[0])):
        torch.testing.assert_close(loss_at(module, step), (last + 0.5 * early) / 1.5, atol=0, rtol=1e-6)


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
    module = module_of(model, LayerSkipSettings(enabled=True, dropout=0.6))

    def gradients(seed: int) -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        loss_at(module, 1).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = [gradients(seed) for seed in range(4)]
    checkpoint_layers(model)
    for seed, before in enumerate(expected):
        for gradient, same in zip(gradients(seed), before, strict=True):
            assert torch.allclose(gradient, same, atol=1e-6)


def test_checkpoints_are_compared_by_the_loss_of_the_recipe_over_the_same_exits() -> None:
    module = module_of(build_tiny("llama", num_hidden_layers=3), LayerSkipSettings(enabled=True, dropout=0.5))
    assert module.monitor == "validation_recipe_loss"
    assert module.layerskip is not None
    module.eval()
    totals = []
    for step in range(2):  # what the last training step trained and dropped makes no difference
        module.layerskip.begin(step)
        module.layerskip.watch()
        total, last, _ = module(BATCH)
        totals.append(total)
    assert totals[0] == totals[1] != last


def test_targets_whose_layers_keep_a_state_are_refused() -> None:
    model = build_tiny("llama")
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UserError, match=r"layerskip needs layers .* full_attention, linear_attention"):
        LayerSkip(model, ON, 10, scratch=False)
