"""Every key and tensor of an export is read by the engines that its card names, or the card says what is not.

Sources of installed engines are read as text. What an engine does not read must not change what it computes, or the
export has no command for that engine. The keys are those that the exporter writes, so a new one has to be classified.
"""

import ast
import functools
import re
import warnings
import zipfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build_tiny
from heads import filed_head
from pairs import make_tokenizer
from safetensors.torch import load_file

from decode.engines.base import CHECKOUT
from decode.files import read_json
from decode.models.heads.eagle import DraftHead, FeatureHead, head_config
from decode.models.heads.files import SLIDING, save_head
from distill.config import ExportSettings
from distill.export.card import commands, exported_facts
from distill.export.draft import export_draft
from distill.export.head import export_head

pytestmark = pytest.mark.engine
ROOTS = {
    "vllm": ".venv-vllm/lib/python3*/site-packages/vllm",
    "sglang": ".engines/sglang/sglang-*.whl",
    "llama.cpp": ".engines/llama.cpp/src",
}
MODELS = "model_executor/models/"  # of vLLM
SOURCES: dict[str, dict[str, Sequence[str]]] = {
    "vllm": {
        "": (
            "config/speculative.py", "config/model.py", "transformers_utils/model_arch_config_convertor.py",
            "model_executor/layers/rotary_embedding/__init__.py", MODELS + "registry.py",
        ),
        "llama": (MODELS + "llama.py",),
        "qwen3": (MODELS + "qwen3.py", MODELS + "qwen2.py"),
        "eagle3": (MODELS + "llama_eagle3.py", MODELS + "llama.py"),
        "dflash": (MODELS + "qwen3_dflash.py", MODELS + "qwen2.py", "v1/worker/gpu/spec_decode/dflash/speculator.py"),
        "dflash2": (MODELS + "qwen3_dflash.py", MODELS + "qwen3_dflash2.py", MODELS + "qwen2.py"),
        "dspark": (
            MODELS + "qwen3_dflash.py", MODELS + "qwen3_dspark.py", MODELS + "qwen2.py",
            "v1/worker/gpu/spec_decode/dspark/speculator.py",
        ),
    },
    "sglang": {
        "": ("configs/model_config.py", "layers/rotary_embedding/factory.py"),
        "llama": ("models/llama.py",),
        "qwen3": ("models/qwen3.py", "models/qwen2.py"),
        "eagle": ("models/llama_eagle.py", "models/llama.py"),
        "eagle3": ("models/llama_eagle3.py", "models/llama.py"),
        "dflash": ("models/dflash.py", "speculative/dflash_utils.py"),
        "dflash2": ("models/dflash.py", "speculative/dflash_utils.py"),
        "dspark": (
            "models/dflash.py", "models/dspark.py", "speculative/dflash_utils.py",
            "speculative/dspark_components/dspark_config.py",
        ),
    },
    "llama.cpp": {
        "": ("conversion/base.py", "conversion/__init__.py", "gguf-py/gguf/tensor_mapping.py"),
        "llama": ("conversion/llama.py",),
        "qwen3": ("conversion/qwen.py:Qwen3Model",),
        "eagle3": ("conversion/llama.py:LlamaModel",),
        "dflash": ("conversion/qwen.py:DFlashModel",),
        "dflash2": ("conversion/qwen.py:DFlashModel",),
        "dspark": ("conversion/qwen.py:DFlashModel,DSparkModel",),
    },
}  # fmt: skip
"""Files, and classes of them, that decide what an engine computes, by kind of export; those of all kinds first."""
REASONS = {
    "bookkeeping of transformers": (
        "_name_or_path", "chunk_size_feed_forward", "id2label", "label2id", "return_dict", "transformers_version",
        "use_cache",
    ),
    "the number format of the file": ("dtype",),
    "of training": ("initializer_range",),
    "engines choose a class by architectures": ("model_type",),
    "engines take the target's": ("bos_token_id", "eos_token_id", "pad_token_id"),
    "layer_types says which layers slide": ("max_window_layers",),
    "the card's command has it": ("num_assistant_tokens",),
    "engines count the target's layers": ("num_target_layers",),
    "transformers' Qwen3Config drops the window without it": ("use_sliding_window",),
}  # fmt: skip
INERT = {*chain(*REASONS.values())}
"""Keys that no engine needs to read, for one of these reasons."""
OF_KIND = {
    "dflash": ("block_size",),  # the command has it
    "dflash2": ("block_size",),
}
"""The same of one kind."""
OF_ENGINE = {
    "llama.cpp": (  # the tensors say it
        "markov_rank", "enable_confidence_head", "confidence_head_with_markov", "attention_bias", "mlp_bias",
        "tie_word_embeddings",
    ),
}  # fmt: skip
"""The same of one engine."""
USUAL = {
    "hidden_act": "silu", "input_embedding_scale": 1.0, "markov_head_type": "vanilla", "pretraining_tp": 1,
    "rope_type": "default", "use_aux_hidden_state": True,
}  # fmt: skip
"""Values that every engine computes with where it does not read their keys, as with those that are empty or false."""
ALWAYS = {"dflash": {"is_causal"}, "dflash2": {"is_causal"}, "dspark": {"is_causal", "sample_from_anchor"}}
"""Keys of which false is no such value."""


