"""Files of heads: our own, and those that other projects publish.

Published heads of one network differ in the names of keys and tensors, in how they are nested, in how they count layers
and in what they leave to the target. What decides the network is read as vLLM reads it; a head that is not computed
here is refused. Engines skip tensors that they do not know; here each has its place.
"""

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.files import Fields, read_model_json, write_safely, write_text
from decode.models.fast.layout import ROPE_TYPES
from decode.models.heads.block import BlockHead
from decode.models.heads.block_config import BLOCK_ARCHITECTURES
from decode.models.heads.eagle import ARCHITECTURES, DraftHead, FeatureHead, default_captured_layers
from decode.models.heads.kinds import HEADS
from decode.models.heads.mtp import MTP, MtpHead, load_mtp
from decode.models.sources import pinned

SELECTOR = {
    "markov_head.markov_w1.weight": "candidate_selector.predecessor_codebook",
    "markov_head.markov_w2.weight": "candidate_selector.successor_codebook",
    "markov_head.hidden_projection.weight": "candidate_selector.hidden_projection.weight",
}
"""Our names of DFlash 2's selector, and those in files."""
RENAMED = {r"^(model\.)+": "", r"^layers\.0\.": "midlayer.", r"^draft_id_to_target_id$": "d2t"}
RENAMED |= {f"^{re.escape(theirs)}$": ours for ours, theirs in SELECTOR.items()}
"""Names of tensors in other projects' files, and ours; EAGLE-1's layer is called as EAGLE-3's here."""
UNREAD = re.compile(r"rotary_emb\.inv_freq$|^verifier_")  # tensors that decoding does not read
SHARED, HEAD = "embed_tokens.weight", "lm_head.weight"
NEXT = "take another head of this target, or train one (student.kind: eagle3, dflash2, …)"

# -- config.json -------------------------------------------------------------------------------------------------------

FORMATS: dict[str, int | str | None] = {
    "peagle": "P-EAGLE", "domino": "Domino", "medusa": "Medusa", "mtp": "MTP", "mlpspeculator": "MLPSpeculator",
    "jetspec": "JetSpec", "eagle4": "EAGLE-4", "dflash2beam": "DFlash 2 with beams", "xpress": "XPress",
    "lilicorr": "LiLiCorr",
    "dspark": "dspark", "dflash2": "dflash2", "dflash": "dflash", "eagle25": None, "eagle3": 3, "eagle": 1,
}  # fmt: skip
"""What a config.json describes whose kinds hold this word, the first of these. Names in capitals are formats of drafts
that we refuse; Eagle 2.5 is a family of vision models.
"""
ENTERED, LEFT = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
LAYERS = {"captured_layers": 0, ENTERED: 0, "aux_hidden_state_layer_ids": 0, "layer_ids": 0, LEFT: 1, "left": 1}
"""Keys of the captured layers, the first of which holds: of the state that enters a layer (vLLM's, as here), or of the
layer that it leaves, which is one less."""
NESTED = ("eagle_config", "transformer_layer_config", "model", "dflash_config", "dspark_config")
"""Parts of config.json that are read as if their keys stood beside them (of SGLang and NVIDIA, speculators, vLLM's
EAGLEConfig, z-lab and DeepSpec)."""
KEPT = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "hidden_act", "max_position_embeddings", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id", "dtype",
    "attention_bias", "tie_word_embeddings", "num_assistant_tokens", "fc_norm", "norm_output", "norm_before_residual",
    "norm_before_fc", "block_size", "mask_token_id", "markov_rank", "sample_from_anchor", "confidence_temperatures",
    "confidence_sampled_temperatures", "conv_kernel_size", "conv_group_size", "candidates",
)  # fmt: skip
"""Keys that mean the same everywhere."""
SCORERS = {
    "dflash2": {"markov_rank": "selector_rank", "candidates": "selector_top_k"},
}
"""Our keys of scorers, and those in files."""
SLIDING = "sliding_attention"
OFF = (None, False)
COMPUTED: dict[str, Sequence[Any]] = {
    "quantization_config": OFF, "logit_scale": OFF, "final_logit_softcapping": OFF, "use_gemma_norm": OFF,
    "output_multiplier": (None, 1), "input_embedding_scale": (None, 1), "attention_value_scale": (None, 1),
    "parallel_draft_step": (None, 0, 1), "is_causal": OFF, "causal": OFF, "use_swa": OFF, "use_sliding_window": OFF,
    "sliding_attention": OFF, "layers of another kind": OFF, "a sliding layer without a window": OFF,
    "rope_type": ROPE_TYPES, "rotation by layer type": OFF, "partial_rotary_factor": (None, 1),
    "is_neox_style": (None, True), "markov_head_type": (None, "vanilla"), "Gemma's norms": OFF,
}  # fmt: skip
"""Keys that change the network, with the values that are computed here."""
SEEN = "is_causal", "causal", "use_swa", "use_sliding_window", SLIDING  # any value of these is computed in a block head


