"""Opening models and tokenizers: the only place that decides device and number format, loads and refuses.

Errors are `UserError`s with transformers' own message, and the next step where that message leaves it open.
"""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging
from transformers.utils import quantization_config

from decode.errors import UserError
from decode.models.gguf_files import converted, gguf_config, gguf_file, gguf_tokenizer
from decode.models.head_files import is_head, load_head
from decode.models.mtp import MTP, load_mtp
from decode.models.other_tokenizer import DraftModel, ForeignDraft, Intersection, Vocabulary
from decode.models.wrapped import adapter_base, language_config, language_model, pinned, with_adapter

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Number formats by their names in settings; `choose_dtype` decides ``auto``."""

SIXTEEN_BITS = (
    "in 16 bits a forward of several tokens rounds otherwise than one of a single token, so lossless means the "
    "distribution up to that rounding: where two tokens are nearly equally probable, greedy texts may differ from "
    "generate's; --dtype float32 makes them identical"
)

OFFLINE = (
    "it is no folder and not in the Hub's cache on this machine, and the Hub is switched off (HF_HUB_OFFLINE) or "
    "does not answer: fetch the model with `hf download` where there is a network, or give its folder"
)


def choose_device(name: str | torch.device = "auto") -> torch.device:
    """The device for a setting: ``auto`` is the first CUDA device, without one the CPU.

    Raises:
        UserError: no such device here, or one that exact sampling cannot run on.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(f"device is {name!r}; choose auto, cpu, cuda or cuda:1") from error
    if device.type == "mps":
        raise UserError("device is 'mps', which has no float64, and tokens are drawn in float64; choose cpu")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise UserError(
            f"device is {str(name)!r}, but torch {torch.__version__} finds {count} CUDA devices; choose cpu or auto"
        )
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
    """The device and number format of an opened model, in a sentence for the terminal; with what 16 bits mean."""
    device, name = model.get_input_embeddings().weight.device, str(model.dtype).removeprefix("torch.")
    where = f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)
    return f"on {where}, {name}" + (f": {SIXTEEN_BITS}" if model.dtype.itemsize == 2 else "")


# -- files -------------------------------------------------------------------------------------------------------------


def unreadable(name: str | os.PathLike[str], what: str, error: Exception) -> UserError:
    """The error of a model or tokenizer that transformers could not open."""
    hint = ""
    if gguf_file(name):
        hint = (
            "; it may be damaged, or of an architecture or a quantisation that transformers does not read: download "
            "it again, or take the model's safetensors files"
        )
    elif isinstance(error, SafetensorError):
        hint = "; its safetensors file is damaged or cut off: download or save it again"
    elif not Path(name).exists():
        if str(name).startswith((".", "/", "~", "runs/")) or str(name).count("/") > 1:
            hint = "; there is no such folder: train it first (make distill) or give the path of one"
        elif constants.HF_HUB_OFFLINE:
            return UserError(f"cannot load the {what} {str(name)!r}: {OFFLINE}")
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return UserError(f"cannot load the {what} {str(name)!r}: {type(error).__name__}: {first}{hint}")


