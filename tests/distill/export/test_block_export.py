"""Exported block heads: what vLLM, SGLang and speculators read, and who is told that an engine reads otherwise."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from families import build_tiny
from heads import drafted, make_block_head
from pairs import make_tokenizer
from safetensors.torch import load_file

from decode.errors import UserError
from decode.models.head_configs import unserved
from decode.models.head_files import load_head, save_head
from decode.models.loading import load_model
from distill.config.run import ExportSettings
from distill.export.draft import check_gguf
from distill.export.head import export_head

LAYER = (
    "input_layernorm", "post_attention_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_norm",
    "self_attn.k_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.q_proj", "self_attn.v_proj",
)  # fmt: skip
"""What vLLM's qwen3_dflash.py and SGLang's dflash.py ask of a layer."""
BACKBONE = {f"layers.{i}.{name}.weight" for i in range(2) for name in LAYER}
BACKBONE |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
MARKOV = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
CONFIDENCE = {"confidence_head.proj.weight", "confidence_head.proj.bias"}


def export(folder: Path, settings: ExportSettings, version: str, **options: Any):  # type: ignore[no-untyped-def]
    """A head, its target as it is loaded from disk, and the exported folder."""
    build_tiny("llama", num_hidden_layers=6).save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    target = load_model(folder / "target", device="cpu", dtype="float32")
    head = make_block_head(target, version, **options)
    (folder / "trained").mkdir()
    save_head(head, folder / "trained")
    given = folder / "trained", folder / "target", folder / "out", {"best_draft_length": 9}, settings
    return head, target, export_head(*given)


def test_vllm_and_sglang_find_what_they_read_of_a_dflash_head(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        head, target, out = export(tmp_path, ExportSettings(), "dflash")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["dflash_config"] == {"target_layer_ids": [1, 2, 4], "mask_token_id": 47, "sample_from_anchor": False}
    assert (config["block_size"], config["is_causal"], config["rope_theta"]) == (5, False, 10000.0)
    assert config["layer_types"] == ["full_attention"] * 2
    assert load_file(out / "model.safetensors").keys() == BACKBONE
    assert (out / "tokenizer.json").exists()
    assert drafted(load_head(out, target), target).equal(drafted(head, target))  # type: ignore[arg-type]
    card = (out / "README.md").read_text()
    assert "# DFlash head for" in card
    assert '"method": "dflash"' in card
    assert '"num_speculative_tokens": 4}' in card  # as many as a block drafts, though 9 was measured
    assert "--speculative-algorithm DFLASH" in card
    assert "--speculative-dflash-block-size 5" in card
    assert "--spec-type draft-dflash --spec-draft-n-max 4" in card


def test_engines_find_what_they_read_of_a_dspark_head_of_some_tokens(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="sglang does not run this export as it was trained: it drafts 24 of"):
        _, target, out = export(tmp_path, ExportSettings(dtype="bfloat16"), "dspark", draft_vocab=24)
    config, state = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["architectures"] == ["Qwen3DSparkModel"]
    names = "target_layer_ids", "mask_token_id", "markov_rank", "enable_confidence_head", "confidence_head_with_markov"
    assert [config[name] for name in (*names, "sample_from_anchor")] == [[1, 2, 4], 47, 8, True, True, True]
    assert state.keys() == BACKBONE | MARKOV | CONFIDENCE | {"d2t", "t2d", "lm_head.weight"}
    assert state["lm_head.weight"].equal(target.lm_head.weight[::2][:24].bfloat16())
    card = (out / "README.md").read_text()
    assert "--spec-type draft-dspark" in card
    assert "SGLang" not in card
    assert "sglang does not run it as it was trained: it drafts 24 of" in card
    assert json.loads((out / "speculation_profile.json").read_text())["unserved"].keys() == {"sglang"}


@pytest.mark.parametrize(
    ("version", "options"),
    [
        ("dflash", {}),
        ("dflash", {"draft_vocab": 24}),
        ("dspark", {"draft_vocab": 24, "markov_kind": "gated", "from_anchor": False}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not run this export")
def test_speculators_format_holds_the_same_head(version: str, options: dict[str, Any], tmp_path: Path) -> None:
    head, target, out = export(tmp_path, ExportSettings(format="speculators"), version, **options)
    config, state = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert config["speculators_model_type"] == version
    assert config["aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")
    assert config["sliding_window_non_causal"]  # vLLM would make full attention causal
    assert state["embed_tokens.weight"].equal(target.get_input_embeddings().weight)
    assert len(state["lm_head.weight"]) == config["draft_vocab_size"]
    assert drafted(load_head(out, target), target).equal(drafted(head, target))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("version", "options", "engines"),
    [
        ("dspark", {}, set()),
        ("dspark", {"from_anchor": False}, set()),
        ("dflash", {"from_anchor": True}, {"vllm", "sglang", "llama.cpp"}),
        ("dflash", {"draft_vocab": 24}, {"sglang", "llama.cpp"}),
        ("dspark", {"markov_kind": "gated"}, {"vllm", "llama.cpp"}),
        ("dspark", {"markov_rank": 0}, {"vllm", "sglang", "llama.cpp"}),
    ],
)
def test_engines_that_would_run_a_head_otherwise_are_named(version, options, engines, tiny, monkeypatch) -> None:
    head = make_block_head(tiny("llama", num_hidden_layers=6), version, **options)
    assert unserved(head).keys() == engines
    monkeypatch.setattr("distill.export.draft.find_converter", lambda: None)
    if "llama.cpp" in engines:
        with pytest.raises(UserError, match=r"llama\.cpp does not run this head"):
            check_gguf(ExportSettings(gguf=["f32"]), head)
    else:
        check_gguf(ExportSettings(gguf=["f32"]), head)
    with pytest.raises(UserError, match=r"export\.format is speculators"):
        check_gguf(ExportSettings(gguf=["f32"], format="speculators"), version)


def test_a_head_that_is_read_back_otherwise_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from distill.export import head as exporting

    def other(folder: Path, target: Any) -> Any:
        found = load_head(folder, target)
        if folder.name != "trained":
            found.mask_id = 3
        return found

    monkeypatch.setattr(exporting, "load_head", other)
    with pytest.raises(UserError, match="has another mask_id"):
        export(tmp_path, ExportSettings(), "dflash")
    assert not (tmp_path / "out").exists()