def head_format(fields: Fields, names: Iterable[str] = ()) -> int | str | None:
    """What a config.json describes, with the names of the tensors beside it, as they are called here.

    Returns:
        1 or 3 for an EAGLE head of this version, ``dflash``, ``dspark`` or ``dflash2`` for a block head, ``mtp`` for
        tuned next-token layers of a target, the name of another format of drafts, or None for anything else.
    """
    if fields.get("draft_format") == MTP:  # the rest is the target's own
        return MTP
    kinds = [*(fields.get("architectures") or ()), fields.get("model_type"), fields.get("speculators_model_type")]
    kinds += [(fields.get("dflash_config") or {}).get("projector_type")]
    kinds += fields.keys() & {"dflash_config", "dspark_config", "medusa_num_heads"}
    words = re.sub("[-_]", "", " ".join(map(str, kinds)).lower())
    for word, format in FORMATS.items():
        if word in words:
            return format
    if fields.get("draft_vocab_size"):  # EAGLE's authors write the architecture of the target
        return 3
    ours = set(names)
    return None if "fc.weight" not in ours else 3 if "midlayer.hidden_norm.weight" in ours else 1


def read_config(
    fields: Fields, state: dict[str, Tensor], target: PreTrainedModel | None, name: str, version: int | str
) -> LlamaConfig | Qwen3Config:
    """Our configuration of a head, from its config.json, its tensors, and the target where that is known.

    The tensors do not tell whether slot 0 of a block drafts, so `sample_from_anchor` is believed. Where it is absent,
    slot 0 of a DSpark head drafts and that of a DFlash head does not; in speculators' format it does not in either, as
    vLLM reads it. Where causality is not told, sliding layers are causal and others are not.

    Raises:
        UserError: a head that is not computed here, or that does not fit the target.
    """
    block, foreign = version in BLOCK_ARCHITECTURES, "speculators_model_type" in fields
    anchor = {"sample_from_anchor": version == "dspark" and not foreign}
    merged: Fields = (anchor if block else {"norm_before_residual": foreign}) | fields
    for key in NESTED:
        part = dict(fields.get(key) or {})
        # SGLang's section names the layers that states leave by the key with which vLLM names those that they enter
        merged |= {"left": part.pop(ENTERED, None)} | part if key == "eagle_config" else part
    needed = ("hidden_size", "vocab_size", *(("block_size", "mask_token_id") if block else ()))
    if lacking := [key for key in needed if merged.get(key) is None]:
        raise UserError(f"{name} does not say its {', '.join(lacking)}: {NEXT}")
    width, vocab, layers = merged["hidden_size"], merged["vocab_size"], merged.get("num_target_layers")
    of_target, fused = width if block else merged.get("target_hidden_size") or width, merged.get("use_aux_hidden_state")
    captured = next(([layer + less for layer in merged[key]] for key, less in LAYERS.items() if merged.get(key)), [])
    final = "captured_layers" in fields  # others mean the state before the final norm, which is not captured here
    if target is not None:
        shape = target.config.get_text_config()
        layers = int(shape.num_hidden_layers)
        if (shape.hidden_size, shape.vocab_size) != (of_target, vocab):
            raise UserError(
                f"the head in {name} is for a target of width {of_target} and {vocab} tokens; this target has width "
                f"{shape.hidden_size} and {shape.vocab_size} tokens"
            )
        if version == 1 or fused is False:
            captured, final = [layers], True
        elif version == 3:
            captured = sorted(captured or default_captured_layers(layers))
    if not captured:
        raise UserError(f"{name} does not name its feature layers; load an EAGLE head together with its target")
    most = layers - (block or not final) if layers else captured[-1]
    if captured != sorted(set(captured)) or captured[0] < block or captured[-1] > most:
        raise UserError(
            f"{name} reads the states that enter layers {captured} of a target of {layers} layers, counted from 0; "
            f"expected ascending numbers up to {most}: {NEXT}"
        )
    if version == 3 and fused is False:
        state["fc.weight"] = torch.eye(width)  # the last hidden state is the feature as it is
    for ours, theirs in SCORERS.get(str(version), {}).items():  # a key of ours is not believed
        merged[ours] = merged.get(theirs)
    types, window = _sliding(merged) if block else ([], None)
    causal = next((merged[key] for key in ("is_causal", "causal") if merged.get(key) is not None), None)
    causal = False if causal is None and merged.get("sliding_window_non_causal") else causal
    heads = merged["num_attention_heads"]
    confidence = state.get("confidence_head.proj.weight")
    rows = next((len(state[key]) for key in (HEAD, "d2t") if key in state), vocab)
    config = {key: merged[key] for key in KEPT if merged.get(key) is not None} | {
        "architectures": [(BLOCK_ARCHITECTURES if block else ARCHITECTURES)[version]],  # type: ignore[index]
        "head_dim": merged.get("head_dim") or width // heads,
        "rope_parameters": _rotation(merged, name, block),
        "target_hidden_size": of_target,
        "draft_vocab_size": merged.get("draft_vocab_size") or rows,
        "captured_layers": captured,
    }
    if not block:
        return LlamaConfig(**config | {"num_hidden_layers": 1, "qk_norm": any("q_norm" in key for key in state)})
    return Qwen3Config(
        **{"num_key_value_heads": heads} | config,
        num_target_layers=layers,
        layer_types=types,
        sliding_window=window,
        use_sliding_window=window is not None,
        is_causal=causal if causal is None and window else bool(causal),
        markov_head_type="vanilla",
        enable_confidence_head=bool(merged.get("enable_confidence_head")) or confidence is not None,
        confidence_head_with_markov=confidence is not None and confidence.shape[1] > width,
    )


