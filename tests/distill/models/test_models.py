"""Adapters, groups of the optimiser, schedules, output heads; models that are refused; where the frozen target is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build_tiny
from torch import nn

from decode.errors import UserError
from distill import models
from distill.config import LoraSettings, TargetSettings, TrainingSettings
from distill.lm_head import LMHead, check_head
from distill.models import adapted, make_optimizer, make_schedule, open_placed, quantization_config, share_of


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_is_merged_into_the_weights_that_it_was_trained_beside(family: str) -> None:
    model, twin = build_tiny(family, seed=3), build_tiny(family, seed=3)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    adapter, same = adapted(model, LoraSettings(rank=2), 5), adapted(twin, LoraSettings(rank=2), 5)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora" in name and weight.equal(dict(twin.named_parameters())[name]) for name, weight in trained.items())
    ids = torch.randint(2, model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(trained.values(), lr=1.0)
    for _ in range(3):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids).logits
        plain = adapter.merge_and_unload()
        assert torch.allclose(plain(input_ids=ids).logits, logits, atol=1e-4)
        assert not torch.allclose(same.merge_and_unload().eval()(input_ids=ids).logits, logits, atol=1e-2)
    changed = {name for name, weight in plain.state_dict().items() if not weight.equal(before[name])}
    assert plain.state_dict().keys() == before.keys()
    assert changed
    assert not [name for name in changed if "embed" in name or "lm_head" in name or "norm" in name or "wte" in name]


def decayed(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[str]:
    names = {id(weight): name for name, weight in model.named_parameters()}
    return {names[id(p)] for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}


@pytest.mark.parametrize("optimizer", ["adamw", {"class_path": "torch.optim.RAdam", "init_args": {"eps": 1e-7}}])
def test_matrices_inside_the_layers_and_a_feature_heads_output_head_are_decayed(optimizer: object) -> None:
    settings = TrainingSettings(steps=1, optimizer=optimizer, weight_decay=0.3, lr=0.02)  # type: ignore[arg-type]
    for family in ("llama", "llama-tied"):
        model = build_tiny(family)
        made = make_optimizer(model, settings)
        inside = {name for name, weight in model.named_parameters() if "layers" in name and weight.ndim == 2}
        assert decayed(model, made) == inside
        assert sum(len(group["params"]) for group in made.param_groups) == len(list(model.parameters()))
    assert made.defaults["lr"] == 0.02
    head = nn.ModuleDict({"lm_head": nn.Linear(4, 6, bias=False), "norm": nn.LayerNorm(4)})  # a feature head's
    assert decayed(head, make_optimizer(head, settings)) == {"lm_head.weight"}


def test_adamw_is_fused_where_lightning_clips_its_gradients_and_unknown_arguments_are_refused() -> None:
    settings, model = TrainingSettings(steps=1, beta2=0.95), build_tiny("llama")
    assert (made := make_optimizer(model, settings)).defaults["fused"] is True
    assert made.defaults["betas"] == (0.9, 0.95)
    assert not make_optimizer(model, settings, precision="16-mixed").defaults["fused"]
    settings.optimizer = {"class_path": "torch.optim.SGD", "init_args": {"momentun": 0.9}}
    with pytest.raises(UserError, match=r"training\.optimizer is .* cannot be made .*momentun"):
        make_optimizer(model, settings)


def rates(steps: int, **settings: Any) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = make_schedule(optimizer, TrainingSettings(lr=1.0, **settings), steps)
    return [(schedule.get_last_lr()[0], optimizer.step(), schedule.step())[0] for _ in range(steps)]


def test_a_constant_schedule_depends_on_the_step_alone_and_others_end_at_zero() -> None:
    assert rates(8, warmup_steps=4) == rates(12, warmup_steps=4)[:8] == [0, 0.25, 0.5, 0.75, 1, 1, 1, 1]
    assert rates(6, warmup_steps=2, schedule="linear") == [0, 0.5, 1, 0.75, 0.5, 0.25]
    assert rates(4, schedule="cosine") == pytest.approx([1, 0.5 + 0.5**1.5, 0.5, 0.5 - 0.5**1.5])


def test_weights_that_are_not_numbers_and_other_output_heads_are_refused() -> None:
    model = build_tiny("llama")
    check_head(model, LMHead(model))
    scaled = LMHead.of(model.get_output_embeddings(), scale=2.0)
    with pytest.raises(UserError, match="does not compute its logits as head"):
        check_head(model, scaled)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"NaN or infinite, as are its weights .*layers\.0\.mlp\.up_proj\.weight"):
        check_head(model, LMHead(model))


def test_a_markov_head_multiplies_states_and_conditions_by_its_two_weights() -> None:
    linear, markov = nn.Linear(4, 6), torch.randn(6, 2, requires_grad=True)
    head, hidden = LMHead.of(linear, scale=0.5, cap=3.0, markov=markov), torch.randn(5, 6)
    both = torch.cat([linear.weight, markov], 1)
    expected = torch.tanh((hidden @ both.T + linear.bias) * 0.5 / 3.0) * 3.0
    assert torch.allclose(head(hidden), expected, atol=1e-6)
    assert torch.allclose(head(hidden, 4), expected[:, :4], atol=1e-6)
    assert dict(head.named_parameters()).keys() == {"linear.weight", "linear.bias"}


def test_devices_are_dealt_out_and_quantisation_is_asked_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, shares in ((0, [[], []]), (1, [[0], [0]]), (3, [[0], [1, 2]]), (4, [[0, 1], [2, 3]])):
        assert [share_of(range(count), rank, 2) for rank in range(2)] == shares
    given: dict[str, Any] = {}
    monkeypatch.setattr(models, "load_model", lambda *_, **options: given.update(options))
    settings = TargetSettings(quantization={"quant_method": "bitsandbytes", "load_in_8bit": True})
    open_placed(settings, "x", torch.device("cpu"))
    assert given["quantization_config"].load_in_8bit
    assert given["device"] == torch.device("cpu")
    with pytest.raises(UserError, match=r"target\.quantization is .*'nothing'"):
        quantization_config({"quant_method": "nothing"}, "cpu")
