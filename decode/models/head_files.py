"""Files of feature heads: our own, and those that other projects publish.

Published heads of one network differ in the names of architectures and tensors, in how config.json is nested, and in
what they leave to the target. Engines skip tensors that they do not know; here each has its place, or the head is
refused. What decides the network is read as vLLM reads it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.errors import UserError
from decode.models.families import ROPE_TYPES
from decode.models.heads import ARCHITECTURES, FeatureHead, default_captured_layers
from decode.models.wrapped import pinned

OTHERS = ("P-EAGLE", "DFlash", "Domino", "DSpark", "Medusa", "MTP", "MLPSpeculator")
"""Formats of drafts that are no EAGLE heads, which have these in the names of their config.json."""
RENAMED = {r"^(model\.)+": "", r"^layers\.0\.": "midlayer.", r"^draft_id_to_target_id$": "d2t"}
"""Names of tensors in other projects' files, and ours."""
UNREAD = re.compile(r"rotary_emb\.inv_freq$|^verifier_")  # tensors that decoding does not read
SHARED, CAPTURED = "embed_tokens.weight", "eagle_aux_hidden_state_layer_ids"
NEXT = "take an EAGLE-3 head of this target, or train one (student.kind: eagle3)"


def head_format(fields: dict[str, Any], names: Iterable[str] = ()) -> int | str | None:
    """What a config.json describes, with the names of the tensors beside it.

    Returns:
        1 or 3 for an EAGLE head of this version, the name of another format of drafts, or None for anything else.
    """
    kinds = [*(fields.get("architectures") or ()), fields.get("model_type"), fields.get("speculators_model_type")]
    said = " ".join(map(str, [*kinds, *fields.keys() & {"dflash_config", "medusa_num_heads"}])).lower().replace("_", "")
    other = next((name for name in OTHERS if name.lower().replace("-", "") in said), None)
    if other is not None or "eagle25" in said:  # Eagle 2.5 is a family of vision models
        return other
    if "eagle" in said:
        return 3 if "eagle3" in said else 1
    if fields.get("draft_vocab_size"):  # EAGLE's authors write the architecture of the target
        return 3
    ours = {_our_name(name) for name in names}
    return None if "fc.weight" not in ours else 3 if "midlayer.hidden_norm.weight" in ours else 1


def is_head(name: str | os.PathLike[str]) -> bool:
    """Whether a folder or Hub name holds a feature head, or a draft of another format, which `load_head` refuses."""
    folder = Path(name)
    try:
        if not folder.exists():
            repository, revision = pinned(name)
            cached = try_to_load_from_cache(repository, "config.json", **revision)
            if not isinstance(cached, str):
                told = HfApi().model_info(repository, timeout=5, revision=revision.get("revision"))
                return head_format(told.config or {}) is not None
            folder = Path(cached).parent
        names = [key for file in folder.glob("*.safetensors") for key in safe_open(file, "pt").keys()]  # noqa: SIM118
        return head_format(json.loads((folder / "config.json").read_text(encoding="utf-8")), names) is not None
    except Exception:  # the network layer has many; what is wrong is told when the draft is opened as a model
        return False


def _our_name(name: str) -> str:
    """Our name of a tensor; EAGLE-1's layer is called as EAGLE-3's here."""
    for pattern, ours in RENAMED.items():
        name = re.sub(pattern, ours, name)
    return name


def save_head(head: FeatureHead, folder: str | Path) -> None:
    """Writes config.json and model.safetensors into an existing folder.

    The vocabulary's tables d2t and t2d are written only where the head drafts some of the target's tokens: vLLM makes
    no parameter for them where the vocabularies are equal.
    """
    folder = Path(folder)
    tables = () if head.reduced else ("d2t", "t2d")
    state = {n: tensor.detach().cpu().contiguous() for n, tensor in head.state_dict().items() if n not in tables}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.config.to_dict(), indent=2, default=str) + "\n")