def _sliding(merged: Fields) -> tuple[list[str], int | None]:
    """The kind of each layer of a block head, and the window of those that slide."""
    count, window = merged["num_hidden_layers"], merged.get("swa_window_size") or merged.get("sliding_window")
    types = list(merged.get("layer_types") or ["full_attention"] * count)[:count]
    if merged.get("use_swa") and SLIDING not in types:
        types = [SLIDING] * count
    return types, window if SLIDING in types else None


def _rotation(merged: Fields, name: str, block: bool) -> Fields:
    """The rotation's settings of a head, after a check that its whole network is computed here (`COMPUTED`).

    Raises:
        UserError: a head whose network is not, with the settings that are in the way.
    """
    rope: Fields = merged.get("rope_parameters") or merged.get("rope_scaling") or {}
    rope = {"rope_theta": merged.get("rope_theta") or 10000.0, "rope_type": "default"} | rope
    rope["rope_type"] = "default" if "mrope_section" in rope else rope.get("type") or rope["rope_type"]
    architecture = (merged.get("architectures") or ["none"])[0]
    settings = merged | rope
    types, window = _sliding(merged) if block else (list(merged.get("layer_types") or [])[:1], 0)
    settings[SLIDING] = SLIDING in types
    if block:
        settings |= dict.fromkeys(SEEN)
        settings["layers of another kind"] = bool({*types} - {"full_attention", SLIDING})
        slides = SLIDING in types or bool(merged.get("use_sliding_window"))
        settings["a sliding layer without a window"] = slides and not window
    settings["rotation by layer type"] = any(isinstance(value, dict) for value in rope.values())
    settings["Gemma's norms"] = "gemma" in architecture.lower()
    wrong = [f"{key} {settings[key]}" for key, values in COMPUTED.items() if settings.get(key) not in values]
    if wrong:
        raise UserError(f"{name} ({architecture}) has {', '.join(wrong)}, with which heads are not run: {NEXT}")
    return rope


def unserved(head: DraftHead) -> dict[str, str]:
    """Engines that do not run a block head as it was trained, each with the reason; of EAGLE's heads none is named.

    Most of them would not say so: they skip tensors and keys that they do not know.
    """
    if not isinstance(head, BlockHead):
        return {}
    markov, every, spark = head.markov_head, ("vllm", "sglang", "llama.cpp"), head.version == "dspark"
    windows, causal = map(set, zip(*head.kinds))
    pairs, second = head.candidates * (head.candidates + 1), head.version == "dflash2"
    joined = head.confidence_head is None or head.config.confidence_head_with_markov
    why: dict[str, tuple[bool, Sequence[str]]] = {
        "its confidence head does not read the Markov head": (not joined, ["llama.cpp"]),
        f"it drafts {head.config.draft_vocab_size:,} of {head.config.vocab_size:,} tokens": (
            head.reduced, every if second else ["sglang"] if spark else ["sglang", "llama.cpp"],
        ),
        f"{head.candidates} candidates need states of {pairs}": (
            second and pairs > head.config.hidden_size, ["llama.cpp"],
        ),
        "its window is not read there": (windows != {None}, ["sglang"]),
        "its layers differ in what is causal": (len(causal) > 1, ["sglang", "llama.cpp"]),
        "a DSpark head without a Markov head is not known there": (spark and markov is None, every),
        "a DFlash head with a Markov head is not known there": (markov is not None and not (spark or second), every),
        "a DFlash head that drafts in its first slot is not known there": (head.from_anchor and not spark, every),
    }  # fmt: skip
    return {engine: reason for reason, (there, engines) in why.items() if there for engine in engines}


