"""Export of a trained feature head in the layout that vLLM and SGLang load.

Both load an EAGLE-3 head from ``config.json`` (architectures ``LlamaForCausalLMEagle3``, ``draft_vocab_size``) and the
tensors of `decode.models.heads`. Their loaders skip unknown names, so the files are read again here. The embedding is
the target's. EAGLE-1 heads keep the names of the official checkpoints, which SGLang loads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerBase

from decode.errors import UserError
from decode.models.head_files import load_head, save_head
from decode.models.heads import FeatureHead
from decode.models.loading import load_model, load_tokenizer
from distill.config.run import ExportSettings
from distill.export.draft import add_legacy_fields, check_export_path, draft_length
from distill.export.model_card import TOKEN_MAP, write_card
from distill.files import replaced, save_tokenizer

TABLES = ("d2t", "t2d")  # tensors that an EAGLE-3 head of a reduced vocabulary has
FIELDS = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "hidden_act", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip
"""Fields of config.json that the engines read; EAGLE-3 needs ``draft_vocab_size`` too."""


def export_head(
    head_dir: str | Path,
    target_dir: str | Path,
    out_dir: str | Path,
    profile: Mapping[str, Any],
    settings: ExportSettings,
    *,
    trust_remote_code: bool = False,
) -> Path:
    """Exports a head; an earlier export in the same place is replaced once the new one is complete.

    Args:
        head_dir: Folder of the trained head.
        target_dir: Folder or Hub name of its target.
        out_dir: Destination.
        profile: Measurements, as for `export_draft`.
        settings: Number format, and that of the GGUF files.
        trust_remote_code: Run model code that comes with the target.

    Returns:
        ``out_dir``.

    Raises:
        UserError: The destination holds something else, or there is no draft length.
    """
    out_dir = Path(out_dir)
    target = load_model(target_dir, device="cpu", dtype="float32", trust_remote_code=trust_remote_code)
    head = cast(FeatureHead, load_head(head_dir, target))
    check_export_path(out_dir, head.version)
    length = draft_length(profile)
    tokenizer = load_tokenizer(target_dir, trust_remote_code=trust_remote_code)
    dtype = torch.float32 if settings.dtype == "keep" else getattr(torch, settings.dtype)
    with replaced(out_dir) as partial:
        write_head(head, partial, tokenizer, length, dtype)
        names = str(target_dir), str(out_dir)
        write_card(partial, profile, head, target.config, length, names=names, gguf_type=(settings.gguf or ["f32"])[0])
        check_files(partial)
        again = load_head(partial, target)
        for (name, one), other in zip(head.state_dict().items(), again.state_dict().values()):
            if not torch.equal(one.to(other.dtype), other):
                raise UserError(f"The exported head, loaded again, has another {name} than the one that was measured.")
    return out_dir


def write_head(
    head: FeatureHead, folder: Path, tokenizer: PreTrainedTokenizerBase, length: int, dtype: torch.dtype
) -> None:
    """Writes config.json, model.safetensors and the tokenizer into an existing folder."""
    config, version = head.config, head.version
    config.num_assistant_tokens = length
    config.dtype = str(dtype).removeprefix("torch.")
    vars(config).pop("bias", None)
    if version == 3:
        captured_layers = list(head.captured_layers)
        config.eagle_config = {"use_aux_hidden_state": True}
        # vLLM numbers states by the layer that they enter, SGLang by the layer that they leave
        config.eagle_aux_hidden_state_layer_ids = captured_layers
        config.eagle_config["eagle_aux_hidden_state_layer_ids"] = [tap - 1 for tap in captured_layers]
    save_head(head.to(dtype), folder)
    ids = head.draft_ids()
    if version == 1 and ids is not None:
        torch.save(ids.tolist(), folder / TOKEN_MAP)
    add_legacy_fields(folder / "config.json")
    save_tokenizer(tokenizer, folder)


def check_files(folder: Path) -> None:
    """Refuses a folder that lacks a field that the engines need, or has what they have no place for."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    version = 3 if config["architectures"] == ["LlamaForCausalLMEagle3"] else 1
    with safe_open(folder / "model.safetensors", "pt") as file:
        tables = [name for name in file.keys() if name in TABLES]  # noqa: SIM118
    lacking = [field for field in (*FIELDS, *["draft_vocab_size"] * (version == 3)) if config.get(field) is None]
    if lacking:
        raise RuntimeError(f"The exported head lacks {', '.join(lacking)}.")
    if config.get("bias"):
        raise RuntimeError("The exported head has bias set: engines would make biases that no tensor fills.")
    if version == 3 and len(tables) != 2 * (config["draft_vocab_size"] < config["vocab_size"]):
        raise RuntimeError(
            f"The exported head drafts {config['draft_vocab_size']} of {config['vocab_size']} tokens and has {tables}; "
            f"vLLM has parameters for {', '.join(TABLES)} where it drafts some tokens only."
        )
    captured = config.get("eagle_aux_hidden_state_layer_ids") or []
    if version == 3 and (len(captured) != 3 or len(set(captured)) != 3):
        raise RuntimeError(f"The exported head captures the layers {captured}; engines expect three different ones.")
