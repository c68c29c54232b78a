"""Of a target's files a head reads what it needs: embedding, output head, norm, first and last layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import build_tiny
from safetensors.torch import load_file, save_file

from decode.models.families import final_norm
from decode.models.loading import load_model
from distill import models
from distill.lm_head import LMHead
from distill.models import hollow_target


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that are read from safetensors files."""
    names: list[str] = []

    read = models._read

    def watched(files: dict[str, Path], name: str, like: torch.Tensor) -> torch.Tensor | None:
        tensor = read(files, name, like)
        names.extend([name] * (tensor is not None))
        return tensor

    monkeypatch.setattr(models, "_read", watched)
    monkeypatch.setattr(models, "load_model", lambda *_, **__: pytest.fail("the target is loaded as a whole"))
    return names


@pytest.mark.parametrize("shards", ["1GB", "10KB"])
@pytest.mark.parametrize("family", ["llama", "llama-tied", "gemma3", "gpt2", "opt"])
def test_parts_equal_the_whole_targets_and_nothing_else_is_read(
    family: str, shards: str, tmp_path: Path, read: list[str]
) -> None:
    build_tiny(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 4}).save_pretrained(
        tmp_path, max_shard_size=shards
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "10KB")
    hollow, whole = hollow_target(tmp_path), load_model(tmp_path, device="cpu", dtype="float32")
    real = {name for name, weight in hollow.state_dict().items() if not weight.is_meta}
    assert len(read) == len(set(read)) == len(real) - whole.config.tie_word_embeddings
    for name, weight in whole.state_dict().items():
        outside = not any(f".{layer}." in name for layer in range(4)) and "position" not in name and "wpe" not in name
        assert (name in real) == (outside or ".0." in name or ".3." in name), name
        assert name not in real or weight.equal(hollow.state_dict()[name])
    states, ids = torch.randn(3, whole.config.hidden_size), torch.arange(5)
    assert LMHead(hollow)(states).equal(LMHead(whole)(states))
    assert hollow.get_input_embeddings()(ids).equal(whole.get_input_embeddings()(ids))
    assert final_norm(hollow)(states).equal(final_norm(whole)(states))
    tied = hollow.get_output_embeddings().weight is hollow.get_input_embeddings().weight
    assert tied == whole.config.tie_word_embeddings == hollow.config.tie_word_embeddings
    assert (hollow.name_or_path, hollow.dtype, hollow.training) == (str(tmp_path), torch.float32, False)
    assert hollow.num_parameters() == whole.num_parameters()
    assert hollow.generation_config.to_dict() == whole.generation_config.to_dict()


def test_further_last_layers_and_quantised_ones(tmp_path: Path, read: list[str]) -> None:
    build_tiny("llama", num_hidden_layers=4).save_pretrained(tmp_path)
    name = "model.layers.{}.self_attn.q_proj.weight"
    hollow = hollow_target(tmp_path, last=2)
    assert [hollow.get_parameter(name.format(layer)).is_meta for layer in range(4)] == [False, True, False, False]
    config, file = json.loads((tmp_path / "config.json").read_text()), tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = name.format(3)
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, file, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    hollow = hollow_target(tmp_path)
    assert hollow.get_parameter(name).is_meta  # without its scales it would be another one
    assert not hollow.get_parameter(name.replace("q_proj", "k_proj")).is_meta


def test_a_head_in_the_file_beside_a_tied_configuration_is_kept(tmp_path: Path, read: list[str]) -> None:
    build_tiny("llama-tied").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    other = torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors | {"lm_head.weight": other}, file, metadata={"format": "pt"})
    hollow = hollow_target(tmp_path)
    assert hollow.get_output_embeddings().weight.equal(other)
    assert not hollow.config.tie_word_embeddings


def test_files_with_other_names_are_loaded_as_a_whole(tmp_path: Path) -> None:
    build_tiny("gpt_neox").save_pretrained(tmp_path)  # whose output head transformers renames
    assert not any(weight.is_meta for weight in hollow_target(tmp_path).parameters())