# -- folders -----------------------------------------------------------------------------------------------------------


def head_kind(name: str | os.PathLike[str]) -> str:
    """The kind of the head in a folder or of a Hub name (`DraftHead.kind`); empty where there is none.

    Drafts of other formats, which `load_head` refuses, count as EAGLE heads.
    """
    if name == MTP:
        return MTP
    folder = Path(name)
    try:
        if not folder.exists():
            repository, revision = pinned(name)
            cached = try_to_load_from_cache(repository, "config.json", **revision)
            if not isinstance(cached, str):
                info = HfApi().model_info(repository, timeout=5, **revision)
                return _kind(head_format(info.config or {}))
            folder = Path(cached).parent
        files = folder.glob("*.safetensors")
        names = [_our_name(key) for file in files for key in safe_open(file, "pt").keys()]  # noqa: SIM118
        return _kind(head_format(json.loads((folder / "config.json").read_text(encoding="utf-8")), names))
    except Exception:  # the network layer has many; what is wrong is told when the draft is opened as a model
        return ""


def _kind(version: int | str | None) -> str:
    return "" if version is None else HEADS[version].network.kind if version in HEADS else FeatureHead.kind


def _our_name(name: str) -> str:
    """Our name of a tensor."""
    for pattern, ours in RENAMED.items():
        name = re.sub(pattern, ours, name)
    return name


def save_head(head: DraftHead, folder: str | Path, shared: dict[str, Tensor] | None = None) -> None:
    """Writes config.json and model.safetensors into a folder.

    The vocabulary's tables d2t and t2d are written only where the head drafts some of the target's tokens: vLLM makes
    no parameter for them where the vocabularies are equal. `shared` are tensors of the target that are written beside
    the head's, for engines that do not take them from it.
    """
    state, fields = head.state_dict() | (shared or {}), head.config.to_dict()
    if isinstance(head, BlockHead):  # as vLLM and SGLang read it, beside our own keys
        layers = [layer - 1 for layer in head.captured_layers]
        slots = {LEFT: layers, "mask_token_id": head.mask_id, "sample_from_anchor": head.from_anchor}
        told = {theirs: fields.get(ours) for ours, theirs in SCORERS.get(str(head.version), {}).items()}
        told |= {theirs: head.candidates for theirs in told if "top" in theirs}
        if fields.get("conv_kernel_size"):
            told |= {key: fields[key] for key in ("conv_kernel_size", "conv_group_size")}
        if head.version == "dflash2":
            state = {SELECTOR.get(name, name): tensor for name, tensor in state.items()}
        slots |= told
        if fields["is_causal"] is None:  # readers take a key that is there for an answer
            del fields["is_causal"]
        fields |= {"dflash_config": slots, "confidence_temperatures": head.temperatures}
        # the architecture that vLLM and SGLang know in all their versions
        fields |= {"architectures": ["Qwen3DSparkModel"], LEFT: layers} if head.version == "dspark" else {}
    if isinstance(head, MtpHead):
        tuned = {name: fields.get(name) for name in ("dtype", "num_assistant_tokens")}
        state, fields = head.tensors(), head.target_config.to_diff_dict() | tuned | {"draft_format": MTP}
        fields.pop("quantization_config", None)  # tuned layers have no scales
    kept = state.keys() - ({"d2t", "t2d"} if not head.reduced else ())
    state = {name: state[name].detach().cpu().contiguous() for name in sorted(kept)}
    write_safely(Path(folder) / "model.safetensors", lambda file: save_file(state, file, metadata={"format": "pt"}))
    write_text(Path(folder) / "config.json", json.dumps(fields, indent=2, default=str) + "\n")


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
        folder, files = Path(name), ["config.json", "*.safetensors"]
        if not folder.exists():
            repository, revision = pinned(name)
            folder = Path(snapshot_download(repository, allow_patterns=files, **revision))
        fields = read_model_json(folder / "config.json")
        tensors = [item for file in sorted(folder.glob(files[1])) for item in load_file(file).items()]
        state = {_our_name(key): tensor for key, tensor in tensors if not UNREAD.search(key)}
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
        if not state:
            raise UserError(
                f"{name} has no safetensors file; weights in a pickle (pytorch_model.bin) are not read, since that can "
                'run code. If you trust them: python -c "import torch, safetensors.torch as s; '
                "s.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors')\""
            )
        if version != 3:
            state = {re.sub("^midlayer", "layers.0", key): tensor for key, tensor in state.items()}
        config = read_config(fields, state, target, str(name), cast(int | str, version))
        head = cast(FeatureHead | BlockHead, HEADS[cast(int | str, version)].network(config))
        _fill(head, state, target, str(name), ours="captured_layers" in fields)
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever the bytes lead to
        raise UserError(
            f"{name} holds no feature head that can be read; save it or download it again ({error!r})"
        ) from error
    if target is not None:
        device = target.get_input_embeddings().weight.device
        head.to(device=device, dtype=target.dtype)
        head.rotary = LlamaRotaryEmbedding(head.config).to(device)  # frequencies are not to be rounded
    return head.eval()