@functools.cache
def text_of(engine: str, kind: str) -> str:
    """The sources that read exports of a kind, empty where the engine is not installed."""
    found = [path for root in (Path.cwd(), CHECKOUT) for path in sorted(root.glob(ROOTS[engine]))]
    if not found:
        return ""
    wheel, parts = zipfile.ZipFile(found[0]) if found[0].suffix == ".whl" else None, []
    for name in (*SOURCES[engine][""], *SOURCES[engine][kind]):
        file, _, classes = name.partition(":")
        text = wheel.read(f"sglang/srt/{file}").decode() if wheel else (found[0] / file).read_text(encoding="utf-8")
        if classes:
            bodies = [node for node in ast.parse(text).body if getattr(node, "name", None) in classes.split(",")]
            assert len(bodies) == len(classes.split(",")), name
            text = "\n".join(str(ast.get_source_segment(text, body)) for body in bodies)
        parts.append(text)
    return "\n".join(parts)


def keys_of(config: dict[str, Any], kind: str) -> Iterator[str]:
    """The keys of a config.json whose values change what is computed."""
    same = {"target_hidden_size": config["hidden_size"], "draft_vocab_size": config["vocab_size"]} | USUAL
    for key, value in config.items():
        if isinstance(value, dict) and key not in INERT:
            yield from keys_of(config | value | {key: None}, kind)
        elif key == "layer_types" and set(value) == {"full_attention"}:
            continue
        elif key in ALWAYS.get(kind, ()) or (value not in (None, False, [], {}, 0) and value != same.get(key)):
            yield key


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
EVERY = {"vllm", "sglang", "llama.cpp"}
LAST_STATE = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": None}
MIXED = {"window": 6, "is_causal": None, "layer_types": [SLIDING, "full_attention"]}


EXPORTS: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "EAGLE-1": ("eagle", {}, set()),
    "EAGLE-1, some tokens": ("eagle", {"draft_vocab": 24}, set()),
    "EAGLE-3": ("eagle3", {}, set()),
    "EAGLE-3, some tokens": ("eagle3", {"draft_vocab": 24}, set()),
    "EAGLE-3, rope llama3": ("eagle3", {"rope_parameters": LLAMA3}, set()),
    "EAGLE-3, rope yarn": ("eagle3", {"rope_parameters": YARN}, set()),
    "EAGLE-3, norm_before_fc": ("eagle3", {"norm_before_fc": True}, set()),
    "EAGLE-3, a copy of the embedding": ("eagle3", {"embedding": "copy"}, set()),
    "EAGLE-3.1, fc_norm": ("eagle3", {"fc_norm": True}, {"llama.cpp"}),
    "EAGLE-3.1, norm_output": ("eagle3", {"norm_output": True}, {"llama.cpp"}),
    "EAGLE-3, norm_before_residual": ("eagle3", {"norm_before_residual": True}, {"sglang"}),
    "EAGLE-3, its own embedding": ("eagle3", {"embedding": "new"}, {"sglang"}),
    "EAGLE-3, two states": ("eagle3", {"captured_layers": (1, 3)}, {"llama.cpp"}),
    "EAGLE-3, last state": ("eagle3", LAST_STATE, EVERY),
    "EAGLE-3, biases": ("eagle3", {"biases": True}, EVERY),
    "EAGLE-3, norms of queries": ("eagle3", {"qk_norm": True}, EVERY),
    "EAGLE-3, gelu": ("eagle3", {"hidden_act": "gelu_pytorch_tanh"}, EVERY),
    "DFlash": ("dflash", {}, set()),
    "DFlash, some tokens": ("dflash", {"draft_vocab": 24}, {"sglang", "llama.cpp"}),
    "DFlash, windows": ("dflash", {"window": 6}, set()),
    "DFlash, causal": ("dflash", {"window": 6, "causal": True}, set()),
    "DFlash, mixed": ("dflash", MIXED, {"llama.cpp"}),
    "DFlash, rope llama3": ("dflash", {"rope_parameters": LLAMA3}, {"llama.cpp"}),
    "DFlash that drafts in slot 0": ("dflash", {"from_anchor": True}, EVERY),
    "DFlash 2": ("dflash2", {}, set()),
    "DFlash 2, windows": ("dflash2", {"window": 6}, set()),
    "DFlash 2, some tokens": ("dflash2", {"draft_vocab": 24}, EVERY),
    "DSpark": ("dspark", {}, set()),
    "DSpark, some tokens": ("dspark", {"draft_vocab": 24}, {"sglang"}),
    "DSpark, fill-in": ("dspark", {"from_anchor": False}, set()),
}
"""Exports by name: their kind, what is particular to their heads, and the engines that are refused."""


