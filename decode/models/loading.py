"""Opening models and tokenizers: the only place that decides device and number format, loads, checks and refuses.

Everything that can be said about a folder, a Hub name or a device before a forward is said here, as a `UserError` with
the next step. What a model's own ``generation_config`` asks of decoding is read here too.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging
from transformers.utils import quantization_config

from decode.errors import UserError
from decode.models.heads import is_head, load_head
from decode.models.other_tokenizer import DraftModel, ForeignDraft, Intersection, Vocabulary

PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
"""How llama.cpp names the files of a model that was split."""

DIGIT_BY_DIGIT = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"}
"""Names of ``tokenizer.ggml.pre`` whose tokenizers split off every digit before anything else (llama.cpp's table)."""


def gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """The GGUF file that a name means: the file itself, or the only one in a folder without config.json; else None.

    Raises:
        UserError: there is no such file, the folder has several, it is one part of a model, or the package gguf is not
            installed.
    """
    path = Path(name)
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
        if len(files) > 1 and not PART.search(files[0].name):
            raise UserError(f"{str(name)!r} holds {len(files)} GGUF files; give one of them, such as {files[0]}")
        if not files:
            return None
        path = files[0]
    elif path.suffix.lower() != ".gguf" or path.is_dir():
        return None
    elif not path.is_file():
        raise UserError(f"there is no file {str(name)!r}; check the path (it is relative to {Path.cwd()})")
    if part := PART.search(path.name):
        raise UserError(f"{str(path)!r} is part {int(part[1])} of {int(part[2])} of a model; {_merge(path)}")
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"reading {str(path)!r} needs the package gguf; install it with pip install gguf")
    return path


@cache
def gguf_config(path: Path) -> PretrainedConfig:
    """The configuration that a file's header describes; read once, since long headers take seconds."""
    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def unpacking(path: Path) -> dict[str, Any]:
    """Arguments with which `from_pretrained` unpacks every weight of the file."""
    extra: dict[str, Any] = {"gguf_file": path.name}
    if hasattr(quantization_config, "GgufConfig"):  # from transformers 5.23 on it may keep them packed on a GPU
        extra["quantization_config"] = quantization_config.GgufConfig(path.name, dequantize=True)
    return extra


def forget_packing(model: PreTrainedModel) -> None:
    """Removes what marks an unpacked model as quantised, for which ``save_pretrained`` refuses it."""
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    vars(model.config).pop("quantization_config", None)


def split_digits(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Makes the tokenizer read digits one by one where the file's header says that its model does.

    transformers builds a byte-level tokenizer from the file's tokens and merges alone, and so reads a number after an
    empty line as other tokens than the model was trained with.
    """
    from gguf import GGUFReader

    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    if field is not None and field.contents() in DIGIT_BY_DIGIT:
        backend = tokenizer.backend_tokenizer
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])


@contextlib.contextmanager
def quiet_in_files() -> Iterator[None]:
    """Inside, the bar that transformers draws while it unpacks weights is shown on a terminal only."""
    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def reason(path: Path, error: Exception) -> str:
    """Why transformers could not read a file, with the next step."""
    from gguf import GGMLQuantizationType, GGUFReader
    from gguf.quants import _type_traits as readable

    damaged = "it is damaged or cut off; download it again"
    try:
        reader = GGUFReader(path)
    except Exception as found:  # whatever broken bytes lead to
        if "GGMLQuantizationType" in str(found):
            return f"a tensor has a quantisation type that the package gguf does not know; {_other_type()}"
        return "it is no GGUF file" if "magic" in str(found) else damaged
    count = reader.get_field("split.count")
    if count is not None and int(count.contents()) > 1:
        return f"it is one of {int(count.contents())} parts of a model; {_merge(path)}"
    plain = {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
    if unknown := sorted({t.tensor_type.name for t in reader.tensors} - {t.name for t in (*readable, *plain)}):
        return f"it has weights of type {', '.join(unknown)}, which cannot be unpacked; {_other_type()}"
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        return damaged
    if "not supported" in str(error) or isinstance(error, KeyError | NotImplementedError):
        from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

        known = sorted({*GGUF_SUPPORTED_ARCHITECTURES} - {"general", "tokenizer"})
        return (
            f"its architecture is {architecture.contents()!r}, and transformers reads GGUF files of "
            f"{', '.join(known)}; take the model's safetensors files"
        )
    return "transformers cannot read it; take the model's safetensors files"


def _merge(path: Path) -> str:
    return f"join the parts with llama.cpp: llama-gguf-split --merge {path} whole.gguf"


def _other_type() -> str:
    return "take another file of the model, such as its Q8_0, Q4_K_M or F16, or pip install -U gguf"


OFFLINE = (
    "it is no folder and not in the Hub's cache on this machine, and the Hub is switched off (HF_HUB_OFFLINE): unset "
    "it, or fetch the model with `hf download` where there is a network"
)
EXPECTED = (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError, SafetensorError)
"""What transformers raises for folders and names that it cannot open."""


def quantized(folder: str, **revision: str) -> bool:
    """Whether the configuration says that the weights are quantised (bitsandbytes, GPTQ, AWQ, ...)."""
    try:
        fields, _ = PretrainedConfig.get_config_dict(folder, **revision)
    except (OSError, ValueError):
        return False
    return "quantization_config" in fields


def unreadable(name: str, what: str, error: Exception, packed: Path | None = None) -> UserError:
    """The error of a model or tokenizer that transformers could not open, with the likeliest reason first."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    why = reason(packed, error) if packed else _reason(name, what, error)
    return UserError(f"cannot load the {what} {name!r}: {why} ({type(error).__name__}: {lines[0]})")


def _reason(name: str, what: str, error: Exception) -> str:
    folder, text = Path(name), str(error)
    if isinstance(error, ImportError) or "pip install" in text:
        return "reading it needs a package that is not installed here; install the one named below"
    if isinstance(error, SafetensorError) or "SafetensorError" in text:
        return "its safetensors file is damaged or cut off; download or save it again"
    if "size mismatch" in text or "ignore_mismatched_sizes" in text:
        return "its weights have other shapes than its config.json says; take the two from one model"
    if isinstance(error, torch.OutOfMemoryError):
        return "there is not enough memory; choose --dtype bfloat16, a smaller model, or --device-map auto"
    if folder.is_dir():
        files = {file.name for file in folder.iterdir()}
        if not files:
            return "the folder is empty"
        if what == "model" and "config.json" not in files:
            return "the folder has no config.json, so it is not a model saved by transformers"
        if (
            what == "model"
            and any(f.endswith(".bin") for f in files)
            and not any(f.endswith(".safetensors") for f in files)
        ):
            return (
                "the folder holds .bin weights only, which are pickles and are not read here; convert them with "
                f"python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{name}', "
                f"use_safetensors=False).save_pretrained('{name}')\""
            )
        return f"the folder exists but holds no {what} that transformers can read"
    if folder.is_file():
        return "it is a file; give the folder of a model, or a GGUF file whose name ends in .gguf"
    if name.startswith((".", "/", "~")) or name.startswith("runs/") or name.count("/") != 1:
        return "there is no such folder; train it first (make distill) or give the path of one"
    if constants.HF_HUB_OFFLINE:
        return OFFLINE
    return "it is neither a folder nor reachable on the Hub; without network, give a local folder"


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
