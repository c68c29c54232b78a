"""Block heads in files: ours, and those of other projects, each of which drafts what the head drafts that it holds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import MASK, drafted, filed_head, make_block_head
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from decode.errors import UserError
from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.heads.files import COMPUTED, SLIDING, head_kind, load_head, save_head, unserved

DRAFTED = 24  # tokens of a reduced vocabulary
DERIVED = ("rope_type", "layer_types")  # of other keys
UNKNOWN = (
    "quantization_config", "final_logit_softcapping", "attn_logit_softcapping", "use_gemma_norm", "attention_sink_bias",
    "attention_value_scale", "shift_label", "pure_draft_prefix_len", "norm_of_tomorrow",
)  # fmt: skip
"""Keys that change what is drafted, which no list here names."""


@pytest.fixture(scope="module")
def target(tiny) -> PreTrainedModel:
    return tiny("llama", num_hidden_layers=6)


def shared(head: BlockHead, target: PreTrainedModel) -> dict[str, Tensor]:
    """Copies of the target's embedding and output head, as files of other projects hold them, in 16 bits."""
    rows, ids = target.get_output_embeddings().weight.detach(), head.draft_ids()
    embedding = target.get_input_embeddings().weight.detach()
    return {"embed_tokens.weight": embedding.half(), "lm_head.weight": (rows if ids is None else rows[ids]).half()}


SHAPE = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "max_position_embeddings", "rms_norm_eps",
)  # fmt: skip


