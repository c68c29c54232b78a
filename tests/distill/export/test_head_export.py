"""Exported heads: what vLLM and SGLang read, who is told that an engine reads otherwise, and files in FP8."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import NEEDED, build_tiny, with_layers
from heads import drafted, filed_head, make_head
from pairs import make_tokenizer
from run_report import FULL, changed, decoding
from safetensors.torch import load_file, save_file
from torch import Tensor

from decode.errors import UserError
from decode.files import read_json
from decode.models.heads.block import BlockHead
from decode.models.heads.eagle import DraftHead
from decode.models.heads.files import load_head, save_head, unserved
from decode.models.heads.mtp import load_mtp
from decode.models.open import load_model
from distill.config import ExportSettings
from distill.export import head as exporting
from distill.export.card import add_measurements
from distill.export.draft import check_gguf
from distill.export.head import export_head, replace_layers
from distill.kinds.block import DFLASH, DSPARK

LAYER = (
    "input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_norm",
    "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj",
)  # fmt: skip
"""What vLLM's qwen3_dflash.py and SGLang's dflash.py ask of a layer."""
BACKBONE = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER}
BACKBONE |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
CONFIDENCE = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
FIELDS = (
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act",
    "tie_word_embeddings", "dtype",
)  # fmt: skip
"""Fields of config.json that the engines read."""


def export(folder: Path, version: int | str, dtype: str = "keep", **options: Any) -> tuple[DraftHead, Any, Path]:
    """A head, its target as it is loaded from disk, and the exported folder."""
    build_tiny("llama", num_hidden_layers=6).save_pretrained(folder / "target", max_shard_size="20KB")
    make_tokenizer().save_pretrained(folder / "target")
    target = load_model(folder / "target", device="cpu", dtype="float32")
    head = make_head(target, version) if isinstance(version, int) else filed_head(target, version, **options)
    (folder / "trained").mkdir()
    save_head(head, folder / "trained")
    paths = folder / "trained", folder / "target", folder / "out"
    return head, target, export_head(*paths, ExportSettings(dtype=dtype), length=7)


def read(out: Path) -> tuple[dict[str, Any], dict[str, Tensor], str]:
    return read_json(out / "config.json"), load_file(out / "model.safetensors"), (out / "README.md").read_text()


@pytest.mark.parametrize("version", [1, 3])
def test_engines_find_what_they_read_of_an_eagle_head(version: int, tmp_path) -> None:
    head, target, out = export(tmp_path, version)
    config, state, card = read(out)
    assert all(config.get(field) is not None for field in FIELDS)
    assert not config.get("bias")  # engines would make biases that no tensor fills
    assert "--speculative-num-steps 7" in card
    again = load_head(out, target)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in head.state_dict().items())
    add_measurements(out, FULL, "adaspec")
    assert read(out)[0]["num_assistant_tokens"] == 2
    assert "of its training" not in read(out)[2]
    add_measurements(out, changed(decoding=[decoding("adaspec", 0.0, 8, 3.0)]), "adaspec")
    assert "\nSGLang (more than the 7 drafted tokens of its training):" in read(out)[2]
    assert "draft 8 tokens a round (more than the 7 drafted tokens of its training), the shortest" in read(out)[2]
    assert read_json(out / "speculation_profile.json")["method"] == {1: "eagle", 3: "eagle3"}[version]
    if version == 1:
        return
    captured = config["eagle_aux_hidden_state_layer_ids"]
    assert captured == [1, 3, 5]  # three different ones
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    assert (config["architectures"], config["draft_vocab_size"]) == (["LlamaForCausalLMEagle3"], 24)
    assert (state["d2t"].dtype, state["t2d"].dtype) == (torch.int64, torch.bool)  # absent where all tokens are drafted


def test_vllm_and_sglang_find_what_they_read_of_a_dflash_head(tmp_path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head, target, out = export(tmp_path, "dflash")
    config, state, card = read(out)
    assert config["architectures"] == ["DFlashDraftModel"]
    slots = {"target_layer_ids": [1, 2, 4], "mask_token_id": 47, "sample_from_anchor": False}
    assert config["dflash_config"] == slots | {"input_embedding_scale": 1.0}  # or llama.cpp takes a Gemma target's
    assert (config["block_size"], config["is_causal"], config["rope_parameters"]["rope_theta"]) == (5, False, 10000.0)
    assert config["layer_types"] == ["full_attention"] * 2
    assert state.keys() == BACKBONE
    assert (out / "tokenizer.json").exists()
    assert drafted(load_head(out, target), target).equal(drafted(head, target))
    assert '"method": "dflash"' in card
    assert '"num_speculative_tokens": 4}' in card  # as many as a block drafts
    assert "--speculative-dflash-block-size 5" in card
    assert "--spec-type draft-dflash --spec-draft-n-max 4" in card


def test_engines_find_what_they_read_of_a_dflash_2_head_whose_layers_slide(tmp_path) -> None:
    head, target, out = export(tmp_path, "dflash2", window=6)
    config, state, card = read(out)
    assert config["architectures"] == ["DFlash2DraftModel"]
    sizes = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 3}
    slots = {"target_layer_ids": [1, 2, 4], "mask_token_id": 47, "sample_from_anchor": False}
    assert config["dflash_config"] == slots | sizes | {"input_embedding_scale": 1.0}
    assert [config[key] for key in ("sliding_window", "use_sliding_window", "is_causal")] == [6, True, False]
    assert config["layer_types"] == ["sliding_attention"] * 2
    parts = "base_kernel", "kernel_projection.weight"
    convs = {f"layers.{i}.{sub}_conv.{part}" for i in range(2) for sub in ("attention", "mlp") for part in parts}
    names = "predecessor_codebook", "successor_codebook", "hidden_projection.weight"
    assert state.keys() == BACKBONE | convs | {f"candidate_selector.{name}" for name in names}
    assert state["layers.0.attention_conv.base_kernel"].shape == (2, 2, 32)
    assert state["layers.0.mlp_conv.kernel_projection.weight"].shape == (2 * 2 * 2, 32)
    assert state["candidate_selector.successor_codebook"].shape == (48, 8)
    assert drafted(load_head(out, target), target).equal(drafted(head, target))
    assert "# DFlash head for" in card
    assert "It is a DFlash 2 head" in card
    assert '"method": "dflash"' in card
    assert '"num_speculative_tokens": 4}' in card
    assert "SGLang (on a GPU):" in card


def test_engines_find_what_they_read_of_a_dspark_head_of_some_tokens(tmp_path) -> None:
    with pytest.warns(UserWarning, match="sglang does not run this export as it was trained: it drafts 24 of"):
        _, target, out = export(tmp_path, "dspark", "bfloat16", draft_vocab=24)
    config, state, card = read(out)
    assert config["architectures"] == ["Qwen3DSparkModel"]
    names = "target_layer_ids", "mask_token_id", "markov_rank", "enable_confidence_head", "confidence_head_with_markov"
    assert [config[name] for name in (*names, "sample_from_anchor")] == [[1, 2, 4], 47, 8, True, True, True]
    assert state.keys() == BACKBONE | MARKOV | CONFIDENCE | {"d2t", "t2d", "lm_head.weight"}
    assert state["lm_head.weight"].equal(target.lm_head.weight[::2][:24].bfloat16())
    assert "--spec-type draft-dspark" in card
    assert "SGLang" not in card
    assert "sglang does not run it as it was trained: it drafts 24 of" in card


def test_a_gguf_file_of_a_head_that_llama_cpp_would_run_otherwise_is_refused(tiny, monkeypatch) -> None:
    monkeypatch.setattr("distill.export.draft.find_converter", lambda: None)
    target, settings = tiny("llama", num_hidden_layers=6), ExportSettings(gguf=["f32"])
    check_gguf(settings, DSPARK, filed_head(target, "dspark"))
    head = filed_head(target, "dflash", from_anchor=True)
    assert unserved(head).keys() == {"vllm", "sglang", "llama.cpp"}
    with pytest.raises(UserError, match=r"leave export\.gguf empty"):
        check_gguf(settings, DFLASH, head)


def test_a_head_that_is_read_back_otherwise_is_not_kept(tmp_path, monkeypatch) -> None:
    def other(folder: Path, target: Any) -> DraftHead:
        head = load_head(folder, target)
        if isinstance(head, BlockHead) and folder.name != "trained":
            head.mask_id = 3
        return head

    monkeypatch.setattr(exporting, "load_head", other)
    with pytest.raises(UserError, match="has another mask_id"):
        export(tmp_path, "dflash")
    assert not (tmp_path / "out").exists()


def in_fp8(folder: Path) -> dict[str, Tensor]:
    """Writes a model's matrices in FP8 with a scale for each 8 × 8 block; returns the weights that these are."""
    file, config = folder / "model.safetensors", read_json(folder / "config.json")
    packed = load_file(file)
    plain = {name: weight.float() for name, weight in packed.items()}
    for name in [name for name in plain if name.endswith("_proj.weight")]:
        rows, columns = plain[name].shape
        full = torch.nn.functional.pad(plain[name], (0, -columns % 8, 0, -rows % 8))
        blocks = full.unflatten(0, (-1, 8)).unflatten(2, (-1, 8))
        scale = blocks.abs().amax((1, 3), keepdim=True).clamp_min(1e-9) / 448
        small = (blocks / scale).to(torch.float8_e4m3fn)
        whole, exact = (each.flatten(2).flatten(0, 1)[:rows, :columns] for each in (small, small.float() * scale))
        plain[name] = exact
        packed |= {name: whole.contiguous(), f"{name}_scale_inv": scale[:, 0, :, 0].contiguous()}
    save_file(packed, file, metadata={"format": "pt"})
    how = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))
    return plain


