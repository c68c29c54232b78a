"""Files of heads: our own, and those that other projects publish.

Published heads of one network differ in the names of keys and tensors, in how they are nested, in how they count layers
and in what they leave to the target. What decides the network is read as vLLM reads it; a head that is not computed
here is refused. Engines skip tensors and keys that they do not know; here each has its place or is refused by name.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.files import Fields, read_json, read_model_json, write_safely, write_text
from decode.models.api import Model
from decode.models.fast.layout import ROPE_TYPES
from decode.models.heads.block import SELECTOR, BlockHead
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.heads.block_runner import BlockRunner
from decode.models.heads.eagle import ARCHITECTURES, DraftHead, FeatureHead, default_captured_layers, draft_ids
from decode.models.heads.mtp import MTP, MtpHead, MtpRunner, load_mtp
from decode.models.heads.runner import HeadRunner
from decode.models.huggingface import mask_of
from decode.models.sources import located, packed, tensors_in

RENAMED = {r"^(model\.)+": "", r"^draft_id_to_target_id$": "d2t"}
RENAMED |= {f"^{re.escape(theirs)}$": ours for ours, theirs in SELECTOR.items()}
"""Names of tensors in files, and those of our networks."""
UNREAD = re.compile(r"rotary_emb\.inv_freq$|^verifier_")  # tensors that decoding does not read
SHARED, HEAD = "embed_tokens.weight", "lm_head.weight"
MASK = "mask_embedding.pt"  # which vLLM and llama.cpp read beside the other tensors of a block head
ENGINES = ["vllm", "sglang", "llama.cpp"]
FULL = ("mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # whose windows llama.cpp does not read
NEXT = "take another head of this target, or train one (student.kind: eagle3, dflash2, …)"


class HeadKind(NamedTuple):
    """A kind of head."""

    network: type[DraftHead]
    runner: Callable[[Any, PreTrainedModel, str], Model]  # from the network, its target and the layout of weights
    served: str = ""  # the name of its method in vLLM and llama.cpp; empty: they take it from the target's own files


HEADS: dict[int | str, HeadKind] = {
    1: HeadKind(FeatureHead, HeadRunner, "eagle"),
    3: HeadKind(FeatureHead, HeadRunner, "eagle3"),
    "dflash": HeadKind(BlockHead, BlockRunner, "dflash"),
    "dspark": HeadKind(BlockHead, BlockRunner, "dspark"),
    "dflash2": HeadKind(BlockHead, BlockRunner, "dflash"),
    MTP: HeadKind(MtpHead, lambda head, target, pack: MtpRunner(head, target)),
}
"""Kinds by the version of a head (`DraftHead.version`)."""

# -- config.json -------------------------------------------------------------------------------------------------------

FORMATS: dict[str, int | str | None] = {
    "peagle": "P-EAGLE", "domino": "Domino", "medusa": "Medusa", "mtp": "MTP", "mlpspeculator": "MLPSpeculator",
    "jetspec": "JetSpec", "eagle4": "EAGLE-4", "dflash2beam": "DFlash 2 with beams", "xpress": "XPress",
    "lilicorr": "LiLiCorr", "pard2": "PARD-2",
    "dspark": "dspark", "dflash2": "dflash2", "dflash": "dflash", "eagle25": None, "eagle3": 3, "eagle": 1,
}  # fmt: skip
"""What a config.json describes whose kinds hold this word, the first of these. Names in capitals are formats of drafts
that we refuse; Eagle 2.5 is a family of vision models.
"""
ENTERED = "eagle_aux_hidden_state_layer_ids"
LAYERS = {ENTERED: 0, "aux_hidden_state_layer_ids": 0, "layer_ids": 0, "target_layer_ids": 1, "left": 1}
"""Keys of the captured layers, the first of which holds: of the state that enters a layer, or of the layer that it
leaves, which is one less."""
NESTED = ("eagle_config", "transformer_layer_config", "model", "dflash_config", "dspark_config")
"""Parts of config.json that are read as if their keys stood beside them (of SGLang and NVIDIA, speculators, vLLM's
EAGLEConfig, z-lab and DeepSpec)."""
KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    "tie_word_embeddings", "num_assistant_tokens", "fc_norm", "norm_output", "norm_before_residual",
    "norm_before_fc", "use_aux_hidden_state", "block_size", "mask_token_id", "markov_rank", "sample_from_anchor",
    "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k",
)  # fmt: skip
"""Keys that mean the same everywhere."""
SLIDING = "sliding_attention"
OFF: Sequence[Any] = (None, False, "", [], {})
COMPUTED: dict[str, Sequence[Any]] = {
    "output_multiplier": (None, 1), "input_embedding_scale": (None, 1), "logit_scale": (None, False, 1),
    "parallel_draft_step": (None, 0, 1), "partial_rotary_factor": (None, 1), "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True), "use_input_layernorm_in_first_layer": (None, True),
    "use_last_layernorm": (None, True), "markov_head_type": (None, "vanilla"), "rope_type": ROPE_TYPES,
    "layer_types": [set()], "Gemma's norms": OFF,
}  # fmt: skip
"""Keys that change the network, with the values that are computed here; of keys that are not named, `OFF` alone."""
BLOCKS = (
    "is_causal", "causal", "use_swa", "swa_window_size", "sliding_window_non_causal", "enable_confidence_head",
    "confidence_head_with_markov",
)  # fmt: skip
"""Keys that are read of block heads alone."""
INERT = (
    # what other keys or the tensors say too
    "bias", "max_window_layers", "sliding_window", "next_layer_regular", "parallel_draft_heads_num_layers",
    "has_lm_head", "num_aux_hidden_states", "num_experts_per_tok", "num_local_experts", "router_aux_loss_coef",
    "decoder_sparse_step", "attention_mode", "truncated_vocab_size",
    # of the training and of tools
    "auto_map", "torch_dtype", "method", "speculators_config", "speculators_version", "target_model_type",
    "target_text_model_type", "target_model_name_or_path", "embed_requires_grad", "confidence_head_alpha",
    "num_anchors", "ttt_length", "step_loss_decay", "draft_num_hidden_layers",
    # of calibrations that decoding makes for itself
    "confidence_temperatures", "confidence_sampled_temperatures",
)  # fmt: skip
"""Keys of others that change nothing."""
KNOWN = {
    *KEPT, *LAYERS, *NESTED, *COMPUTED, *INERT, *vars(LlamaConfig()), *vars(GenerationConfig()), "model_type",
    "speculators_model_type", "projector_type", "rope_theta", "rope_scaling", "target_hidden_size",
    "num_target_layers", "draft_vocab_size", "qk_norm", "use_sliding_window",
}  # fmt: skip


def head_format(fields: Fields, names: Iterable[str] = ()) -> int | str | None:
    """What a config.json describes, with the names of the tensors beside it, as they are called here.

    Returns:
        1 or 3 for an EAGLE head of this version, ``dflash``, ``dspark`` or ``dflash2`` for a block head, ``mtp`` for
        tuned next-token layers of a target, the name of another format of drafts, or None for anything else.
    """
    if fields.get("draft_format") == MTP:  # the rest is the target's own
        return MTP
    kinds = [*(fields.get("architectures") or ()), fields.get("model_type"), fields.get("speculators_model_type")]
    kinds += [(fields.get("dflash_config") or {}).get("projector_type"), fields.get("spd_type")]
    kinds += fields.keys() & {"dflash_config", "dspark_config", "medusa_num_heads"}
    words = re.sub("[-_]", "", " ".join(map(str, kinds)).lower())
    for word, format in FORMATS.items():
        if word in words:
            return format
    if fields.get("draft_vocab_size"):  # EAGLE's authors write the architecture of the target
        return 3
    if "fc.weight" not in names:
        return None
    return 3 if any("hidden_norm" in name for name in names) else 1


def read_config(
    fields: Fields, state: dict[str, Tensor], target: PreTrainedModel | None, name: str, version: int | str
) -> LlamaConfig | Qwen3Config:
    """The configuration of a head, from its config.json, its tensors, and the target where that is known.

    Raises:
        UserError: a head that is not computed here, or that does not fit the target.
    """
    block, flat = version in BLOCK_ARCHITECTURES, _flat(fields, version)
    needed = ("hidden_size", "vocab_size", *(("block_size", "mask_token_id") if block else ()))
    if lacking := [key for key in needed if flat.get(key) is None]:
        raise UserError(f"{name} does not say its {', '.join(lacking)}: {NEXT}")
    width, vocab, heads = flat["hidden_size"], flat["vocab_size"], flat["num_attention_heads"]
    of_target = width if block else flat.get("target_hidden_size") or width
    if target is not None:
        shape = target.config.get_text_config()
        flat["num_target_layers"] = int(shape.num_hidden_layers)
        if (shape.hidden_size, shape.vocab_size) != (of_target, vocab):
            raise UserError(
                f"the head in {name} is for a target of width {of_target} and {vocab} tokens; this target has width "
                f"{shape.hidden_size} and {shape.vocab_size} tokens"
            )
    config = {key: flat[key] for key in KEPT if flat.get(key) is not None} | {
        "head_dim": flat.get("head_dim") or width // heads,
        "attention_bias": any("q_proj.bias" in key for key in state),
        "rope_parameters": _rotation(flat),
        "target_hidden_size": of_target,
        "num_target_layers": flat.get("num_target_layers"),
        "draft_vocab_size": flat.get("draft_vocab_size")
        or next((len(state[key]) for key in (HEAD, "d2t") if key in state), vocab),
    }
    entered = _captured(flat, version, name)
    _check_network(flat, config["rope_parameters"], name, block)
    if not block:
        if window := _attention(flat)["sliding_window"]:  # in texts of this length it is full attention
            config["max_position_embeddings"] = min(window, config.get("max_position_embeddings", window))
        config |= {ENTERED: entered, "num_hidden_layers": 1, "qk_norm": any("q_norm" in key for key in state)}
        return LlamaConfig(**config, architectures=[ARCHITECTURES[cast(int, version)]])
    confidence = state.get("confidence_head.proj.weight")
    return Qwen3Config(
        **{"num_key_value_heads": heads} | config,
        architectures=[BLOCK_ARCHITECTURES[cast(str, version)]],
        target_layer_ids=[layer - 1 for layer in entered],
        **_attention(flat),
        markov_head_type="vanilla",
        enable_confidence_head=bool(flat.get("enable_confidence_head")) or confidence is not None,
        confidence_head_with_markov=confidence is not None and confidence.shape[1] > width,
    )


def _flat(fields: Fields, version: int | str) -> Fields:
    """The fields of a config.json with those of its `NESTED` parts, and what engines take where they are absent.

    The tensors do not tell whether slot 0 of a block drafts. Where `sample_from_anchor` is absent, slot 0 of a DSpark
    head drafts and that of a DFlash head does not; in speculators' format it does not in either, as vLLM reads it.
    """
    foreign, block = "speculators_model_type" in fields, version in BLOCK_ARCHITECTURES
    absent = {"sample_from_anchor": version == "dspark" and not foreign} if block else {"norm_before_residual": foreign}
    flat = absent | fields
    for key in NESTED:
        part = dict(fields.get(key) or {})
        if key == "eagle_config":  # SGLang's names the layers that states leave by vLLM's key for those they enter
            part["left"] = part.pop(ENTERED, None)
        flat |= part
    return flat


def _captured(flat: Fields, version: int | str, name: str) -> list[int]:
    """The states that a head reads, by the layers that they enter; empty for the last one, behind the final norm.

    Raises:
        UserError: there are none, or not in the target.
    """
    block, layers = version in BLOCK_ARCHITECTURES, flat.get("num_target_layers")
    if layers and (version == 1 or flat.get("use_aux_hidden_state") is False):
        return []
    entered = next(([layer + less for layer in flat[key]] for key, less in LAYERS.items() if flat.get(key)), [])
    if version == 3 and layers:
        entered = sorted(entered or default_captured_layers(layers))
    if not entered:
        raise UserError(f"{name} does not name its feature layers; load an EAGLE head together with its target")
    most = layers - 1 if layers else entered[-1]  # the last state is read by engines before the final norm
    if entered != sorted(set(entered)) or entered[0] < block or entered[-1] > most:
        raise UserError(
            f"{name} reads the states that enter layers {entered} of a target of {layers} layers, counted from 0; "
            f"expected ascending numbers up to {most}: {NEXT}"
        )
    return entered


def _rotation(flat: Fields) -> Fields:
    """The settings of a head's rotation, under the names of today's transformers."""
    rope: Fields = flat.get("rope_parameters") or flat.get("rope_scaling") or {}
    rope = {"rope_theta": flat.get("rope_theta") or 10000.0, "rope_type": rope.get("type") or "default"} | rope
    if any(isinstance(value, dict) for value in rope.values()):
        rope["rope_type"] = "by layer type"
    return rope | {"rope_type": "default"} if "mrope_section" in rope else rope


def _attention(flat: Fields) -> Fields:
    """What the layers of a head attend to, as vLLM reads it; a causality of None: sliding layers alone."""
    types = list(flat.get("layer_types") or ["full_attention"] * flat["num_hidden_layers"])
    if flat.get("use_swa") and SLIDING not in types:
        types = [SLIDING] * len(types)
    window = (flat.get("swa_window_size") or flat.get("sliding_window")) if SLIDING in types else None
    told = [bool(flat[key]) for key in ("is_causal", "causal") if flat.get(key) is not None]
    by_layer = SLIDING in (flat.get("layer_types") or ()) and not flat.get("sliding_window_non_causal")
    return {
        "layer_types": types[: flat["num_hidden_layers"]],
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "is_causal": told[0] if told else None if by_layer else False,
    }


def _check_network(flat: Fields, rope: Fields, name: str, block: bool) -> None:
    """Refuse a head of which some setting is not computed here, or not known.

    Raises:
        UserError: naming the settings.
    """
    architecture = str(flat.get("architectures"))
    kinds = {*(flat.get("layer_types") or ())[: flat["num_hidden_layers"] if block else 1]} - {"full_attention"}
    settings = flat | rope | {"layer_types": kinds - {SLIDING}}
    settings["Gemma's norms"] = "Gemma" in architecture
    other = {key for key in flat.keys() - KNOWN if not key.startswith("_")} - {*(BLOCKS if block else ())}
    computed = dict.fromkeys(sorted(other), OFF) | COMPUTED
    wrong = [f"{key} {settings[key]}" for key, values in computed.items() if settings.get(key, values[0]) not in values]
    if not (attention := _attention(flat))["sliding_window"]:
        slides = SLIDING in attention["layer_types"] or flat.get("use_sliding_window")
        wrong += ["a sliding layer without a window"] if slides else []
    if wrong:
        raise UserError(
            f"{name} ({architecture}) has {', '.join(wrong)}, with which heads are not run: {NEXT}; a key that changes "
            "nothing can be removed from its config.json"
        )


def unserved(head: DraftHead | PreTrainedModel) -> dict[str, str]:
    """Engines that do not run a head or a draft model as it was trained, each with the reason.

    Most of them would not say so: they skip tensors and keys that they do not know.
    """
    config, names = head.config, " ".join(name for name, _ in head.named_parameters())
    why: list[tuple[Any, list[str], str]] = []
    if isinstance(head, FeatureHead | BlockHead):
        act, rope = config.hidden_act, config.rope_parameters["rope_type"]
        why += [(act != "silu", ENGINES, f"its activation is {act}, expected silu")]
    elif not isinstance(head, DraftHead):
        window = config.model_type in FULL and getattr(config, "sliding_window", None)
        slides = window and SLIDING in (getattr(config, "layer_types", None) or [SLIDING])
        why += [(slides, ["llama.cpp"], f"its window of {window} tokens is not read there")]
        why += [(config.model_type == "llama" and config.mlp_bias, ["sglang"], "its mlp_bias is not read there")]
        some = "it drafts some tokens, and there all rows of its head are drafted from"
        why += [(draft_ids(head) is not None, ENGINES, some)]
        why += [(mask_of(head) is not None, ENGINES[1:], "it drafts a token in each forward there")]
    if isinstance(head, FeatureHead):
        third, states = head.version == 3, head.captured_layers
        why += [
            (third and max(states) == config.num_target_layers, ENGINES, "it reads the state behind the target's norm"),
            (re.search(r"proj\.bias|q_norm", names), ENGINES, "its attention has biases or norms of its own"),
            (third and len(states) != 3, ["llama.cpp"], f"it reads {len(states)} states, expected three"),
            ("fc_norm" in names, ["llama.cpp"], "its fc_norm is not read there"),
            (third and head.normed_states, ["llama.cpp"], "its norm_output is not read there"),
            (third and head.normed_residual, ["sglang"], "its norm_before_residual is not read there"),
            (head.owns_embedding, ["sglang"], "its own embedding is not read there"),
            (not third and "fc.bias" not in names, ["sglang"], "its fc has no bias"),
        ]
    elif isinstance(head, BlockHead):
        causal, spark = {causal for _, causal in head.kinds}, head.version == "dspark"
        of_version = {"dflash": ["sglang", "llama.cpp"], "dspark": ["sglang"], "dflash2": ENGINES}
        pairs = head.candidates * (head.candidates + 1)
        other = not head.rank if spark else head.from_anchor or (head.rank and not head.candidates)
        apart = head.confidence_head is not None and not config.confidence_head_with_markov
        drafted = f"it drafts {config.draft_vocab_size:,} of {config.vocab_size:,} tokens"
        why += [
            (rope == "llama3", ["llama.cpp"], "its rope_type llama3 is not read there"),
            (apart, ["llama.cpp"], "its confidence head does not read the Markov head"),
            (head.reduced, of_version[str(head.version)], drafted),
            (len(causal) > 1, ["llama.cpp"], "its layers differ in what is causal"),
            (other, ENGINES, f"a {head.version} head of these parts is not known there"),
            (pairs > config.hidden_size, ["llama.cpp"], f"{head.candidates} candidates need states of {pairs}"),
        ]
    return {engine: reason for wrong, engines, reason in why if wrong for engine in engines}


# -- folders -----------------------------------------------------------------------------------------------------------


def head_kind(name: str | os.PathLike[str]) -> str:
    """The kind of the head in a folder or of a Hub name (`DraftHead.kind`); empty where there is none.

    Drafts of other formats, which `load_head` refuses, count as EAGLE heads.
    """
    if name == MTP:
        return MTP
    try:
        folder = located(name)
        fields = read_json(folder / "config.json")
        version = head_format(fields) or head_format(fields, map(_our_name, tensors_in(folder)))
    except Exception:  # the network layer has many; what is wrong is told when the draft is opened as a model
        return ""
    return "" if version is None else HEADS[version].network.kind if version in HEADS else FeatureHead.kind


def _our_name(name: str) -> str:
    """Our name of a tensor."""
    for pattern, ours in RENAMED.items():
        name = re.sub(pattern, ours, name)
    return name


def save_head(head: DraftHead, folder: str | Path, shared: dict[str, Tensor] | None = None) -> None:
    """Writes config.json and model.safetensors into a folder.

    `shared` are tensors of the target that are written beside the head's, for engines that do not take them from it.
    """
    state = head.tensors() | (shared or {})
    state = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
    write_safely(Path(folder) / "model.safetensors", lambda file: save_file(state, file, metadata={"format": "pt"}))
    write_text(Path(folder) / "config.json", json.dumps(head.fields(), indent=2, default=str) + "\n")


def load_head(name: str | os.PathLike[str], target: PreTrainedModel | None = None) -> DraftHead:
    """A head from its folder or from the Hub, ours or a published one in safetensors.

    Args:
        name: folder with config.json and safetensors files, or Hub name (with its revision after an @).
        target: the model it drafts for, to fill in and check what the file leaves to it; the head takes its number
            format and device. A target's next-token layers are not loaded without it.

    Raises:
        UserError: a damaged or unfit head, or another format of drafts.
    """
    try:
        folder = located(name, weights=True)
        if (folder / MASK).exists():
            raise UserError(f"{name} has a {MASK}, an embedding of its masked slots alone, which is not run: {NEXT}")
        fields = read_model_json(folder / "config.json")
        version = head_format(fields)
        tensors = tensors_in(folder) if version is None or version in HEADS else {}
        if wrong := packed(tensors):
            raise UserError(f"{name}: {wrong[0]}: {NEXT}")
        state = {_our_name(key): part[...] for key, part in tensors.items() if not UNREAD.search(key)}
        if not all(tensor.isfinite().all() for tensor in state.values()):
            raise ValueError("its weights are not finite")
        version = head_format(fields, state)
        if version == MTP:
            if target is None:
                raise UserError(f"{name} holds next-token layers of a target; load them together with it")
            layers = load_mtp(target, folder)
            layers.config.num_assistant_tokens = fields["num_assistant_tokens"]
            return layers
        if version not in HEADS:
            what = f"a draft in the format of {version}" if version else "no feature head"
            raise UserError(
                f"{name} holds {what} (architectures {fields.get('architectures')}), which is not run: {NEXT}"
            )
        if version == 3:
            state = {re.sub(r"^layers\.0\.", "midlayer.", key): tensor for key, tensor in state.items()}
        config = read_config(fields, state, target, str(name), version)
        head = cast(FeatureHead | BlockHead, HEADS[version].network(config))
        ids = _draft_ids(state, config.vocab_size)
        if target is not None:
            _share(head, state, ids, target)
        _fill(head, state)
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever the bytes lead to
        raise UserError(
            f"{name} holds no feature head that can be read ({error}); load it together with its target, download it "
            f"again, or {NEXT}"
        ) from error
    if target is not None:
        device = target.get_input_embeddings().weight.device
        head.to(device=device, dtype=target.dtype)
        head.rotary = LlamaRotaryEmbedding(head.config).to(device)  # frequencies are not to be rounded
    return head.eval()


def _draft_ids(state: dict[str, Tensor], vocab: int) -> Tensor | None:
    """The target's ids of a head's logits, by the tables among its tensors; None: the same.

    Raises:
        ValueError: tables that do not lead to different tokens.
    """
    if "d2t" not in state:
        return None
    ids = torch.arange(len(state["d2t"])) + state["d2t"]
    times = torch.bincount(ids, minlength=vocab)  # refuses fractions and negative numbers
    if len(times) > vocab or times.max() > 1 or not times.equal(state.pop("t2d", times).long()):
        raise ValueError(
            f"d2t, added to 0, 1, …, does not lead to {len(ids)} different tokens of {vocab}, those of t2d"
        )
    return ids


def _share(head: DraftHead, state: dict[str, Tensor], ids: Tensor | None, target: PreTrainedModel) -> None:
    """Take away the tensors of a file that are copies of the target's, and add those that it leaves to the target."""
    embedding, output = target.get_input_embeddings(), target.get_output_embeddings().weight.detach()
    rows = output if ids is None else output[ids.to(output.device)]
    theirs = {SHARED: embedding.weight.detach(), HEAD: rows}
    bare = type(embedding) is nn.Embedding  # other ones scale the table, which engines take as it is (Gemma)
    if isinstance(head, FeatureHead) and head.version == 3:
        own = state.get(SHARED)
        tied, head.config.tie_word_embeddings = head.config.tie_word_embeddings, False
        state.setdefault(HEAD, rows if own is None or not tied else own if ids is None else own[ids])
        if not bare:
            state.setdefault(SHARED, theirs[SHARED])
        head.owns_embedding = own is not None and not _same(own, theirs[SHARED])
        if bare and own is not None and not head.owns_embedding:
            del state[SHARED]
        return
    for key, of_target in theirs.items():
        # of EAGLE-1 the file's is the bare table, which the target scales
        if key in state and (bare or key != SHARED or head.version != 1) and _same(state[key], of_target):
            del state[key]


def _same(weight: Tensor, of_target: Tensor) -> bool:
    """Whether a tensor of a file is the target's, in either one's number format."""
    return weight.to(of_target).equal(of_target) or weight.equal(of_target.to(weight))


def _fill(head: FeatureHead | BlockHead, state: dict[str, Tensor]) -> None:
    """Fill a head with the tensors of its files.

    Raises:
        RuntimeError: tensors that it lacks, or has no place for.
    """
    config = head.config
    if isinstance(head, FeatureHead):
        if SHARED in state or config.target_hidden_size != config.hidden_size:
            head.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
            head.embed_tokens.requires_grad_(False)
        if getattr(config, "use_aux_hidden_state", True) is False:  # the last hidden state is the feature as it is
            state.setdefault("fc.weight", torch.eye(config.hidden_size))
        for part, linear in head.named_modules():
            if isinstance(linear, nn.Linear):
                bias = state.get(f"{part}.bias")
                linear.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    if not head.reduced:
        state.pop("d2t", None)
    head.load_state_dict(state)