def publish(folder: Path, head: BlockHead, target: PreTrainedModel, format: str) -> dict[str, Any]:
    """Write a head as another project does; returns config.json."""
    config, layers = head.config.to_dict(), [layer - 1 for layer in head.captured_layers]
    shape = {key: config[key] for key in SHAPE} | {"model_type": "qwen3"}
    old_rope = {"rope_theta": config["rope_parameters"]["rope_theta"], "rope_scaling": None}
    markov = {}
    if head.markov_head is not None:
        names = "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"
        markov = {key: config[key] for key in names if key in config}
    state = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    if head.version == "dflash2":
        names = "predecessor_codebook", "successor_codebook", "hidden_projection.weight"
        ours = "markov_w1.weight", "markov_w2.weight", "hidden_projection.weight"
        state |= {f"candidate_selector.{name}": state.pop(f"markov_head.{key}") for name, key in zip(names, ours)}
        markov = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 3}
    if format == "z-lab":
        slots = {"target_layer_ids": layers, "mask_token_id": MASK} | markov
        name = BLOCK_ARCHITECTURES[head.version]
        fields = shape | old_rope | {"architectures": [name], "block_size": 5, "dflash_config": slots}
        fields |= {"num_target_layers": 6, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    elif format == "DeepSpec":
        fields = shape | old_rope | markov | {"architectures": ["Qwen3DSparkModel"], "block_size": 5}
        fields |= {"target_layer_ids": layers, "mask_token_id": MASK}
    elif format == "SpecForge":  # all that its templates and transformers write
        slots = {"target_layer_ids": layers, "mask_token_id": MASK, "pure_draft_prefix_len": 0, "shift_label": False}
        if head.version == "dspark":
            slots |= markov | {"projector_type": "dspark", "attention_mode": "gqa", "confidence_temperatures": [1.5]}
        name = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel"}[head.version]
        fields = shape | old_rope | {"architectures": [name], "dflash_config": slots, "block_size": 5}
        fields |= {"auto_map": {"AutoModel": f"{head.version}.{name}"}, "num_target_layers": 6, "use_cache": True}
        fields |= {"layer_types": config["layer_types"], "sliding_window": config["sliding_window"]}
        fields |= {"use_sliding_window": config["use_sliding_window"], "max_window_layers": 28, "dtype": "bfloat16"}
        fields |= {"attention_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02, "eos_token_id": [2, 3]}
        fields |= {"target_hidden_size": None, "tie_word_embeddings": True, "transformers_version": "5.5.3"}
    elif format == "vLLM":
        fields = shape | {"architectures": ["DFlashDraftModel"], "rope_parameters": config["rope_parameters"]}
        fields |= {"eagle_aux_hidden_state_layer_ids": list(head.captured_layers), "is_causal": False, "block_size": 5}
        fields |= {"mask_token_id": MASK, "draft_vocab_size": config["draft_vocab_size"], "target_layer_ids": [0, 1, 2]}
        state = {key.replace("d2t", "draft_id_to_target_id"): tensor for key, tensor in state.items()}
    else:  # all that its version 0.9 writes
        attention = {key: config[key] for key in ("layer_types", "sliding_window", "use_sliding_window")}
        layer = shape | attention | {"rope_parameters": config["rope_parameters"]}
        proposed = {"proposal_type": "greedy", "speculative_tokens": head.drafts}
        methods = {"algorithm": head.version, "default_proposal_method": "greedy", "proposal_methods": [proposed]}
        verifier = {"verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"}}
        name = "DFlash2DraftModel" if head.version == "dflash2" else f"{head.version}Speculator"
        fields = markov | {"architectures": [name], "transformer_layer_config": layer, "dtype": "bfloat16"}
        fields |= {"speculators_model_type": head.version, "speculators_version": "0.9.0", "target_hidden_size": None}
        fields |= {"aux_hidden_state_layer_ids": list(head.captured_layers), "block_size": 5, "mask_token_id": MASK}
        fields |= {"draft_vocab_size": config["draft_vocab_size"], "speculators_config": methods | verifier}
        fields |= {"sliding_window_non_causal": not head.layers[0].causal, "tie_word_embeddings": False}
        fields |= {"transformers_version": "5.19.0"}
        if head.from_anchor:
            fields["sample_from_anchor"] = True
        state |= shared(head, target) | {"verifier_norm.weight": torch.ones(32)}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(state, folder / "model.safetensors")
    return fields


MIXED = {"window": 6, "is_causal": None, "layer_types": [SLIDING, "full_attention"]}
HEADS = {
    "DFlash": {"version": "dflash"},
    "DFlash that drafts in slot 0": {"version": "dflash", "from_anchor": True},
    "DSpark": {"version": "dspark"},
    "DSpark, reduced": {"version": "dspark", "draft_vocab": DRAFTED},
    "DSpark, fill-in": {"version": "dspark", "from_anchor": False},
    "DSpark without Markov head": {"version": "dspark", "markov_rank": 0},
    "reduced vocabulary": {"version": "dflash", "draft_vocab": DRAFTED},
    "DFlash 2": {"version": "dflash2"},
    "DFlash 2, reduced": {"version": "dflash2", "draft_vocab": DRAFTED, "window": 6},
    "DFlash 2 of few tokens": {"version": "dflash2", "draft_vocab": 6, "candidates": 8},
    "sliding and causal": {"version": "dflash", "window": 6, "causal": True},
    "DFlash, half of whose layers slide": {"version": "dflash", **MIXED},
    "mixed": {"version": "dspark", **MIXED},
}


PUBLISHED = {
    "ours": ["DSpark without Markov head", "DFlash 2 of few tokens", "sliding and causal"],
    "z-lab": ["DFlash", "DFlash 2"],
    "vLLM": ["reduced vocabulary"],
    "DeepSpec": ["DSpark"],
    "SpecForge": ["DSpark", "DFlash, half of whose layers slide"],
    "speculators": ["DFlash that drafts in slot 0", "DSpark, reduced", "DSpark, fill-in", "DFlash 2, reduced", "mixed"],
}


@pytest.mark.parametrize(("format", "name"), [(format, name) for format in PUBLISHED for name in PUBLISHED[format]])
def test_a_published_head_drafts_as_it_does_there(format: str, name: str, target: PreTrainedModel, tmp_path) -> None:
    head = filed_head(target, **HEADS[name])
    if format == "ours":
        save_head(head, tmp_path)
    else:
        publish(tmp_path, head, target, format)
    assert head_kind(tmp_path)
    again = load_head(tmp_path, target)
    assert isinstance(again, BlockHead)
    assert (again.version, again.from_anchor, again.drafts) == (head.version, head.from_anchor, head.drafts)
    assert drafted(again, target).equal(drafted(head, target))
    save_head(again, tmp_path)  # in our layout
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    assert load_head(tmp_path).state_dict().keys() == head.state_dict().keys()
    assert drafted(load_head(tmp_path, target), target).equal(drafted(head, target))


WRONG = [
    ({"target_layer_ids": [1, 2, 5]}, r"layers \[2, 3, 6\] of a target of 6 layers.*up to 5"),
    ({"target_layer_ids": [1, 4, 2]}, r"layers \[2, 5, 3\].*ascending"),
    ({"target_layer_ids": None}, "does not name its feature layers"),
    ({"block_size": None}, "does not say its block_size"),
    ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types {'chunked_attention'}, with"),
    ({"dflash_config": {"use_swa": True, "swa_window_size": 4}}, "window of 4 tokens is shorter than a"),
    ({"architectures": ["DFlash2BeamDraftModel"]}, "format of DFlash 2 with beams"),
    ({"architectures": ["Qwen3XPressModel"]}, "format of XPress"),
    ({"architectures": ["JetSpecDraftModel"]}, "format of JetSpec"),
    ({"architectures": ["LlamaForCausalLMEagle4"]}, "format of EAGLE-4"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
    ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rope_type by layer type"),
    ({"architectures": ["Gemma3DSparkModel"]}, "Gemma's norms"),
    ({"markov_head_type": "gated"}, "markov_head_type gated, with which"),
    ({"num_hidden_layers": 3}, r"layers\.2.*load it together with its target"),
    ({"markov_rank": 0}, r"(?s)Unexpected key.*markov_w1"),
    ({"vocab_size": 99}, "99 tokens; this target has"),
]


def test_what_is_not_computed_here_is_refused(target: PreTrainedModel, tmp_path) -> None:
    published = publish(tmp_path, filed_head(target, "dspark"), target, "DeepSpec")
    keys = [*(key for key in COMPUTED if re.fullmatch("[a-z_]+", key) and key not in DERIVED), *UNKNOWN]
    others = [({key: "other"}, rf"{key} other\b.*, with which") for key in keys]
    nested = [({"dflash_config": fields}, told) for fields, told in others]
    for fields, told in [*WRONG, *others[::2], *nested[1::2]]:  # in either part of the file
        (tmp_path / "config.json").write_text(json.dumps(published | fields))
        assert head_kind(tmp_path)
        with pytest.raises(UserError, match=told):
            load_head(tmp_path, target)


@pytest.mark.parametrize(
    ("fields", "window", "causal"),
    [
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8}, [8, 8], [True, True]),
        ({"layer_types": [SLIDING, "full_attention"], "sliding_window": 8}, [8, None], [True, False]),
        ({"layer_types": [SLIDING, "full_attention"], "sliding_window": 8, "is_causal": True}, [8, None], [True, True]),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 9}, "sliding_window": 8}, [9, 9], [False] * 2),
        ({"dflash_config": {"causal": True}}, [None, None], [True, True]),
        ({"dflash_config": {"causal": True}, "is_causal": False}, [None, None], [False, False]),
        ({"layer_types": [SLIDING] * 2, "sliding_window": 8, "sliding_window_non_causal": True}, [8, 8], [False] * 2),
    ],
)
def test_windows_and_causality_are_read_as_vllm_reads_them(fields, window, causal, target, tmp_path: Path) -> None:
    published = publish(tmp_path, filed_head(target, "dspark"), target, "DeepSpec")
    (tmp_path / "config.json").write_text(json.dumps(published | fields))
    for _ in range(2):  # and once more, as we write it
        head = load_head(tmp_path, target)
        assert head.kinds == list(zip(window, causal))
        save_head(head, tmp_path)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight"])