def load_model(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device,
    dtype: str,
    device_map: str | None = None,
    trust_remote_code: bool = False,
    anew: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """A causal language model in evaluation mode.

    Of a model that reads images or audio too, it is the language model alone. An adapter is merged into its base.

    Args:
        name: folder, Hub name (with its revision after an @) or GGUF file; or those of an adapter (peft).
        device: the model's device; ignored with a `device_map`.
        dtype: one of `DTYPES`, or ``auto`` (see `choose_dtype`).
        device_map: passed to transformers, to spread a model over several devices.
        trust_remote_code: run code of the Hub repository.
        anew: read a GGUF file even where its weights were kept (see `converted`).
        options: further arguments of transformers' ``from_pretrained``.

    Raises:
        UserError: the model cannot be found or read, its files do not fit each other, or the device or number format
            is unknown.
    """
    device, packed, base = choose_device(device), gguf_file(name), adapter_base(name)
    format = choose_dtype(dtype, device)
    if packed and not anew:
        given: Any = {"device": device, "dtype": dtype, "device_map": device_map, **options}
        read = partial(load_model, name, anew=True, config=load_config(name), **given)
        return converted(packed, f"weights-{format}", read, lambda folder: load_model(folder, **given))
    folder, revision = pinned(packed.parent if packed else base or name)
    extra: dict[str, Any] = dict(options)
    auto, inside = AutoModelForCausalLM, False
    if device_map:
        extra["device_map"] = device_map
    bars, level = hf_logging.is_progress_bar_enabled(), hf_logging.get_verbosity()
    hf_logging.disable_progress_bar()
    hf_logging.set_verbosity_error()  # what is missing is an error here, not a table of warnings
    try:
        if packed:
            extra["gguf_file"] = packed.name
            if hasattr(quantization_config, "GgufConfig"):  # from transformers 5.23 on it may keep them packed on a GPU
                extra["quantization_config"] = quantization_config.GgufConfig(packed.name, dequantize=True)
        else:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **revision)
            quantised = "quantization_config" in options or getattr(config, "quantization_config", None)
            if quantised and not device_map:
                extra["device_map"] = {"": device}  # quantised weights are placed while loading and do not move later
            if language_config(config) is not config and type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
                auto, inside = AutoModelForMultimodalLM, not getattr(config, "quantization_config", None)
        model, found = auto.from_pretrained(
            folder,
            dtype=DTYPES.get(format, format),
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **revision,
            **({} if inside else extra),
        )
        wrong = [f"{key} is missing" for key in sorted(found["missing_keys"])]
        wrong += [
            f"{key} is {list(seen)} instead of {list(wanted)}" for key, seen, wanted in sorted(found["mismatched_keys"])
        ]
        if wrong:
            raise UserError(
                f"the weights of the model {base or str(name)!r} do not fit its configuration: {', '.join(wrong[:3])} "
                f"({len(wrong)} in all); take both from one model, or download or save it again"
            )
        if base:
            model = with_adapter(model, name)
        if inside:
            model = language_model(model, **extra)
        if "device_map" not in extra:
            model = model.to(device)
    except UserError:
        raise
    except Exception as error:  # damaged files raise whatever the bytes lead to
        what = f"base that the adapter {str(name)!r} names in its adapter_config.json," if base else "model"
        raise unreadable(base or name, what, error) from error
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
    if packed:  # unpacked weights are plain ones, which save_pretrained would refuse otherwise
        for attribute in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(model).pop(attribute, None)
        vars(model.config).pop("quantization_config", None)
    if model.base_model is model and isinstance(getattr(model, "model", None), PreTrainedModel):
        model.base_model_prefix = "model"  # Llama 4's class names another
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and getattr(head, "weight", None) is not table.weight:
        model.config.tie_word_embeddings = False  # the file holds two: transformers keeps both, an engine would tie
    return model.eval()


def load_tokenizer(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, or of a GGUF file.

    Raises:
        UserError: it cannot be found or read.
    """
    packed, base = gguf_file(name), adapter_base(name)
    if base and Path(name).is_dir() and not _brings_tokenizer(Path(name)):
        name = base
    try:
        if packed:
            return gguf_tokenizer(packed)
        folder, revision = pinned(name)
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, **revision)
    except Exception as error:  # the tokenizers package raises bare Exceptions for damaged files
        raise unreadable(name, "tokenizer", error) from error


def _brings_tokenizer(folder: Path) -> bool:
    kinds = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
    return any(file.name.startswith(kinds) for file in folder.iterdir())


def load_config(name: str | os.PathLike[str], *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The configuration of the model that `load_model` opens, without its weights.

    Raises:
        UserError: it cannot be found or read.
    """
    packed = gguf_file(name)
    try:
        if packed:
            return gguf_config(packed)
        folder, revision = pinned(adapter_base(name) or name)
        return language_config(AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, **revision))
    except UserError:
        raise
    except Exception as error:
        raise unreadable(name, "model", error) from error


# -- shapes ------------------------------------------------------------------------------------------------------------


def family_of(model: str) -> tuple[str, bool, str]:
    """The family of a model by its configuration, where that is on this machine; else Llama's.

    Returns:
        ``model_type``, whether several query heads share a key head, and a note where the model is not here.
    """
    name, at = pinned(adapter_base(model) or model)
    try:
        packed = gguf_file(model)
        config = gguf_config(packed) if packed else AutoConfig.from_pretrained(name, local_files_only=True, **at)
    except (OSError, ValueError):
        return "llama", True, f"{model} is not on this machine; a tiny llama stands for it"
    layer = language_config(config).per_layer_config[0]
    heads = int(layer.num_attention_heads)
    return str(layer.model_type), heads > int(getattr(layer, "num_key_value_heads", None) or heads), ""


