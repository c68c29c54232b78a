"""Block heads in files: ours, and those of other projects, each of which drafts what the head drafts that it holds."""

from __future__ import annotations

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
from decode.models.heads.files import COMPUTED, is_head, load_head, save_head, unserved

DRAFTED = 24  # tokens of a reduced vocabulary
DERIVED = ("sliding_attention", "rope_type")  # of other keys


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
        markov = {key: config[key] for key in names}
    state = {key: tensor.clone() for key, tensor in head.state_dict().items()}
    if format == "z-lab":
        slots = {"target_layer_ids": layers, "mask_token_id": MASK}
        fields = shape | old_rope | {"architectures": ["DFlashDraftModel"], "block_size": 5, "dflash_config": slots}
        fields |= {"num_target_layers": 6, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    elif format == "DeepSpec":
        fields = shape | old_rope | markov | {"architectures": ["Qwen3DSparkModel"], "block_size": 5}
        fields |= {"target_layer_ids": layers, "mask_token_id": MASK}
    elif format == "SpecForge":
        slots = {"target_layer_ids": layers, "mask_token_id": MASK, "projector_type": "dspark", "block_size": 5}
        fields = shape | old_rope | {"architectures": ["DSparkDraftModel"], "dflash_config": slots | markov}
    elif format == "vLLM":
        fields = shape | {"architectures": ["DFlashDraftModel"], "rope_parameters": config["rope_parameters"]}
        fields |= {"eagle_aux_hidden_state_layer_ids": list(head.captured_layers), "is_causal": False, "block_size": 5}
        fields |= {"mask_token_id": MASK, "draft_vocab_size": config["draft_vocab_size"], "target_layer_ids": [0, 1, 2]}
        state = {key.replace("d2t", "draft_id_to_target_id"): tensor for key, tensor in state.items()}
    else:
        fields = {
            "architectures": [f"{head.version}Speculator"],
            "speculators_model_type": head.version,
            "transformer_layer_config": shape | {"rope_parameters": config["rope_parameters"]},
            "aux_hidden_state_layer_ids": list(head.captured_layers),
            "block_size": 5,
            "mask_token_id": MASK,
            "draft_vocab_size": config["draft_vocab_size"],
            "sliding_window_non_causal": False,
            "speculators_config": {"algorithm": head.version, "verifier": {"name_or_path": "target"}},
        } | markov
        if head.from_anchor:
            fields["sample_from_anchor"] = True
        state |= shared(head, target) | {"verifier_norm.weight": torch.ones(32)}
    (folder / "config.json").write_text(json.dumps(fields))
    save_file(state, folder / "model.safetensors")
    return fields


HEADS = {
    "DFlash": {"version": "dflash"},
    "DFlash that drafts in slot 0": {"version": "dflash", "from_anchor": True},
    "DSpark": {"version": "dspark"},
    "DSpark, gated": {"version": "dspark", "markov_kind": "gated", "draft_vocab": DRAFTED},
    "DSpark, gated, fill-in": {"version": "dspark", "markov_kind": "gated", "from_anchor": False},
    "DSpark, rnn": {"version": "dspark", "markov_kind": "rnn"},
    "DSpark, rnn, fill-in": {"version": "dspark", "markov_kind": "rnn", "from_anchor": False},
    "DSpark without Markov head": {"version": "dspark", "markov_rank": 0},
    "reduced vocabulary": {"version": "dflash", "draft_vocab": DRAFTED},
}


@pytest.mark.parametrize("name", HEADS)
def test_a_saved_head_drafts_as_before(name: str, target: PreTrainedModel, tmp_path: Path) -> None:
    head = filed_head(target, **HEADS[name])
    head.temperatures = [1.5, 0.5]
    save_head(head, tmp_path)
    assert is_head(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dflash_config"]["target_layer_ids"] == [1, 2, 4]
    again = load_head(tmp_path, target)
    assert isinstance(again, BlockHead)
    assert (again.version, again.drafts, again.temperatures) == (head.version, head.drafts, [1.5, 0.5])
    assert load_head(tmp_path).state_dict().keys() == head.state_dict().keys()
    assert drafted(again, target).equal(drafted(head, target))
    save_head(again, tmp_path)
    assert drafted(load_head(tmp_path, target), target).equal(drafted(head, target))


@pytest.mark.parametrize(
    ("format", "name"),
    [
        ("z-lab", "DFlash"),
        ("vLLM", "reduced vocabulary"),
        ("DeepSpec", "DSpark"),
        ("SpecForge", "DSpark"),
        ("speculators", "DFlash"),
        ("speculators", "DFlash that drafts in slot 0"),
        ("speculators", "reduced vocabulary"),
        ("speculators", "DSpark, gated"),
        ("speculators", "DSpark, gated, fill-in"),
        ("speculators", "DSpark, rnn"),
    ],
)
def test_a_published_head_drafts_as_it_does_there(format: str, name: str, target: PreTrainedModel, tmp_path) -> None:
    head = filed_head(target, **HEADS[name])
    publish(tmp_path, head, target, format)
    assert is_head(tmp_path)
    again = load_head(tmp_path, target)
    assert isinstance(again, BlockHead)
    assert (again.version, again.from_anchor) == (head.version, head.from_anchor)
    assert drafted(again, target).equal(drafted(head, target))
    save_head(again, tmp_path)  # in our layout
    assert drafted(load_head(tmp_path, target), target).equal(drafted(head, target))


@pytest.mark.parametrize(
    ("format", "fields", "told"),
    [
        ("DeepSpec", {"target_layer_ids": [1, 2, 5]}, r"layers \[2, 3, 6\] of a target of 6 layers.*up to 5"),
        ("DeepSpec", {"target_layer_ids": [1, 4, 2]}, r"layers \[2, 5, 3\].*ascending"),
        ("DeepSpec", {"target_layer_ids": None}, "does not name its feature layers"),
        ("DeepSpec", {"block_size": None}, "does not say its block_size"),
        ("DeepSpec", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention True, with which"),
        ("DeepSpec", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type dynamic"),
        ("DeepSpec", {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "rotation by layer type"),
        ("DeepSpec", {"architectures": ["Gemma3DSparkModel"]}, "Gemma's norms"),
        ("speculators", {"markov_head_type": "rnn", "sample_from_anchor": False}, "state passes the slot that drafts"),
        ("DeepSpec", {"markov_head_type": "gated"}, r"dspark head of 2 Qwen3 layers .*it lacks .*gate_proj"),
        ("DeepSpec", {"markov_rank": 0}, r"has .*markov_w1.* beside it"),
        ("DeepSpec", {"vocab_size": 99}, "99 tokens; this target has"),
        *(  # in either part of the file
            ("DeepSpec", {"dflash_config": {key: "other"}} if i % 2 else {key: "other"}, f"{key} other, with which")
            for i, key in enumerate(key for key in COMPUTED if re.fullmatch("[a-z_]+", key) and key not in DERIVED)
        ),
    ],
)
def test_what_is_not_computed_here_is_refused(format, fields, told: str, target: PreTrainedModel, tmp_path) -> None:
    published = publish(tmp_path, filed_head(target, "dspark"), target, format)
    (tmp_path / "config.json").write_text(json.dumps(published | fields))
    assert is_head(tmp_path)
    with pytest.raises(UserError, match=told):
        load_head(tmp_path, target)


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight", "confidence_head.proj.weight"])
def test_a_tensor_of_its_own_or_a_declared_one_that_is_absent_is_refused(name: str, target, tmp_path: Path) -> None:
    own = not name.startswith("confidence")
    head = filed_head(target, "dflash", draft_vocab=DRAFTED) if own else filed_head(target, "dspark")
    publish(tmp_path, head, target, "speculators" if own else "DeepSpec")
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    values = state.pop(name)
    save_file(state | ({name: values + 0.1} if own else {}), file)
    with pytest.raises(UserError, match=rf"has \['{name}'\] beside it" if own else r"it lacks .*confidence_head\.proj"):
        load_head(tmp_path, target)
    with pytest.raises(UserError, match="load it together with its target" if own else "it lacks"):
        load_head(tmp_path)


def test_engines_that_would_skip_parts_of_a_head_are_named(target: PreTrainedModel) -> None:
    """vLLM does not load a DFlash head with a Markov head, and llama.cpp runs it otherwise without a word."""
    assert unserved(make_block_head(target, "dflash")) == {} == unserved(make_block_head(target, "dspark"))
    for shape in ({"version": "dflash", "markov_rank": 8}, {"version": "dspark", "markov_rank": 0}):
        assert unserved(make_block_head(target, **shape)).keys() == {"vllm", "sglang", "llama.cpp"}
    assert unserved(make_block_head(target, "dspark", markov_kind="gated")).keys() == {"vllm", "llama.cpp"}
