"""Adapters, optimisers, schedules, output heads; what a head reads of its target's files; LayerSkip's recipe."""

import json
import math
from typing import Any

import pytest
import torch
from families import build_architecture, build_tiny, in_double
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.open import load_model
from distill.config.models import LayerSkipSettings, LoraSettings, TrainingSettings
from distill.data.dataset import label_mask
from distill.losses.chunked import next_token_loss
from distill.networks import models
from distill.networks.layers import decoder_layers, final_norm
from distill.networks.layerskip import LayerSkip, dropout_rates, exits_on
from distill.networks.lm_head import LMHead, check_head
from distill.networks.models import adapted, checkpoint_layers, hollow_target, make_optimizer, make_schedule
from distill.training.modules import CausalLMModule


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


@pytest.mark.parametrize("optimizer", ["adamw", {"class_path": "torch.optim.RAdam", "init_args": {"eps": 1e-7}}])
def test_matrices_inside_the_layers_and_a_feature_heads_output_head_are_decayed(optimizer) -> None:
    head = nn.ModuleDict({"lm_head": nn.Linear(4, 6, bias=False), "norm": nn.LayerNorm(4)})  # a feature head's
    for model in (build_tiny("llama"), build_tiny("llama-tied"), build_architecture("Qwen3-MoE"), head):
        made = make_optimizer(model, TrainingSettings(steps=1, optimizer=optimizer, weight_decay=0.3, lr=0.02))
        names = {id(weight): name for name, weight in model.named_parameters()}
        groups = [({names[id(p)] for p in group["params"]}, group["weight_decay"]) for group in made.param_groups]
        inside = {n for n, w in model.named_parameters() if w.ndim > 1 and ("layers" in n or model is head)}
        assert [decayed for decayed, rate in groups if rate] == [inside]
        assert set().union(*(group for group, _ in groups)) == set(names.values())
        assert made.defaults["lr"] == 0.02


def test_muon_moves_the_matrices_inside_the_layers_by_orthogonal_steps() -> None:
    settings = TrainingSettings(steps=1, optimizer="muon", weight_decay=0.0, lr=0.01)
    model = build_tiny("llama", num_hidden_layers=1)
    made, before = make_optimizer(model, settings), {n: w.detach().clone() for n, w in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    made.step()
    for name, weight in model.named_parameters():
        step, inside = before[name] - weight.detach(), "layers" in name and weight.ndim == 2
        if inside:
            values = torch.linalg.svdvals(step / (0.01 * 0.8 * max(weight.shape) ** 0.5))
            assert 0.5 < values.min() <= values.max() < 1.4, name
            assert (step * weight.grad).sum() > 0, name
        else:
            torch.testing.assert_close(step.abs(), torch.full_like(step, 0.01), rtol=1e-3, atol=1e-6)  # AdamW's first


def test_adamw_is_fused_where_lightning_clips_its_gradients_and_unknown_arguments_are_refused() -> None:
    settings, model = TrainingSettings(steps=1, beta2=0.95), build_tiny("llama")
    assert (made := make_optimizer(model, settings)).defaults["fused"] is True
    assert made.defaults["betas"] == (0.9, 0.95)
    assert not make_optimizer(model, settings, precision="16-mixed").defaults["fused"]
    settings.optimizer = {"class_path": "torch.optim.SGD", "init_args": {"momentun": 0.9}}
    with pytest.raises(UserError, match=r"training\.optimizer is .*momentun"):
        settings.validate("training")


def rates(steps: int, **settings: Any) -> list[float]:
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


@pytest.fixture
def in_parts(monkeypatch) -> None:
    whole = models.load_model
    monkeypatch.setattr(models, "load_model", lambda *a, **options: whole(*a, wanted=options.pop("wanted"), **options))


@pytest.mark.parametrize(
    ("family", "shards"), [("llama", "1GB"), ("llama-tied", "10KB"), ("gpt2", "10KB"), ("gpt_neox", "1GB")]
)
def test_parts_equal_the_target_and_nothing_else_is_read(family: str, shards: str, tmp_path, in_parts) -> None:
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 4}
    build_tiny(family, **layers).save_pretrained(tmp_path, max_shard_size=shards)
    hollow, whole = hollow_target(tmp_path), load_model(tmp_path, device="cpu", dtype="float32")
    parts = hollow.state_dict()
    real = {name for name, weight in parts.items() if not weight.is_meta}
    for name, weight in whole.state_dict().items():
        outside = not any(f".{layer}." in name for layer in range(4))
        assert (name in real) == (outside or ".0." in name or ".3." in name), name
        assert name not in real or weight.equal(parts[name])
    states, ids = torch.randn(3, whole.config.hidden_size), torch.arange(5)
    for part, given in ((LMHead, states), (final_norm, states), (PreTrainedModel.get_input_embeddings, ids)):
        assert part(hollow)(given).equal(part(whole)(given))
    tied = hollow.get_output_embeddings().weight is hollow.get_input_embeddings().weight
    assert tied == whole.config.tie_word_embeddings == hollow.config.tie_word_embeddings
    assert (hollow.name_or_path, hollow.dtype, hollow.training) == (str(tmp_path), torch.float32, False)
    assert hollow.generation_config.to_dict() == whole.generation_config.to_dict()


def test_further_last_layers_are_read_and_quantised_weights_are_not(tmp_path, in_parts) -> None:
    build_tiny("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in range(4)]
    hollow = hollow_target(tmp_path, last=2)
    assert [name for name in names if hollow.get_parameter(name).is_meta] == names[1:2]
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    tensors = load_file(file)
    quantised = tensors[names[3]].to(torch.float8_e4m3fn)
    save_file(tensors | {names[3]: quantised}, file, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    hollow = hollow_target(tmp_path)
    assert hollow.get_parameter(names[3]).is_meta  # without its scales it would be another one
    assert not hollow.get_parameter(names[3].replace("q_proj", "k_proj")).is_meta


def test_a_head_in_the_file_beside_a_tied_configuration_is_kept(tmp_path, in_parts) -> None:
    build_tiny("llama-tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    other = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": other}, file, metadata={"format": "pt"})
    hollow = hollow_target(tmp_path)
    assert hollow.get_output_embeddings().weight.equal(other)
    assert not hollow.config.tie_word_embeddings


# -- LayerSkip's recipe ------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_computes_the_same_layers_again_but_for_dropped_ones(family: str) -> None:
    """With the same gradients."""
    model, calls = in_double(build_tiny(family, dtype=torch.float64)), list[int]()
    next(decoder_layers(model)[-1].children()).register_forward_pre_hook(lambda *_: calls.append(0))
    module, recipe = module_of(model, dropout=0.6)

    def gradients(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        recipe.begin(1)
        return list(torch.autograd.grad(module(BATCH)[0], list(model.parameters()), materialize_grads=True))

    expected = [gradients(seed) for seed in range(4)]
    count = len(calls)
    checkpoint_layers(model)
    for seed, before in enumerate(expected):
        assert all(torch.allclose(a, b, atol=1e-9) for a, b in zip(gradients(seed), before, strict=True))
    assert len(calls) > 2 * count > 0


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
