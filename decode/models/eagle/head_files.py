"""Feature heads as folders: config.json and model.safetensors, ours or published ones."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decode.core.errors import UserError
from decode.models.eagle.head import VERSIONS, FeatureHead

VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Fields of config.json by which heads of other projects differ from the published EAGLE-3."""

SHARED = "embed_tokens.weight"  # the target's embedding, which files may repeat


def default_captured_layers(layers: int) -> tuple[int, int, int]:
    """EAGLE-3's low, middle and high states: those that enter layers 2, L/2 and L − 3, as the engines take them.

    Targets in which these are not three different ones get the first, the middle and the last state between layers.

    Raises:
        UserError: a target of one layer.
    """
    if layers < 2:
        raise UserError(f"EAGLE-3 reads three different hidden states, and a target of {layers} layer has only two")
    if layers > 6:
        return 2, layers // 2, layers - 3
    return (1, layers // 2, layers - 1) if layers > 3 else (0, 1, 2)


def head_config(
    target: Any,
    version: int,
    *,
    intermediate_size: int | None = None,
    heads: int | None = None,
    kv_heads: int | None = None,
    draft_vocab: int | None = None,
    captured_layers: tuple[int, ...] | None = None,
) -> LlamaConfig:
    """The configuration of a head for a target; what is None is the target's.

    Raises:
        UserError: sizes that do not fit.
    """
    width, layers = int(target.hidden_size), int(target.num_hidden_layers)
    heads = heads or int(target.num_attention_heads)
    kv_heads = kv_heads or int(getattr(target, "num_key_value_heads", None) or heads)
    if width % heads or heads % kv_heads or (width // heads) % 2:
        raise UserError(
            f"a feature head of {heads} heads and {kv_heads} key-value heads does not fit the target's width {width}: "
            "heads have to divide it into even parts, and key-value heads to divide heads"
        )
    captured_layers = (layers,) if version == 1 else tuple(captured_layers or default_captured_layers(layers))
    if not all(0 <= layer <= layers for layer in captured_layers) or list(captured_layers) != sorted(captured_layers):
        raise UserError(f"captured layers are {list(captured_layers)}; expected ascending numbers from 0 to {layers}")
    if version == 3 and len(set(captured_layers)) != 3:
        raise UserError(f"captured layers are {list(captured_layers)}; EAGLE-3 reads three different ones")
    drafted = min(draft_vocab or target.vocab_size, target.vocab_size)
    rope = getattr(target, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    name = next(name for name, number in VERSIONS.items() if number == version)
    return LlamaConfig(
        architectures=[name],
        hidden_size=width,
        target_hidden_size=width,
        intermediate_size=intermediate_size or getattr(target, "intermediate_size", None) or 4 * width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=width // heads,
        vocab_size=int(target.vocab_size),
        draft_vocab_size=drafted if version == 3 or drafted < target.vocab_size else None,
        max_position_embeddings=int(getattr(target, "max_position_embeddings", None) or 2048),
        rms_norm_eps=float(getattr(target, "rms_norm_eps", None) or 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta") or 10000.0},
        tie_word_embeddings=False,
        bos_token_id=getattr(target, "bos_token_id", None),
        eos_token_id=getattr(target, "eos_token_id", None),
        pad_token_id=getattr(target, "pad_token_id", None),
        captured_layers=list(captured_layers),
        # no key "bias": EAGLE-1's fc has one in any case, and engines would make biases of the attention for it
    )


def random_head(config: LlamaConfig) -> FeatureHead:
    """A head with weights that are not trained, always the same ones; it drafts the tokens of the lowest ids."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = FeatureHead(config)
    if head.reduced or head.version == 3:
        head.set_vocabulary(torch.arange(int(getattr(config, "draft_vocab_size", None) or config.vocab_size)))
    return head.eval()


def head_version(folder: str | os.PathLike[str]) -> int | None:
    """1 or 3 where a folder's config.json says that it holds an EAGLE head of this version; else None."""
    try:
        fields = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        return VERSIONS.get((fields.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError):
        return None


def is_head(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder's config.json says that it holds a feature head."""
    return head_version(folder) is not None


def save_head(head: FeatureHead, folder: str | Path) -> None:
    """config.json and model.safetensors into an existing folder.

    The vocabulary's tables d2t and t2d are written only where the head drafts some of the target's tokens: vLLM makes
    no parameter for them where the vocabularies are equal.
    """
    folder = Path(folder)
    tables = () if head.draft_ids() is not None else ("d2t", "t2d")
    state = {n: tensor.detach().cpu().contiguous() for n, tensor in head.state_dict().items() if n not in tables}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(head.config.to_dict(), indent=2, default=str) + "\n")


def load_head(folder: str | os.PathLike[str], target: PreTrainedModel | None = None) -> FeatureHead:
    """A head from its folder, ours or a published one in safetensors.

    Args:
        folder: with config.json and model.safetensors.
        target: the model it drafts for, to fill in and check what the file leaves to it; the head takes its number
            format and device.

    Raises:
        UserError: a damaged or unfit head.
    """
    folder = Path(folder)
    try:
        fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        state = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"no feature head can be read from {folder}: {error}") from error
    try:
        config = _config_of(fields, target, folder)
        head = FeatureHead(config)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{folder}/config.json does not describe a feature head: {error!r}") from error
    wrong = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(wanted.shape)}"
        for name, wanted in head.state_dict().items()
        if name in state and state[name].shape != wanted.shape
    ]
    if wrong:
        raise UserError(f"{folder} does not hold what its config.json names: {', '.join(wrong[:4])}")
    if SHARED in state:
        weight = state.pop(SHARED)
        head.embed_tokens = nn.Embedding.from_pretrained(weight)
    missing, unknown = head.load_state_dict(state, strict=False)
    ids = head.draft_ids()
    if ids is not None and "d2t" in state:
        head.set_vocabulary(ids)  # files may leave out t2d, which follows from d2t
    missing = [name for name in missing if name not in ("t2d", SHARED) and (name != "d2t" or ids is not None)]
    if missing or unknown:
        raise UserError(
            f"{folder} does not hold what its config.json names: missing {missing[:4] or 'nothing'}, unknown "
            f"{unknown[:4] or 'nothing'}"
        )
    return (head if target is None else fitted(head, target)).eval()


def fitted(head: FeatureHead, target: PreTrainedModel) -> FeatureHead:
    """The head in the target's number format, on its device."""
    device = target.get_input_embeddings().weight.device
    head.to(device=device, dtype=target.dtype)
    head.rotary = LlamaRotaryEmbedding(head.config).to(device)  # frequencies are not to be rounded
    return head


def _config_of(fields: dict[str, Any], target: PreTrainedModel | None, folder: Path) -> LlamaConfig:
    version = VERSIONS.get((fields.get("architectures") or [""])[0])
    if version is None:
        raise UserError(f"{folder} holds no feature head: its architecture is {fields.get('architectures')}")
    if variants := [name for name in VARIANTS if fields.get(name)]:
        raise UserError(
            f"{folder} has {', '.join(variants)} set in its config.json, variants of EAGLE-3 that are not supported"
        )
    width = int(fields["hidden_size"])
    fields = dict(fields)
    fields["head_dim"] = fields.get("head_dim") or width // int(fields["num_attention_heads"])
    fields["target_hidden_size"] = fields.get("target_hidden_size") or width
    if fields["target_hidden_size"] != width:
        raise UserError(f"{folder} is {width} wide, its target {fields['target_hidden_size']}; they have to be equal")
    names = ("captured_layers", "taps", "eagle_aux_hidden_state_layer_ids")  # ours, our former one, the engines'
    fields["captured_layers"] = next((fields[name] for name in names if fields.get(name)), None)
    if target is None:
        if not fields["captured_layers"]:
            raise UserError(f"{folder} does not name its feature layers; load it together with its target")
        return LlamaConfig(**fields)
    shape = target.config.get_text_config()
    if (shape.hidden_size, int(shape.vocab_size)) != (width, int(fields["vocab_size"])):
        raise UserError(
            f"the head in {folder} is for a target of width {width} and {fields['vocab_size']} tokens; this target has "
            f"width {shape.hidden_size} and {shape.vocab_size} tokens"
        )
    layers = int(shape.num_hidden_layers)
    captured = fields["captured_layers"] or default_captured_layers(layers)
    fields["captured_layers"] = [layers] if version == 1 else list(captured)
    return LlamaConfig(**fields)
