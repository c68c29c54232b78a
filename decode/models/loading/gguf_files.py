"""GGUF files: which one a name means, how transformers is told to unpack it, and what is wrong with one it cannot read.

transformers unpacks the weights while loading. What it leaves on the model to mark it as quantised is removed, so that
the model can be trained and saved like any other.
"""

import contextlib
import importlib.util
import io
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import quantization_config

from decode.core.errors import UserError

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