def block_head(target: Any, version: str, *, rope_parameters: Any = None, **options: Any) -> DraftHead:
    head = filed_head(target, version, **options)
    if rope_parameters:
        head.config.rope_parameters = rope_parameters
    return head


def feature_head(
    target: Any, version: int, *, draft_vocab: int | None = None, captured_layers: tuple[int, ...] = (),
    biases: bool = False, embedding: str = "", **fields: Any,
) -> DraftHead:  # fmt: skip
    """A head of a configuration with these fields, as published heads have them."""
    config = head_config(target.config, version, captured_layers=captured_layers, draft_vocab=draft_vocab)
    config.update(fields)
    head = FeatureHead(config)
    for name in ("q_proj", "k_proj", "v_proj", "o_proj") if biases else ():
        linear = head.midlayer.self_attn[name]
        linear.bias = torch.nn.Parameter(torch.ones(linear.out_features))
    if embedding:
        head.embed_tokens = torch.nn.Embedding(target.config.vocab_size, 32)
    if embedding == "copy":
        head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    return head


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a target."""
    path: Path = tmp_path_factory.mktemp("keys")
    build_tiny("llama", num_hidden_layers=6).save_pretrained(path / "target")
    make_tokenizer().save_pretrained(path / "target")
    return path


def check(out: Path, kind: str, family: str = "") -> set[str]:
    """Demands that the engines of the card read what changes what is computed; returns those that it has."""
    config, card = read_json(out / "config.json"), (out / "README.md").read_text(encoding="utf-8")
    parts = {part for name in load_file(out / "model.safetensors") for part in name.split(".")}
    parts -= {"weight", "bias", "model", "layers", *map(str, range(8))}
    titles = [title.lower() for title, _, _ in commands("T", "D", exported_facts(out))]
    engines = {engine for engine in ROOTS if any(title.startswith(engine) for title in titles)}
    names = {*keys_of(config, kind), *config["architectures"], *parts} - {*INERT, *OF_KIND.get(kind, ())}
    names -= {"architectures", *re.findall(r"`(\w+)`", card)}
    read = {engine: text for engine in sorted(engines) if (text := text_of(engine, family or kind))}
    if not read and engines:
        pytest.skip(f"none of {', '.join(sorted(engines))} is here (make engines)")
    for engine, text in read.items():
        asked = names - {*OF_ENGINE.get(engine, ())}
        unread = sorted(name for name in asked if not re.search(rf"\b{name}\b", text))
        assert not unread, f"{engine} does not read {unread}: refuse it in `unserved`, or name it in the card"
    return engines


@pytest.mark.parametrize("name", EXPORTS)
def test_engines_of_a_head_s_card_read_all_that_changes_what_it_computes(name: str, folder: Path, tmp_path) -> None:
    kind, options, refused = EXPORTS[name]
    target, versions = build_tiny("llama", num_hidden_layers=6), {"eagle": 1, "eagle3": 3}
    head: Any = (
        feature_head(target, versions[kind], **options) if kind in versions else block_head(target, kind, **options)
    )
    (tmp_path / "trained").mkdir()
    save_head(head, tmp_path / "trained")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = export_head(tmp_path / "trained", folder / "target", tmp_path / "out", ExportSettings(), length=4)
    offered = {"eagle": {"sglang"}}.get(kind, EVERY)
    assert check(out, kind) == offered - refused
    profile = read_json(out / "speculation_profile.json")["export"]
    assert set(profile["unserved"]) == refused


@pytest.mark.parametrize(
    ("family", "options", "refused"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}, {"sglang"}),
        ("llama", {"rope_parameters": LLAMA3, "head_dim": 16}, set()),
        ("qwen3", {"rope_parameters": YARN}, set()),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, {"llama.cpp"}),
        ("mistral", {"sliding_window": 8}, {"llama.cpp"}),
    ],
)
def test_engines_of_a_draft_s_card_read_all_that_changes_what_it_computes(family, options, refused, tmp_path) -> None:
    build_tiny("llama").save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    build_tiny(family, **options).save_pretrained(tmp_path / "trained")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = export_draft(tmp_path / "trained", tmp_path / "target", tmp_path / "out", ExportSettings())
    assert check(out, "draft", {"mistral": "llama"}.get(family, family)) == EVERY - refused
