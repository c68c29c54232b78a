"""GGUF files: what is refused, how texts are split, and files that hold the model's own weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from families import build_tiny
from pairs import make_tokenizer, save_pair
from safetensors.torch import load_file

from decode.engines.base import installed
from decode.engines.llama_cpp import CONVERTER, convert, split_of
from decode.errors import UserError
from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import block_config
from decode.models.heads.eagle import FeatureHead, head_config
from distill.config import ExportSettings
from distill.export.draft import check_gguf, export_gguf
from distill.export.head import write_head
from distill.kinds.eagle import EAGLE


def tokenizer(folder: Path, *steps: dict, **more: object) -> Path:
    core = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)}, **more}
    (folder / "tokenizer.json").write_text(json.dumps(core))
    return folder


def test_ways_to_split_texts_that_llama_cpp_has_a_name_for(tmp_path: Path) -> None:
    bytes_, digits = {"type": "ByteLevel", "use_regex": True}, {"type": "Digits", "individual_digits": True}
    assert split_of(tokenizer(tmp_path, bytes_)) == "gpt-2"
    assert split_of(tokenizer(tmp_path, digits, bytes_)) == "smollm"
    assert split_of(tokenizer(tmp_path, digits | {"individual_digits": False}, bytes_)) == ""
    assert split_of(tokenizer(tmp_path, bytes_ | {"add_prefix_space": True})) == ""
    assert split_of(tokenizer(tmp_path, bytes_, normalizer={"type": "NFC"})) == ""
    assert split_of(tmp_path / "nothing") == ""


def test_a_missing_converter_is_said_before_training(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("decode.engines.base.CHECKOUT", tmp_path)
    check_gguf(ExportSettings())
    with pytest.raises(UserError, match="make engines"):
        check_gguf(ExportSettings(gguf=["f32"]))
    (tmp_path / CONVERTER).parent.mkdir(parents=True)
    (tmp_path / CONVERTER).touch()
    with pytest.raises(UserError, match="no EAGLE-1 heads"):
        check_gguf(ExportSettings(gguf=["f32"]), EAGLE)


needs_converter = pytest.mark.skipif(
    not installed(CONVERTER).is_file(), reason="llama.cpp is not set up (make engines)"
)


def read(file: Path):
    sys.path.insert(0, str(installed(CONVERTER).with_name("gguf-py")))
    try:
        from gguf import GGUFReader
    finally:
        sys.path.pop(0)
    reader = GGUFReader(file)
    return {tensor.name: tensor.data for tensor in reader.tensors}, reader.fields


@pytest.mark.engine
@needs_converter
def test_the_files_hold_the_models_own_weights(tiny, tmp_path: Path) -> None:
    save_pair(tmp_path, tiny)
    files = export_gguf(tmp_path / "draft", tmp_path / "target", ExportSettings(gguf=["f32"]))
    assert [file.name for file in files] == ["target-f32.gguf", "draft-f32.gguf"]
    for name, file in zip(("target", "draft"), files):
        tensors, _ = read(file)
        ours = load_file(tmp_path / name / "model.safetensors")
        assert len(tensors) >= len(ours)
        assert np.array_equal(tensors["token_embd.weight"], ours["model.embed_tokens.weight"].numpy())
    with pytest.raises(UserError, match="converter refuses"):
        convert(tmp_path / "nothing", tmp_path / "x.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    with pytest.raises(UserError, match=r"refuses .*NoSuchModel is not supported"):
        convert(tmp_path, tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


LAYER = {f"blk.0.{name}.weight" for name in ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output",
                                             "ffn_norm", "ffn_gate", "ffn_down", "ffn_up")}  # fmt: skip
"""What llama.cpp's eagle3.cpp asks of a head's layer."""


@pytest.mark.engine
@needs_converter
@pytest.mark.parametrize(
    ("family", "version", "drafted"),
    [
        ("llama", 3, 64),
        ("qwen3", 3, 64),
        ("llama", "dflash", None),
        ("gemma3", "dflash", None),
        ("llama", "dspark", None),
        ("llama", "dspark", 64),
    ],
)
def test_the_converter_takes_heads_whole(family: str, version, drafted: int | None, tmp_path: Path) -> None:
    target = build_tiny(family, vocab_size=280, num_hidden_layers=6)
    for folder in ("target", "head"):
        (tmp_path / folder).mkdir()
    target.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    markov = {"markov_rank": 8, "confidence": True} if version == "dspark" else {}
    shape = {"layers": 2, "block": 5, "mask_id": 7, "target_layers": [1, 2, 4], "draft_vocab": drafted} | markov
    head = (
        FeatureHead(head_config(target.config, 3, draft_vocab=drafted, captured_layers=(1, 2, 3)))
        if version == 3
        else BlockHead(block_config(target.config, version, **shape))
    )
    if drafted:
        head.set_vocabulary(torch.randperm(280)[:drafted].sort()[0])
    write_head(head, tmp_path / "head", make_tokenizer(), 3, torch.float32, None if version == 3 else target)
    tensors, fields = read(convert(tmp_path / "head", tmp_path / "x.gguf", target=tmp_path / "target"))
    held = sum(tensor.size for tensor in tensors.values()) - sum(p.numel() for p in head.parameters())
    if version == 3:
        assert tensors.keys() == {"fc.weight", "output_norm.weight", "output.weight", "d2t"} | LAYER
        assert np.array_equal(tensors["d2t"], head.draft_ids())  # ids here, where our file has offsets
        assert (held, fields["eagle3.target_layers"].contents()) == (64, [1, 2, 3])
        return
    assert held == (
        0 if drafted is None else drafted * (1 + head.config.hidden_size)
    )  # d2t, a copy of the target's rows
    assert fields["dflash.target_layers"].contents() == [2, 3, 5]
    assert fields["dflash.block_size"].contents() == 5
    assert fields["tokenizer.ggml.mask_token_id"].contents() == 7
    assert fields["dflash.embedding_scale"].contents() == 1  # of a Gemma target too, whose scale is not the head's
    assert not fields["dflash.attention.causal"].contents()
    for name in ("sample_from_anchor", "has_confidence_head") if version == "dspark" else ():
        assert fields[f"dflash.{name}"].contents()
