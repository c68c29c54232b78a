"""Why a model or tokenizer could not be opened: the likeliest reason first, with the next step."""

from pathlib import Path

import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import PretrainedConfig

from decode.core.errors import UserError
from decode.models.loading.gguf_files import reason as gguf_reason

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
    why = gguf_reason(packed, error) if packed else _reason(name, what, error)
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
