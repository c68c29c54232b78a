"""What the config.json of a head says: of EAGLE's and of block heads, our own and those that other projects publish.

Published configurations of one network differ in the names of architectures, in how they are nested, in how they count
layers and in what they leave to the reader. What decides the network is read as vLLM reads it, and what is not computed
here is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config

from decode.errors import UserError
from decode.models.block_head import BLOCK_ARCHITECTURES, MARKOV_KINDS, BlockHead
from decode.models.families import ROPE_TYPES
from decode.models.heads import ARCHITECTURES, DraftHead, default_captured_layers
from decode.models.mtp import MTP

OTHERS = ("P-EAGLE", "Domino", "Medusa", "MTP", "MLPSpeculator")
"""Formats of drafts that are no heads of these kinds, which have these in the names of their config.json."""
CAPTURED = "eagle_aux_hidden_state_layer_ids"
DSPARK = "Qwen3DSparkModel"  # the architecture of DSpark heads that vLLM and SGLang know in all their versions
NESTED = ("transformer_layer_config", "model", "dflash_config", "dspark_config")
"""Parts of config.json that are read as if their keys stood beside them (of speculators, vLLM's EAGLEConfig, z-lab and
DeepSpec)."""
SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "hidden_act",
    "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
SHAPE = (*SIZES, "num_key_value_heads", "head_dim", "rope_parameters", "layer_types", "attention_bias")
KEPT = (*SIZES, "dtype", "block_size", "mask_token_id", "confidence_temperatures",
        "confidence_sampled_temperatures", "num_assistant_tokens")  # fmt: skip
"""Keys of a block head's config.json that are taken over as they are."""
SCALES = ("output_multiplier", "final_logit_softcapping", "attention_value_scale", "use_gemma_norm")
"""Keys of block heads that are computed otherwise, where they are set."""
NEXT = "take another head of this target, or train one (student.kind: eagle3, dflash or dspark)"


def head_format(fields: dict[str, Any], names: Iterable[str] = ()) -> int | str | None:
    """What a config.json describes, with the names of the tensors beside it, as they are called here.

    Returns:
        1 or 3 for an EAGLE head of this version, ``dflash`` or ``dspark`` for a block head, ``mtp`` for tuned
        next-token layers of a target, the name of another format of drafts, or None for anything else.
    """
    if fields.get("draft_format") == MTP:  # the rest is the target's own
        return MTP
    kinds = [*(fields.get("architectures") or ()), fields.get("model_type"), fields.get("speculators_model_type")]
    kinds += [(fields.get("dflash_config") or {}).get("projector_type")]
    keys = fields.keys() & {"dflash_config", "dspark_config", "medusa_num_heads"}
    said = " ".join(map(str, [*kinds, *keys])).lower().replace("_", "")
    found = (name for name in (*OTHERS, "dspark", "dflash") if name.lower().replace("-", "") in said)
    other = next(found, None)
    if other is not None or "eagle25" in said:  # Eagle 2.5 is a family of vision models
        return other
    if "eagle" in said:
        return 3 if "eagle3" in said else 1
    if fields.get("draft_vocab_size"):  # EAGLE's authors write the architecture of the target
        return 3
    ours = set(names)
    return None if "fc.weight" not in ours else 3 if "midlayer.hidden_norm.weight" in ours else 1


