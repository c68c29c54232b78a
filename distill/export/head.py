"""Export of a trained head in the layout that vLLM and SGLang load.

Both load an EAGLE-3 head from ``config.json`` (architectures ``LlamaForCausalLMEagle3``, ``draft_vocab_size``) and the
tensors of `decode.models.heads.eagle`. Their loaders skip unknown names, so the files are read again here. The
embedding is the target's. EAGLE-1 heads keep the names of the official checkpoints, which SGLang loads. Of block heads
the output head is the target's too; where they draft some tokens only, engines need a copy of its rows. Next-token
layers keep the names of the target's own files, into which `replace_layers` puts them.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from decode.errors import UserError
from decode.files import read_model_json, replaced, write_json, write_safely
from decode.models.heads.block import BlockHead
from decode.models.heads.eagle import DraftHead, output_head
from decode.models.heads.files import HEAD, load_head, save_head
from decode.models.open import load_tokenizer
from decode.models.sources import INDEX, weight_files
from distill.config import ExportSettings
from distill.export.card import Facts, describe, write_card
from distill.export.draft import check_export_path, check_gguf
from distill.kinds.kind import of_model
from distill.networks.models import hollow_target

NETWORK = ("version", "captured_layers", "drafts", "mask_id", "candidates", "kinds")
"""Besides its tensors, these fields decide what a head drafts."""
SKIPPED = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Where a quantization_config lists modules that are not quantised: of transformers, of vLLM, of compressed-tensors."""


def export_head(
    head_dir: str | Path,
    target_dir: str | Path,
    out_dir: str | Path,
    settings: ExportSettings,
    *,
    length: int,
    trust_remote_code: bool = False,
    about: Facts | None = None,
    keep: Callable[[Path], object] | None = None,
) -> Path:
    """Exports a head; an earlier export in its place is replaced once the new one is complete.

    A head that an engine would run otherwise than it was trained is exported with a warning, and its card has no
    command for that engine.

    Args:
        head_dir: Folder of the trained head.
        target_dir: Folder or Hub name of its target, of which embedding, output head and shape are read.
        out_dir: Destination.
        settings: Number format, and that of the GGUF files.
        length: Drafted tokens per round that were trained: so many are drafted until the best number is measured.
        trust_remote_code: Run model code that comes with the target.
        about: What the card says of the training; None: nothing.
        keep: Renames an earlier export; None: it is removed.

    Returns:
        ``out_dir``.

    Raises:
        UserError: The destination holds something else, or the head is not the same when it is read again.
    """
    out_dir = Path(out_dir)
    target = hollow_target(target_dir, trust_remote_code=trust_remote_code)
    head = load_head(head_dir, target)
    check_export_path(out_dir, of_model(head))
    check_gguf(settings, of_model(head), head)
    length = min(length, head.drafts or length)
    tokenizer = load_tokenizer(target_dir, trust_remote_code=trust_remote_code)
    dtype = torch.float32 if settings.dtype == "keep" else getattr(torch, settings.dtype)
    with replaced(out_dir, keep) as partial:
        write_head(head, partial, tokenizer, length, dtype, target)
        facts = describe(head, target.config, str(target_dir), str(out_dir), settings.gguf)
        write_card(partial, facts | (about or {}) | {"trained_length": length}, length)
        again = load_head(partial, target)
        state = again.state_dict()
        other = [key for key, value in head.state_dict().items() if not value.to(target.dtype).equal(state[key])]
        other += [key for key in NETWORK if getattr(head, key, None) != getattr(again, key, None)]
        if other:
            raise UserError(
                f"The exported head, loaded again, has another {other[0]} than the one that was trained; it was not "
                "kept. Set export.dtype to float32, or use the draft's own folder."
            )
    return out_dir


def write_head(
    head: DraftHead,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    dtype: torch.dtype,
    target: PreTrainedModel | None = None,
) -> None:
    """Writes config.json, model.safetensors and the tokenizer into a folder.

    The target is needed for a block head of a reduced vocabulary, which gets a copy of rows of its output head.
    """
    config, shared = head.config, dict[str, Tensor]()
    config.num_assistant_tokens = length
    config.dtype = str(dtype).removeprefix("torch.")
    if isinstance(head, BlockHead) and head.reduced and target is not None:
        shared[HEAD] = output_head(target, head.draft_ids(), block=True).weight.to(dtype)
    save_head(head.to(dtype), folder, shared)
    tokenizer.save_pretrained(folder)


def replace_layers(export: str | Path, folder: str | Path) -> None:
    """Puts exported next-token layers into a copy of their target's files, for engines that run these.

    What was quantised is written in 16 bits: its scales are removed and config.json lists its modules as not quantised,
    or an engine would scale the new weights. ``folder`` is that copy.

    Raises:
        UserError: The copy lacks tensors of these names, as one does whose numbers are packed.
    """
    folder, tuned = Path(folder), load_file(Path(export) / "model.safetensors")
    names = {file: set(safe_open(file, "pt").keys()) for file in weight_files(folder)}
    present, modules = set[str]().union(*names.values()), {_module(name) for name in tuned}
    if lacking := sorted(tuned.keys() - present):
        raise UserError(
            f"{folder} has no {lacking[0]} ({len(lacking)} of {len(tuned)} tensors of {export} are not there): give a "
            "copy of the target that was trained for, whose weights are not packed"
        )
    stale = {name for name in present - tuned.keys() if "scale" in name.rpartition(".")[2] and _module(name) in modules}
    config, index = (read_model_json(folder / name) for name in ("config.json", INDEX))
    if stale and (quantised := config.get("quantization_config")):
        key = next((key for key in SKIPPED if key in quantised), SKIPPED[0])
        quantised[key] = sorted({*(quantised.get(key) or ()), *map(_module, stale)})
        write_json(folder / "config.json", config)
    for file, listed in names.items():
        if not listed & (stale | tuned.keys()):
            continue
        tensors = {name: tensor for name, tensor in load_file(file).items() if name not in stale}
        for name in tensors.keys() & tuned.keys():
            dtype = tensors[name].dtype
            tensors[name] = tuned[name].to(dtype if dtype.itemsize > 1 else torch.bfloat16)
        write_safely(file, lambda made: save_file(tensors, made, metadata={"format": "pt"}))  # noqa: B023
    if index:
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if name not in stale}
        write_json(folder / INDEX, index)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
