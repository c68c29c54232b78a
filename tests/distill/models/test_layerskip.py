"""LayerSkip's recipe: its schedules by their formulas, on every family whose layers can be found."""

from __future__ import annotations

import math

import pytest
import torch
from architectures import build_architecture
from families import in_double
from torch import Tensor

from decode.errors import UserError
from decode.models.families import decoder_layers, final_norm
from distill.config.training import LayerSkipSettings, TrainingSettings
from distill.data.batches import label_mask
from distill.losses.chunked import next_token_loss
from distill.models.layers import LayerSkip, dropout_rates, exit_weights, exits_on
from distill.models.lm_head import LMHead
from distill.models.loading import checkpoint_layers
from distill.modules import CausalLMModule

ON = LayerSkipSettings(enabled=True)
BATCH = {
    "input_ids": torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]]),
    "labels": torch.tensor([[-100, -100, 4, 1, 5, 9], [-100, 6, 5, 3, 5, 8]]),
}


@pytest.fixture
def build():
    from families import build_tiny

    return build_tiny


def module_of(model, settings: LayerSkipSettings, steps: int = 100, *, scratch: bool = False) -> CausalLMModule:
    recipe = LayerSkip(model, settings, steps, scratch=scratch)
    return CausalLMModule(model, TrainingSettings(steps=steps), steps, layerskip=recipe).train()


def loss_at(module: CausalLMModule, step: int) -> Tensor:
    """The training loss of a step, without a trainer."""
    module.layerskip.begin(step)
    return module(BATCH)[0]


def test_layers_are_dropped_by_the_papers_formula() -> None:
    rates = dropout_rates(5, 0, 100, 0.2, scratch=False)
    assert rates[0] == 0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[2] == pytest.approx(0.2 * (math.sqrt(2) - 1))
    assert dropout_rates(5, 0, 100, 0.2, scratch=True) == [0] * 5
    assert dropout_rates(5, 99, 100, 0.2, scratch=True) == pytest.approx(rates)


def test_the_rotation_trains_every_exit_in_turn_and_the_gradual_one_all_from_half_time() -> None:
    assert [exits_on(ON, 5, step) for step in range(5)] == [[0], [1], [2], [3], [0]]
    pairs = LayerSkipSettings(rotation=2)
    assert [exits_on(pairs, 5, step) for step in range(3)] == [[0, 2], [1, 3], [0, 2]]
    rare = LayerSkipSettings(rotation=6)
    assert [exits_on(rare, 5, step) for step in range(7)] == [[0], [1], [2], [3], [], [], [0]]


def test_the_weights_are_the_papers_and_add_up_to_one() -> None:
    early, last = exit_weights(LayerSkipSettings(weighting="depth", early_exit_scale=0.2), 4, [1, 2])
    raw = [0.2 * 1, 0.2 * 3, 3 + 0.2 * 3]
    assert [*early, last] == pytest.approx([w / sum(raw) for w in raw])
    assert exit_weights(ON, 4, [1]) == ([0.5], 0.5)
    assert exit_weights(ON, 4, []) == ([], 1.0)


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi", "gpt2", "opt", "codegen", "gemma2", "mistral"])
def test_the_loss_is_the_weighted_sum_of_the_exits_losses_on_every_family(build, family: str) -> None:
    model = build(family, num_hidden_layers=3) if family not in ("gpt2", "codegen") else build(family, n_layer=3)
    module = module_of(model, LayerSkipSettings(enabled=True, dropout=0.0, early_exit_scale=0.5))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0
    mask = label_mask(BATCH["labels"])
    labels = BATCH["labels"].roll(-1, 1)[mask]
    head = LMHead(module.model)
    out = model.base_model(BATCH["input_ids"], use_cache=False, output_hidden_states=True)
    losses = [next_token_loss(final_norm(model)(out.hidden_states[e + 1][mask]), head, labels) for e in (0, 1)]
    whole = next_token_loss(out.last_hidden_state[mask], head, labels)
    for step, early in ((0, losses[0]), (1, losses[1]), (2, losses[0])):
        torch.testing.assert_close(loss_at(module, step), (whole + 0.5 * early) / 1.5, atol=1e-5, rtol=1e-5)


def test_a_dropped_layer_is_dropped_for_single_samples(build) -> None:
    model = build("llama", num_hidden_layers=2)
    skip = LayerSkip(model, LayerSkipSettings(dropout=0.5, early_exit_scale=0.0), 10, scratch=False)
    model.train()
    with torch.no_grad():
        plain = model.eval()(BATCH["input_ids"], output_hidden_states=True)
        without = model.get_output_embeddings()(model.model.norm(plain.hidden_states[1]))
        model.train()
        kinds = set()
        for seed in range(12):
            torch.manual_seed(seed)
            skip.begin(5)
            seen = model(BATCH["input_ids"]).logits
            for row in range(2):
                dropped = torch.allclose(seen[row], without[row], atol=1e-4)
                assert dropped or torch.allclose(seen[row], plain.logits[row], atol=1e-4)
                kinds.add((row, dropped))
    assert kinds == {(0, True), (1, True), (0, False), (1, False)}


def test_gradient_checkpointing_drops_the_same_layers_again(build) -> None:
    model = in_double(build("llama", num_hidden_layers=3, dtype=torch.float64))  # rounding is not the distribution
    module = module_of(model, LayerSkipSettings(enabled=True, dropout=0.6), scratch=False)

    def gradients(seed: int) -> list[torch.Tensor]:
        model.zero_grad()
        torch.manual_seed(seed)
        loss_at(module, 1).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    wanted = [gradients(seed) for seed in range(8)]
    assert any(not torch.allclose(a, b) for a, b in zip(wanted[0], wanted[1]))  # layers are really dropped
    checkpoint_layers(model)
    for seed, before in enumerate(wanted):
        for got, same in zip(gradients(seed), before, strict=True):
            assert torch.allclose(got, same, atol=1e-6)


def test_evaluation_and_a_finished_model_are_untouched(build) -> None:
    model = build("llama", num_hidden_layers=2)
    wanted = model(BATCH["input_ids"]).logits
    module = module_of(model, LayerSkipSettings(enabled=True, dropout=0.9))
    module.layerskip.begin(3)
    model.eval()
    torch.testing.assert_close(model(BATCH["input_ids"]).logits, wanted)
    module.layerskip.remove()
    assert all(not layer._forward_hooks for layer in decoder_layers(model))


def test_checkpoints_are_compared_by_the_loss_of_the_recipe_over_the_same_exits(build) -> None:
    module = module_of(build("llama", num_hidden_layers=3), LayerSkipSettings(enabled=True, dropout=0.5))
    assert module.monitor == "validation_recipe_loss"
    module.eval()
    totals = []
    for step in range(2):  # what the last training step trained and dropped makes no difference
        module.layerskip.begin(step)
        module.layerskip.watch()
        total, last, _ = module(BATCH)
        totals.append(total)
    assert totals[0] == totals[1] != last


def test_targets_whose_layers_keep_a_state_are_refused() -> None:
    with pytest.raises(UserError, match=r"layerskip needs layers .* full_attention, linear_attention"):
        LayerSkip(build_architecture("Qwen3-Next"), ON, 10, scratch=False)