def eagle_config(
    fields: dict[str, Any], state: dict[str, Tensor], target: PreTrainedModel | None, name: str, version: int
) -> LlamaConfig:
    """Our configuration of an EAGLE head, from its config.json, its tensors, and the target where that is known."""
    ours = "captured_layers" in fields
    fields = {"norm_before_residual": "transformer_layer_config" in fields} | _flat(fields)
    eagle = fields.get("eagle_config") or {}
    width, vocab = fields["hidden_size"], fields["vocab_size"]
    of_target, fused = fields.get("target_hidden_size") or width, eagle.get("use_aux_hidden_state", True)
    # vLLM numbers states by the layer that they enter, as here; SGLang and NVIDIA by the layer that they leave
    named = fields.get("captured_layers") or fields.get(CAPTURED) or eagle.get("layer_ids")
    captured = sorted(named or [layer + 1 for layer in eagle.get(CAPTURED) or ()])
    if target is not None:
        layers = _layers_of(target, of_target, vocab, name)
        if version == 1 or not fused:
            captured, ours = [layers], True
        captured = captured or list(default_captured_layers(layers))
        if captured[0] < 0 or captured[-1] > layers - (not ours):  # engines give the last state before the final norm
            raise UserError(f"{name} reads the states that enter layers {captured}; this target has {layers} layers")
    if not captured:
        raise UserError(f"{name} does not name its feature layers; load it together with its target")
    if version == 3 and not fused:
        state["fc.weight"] = torch.eye(width)  # the last hidden state is the feature as it is
    other = {
        "a sliding window": (fields.get("layer_types") or [""])[0] == "sliding_attention",
        "parallel drafting": "mask_hidden" in state or (eagle.get("parallel_draft_step") or 1) > 1,
        "more than one decoder layer": any(key.startswith("layers.1.") for key in state),
    }
    rows = next((len(state[key]) for key in ("lm_head.weight", "d2t") if key in state), vocab)
    changes = _common(fields, other, name) | {
        "architectures": [ARCHITECTURES[version]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "layer_types": None,
        "target_hidden_size": of_target,
        "draft_vocab_size": fields.get("draft_vocab_size") or rows,
        "captured_layers": captured,
        "mlp_bias": False,  # layers have the biases that the file holds
        "norm_before_fc": eagle.get("norm_before_fc", fields.get("norm_before_fc")),
        "qk_norm": any("q_norm" in key for key in state),
    }
    return LlamaConfig(**{key: value for key, value in (fields | changes).items() if value is not None})


def block_config_of(
    fields: dict[str, Any], state: dict[str, Tensor], target: PreTrainedModel | None, name: str, version: str
) -> Qwen3Config:
    """Our configuration of a block head, from its config.json, its tensors, and the target where that is known.

    The tensors do not tell whether slot 0 drafts, so `sample_from_anchor` is believed. Where it is absent, slot 0 of a
    DSpark head drafts and that of a DFlash head does not; in speculators' format it does not in either, as vLLM reads
    it.

    Raises:
        UserError: a head that is not computed here, or that does not fit the target.
    """
    of_speculators = "speculators_model_type" in fields
    fields = {"sample_from_anchor": version == "dspark" and not of_speculators} | _flat(fields)
    lacking = [key for key in ("hidden_size", "vocab_size", "block_size", "mask_token_id") if fields.get(key) is None]
    # vLLM's key for EAGLE and speculators number states by the layer that they enter, the others by the one they leave
    captured = fields.get(CAPTURED) or fields.get("aux_hidden_state_layer_ids")
    captured = captured or [layer + 1 for layer in fields.get("target_layer_ids") or ()]
    if lacking or not captured:
        raise UserError(f"{name} does not say its {', '.join(lacking or ['target_layer_ids'])}: {NEXT}")
    width, vocab, depth = fields["hidden_size"], fields["vocab_size"], fields.get("num_target_layers")
    if target is not None:
        depth = _layers_of(target, fields.get("target_hidden_size") or width, vocab, name)
    if captured != sorted(set(captured)) or captured[0] < 1 or (depth and captured[-1] >= depth):
        raise UserError(
            f"{name} reads the states after layers {[layer - 1 for layer in captured]} of a target of {depth} layers, "
            "counted from 0; expected ascending numbers without the last layer, whose state is normed before heads can "
            f"read it: {NEXT}"
        )
    kind, types = str(fields.get("markov_head_type") or "vanilla").lower(), fields.get("layer_types")
    windows = "sliding_attention" in types if types else fields.get("use_sliding_window")
    other = {
        "a sliding window": windows or fields.get("use_swa"),
        "causal blocks": fields.get("is_causal") or fields.get("causal"),
        # elsewhere its state is 0 at the first slot that drafts
        "an rnn whose state passes the slot that drafts nothing": (
            of_speculators and kind == "rnn" and not fields["sample_from_anchor"]
        ),
        f"markov_head_type {kind}, expected one of {', '.join(MARKOV_KINDS)},": kind not in MARKOV_KINDS,
    } | {f"{key} {fields.get(key)}": fields.get(key) not in (None, False, 1) for key in SCALES}
    confidence, declared = state.get("confidence_head.proj.weight"), fields.get("enable_confidence_head")
    rows = len(state["d2t"]) if "d2t" in state else vocab
    changes = _common(fields, other, name) | {
        "architectures": [BLOCK_ARCHITECTURES[version]],
        "layer_types": ["full_attention"] * fields["num_hidden_layers"],
        "num_key_value_heads": fields.get("num_key_value_heads") or fields["num_attention_heads"],
        "target_hidden_size": width,
        "num_target_layers": depth,
        "draft_vocab_size": fields.get("draft_vocab_size") or rows,
        "captured_layers": captured,
        "sample_from_anchor": bool(fields["sample_from_anchor"]),
        "is_causal": False,
        "markov_rank": fields.get("markov_rank") or 0,
        "markov_head_type": kind,
        "enable_confidence_head": bool(declared) or confidence is not None,
        "confidence_head_with_markov": confidence is not None and confidence.shape[1] > width,
    }
    taken = {key: fields[key] for key in KEPT if fields.get(key) is not None}
    return Qwen3Config(**(taken | {key: value for key, value in changes.items() if value is not None}))


def block_fields(head: BlockHead) -> dict[str, Any]:
    """The config.json of a block head as vLLM and SGLang read it, with our own keys."""
    layers = [layer - 1 for layer in head.captured_layers]
    slots = {"target_layer_ids": layers, "mask_token_id": head.mask_id, "sample_from_anchor": head.from_anchor}
    fields = head.config.to_dict() | {"dflash_config": slots, "confidence_temperatures": head.temperatures}
    return fields | ({"architectures": [DSPARK], "target_layer_ids": layers} if head.version == "dspark" else {})


def speculators_fields(head: BlockHead, target: str) -> dict[str, Any]:
    """The config.json of a block head as speculators writes it, for a target of this name."""
    kind, config = {"dflash": "DFlash", "dspark": "DSpark"}[str(head.version)], head.config.to_dict()
    named = ["block_size", "mask_token_id", "draft_vocab_size", "sample_from_anchor", "dtype"]
    if head.version == "dspark":
        named += ["markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"]
    layer = {key: config[key] for key in SHAPE}
    return {key: config[key] for key in named} | {
        "architectures": [f"{kind}DraftModel"],
        "speculators_model_type": head.version,
        "transformer_layer_config": layer | {"model_type": "qwen3", "tie_word_embeddings": False},
        "aux_hidden_state_layer_ids": list(head.captured_layers),
        "target_hidden_size": None,
        "sliding_window_non_causal": True,  # vLLM makes full attention causal where it is false
        "tie_word_embeddings": False,
        "confidence_temperatures": head.temperatures,
        "confidence_sampled_temperatures": head.sampled_temperatures,
        "speculators_config": {
            "algorithm": head.version,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": head.drafts}],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def unserved(head: DraftHead) -> dict[str, str]:
    """Engines that do not run a block head as it was trained, each with the reason; of EAGLE's heads none is named.

    Most of them would not say so: they skip tensors and keys that they do not know.
    """
    if not isinstance(head, BlockHead):
        return {}
    markov, every = head.markov_head, ("vllm", "sglang", "llama.cpp")
    kind, spark = "vanilla" if markov is None else markov.kind, head.version == "dspark"
    joined = head.confidence_head is None or head.config.confidence_head_with_markov
    why: dict[str, tuple[bool, Sequence[str]]] = {
        "its confidence head does not read the Markov head": (not joined, ["llama.cpp"]),
        f"it drafts {head.config.draft_vocab_size:,} of {head.config.vocab_size:,} tokens": (
            head.reduced, ["sglang"] if spark else ["sglang", "llama.cpp"],
        ),
        f"its Markov head is {kind}": (kind != "vanilla", ["vllm", "llama.cpp"]),
        "a DSpark head without a Markov head is not known there": (spark and markov is None, every),
        "a DFlash head that drafts in its first slot is not known there": (head.from_anchor and not spark, every),
    }  # fmt: skip
    return {engine: reason for reason, (there, engines) in why.items() if there for engine in engines}


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    for key in NESTED:
        fields = fields | (fields.get(key) or {})
    return fields


def _layers_of(target: PreTrainedModel, width: int, vocab: int, name: str) -> int:
    """The number of a target's layers, which has to have this width and these tokens."""
    shape = target.config.get_text_config()
    if (shape.hidden_size, shape.vocab_size) != (width, vocab):
        raise UserError(
            f"the head in {name} is for a target of width {width} and {vocab} tokens; this target has width "
            f"{shape.hidden_size} and {shape.vocab_size} tokens"
        )
    return int(shape.num_hidden_layers)


def _common(fields: dict[str, Any], other: dict[str, Any], name: str) -> dict[str, Any]:
    """What configurations of all heads have.

    Args:
        fields: of config.json.
        other: whether the head has what heads of its kind are not run with, by its name.
        name: the head's, for messages.

    Raises:
        UserError: it has, or is quantised, rotates otherwise or has other norms.
    """
    architecture = (fields.get("architectures") or ["none"])[0]
    rope: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = {"rope_theta": fields.get("rope_theta") or 10000.0, "rope_type": "default"} | rope
    kind = "default" if "mrope_section" in rope else rope.get("type") or rope["rope_type"]  # text has one position
    other = other | {f"{key} {fields.get(key)}": fields.get(key) for key in ("quantization_config", "logit_scale")}
    other |= {
        f"rope_type {kind}": kind not in ROPE_TYPES,
        "rotation by layer type": any(isinstance(value, dict) for value in rope.values()),
        "partial rotation": (fields | rope).get("partial_rotary_factor") not in (None, 1),
        "rotation of neighbouring elements": fields.get("is_neox_style") is False,
        "Gemma's norms": "gemma" in architecture.lower(),
    }
    if any(other.values()):
        found = ", ".join(what for what, there in other.items() if there)
        raise UserError(f"{name} ({architecture}) has {found}, with which heads are not run: {NEXT}")
    return {
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "rope_parameters": rope | {"rope_type": kind},
        "rope_scaling": None,
    }