def config_for(
    model_type: str,
    *,
    hidden_size: int,
    layers: int,
    heads: int,
    vocab: int,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    positions: int = 512,
    tie_embeddings: bool = True,
    tokenizer: PreTrainedTokenizerBase | None = None,
    extra: Mapping[str, Any] | None = None,
) -> PretrainedConfig:
    """The configuration of a model of this shape.

    Args:
        model_type: family as transformers names it.
        hidden_size: width of the hidden states.
        layers: depth.
        heads: attention heads.
        vocab: tokens.
        kv_heads: key and value heads; None: as many as heads.
        intermediate_size: width inside the MLP; None: 8/3 of the width, rounded up to a multiple of 32.
        positions: longest text, in tokens.
        tie_embeddings: one matrix for embedding and head.
        tokenizer: gives the special tokens.
        extra: further fields of the family's configuration class.

    Raises:
        UserError: a family that transformers does not know, or fields that it refuses.
    """
    values: dict[str, Any] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        "intermediate_size": intermediate_size or -(-hidden_size * 8 // 96) * 32,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tie_embeddings,
        "vocab_size": vocab,
        **{name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if model_type in ("gpt2", "codegen", "gptj"):  # the other names are mapped by transformers
        values["n_inner"] = values.pop("intermediate_size")
        del values["num_key_value_heads"]
        if model_type != "gpt2":
            values["rotary_dim"] = hidden_size // heads
    elif model_type.startswith(("qwen3", "gemma")):
        values["head_dim"] = hidden_size // heads
    try:
        return AutoConfig.for_model(model_type, **(values | dict(extra or {})))
    except (ValueError, TypeError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"architecture.model_type {model_type!r} cannot be built: {first}") from error


# -- drafts ------------------------------------------------------------------------------------------------------------


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
        name: folder or Hub name of a language model, or of a head of this target; or ``mtp``, the target's own
            next-token layers.
        target: the target.
        tokenizer: the target's tokenizer.
        vocabulary: for a draft whose tokenizer differs from the target's: ``same`` refuses it, ``intersection`` makes
            it a `ForeignDraft`.
        trust_remote_code: run code of the Hub repository.

    Raises:
        UserError: it or its tokenizer cannot be read, its token ids mean other strings, or the vocabularies have too
            little in common.
    """
    if name == MTP:
        return load_mtp(target)
    if is_head(name):
        return load_head(name, target)
    folder, own = Path(name), None
    if not folder.is_dir() or gguf_file(name) or adapter_base(name) or _brings_tokenizer(folder):
        own = load_tokenizer(name, trust_remote_code=trust_remote_code)  # one that is there has to be readable
    differs = False
    if own is not None:
        try:
            check_tokenizers(tokenizer, own)
        except UserError as error:
            differs = True
            if vocabulary != "intersection":
                raise UserError(
                    f"{error}; or decode with the tokens that both have: --draft-vocabulary intersection"
                ) from error
    device, dtype = target.get_input_embeddings().weight.device, str(target.dtype).removeprefix("torch.")
    model = load_model(name, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    known = int(model.get_output_embeddings().weight.shape[0])
    if own is not None and differs:
        ours = Vocabulary(tokenizer, int(target.get_output_embeddings().weight.shape[0]), "target")
        return ForeignDraft(model, Intersection(ours, Vocabulary(own, known, "draft")))
    if own is None and known < 0.9 * len(tokenizer):
        raise UserError(
            f"the draft {str(name)!r} knows {known} tokens and has no tokenizer, the target's tokenizer has "
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
                f"the draft's tokenizer is not the target's: id {i} is {ours[i]!r} for the target and {theirs[i]!r} "
                "for the draft; use a draft of the same model family, or train one with python -m distill"
            )
    if min(len(ours), len(theirs)) < 0.9 * max(len(ours), len(theirs)):
        raise UserError(
            f"the tokenizers know {len(ours)} (target) and {len(theirs)} (draft) tokens; they have to be the same "
            "except for padding; use a draft of the same model family"
        )


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> set[int]:
    """Every token id that ends a text: generation config first, then config, then tokenizer."""
    return set(_ends_of(model.generation_config, model.config, tokenizer))


def stop_ids_of(name: str | os.PathLike[str], tokenizer: PreTrainedTokenizerBase, trust: bool = False) -> list[int]:
    """The `stop_ids` of a model that is not loaded, in the order in which its files name them."""
    folder, revision = pinned(adapter_base(name) or name)
    try:
        generation = GenerationConfig.from_pretrained(folder, **revision)
    except OSError:  # it has none
        generation = None
    return _ends_of(generation, load_config(name, trust_remote_code=trust), tokenizer)


def _ends_of(*sources: Any) -> list[int]:
    for source in sources:
        if (eos := getattr(source, "eos_token_id", None)) is not None:
            return list(eos) if isinstance(eos, (list, tuple)) else [int(eos)]
    return []