def test_fp8_weights_are_plain_ones_on_a_cpu_and_are_saved_so(tmp_path) -> None:
    build_tiny("llama", dtype=torch.bfloat16).save_pretrained(tmp_path / "fp8")
    wanted = in_fp8(tmp_path / "fp8")
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(tmp_path / "fp8", device="cpu", dtype=str(dtype).removeprefix("torch."))
        assert {weight.dtype for weight in model.parameters()} == {dtype}
        assert all(weight.equal(wanted[name].to(dtype)) for name, weight in model.named_parameters())
        assert torch.isfinite(model(input_ids=torch.arange(5)[None]).logits).all()
        model.save_pretrained(tmp_path / "again")
        again = load_model(tmp_path / "again", device="cpu", dtype="float32").named_parameters()
        assert all(weight.equal(wanted[name].to(dtype).float()) for name, weight in again)


@NEEDED
def test_tuned_layers_in_files_of_fp8_are_not_scaled_again(tmp_path, monkeypatch) -> None:
    folder, out = tmp_path / "target", tmp_path / "out"
    with_layers(folder, monkeypatch, "DeepSeek-V3", vocab_size=280, max_position_embeddings=256)
    make_tokenizer().save_pretrained(folder)
    in_fp8(folder)
    file, config = folder / "model.safetensors", read_json(folder / "config.json")
    target = load_model(folder, device="cpu", dtype="float32")
    head = load_mtp(target)
    with torch.no_grad():
        for weight in head.parameters():
            weight += 0.01
    (tmp_path / "tuned").mkdir()
    head.config.num_assistant_tokens, head.target_config.quantization_config = 1, config["quantization_config"]
    save_head(head, tmp_path / "tuned")
    export_head(tmp_path / "tuned", folder, out, ExportSettings(), length=3)
    assert "quantization_config" not in read_json(out / "config.json")
    assert not any("scale" in name for name in load_file(out / "model.safetensors"))
    replace_layers(out, folder)
    replace_layers(out, folder)  # nothing is left to do
    tuned, (settings, files) = head.tensors(), (read_json(folder / "config.json"), load_file(file))
    projections = {name.removesuffix(".weight") for name in tuned if name.endswith("_proj.weight")}
    assert set(settings["quantization_config"]["modules_to_not_convert"]) == projections
    assert not any(f"{name}_scale_inv" in files for name in tuned)
    assert "model.layers.1.self_attn.o_proj.weight_scale_inv" in files  # of the other layers
    assert all(torch.equal(files[name].float(), value.to(files[name].dtype).float()) for name, value in tuned.items())
    again = load_mtp(load_model(folder, device="cpu", dtype="float32")).state_dict()
    assert all(torch.allclose(again[name], value, atol=0, rtol=1e-2) for name, value in head.state_dict().items())