def load_head(name: str | os.PathLike[str], target: PreTrainedModel | None = None) -> FeatureHead:
    """A head from its folder or from the Hub, ours or a published one in safetensors.

    Args:
        name: folder with config.json and safetensors files, or Hub name (with its revision after an @).
        target: the model it drafts for, to fill in and check what the file leaves to it; the head takes its number
            format and device.

    Raises:
        UserError: a damaged or unfit head, or another format of drafts.
    """
    try:
        folder, files = Path(name), ["config.json", "*.safetensors"]
        if not folder.exists():
            repository, revision = pinned(name)
            folder = Path(snapshot_download(repository, revision=revision.get("revision"), allow_patterns=files))
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = [item for file in sorted(folder.glob(files[1])) for item in load_file(file).items()]
        state = {_our_name(key): tensor for key, tensor in tensors if not UNREAD.search(key)}
        version = head_format(fields, state)
        if version not in (1, 3):
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
        if version == 1:
            state = {re.sub("^midlayer", "layers.0", key): tensor for key, tensor in state.items()}
        head = FeatureHead(_config_of(fields, state, target, str(name), version))
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


def _config_of(
    fields: dict[str, Any], state: dict[str, Tensor], target: PreTrainedModel | None, name: str, version: int
) -> LlamaConfig:
    """Our configuration of a head, from its config.json, its tensors, and the target where that is known."""
    architecture, ours = (fields.get("architectures") or ["none"])[0], "captured_layers" in fields
    # of speculators, and of vLLM's EAGLEConfig
    nested = fields.get("transformer_layer_config") or fields.get("model") or {}
    fields = {"norm_before_residual": "transformer_layer_config" in fields} | fields | nested
    eagle = fields.get("eagle_config") or {}
    width, vocab = fields["hidden_size"], fields["vocab_size"]
    of_target, fused = fields.get("target_hidden_size") or width, eagle.get("use_aux_hidden_state", True)
    # vLLM numbers states by the layer that they enter, as here; SGLang and NVIDIA by the layer that they leave
    named = fields.get("captured_layers") or fields.get(CAPTURED) or eagle.get("layer_ids")
    captured = sorted(named or [layer + 1 for layer in eagle.get(CAPTURED) or ()])
    if target is not None:
        shape = target.config.get_text_config()
        if (shape.hidden_size, shape.vocab_size) != (of_target, vocab):
            raise UserError(
                f"the head in {name} is for a target of width {of_target} and {vocab} tokens; this target has width "
                f"{shape.hidden_size} and {shape.vocab_size} tokens"
            )
        layers = shape.num_hidden_layers
        if version == 1 or not fused:
            captured, ours = [layers], True
        captured = captured or list(default_captured_layers(layers))
        if captured[0] < 0 or captured[-1] > layers - (not ours):  # engines give the last state before the final norm
            raise UserError(f"{name} reads the states that enter layers {captured}; this target has {layers} layers")
    if not captured:
        raise UserError(f"{name} does not name its feature layers; load it together with its target")
    if version == 3 and not fused:
        state["fc.weight"] = torch.eye(width)  # the last hidden state is the feature as it is
    rope: dict[str, Any] = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    rope = {"rope_theta": fields.get("rope_theta") or 10000.0, "rope_type": "default"} | rope
    kind = "default" if "mrope_section" in rope else rope.get("type") or rope["rope_type"]  # text has one position
    other = {f"{key} {fields.get(key)}": fields.get(key) for key in ("quantization_config", "logit_scale")} | {
        f"rope_type {kind}": kind not in ROPE_TYPES,
        "rotation by layer type": any(isinstance(value, dict) for value in rope.values()),
        "partial rotation": (fields | rope).get("partial_rotary_factor") not in (None, 1),
        "a sliding window": (fields.get("layer_types") or [""])[0] == "sliding_attention",
        "Gemma's norms": "gemma" in architecture.lower(),
        "parallel drafting": "mask_hidden" in state or (eagle.get("parallel_draft_step") or 1) > 1,
        "more than one decoder layer": any(key.startswith("layers.1.") for key in state),
    }
    if any(other.values()):
        found = ", ".join(what for what, there in other.items() if there)
        raise UserError(f"{name} ({architecture}) has {found}, with which heads are not run: {NEXT}")
    rows = next((len(state[key]) for key in ("lm_head.weight", "d2t") if key in state), vocab)
    changes = {
        "architectures": [ARCHITECTURES[version]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "layer_types": None,
        "head_dim": fields.get("head_dim") or width // fields["num_attention_heads"],
        "target_hidden_size": of_target,
        "draft_vocab_size": fields.get("draft_vocab_size") or rows,
        "captured_layers": captured,
        "rope_parameters": rope | {"rope_type": kind},
        "rope_scaling": None,
        "mlp_bias": False,  # layers have the biases that the file holds
        "norm_before_fc": eagle.get("norm_before_fc", fields.get("norm_before_fc")),
        "qk_norm": any("q_norm" in key for key in state),
    }
    return LlamaConfig(**{key: value for key, value in (fields | changes).items() if value is not None})


def _fill(
    head: FeatureHead, state: dict[str, Tensor], target: PreTrainedModel | None, name: str, *, ours: bool
) -> None:
    """Fill a head with the tensors of its files, and with the target's where these leave them to it."""
    config, modules, ids = head.config, dict(head.named_modules()), None
    if "d2t" in state:
        ids = torch.arange(len(state["d2t"])) + state["d2t"]
        times = torch.bincount(ids, minlength=config.vocab_size)  # refuses fractions and negative numbers
        if (
            len(times) > config.vocab_size
            or times.max() > 1
            or (head.reduced and not times.equal(state.get("t2d", times).long()))
        ):
            raise UserError(
                f"the table d2t in {name} does not lead, added to 0, 1, …, to {len(ids)} different tokens of "
                f"{config.vocab_size}, those of t2d; download it again, or {NEXT}"
            )
    if target is not None:
        embedding, output = target.get_input_embeddings(), target.get_output_embeddings().weight.detach()
        if not ours and type(embedding) is not nn.Embedding:  # engines give a head the bare table, which Gemma scales
            state.setdefault(SHARED, embedding.weight.detach())
        if head.version == 1 and torch.equal(state.get("lm_head.weight", output).to(output), output):
            state.pop("lm_head.weight", None)  # a copy of the target's
        if head.version == 3 and "lm_head.weight" not in state:
            rows = state.get(SHARED, output) if config.tie_word_embeddings else output
            state["lm_head.weight"] = rows if ids is None else rows[ids.to(rows.device)]
    if SHARED in state or config.target_hidden_size != config.hidden_size:
        head.embed_tokens = nn.utils.skip_init(nn.Embedding, config.vocab_size, config.hidden_size)
        head.embed_tokens.requires_grad_(False)
    for key, tensor in state.items():
        linear = modules.get(key.removesuffix(".bias"))
        if key.endswith(".bias") and isinstance(linear, nn.Linear):
            linear.bias = nn.Parameter(tensor)
    if "fc.bias" not in state:
        head.fc.register_parameter("bias", None)
    # files may leave out t2d, which follows from d2t, and both where the head drafts all tokens
    wanted, optional = head.state_dict(), {"t2d"} if head.reduced else {"t2d", "d2t"}
    lacking, beside = sorted(wanted.keys() - state.keys() - optional), sorted(state.keys() - wanted.keys())
    if lacking or beside:
        raise UserError(
            f"{name} is no whole EAGLE-{head.version} head of one Llama or Qwen3 layer: it lacks {lacking[:4]} and has "
            f"{beside[:4]} beside it ({len(lacking)} and {len(beside)} tensors); download it again, or {NEXT}"
        )
    head.load_state_dict(wanted | state)
    if head.reduced:
        head.set_vocabulary(cast(Tensor, head.draft_ids()))
