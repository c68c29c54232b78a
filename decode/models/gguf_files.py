"""Reading GGUF files by transformers, which unpacks them; what it makes of them is kept for the next time."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import transformers
from huggingface_hub import constants
from rich.console import Console
from safetensors import SafetensorError
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from decode.errors import UserError, read_json, write_text
from decode.progress import working

DIGIT_BY_DIGIT = {"starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"}
"""Names of ``tokenizer.ggml.pre`` whose tokenizers split off every digit before anything else (llama.cpp's table)."""
PRE = b"\x12\0\0\0\0\0\0\0tokenizer.ggml.pre\x08\0\0\0"
"""That key in a header: length and name, and that a text follows. It stands before the vocabulary, whose reading by
the gguf package takes half a minute."""


def gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """The GGUF file of a model: the path itself, or the only one in a folder without config.json; else None.

    Raises:
        UserError: there is no such file, or the folder has several.
    """
    path = Path(name)
    files = [path] if path.suffix.lower() == ".gguf" and not path.is_dir() else []
    if path.is_dir() and not (path / "config.json").exists():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise UserError(
            f"{str(name)!r} holds {len(files)} GGUF files; give one of them, such as {files[0]} (parts of a model are "
            "joined by llama.cpp's llama-gguf-split --merge)"
        )
    if files and not files[0].is_file():
        raise UserError(f"there is no file {str(name)!r}; check the path (it is relative to {Path.cwd()})")
    return files[0] if files else None


def converted(file: Path, part: str, read: Callable[[], Any], again: Callable[[Path], Any]) -> Any:
    """A part of a GGUF file, from the folder below ``$HF_HOME/gguf`` where it was kept the last time.

    The folder belongs to the file's path. It is written anew once the file or the version of transformers is another
    one; where it cannot be written, a warning says so.

    Args:
        file: the GGUF file.
        part: name of the folder, such as ``tokenizer``.
        read: makes the part of the file; the result has `save_pretrained`.
        again: opens a folder that it was saved to.
    """
    found = file.stat()
    name = f"{file.stem}-{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]}"
    place = Path(constants.HF_HOME) / "gguf" / name / part
    key = {"bytes": found.st_size, "changed": found.st_mtime_ns, "transformers": transformers.__version__}
    if read_json(place / "source.json") == key:
        with contextlib.suppress(Exception):  # a folder that is damaged, or replaced at this moment
            return again(place)
    import gguf  # it takes a quarter of a second

    # memory maps are slow to slice: as an array, a large vocabulary takes a third of the time
    data = property(lambda self: self.mapped, lambda self, mapped: setattr(self, "mapped", mapped.view(np.ndarray)))
    reader = type("Reader", (gguf.GGUFReader,), {"data": data})
    made, quiet = None, contextlib.redirect_stderr(io.StringIO())  # transformers draws bars of its own
    try:
        with working(Console(file=sys.stderr), f"{file.name}: reading its {part}"), quiet:
            with patch.object(gguf, "GGUFReader", reader):
                made = read()
            size = sum(p.numel() * p.element_size() for p in made.parameters()) if hasattr(made, "parameters") else 0
            place.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(place.parent).free < 2 * size:
                raise OSError(f"{size / 1e9:.1f} GB and as much again have to be free")
            with tempfile.TemporaryDirectory(dir=place.parent) as partial:
                folder = Path(partial) / part
                made.save_pretrained(folder)
                texts = {one.backend_tokenizer.to_str() for one in (made, again(folder))} if part == "tokenizer" else ()
                if len(texts) > 1:
                    raise OSError("read back, it is another one")
                write_text(folder / "source.json", json.dumps(key))
                shutil.rmtree(place, ignore_errors=True)
                folder.rename(place)
    except (OSError, SafetensorError) as error:
        if made is None:
            raise
        warnings.warn(f"{file.name} will be read anew the next time: {place} cannot be kept ({error})", stacklevel=2)
        return made
    del made  # memory holds weights once
    return again(place)


def gguf_config(file: Path) -> PretrainedConfig:
    """The configuration in a file's header."""
    return converted(
        file, "config", lambda: AutoConfig.from_pretrained(file.parent, gguf_file=file.name), AutoConfig.from_pretrained
    )


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a file's header."""

    def read() -> PreTrainedTokenizerBase:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        with file.open("rb") as opened:
            found = opened.read(1 << 26).partition(PRE)[2]
        if found[8 : 8 + int.from_bytes(found[:8], "little")].decode() in DIGIT_BY_DIGIT:
            # transformers builds it from tokens and merges alone, and would read digits otherwise than the model's own
            backend = tokenizer.backend_tokenizer
            backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
        return tokenizer

    return converted(file, "tokenizer", read, AutoTokenizer.from_pretrained)
