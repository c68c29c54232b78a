"""Opening models and tokenizers: the only place that decides device and number format, loads, checks and refuses.

Everything that can be said about a folder, a Hub name or a device before a forward is said here, as a `UserError` with
the next step. What a model's own ``generation_config`` asks of decoding is read here too.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from decode.core.errors import UserError
from decode.models.eagle.head_files import is_head, load_head
from decode.models.loading.gguf_files import (
    forget_packing,
    gguf_config,
    gguf_file,
    quiet_in_files,
    split_digits,
    unpacking,
)
from decode.models.loading.loading_errors import EXPECTED, quantized, unreadable
from decode.models.other_tokenizer import DraftModel, ForeignDraft, Intersection, Vocabulary

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Number formats by their names in settings; ``auto`` is decided by `choose_dtype`."""

SIXTEEN_BITS = (
    "in 16 bits a forward of several tokens rounds otherwise than one of a single token, so lossless means the "
    "distribution up to that rounding: where two tokens are nearly equally probable, greedy texts may differ from "
    "generate's; --dtype float32 makes them identical"
)

# -- where and in what format --------------------------------------------------------------------------------------


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """The device for a setting: ``auto`` is the first CUDA device, without one the CPU.

    Raises:
        UserError: no such device here, or one that exact sampling cannot run on.
    """
    available = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if available else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is {name!r}; choose auto, cpu, cuda or cuda:1") from error
    if device.type == "mps":
        raise UserError("device is 'mps', which has no float64, and tokens are drawn in float64; choose cpu")
    if device.type == "cuda" and not available:
        build = (
            "is built without CUDA" if torch.version.cuda is None else "finds no GPU (nvidia-smi shows what is there)"
        )
        raise UserError(f"device is {str(name)!r}, but torch {torch.__version__} {build}; choose cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device is {str(name)!r}, but there are {torch.cuda.device_count()} CUDA devices, from cuda:0")
    return device


def choose_dtype(name: str, device: torch.device) -> str:
    """The number format for a setting: a key of `DTYPES`, or ``auto``.

    ``auto`` is float32 on a CPU; on a GPU it stays ``auto`` and `load_model` takes the format of the checkpoint.

    Raises:
        UserError: an unknown name.
    """
    if name not in (*DTYPES, "auto"):
        raise UserError(f"dtype is {name!r}; choose auto or one of {', '.join(DTYPES)}")
    return "float32" if name == "auto" and device.type == "cpu" else name


def placement(model: PreTrainedModel) -> str:
    """Where an opened model is and in what format, in a sentence for the terminal; with what 16 bits mean."""
    device = model.get_input_embeddings().weight.device
    where = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    name = str(model.dtype).removeprefix("torch.")
    return f"on {where}, {name}" + (f": {SIXTEEN_BITS}" if model.dtype in (torch.bfloat16, torch.float16) else "")


# -- models and tokenizers -----------------------------------------------------------------------------------------


