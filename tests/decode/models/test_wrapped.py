"""The language model in models that read images or audio too."""

from pathlib import Path

import pytest
import torch
from families import VOCAB, WRAPPERS, build_wrapper
from greedy import PROMPTS, assert_decodes, generate
from scripted import Oracle
from transformers import AutoModelForCausalLM, Blip2Config, Blip2ForConditionalGeneration, T5Config

from decode.core.stop import StopRule
from decode.errors import UserError
from decode.loop import Method
from decode.models.check import open_runner
from decode.models.open import load_config, load_model
from distill.kinds.language_model import cut
from distill.networks.layers import decoder_layers, final_norm

CPU = {"device": "cpu", "dtype": "float32"}
SERVED = [kind for kind, (*_, name) in WRAPPERS.items() if name]


@pytest.mark.parametrize("kind", SERVED)
def test_the_language_model_alone_decodes_as_the_whole_generates(kind: str, tmp_path: Path) -> None:
    whole = build_wrapper(kind)
    whole.save_pretrained(tmp_path)
    model = load_model(tmp_path, **CPU)
    assert type(model).__name__ == WRAPPERS[kind][2] == type(AutoModelForCausalLM.from_config(model.config)).__name__
    assert type(load_config(tmp_path)) is type(model.config)
    assert model.num_parameters() < whole.num_parameters()  # the towers are gone
    runner = open_runner(model)
    assert runner.cache_bytes_per_token
    text = generate(whole, PROMPTS[1])
    for way in ("alternating", "tree"):
        assert_decodes(runner, Method(way, Oracle(text, way, VOCAB), StopRule()), text, PROMPTS[1])


@pytest.mark.parametrize("kind", ["gemma4", "qwen2_5_vl", "qwen3_vl_moe", "smolvlm"])
def test_a_cut_draft_is_a_text_model_of_the_text_layers(kind: str, tmp_path: Path) -> None:
    """Given as a whole or as its language model; Gemma 4's last layer has another head_dim, and is always kept."""
    whole = build_wrapper(kind)
    whole.save_pretrained(tmp_path / "whole")
    model = load_model(tmp_path / "whole", **CPU)
    draft = cut(whole, [1])
    assert type(draft).__name__ == WRAPPERS[kind][2]
    ids = torch.arange(2, 14)[None]
    kept = {name: weight for name, weight in model.named_parameters() if "layers.1" in name}
    assert all(torch.equal(draft.get_parameter(name.replace("rs.1", "rs.0")), kept[name]) for name in kept)
    decoder_layers(model)[0].register_forward_hook(lambda layer, args, output: args[0])
    with torch.no_grad():
        wanted = model(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(draft(input_ids=ids, use_cache=False).logits, wanted, atol=1e-4, rtol=1e-4)
        draft.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        torch.testing.assert_close(again(input_ids=ids, use_cache=False).logits, wanted, atol=1e-4, rtol=1e-4)


def test_layers_are_never_those_of_a_vision_tower() -> None:
    whole = build_wrapper("smolvlm")  # both towers have two layers, and the vision tower comes first
    assert decoder_layers(whole) is whole.model.text_model.layers
    assert final_norm(whole) is whole.model.text_model.norm


def test_a_cut_that_its_family_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Gemma4ForCausalLM .* to layers \[0\]: layer_types would be .*full_attention"):
        cut(build_wrapper("gemma4"), 1)
    build_wrapper("llama4").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"Llama4ForCausalLM .* to layers \[1\]: .*gate_proj.* another student.kind"):
        cut(load_model(tmp_path, **CPU), [1])


def test_what_has_no_language_model_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    build_wrapper("aya_vision").save_pretrained(tmp_path / "aya")
    tiny = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    text = {"model_type": "opt", "vocab_size": VOCAB, "ffn_dim": 16, "word_embed_proj_dim": 16} | tiny
    config = Blip2Config(
        vision_config=tiny | {"image_size": 28}, qformer_config=tiny | {"encoder_hidden_size": 16}, text_config=text
    )
    Blip2ForConditionalGeneration(config).save_pretrained(tmp_path / "blip")
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    for folder, words in (
        ("aya", r"AyaVisionForConditionalGeneration .* as Cohere2ForCausalLM it gives other logits.*model.generate"),
        ("blip", "cannot load the model .*pixel_values"),
        ("t5", r"T5ForConditionalGeneration \(t5\) cannot be opened: .* Take a text model"),
    ):
        with pytest.raises(UserError, match=words):
            load_model(tmp_path / folder, **CPU)
    with pytest.raises(UserError, match="T5ForConditionalGeneration"):
        load_config(tmp_path / "t5")
