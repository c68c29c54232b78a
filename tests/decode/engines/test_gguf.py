"""GGUF files: what is refused, how texts are split, and files that hold the model's own weights."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from pairs import save_pair
from safetensors.torch import load_file

from decode.core.errors import UserError
from decode.engines.engine import CHECKOUT
from decode.engines.gguf import CONVERTER, convert, split_of
from distill.config.export import ExportSettings
from distill.export.gguf import check_gguf, export_gguf


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
    monkeypatch.setattr("decode.engines.gguf.CHECKOUT", tmp_path)
    check_gguf(ExportSettings())
    with pytest.raises(UserError, match="make engines"):
        check_gguf(ExportSettings(formats=["hf", "gguf"]))
    with pytest.raises(UserError, match="number format is 'q4'"):
        convert(tmp_path, tmp_path / "x.gguf", "q4")


@pytest.mark.engine
@pytest.mark.skipif(not (CHECKOUT / CONVERTER).is_file(), reason="llama.cpp is not set up (make engines)")
def test_the_files_hold_the_models_own_weights(tiny, tmp_path: Path) -> None:
    save_pair(tmp_path, tiny)
    files = export_gguf(tmp_path / "draft", tmp_path / "target", ExportSettings(formats=["gguf"], gguf_types=["f32"]))
    assert [file.name for file in files] == ["target-f32.gguf", "draft-f32.gguf"]
    sys.path.insert(0, str(CHECKOUT / CONVERTER.parent / "gguf-py"))
    try:
        from gguf import GGUFReader
    finally:
        sys.path.pop(0)
    for name, file in zip(("target", "draft"), files):
        tensors = {tensor.name: tensor.data for tensor in GGUFReader(file).tensors}
        ours = load_file(tmp_path / name / "model.safetensors")
        assert len(tensors) >= len(ours)
        assert np.array_equal(tensors["token_embd.weight"], ours["model.embed_tokens.weight"].numpy())
    with pytest.raises(UserError, match="converter refuses"):
        convert(tmp_path / "nothing", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()
