"""Models as GGUF files, by llama.cpp's own converter, which `make engines` brings."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from decode.core.errors import UserError
from decode.engines.engine import CHECKOUT

CONVERTER = Path(".engines/llama.cpp/src/convert_hf_to_gguf.py")
TYPES = ("f32", "f16", "bf16", "q8_0")
"""Number formats that the converter writes."""


def find_converter() -> Path:
    """The converter's script.

    Raises:
        UserError: it is not installed.
    """
    for folder in (Path.cwd(), CHECKOUT):
        if (folder / CONVERTER).is_file():
            return folder / CONVERTER
    raise UserError("GGUF files are written by llama.cpp's converter, which is not installed here; run `make engines`")


def convert(
    folder: str | Path, file: str | Path, kind: str = "f32", *, target: str | Path | None = None, seconds: float = 1800
) -> Path:
    """Write a model's folder as a GGUF file; a file already there is replaced once the new one is complete.

    Args:
        folder: of a model as transformers saves it, or of an EAGLE-3 head.
        file: to write.
        kind: one of `TYPES`.
        target: of a head, which needs it.
        seconds: limit.

    Returns:
        The file.

    Raises:
        UserError: no converter, a number format that it does not write, or a model that it refuses.
    """
    folder, file = Path(folder), Path(file)
    if kind not in TYPES:
        raise UserError(f"the GGUF number format is {kind!r}; choose one of {', '.join(TYPES)}")
    script = find_converter()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as partial:
        made = Path(partial) / file.name
        command = [sys.executable, str(script), str(folder), "--outfile", str(made), "--outtype", kind]
        if target is not None:
            command += ["--target-model-dir", str(target)]
        paths = [str(script.parents[1] / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise UserError(f"the converter was not done with {folder} after {seconds:.0f} s") from error
        if done.returncode or not made.is_file():
            raise UserError(f"llama.cpp's converter refuses {folder}: {_reason(done.stderr)}")
        os.replace(made, file)
    return file


def _reason(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    if any("BPE pre-tokenizer was not recognized" in line for line in lines):
        return (
            "it knows the tokenizers of published models only, by a checksum, and not this one; vLLM, SGLang and "
            "transformers take the folder as it is"
        )
    return lines[-1] if lines else "it ended without a message"
