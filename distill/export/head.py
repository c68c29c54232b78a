"""Export of a trained head in the layout that vLLM and SGLang load.

Both load an EAGLE-3 head from ``config.json`` (architectures ``LlamaForCausalLMEagle3``, ``draft_vocab_size``) and the
tensors of `decode.models.heads`. Their loaders skip unknown names, so the files are read again here. The embedding is
the target's. EAGLE-1 heads keep the names of the official checkpoints, which SGLang loads. Of block heads the output
head is the target's too; where they draft some tokens only, engines need a copy of its rows. Next-token layers
keep the names of the target's own files.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.errors import UserError
from decode.models.block_head import BlockHead
from decode.models.head_configs import head_format, speculators_fields, unserved
from decode.models.head_files import HEAD, SHARED, load_head, save_head
from decode.models.heads import DraftHead, output_head
from decode.models.loading import load_model, load_tokenizer
from decode.models.mtp import MTP
from distill.config.run import ExportSettings
from distill.export.draft import add_legacy_fields, check_export_path, check_gguf, draft_length
from distill.export.model_card import TOKEN_MAP, write_card
from distill.files import replaced, save_tokenizer

TABLES = ("d2t", "t2d")  # tensors that a head of a reduced vocabulary has
NETWORK = ("version", "captured_layers", "drafts", "mask_id", "temperatures")
"""What decides beside the tensors what a head drafts."""
FIELDS = (
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "num_hidden_layers", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta",
    "hidden_act", "tie_word_embeddings", "torch_dtype",
)  # fmt: skip
"""Fields of config.json that the engines read; all but EAGLE-1 need ``draft_vocab_size`` too."""


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

    A block head that an engine would run otherwise than it was trained is exported with a warning, and its card has no
    command for that engine.

    Args:
        head_dir: Folder of the trained head.
        target_dir: Folder or Hub name of its target.
        out_dir: Destination.
        profile: Measurements, as for `export_draft`.
        settings: Layout, number format, and that of the GGUF files.
        trust_remote_code: Run model code that comes with the target.

    Returns:
        ``out_dir``.

    Raises:
        UserError: The destination holds something else, or there is no draft length.
    """
    out_dir = Path(out_dir)
    target = load_model(target_dir, device="cpu", dtype="float32", trust_remote_code=trust_remote_code)
    head, of_speculators = load_head(head_dir, target), settings.format == "speculators"
    check_export_path(out_dir, head.version)
    check_gguf(settings, head)
    length, why = draft_length(profile), unserved(head)
    if isinstance(head, BlockHead):
        length = min(length, head.drafts)
        why |= {"sglang": "it does not read speculators' format"} if of_speculators else {}
    for engine, reason in why.items():
        warnings.warn(f"{engine} does not run this export as it was trained: {reason}", stacklevel=2)
    tokenizer = load_tokenizer(target_dir, trust_remote_code=trust_remote_code)
    dtype = torch.float32 if settings.dtype == "keep" else getattr(torch, settings.dtype)
    with replaced(out_dir) as partial:
        names = str(target_dir), str(out_dir)
        write_head(head, partial, tokenizer, length, dtype, target)
        if head.version != MTP:  # whose config.json is the target's
            check_files(partial)
        if isinstance(head, BlockHead) and of_speculators:
            embedding = target.get_input_embeddings().weight.to(dtype)
            save_head(head, partial, {SHARED: embedding} | _rows(head, target, dtype))
            fields = json.dumps(speculators_fields(head, names[0]), indent=2, default=str)
            (partial / "config.json").write_text(fields + "\n", encoding="utf-8")
        write_card(
            partial, profile, head, target.config, length, names=names, gguf_type=(settings.gguf or ["f32"])[0],
            unserved=why,
        )  # fmt: skip
        again = load_head(partial, target)
        state = again.state_dict()
        other = [name for name, one in head.state_dict().items() if not torch.equal(one.to(target.dtype), state[name])]
        other += [name for name in NETWORK if getattr(head, name, None) != getattr(again, name, None)]
        if other:
            raise UserError(f"The exported head, loaded again, has another {other[0]} than the one that was measured.")
    return out_dir


def write_head(
    head: DraftHead,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    dtype: torch.dtype,
    target: PreTrainedModel | None = None,
) -> None:
    """Writes config.json, model.safetensors and the tokenizer into an existing folder.

    The target is needed for a block head of a reduced vocabulary, which gets a copy of rows of its output head.
    """
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
    shared = _rows(head, target, dtype) if isinstance(head, BlockHead) and head.reduced and target is not None else {}
    save_head(head.to(dtype), folder, shared)
    ids = head.draft_ids()
    if version == 1 and ids is not None:
        torch.save(ids.tolist(), folder / TOKEN_MAP)
    add_legacy_fields(folder / "config.json")
    save_tokenizer(tokenizer, folder)


def _rows(head: BlockHead, target: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The rows of the target's output head that a block head drafts from."""
    return {HEAD: output_head(target, head.draft_ids()).weight.to(dtype)}


def check_files(folder: Path) -> None:
    """Refuses a folder that lacks a field that the engines need, or has what they have no place for."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    version = head_format(config)
    with safe_open(folder / "model.safetensors", "pt") as file:
        tables = [name for name in file.keys() if name in TABLES]  # noqa: SIM118
    lacking = [field for field in (*FIELDS, *["draft_vocab_size"] * (version != 1)) if config.get(field) is None]
    if lacking:
        raise RuntimeError(f"The exported head lacks {', '.join(lacking)}.")
    if config.get("bias"):
        raise RuntimeError("The exported head has bias set: engines would make biases that no tensor fills.")
    if version != 1 and len(tables) != 2 * (config["draft_vocab_size"] < config["vocab_size"]):
        raise RuntimeError(
            f"The exported head drafts {config['draft_vocab_size']} of {config['vocab_size']} tokens and has {tables}; "
            f"vLLM has parameters for {', '.join(TABLES)} where it drafts some tokens only."
        )
    captured = config.get("eagle_aux_hidden_state_layer_ids") or []
    if version == 3 and (len(captured) != 3 or len(set(captured)) != 3):
        raise RuntimeError(f"The exported head captures the layers {captured}; engines expect three different ones.")