def test_a_tensor_of_its_own_or_a_declared_one_that_is_absent_is_refused(name: str, target, tmp_path: Path) -> None:
    own = not name.startswith("confidence")
    head = filed_head(target, "dflash", draft_vocab=DRAFTED) if own else filed_head(target, "dspark")
    publish(tmp_path, head, target, "speculators" if own else "DeepSpec")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    values = state.pop(name)
    save_file(state | ({name: values + 0.1} if own else {}), file)
    told = rf"(?s){'Unexpected' if own else 'Missing'} key.*{name}.*load it together with its target"
    for of_target in (target, None):
        with pytest.raises(UserError, match=told):
            load_head(tmp_path, of_target)


def test_engines_that_would_skip_parts_of_a_head_are_named(target: PreTrainedModel) -> None:
    """vLLM does not load a DFlash head with a Markov head, and llama.cpp runs it otherwise without a word."""
    assert unserved(make_block_head(target, "dflash")) == {} == unserved(make_block_head(target, "dspark"))
    for shape in ({"version": "dflash", "markov_rank": 8}, {"version": "dspark", "markov_rank": 0}):
        assert unserved(make_block_head(target, **shape)).keys() == {"vllm", "sglang", "llama.cpp"}
    assert unserved(make_block_head(target, "dflash2")) == {}
    wide = unserved(make_block_head(target, "dflash2", candidates=16))
    assert wide == {"llama.cpp": "16 candidates need states of 272"}
    assert unserved(make_block_head(target, "dflash2", draft_vocab=24)).keys() == {"vllm", "sglang", "llama.cpp"}
    assert unserved(make_block_head(target, "dflash", window=6)) == {}
    assert unserved(make_block_head(target, "dflash", causal=True)) == {}
    assert unserved(make_block_head(target, "dflash", **MIXED)).keys() == {"llama.cpp"}
    apart = make_block_head(target, "dspark")
    apart.config.confidence_head_with_markov = False
    assert unserved(apart) == {"llama.cpp": "its confidence head does not read the Markov head"}