def load_model(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device,
    dtype: str,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    Args:
        name: folder or Hub name (its revision behind an @), or a GGUF file (needs the package gguf).
        device: where it goes; ignored with a `device_map`.
        dtype: one of `DTYPES`, or ``auto`` (see `choose_dtype`).
        device_map: passed to transformers, to spread a model over several devices.
        trust_remote_code: run code that the Hub repository brings.
        options: further ones of transformers' ``from_pretrained``.

    Raises:
        UserError: the model cannot be found or read, its files are damaged or do not fit each other, a package is
            missing, or the device or number format is unknown.
    """
    device = choose_device(device)
    format = choose_dtype(dtype, device)
    packed = gguf_file(name)
    extra: dict[str, Any] = options | (unpacking(packed) if packed else {})
    folder, revision = pinned(packed.parent if packed else name)
    extra |= revision
    if device_map:
        extra["device_map"] = device_map
    elif not packed and ("quantization_config" in options or quantized(folder, **revision)):
        extra["device_map"] = {"": device}  # quantised weights are put in place while loading and do not move later
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()  # what is missing is an error here, not a table of warnings
    try:
        with quiet_in_files() if packed else nullcontext():
            model, found = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=DTYPES.get(format, format),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **extra,
            )
    except Exception as error:  # damaged files raise whatever the bytes lead to
        if not packed and not isinstance(error, EXPECTED):
            raise
        raise unreadable(str(name), "model", error, packed) from error
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"the model {str(name)!r} is incomplete: its {'header' if packed else 'config.json'} asks for "
            f"{len(missing)} tensors that its files do not hold, {missing[0]} the first; download or save it again"
            + ("" if packed else ", or correct config.json")
        )
    if packed:
        forget_packing(model)
    if "device_map" not in extra:
        try:
            model = model.to(device)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"the model {str(name)!r} does not fit into the memory of {device}; choose --dtype bfloat16, a smaller "
                "model, or --device-map auto"
            ) from error
    return model.eval()


def pinned(name: str | os.PathLike[str]) -> tuple[str, dict[str, str]]:
    """A Hub name and the revision behind its @, as transformers takes them; folders stay as they are."""
    repository, at, revision = str(name).rpartition("@")
    return (repository, {"revision": revision}) if at and not Path(name).exists() else (str(name), {})


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, or of a GGUF file.

    Raises:
        UserError: it cannot be found or read.
    """
    packed = gguf_file(name)
    folder, extra = (str(packed.parent), {"gguf_file": packed.name}) if packed else pinned(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **extra)
        if packed is not None:
            split_digits(tokenizer, packed)
        return tokenizer
    except Exception as error:  # the tokenizers package raises bare Exceptions for damaged files
        raise unreadable(str(name), "tokenizer", error, packed) from error


def load_config(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of a folder, a Hub name or a GGUF file, without its weights.

    Raises:
        UserError: it cannot be found or read.
    """
    packed = gguf_file(name)
    try:
        if packed:
            return gguf_config(packed)
        folder, revision = pinned(name)
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **revision)
    except Exception as error:
        if not packed and not isinstance(error, EXPECTED):
            raise
        raise unreadable(str(name), "model", error, packed) from error


def open_draft(
    name: str | os.PathLike[str],
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocabulary: str = "same",
    trust_remote_code: bool = False,
) -> DraftModel:
    """A draft model, on the target's device and in its number format, after their tokenizers have been compared.

    Args:
        name: folder or Hub name of a language model, or folder of a feature head of this target.
        target: the model it drafts for.
        tokenizer: the target's.
        vocabulary: what to do where the draft's tokenizer differs: ``same`` refuses it, ``intersection`` makes it a
            `ForeignDraft`.
        trust_remote_code: run code that the Hub repository brings.

    Raises:
        UserError: it or its tokenizer cannot be read, its token ids mean other strings, or the vocabularies have too
            little in common.
    """
    if is_head(name):
        return load_head(name, target)
    own = _draft_tokenizer(name, trust_remote_code)
    foreign = own is not None and not _same(tokenizer, own, vocabulary)
    device, dtype = target.get_input_embeddings().weight.device, str(target.dtype).removeprefix("torch.")
    model = load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    known = _outputs(model)
    if own is not None and foreign:
        mine = Vocabulary(tokenizer, _outputs(target), "target")
        return ForeignDraft(model, Intersection(mine, Vocabulary(own, known, "draft")))
    if own is None and known < 0.9 * len(tokenizer):
        raise UserError(
            f"the draft {str(name)!r} knows {known} tokens and brings no tokenizer, the target's tokenizer has "
            f"{len(tokenizer)}; use a draft of the same model family"
        )
    return model


def check_tokenizers(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Refuse a draft whose token ids mean other strings than the target's.

    Padded vocabularies of one family pass: only ids that both tokenizers name are compared.

    Raises:
        UserError: with the first id that differs.
    """
    ours = {i: t for t, i in target.get_vocab().items()}
    theirs = {i: t for t, i in draft.get_vocab().items()}
    for i in sorted(ours.keys() & theirs.keys()):
        if ours[i] != theirs[i]:
            raise UserError(
                f"the draft's tokenizer is not the target's: id {i} is {ours[i]!r} for the target and "
                f"{theirs[i]!r} for the draft; use a draft of the same model family, or train one with "
                "python -m distill"
            )
    if min(len(ours), len(theirs)) < 0.9 * max(len(ours), len(theirs)):
        raise UserError(
            f"the tokenizers know {len(ours)} (target) and {len(theirs)} (draft) tokens; they have to be the same "
            "but for padding; use a draft of the same model family"
        )


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    """Every token id that ends a text: generation config first, then config, then tokenizer."""
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return set(eos) if isinstance(eos, (list, tuple)) else {int(eos)}
    return set()


def _draft_tokenizer(name: str | os.PathLike[str], trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a draft; None for a folder that brings none of the files that one is made of.

    A tokenizer that is there but cannot be read is an error: without it nothing says that the ids mean the same.
    """
    folder = Path(name)
    if (
        folder.is_dir()
        and not gguf_file(name)
        and not any(
            file.name.startswith(("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken"))
            for file in folder.iterdir()
        )
    ):
        return None
    return load_tokenizer(name, trust_remote_code=trust_remote_code)


def _same(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase, vocabulary: str) -> bool:
    """Whether the tokenizers agree; where they do not, `vocabulary` has to allow it."""
    try:
        check_tokenizers(target, draft)
    except UserError as error:
        if vocabulary == "intersection":
            return False
        raise UserError(f"{error}; or decode with the tokens that both have: --draft-vocabulary intersection") from None
    return True


def _outputs(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])