def _fill(
    head: FeatureHead | BlockHead, state: dict[str, Tensor], target: PreTrainedModel | None, name: str, *, ours: bool
) -> None:
    """Fill a head with the tensors of its files, and with the target's where these leave them to it."""
    config, ids, block = head.config, None, head.kind == "block"
    if "d2t" in state:
        ids = torch.arange(len(state["d2t"])) + state["d2t"]
        times = torch.bincount(ids, minlength=config.vocab_size)  # refuses fractions and negative numbers
        drafted = state.get("t2d", times).long() if head.reduced else times
        if len(times) > config.vocab_size or times.max() > 1 or not times.equal(drafted):
            raise UserError(
                f"the table d2t in {name} does not lead, added to 0, 1, …, to {len(ids)} different tokens of "
                f"{config.vocab_size}, those of t2d; download it again, or {NEXT}"
            )
    if target is not None:
        embedding, output = target.get_input_embeddings(), target.get_output_embeddings().weight.detach()
        theirs = {SHARED: embedding.weight.detach(), HEAD: output if ids is None else output[ids.to(output.device)]}
        for key in (SHARED, HEAD) if block else (HEAD,) if head.version == 1 else ():
            weight, of_target = state.get(key), theirs[key]  # a copy of the target's, in either model's number format?
            if weight is not None and (weight.to(of_target).equal(of_target) or weight.equal(of_target.to(weight))):
                del state[key]
        if not (block or ours or type(embedding) is nn.Embedding):  # engines take the bare table, which Gemma scales
            state.setdefault(SHARED, theirs[SHARED])
        if head.version == 3 and HEAD not in state:
            tied = state.get(SHARED, output) if config.tie_word_embeddings else output
            state[HEAD] = tied if ids is None else tied[ids.to(tied.device)]
    if isinstance(head, FeatureHead):
        if SHARED in state or config.target_hidden_size != config.hidden_size:
            head.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
            head.embed_tokens.requires_grad_(False)
        for part, linear in head.named_modules():
            if isinstance(linear, nn.Linear):
                bias = state.get(f"{part}.bias")
                linear.register_parameter("bias", None if bias is None else nn.Parameter(bias))
    # files may leave out t2d, which follows from d2t, and both where the head drafts all tokens
    wanted, optional = head.state_dict(), {"t2d"} if head.reduced else {"t2d", "d2t"}
    lacking, beside = sorted(wanted.keys() - state.keys() - optional), sorted(state.keys() - wanted.keys())
    if lacking or beside:
        kind = f"{head.version} head of {config.num_hidden_layers} Qwen3 layers with its target's embedding and output"
        kind = kind if block else f"EAGLE-{head.version} head of one Llama or Qwen3 layer"
        raise UserError(
            f"{name} is no whole {kind}: it lacks {lacking[:4]} and has {beside[:4]} beside it ({len(lacking)} and "
            f"{len(beside)} tensors); load it together with its target, download it again, or {NEXT}"
        )
    head.load_state_dict(wanted | state)
    if head.reduced:
        head.set_vocabulary(cast(Tensor, head.draft_ids()))
