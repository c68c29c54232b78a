"""Models as GGUF files, written by llama.cpp's own converter, which `make engines` installs."""

import os
import subprocess
import sys
from pathlib import Path

from decode.engines.base import CHECKOUT
from decode.errors import UserError
from decode.files import read_model_json, write_safely

CONVERTER = Path(".engines/llama.cpp/src/convert_hf_to_gguf.py")
WITH_SPLIT = """
import pathlib, runpy, sys
split, script = sys.argv[1:3]
sys.path[:0] = [str(pathlib.Path(script).parent / "gguf-py"), str(pathlib.Path(script).parent)]
from conversion.base import TextModel
published = TextModel.get_vocab_base_pre
def get_vocab_base_pre(self, tokenizer):
    try:
        return published(self, tokenizer)
    except NotImplementedError:
        if not split:
            raise
        return split
TextModel.get_vocab_base_pre = get_vocab_base_pre
sys.argv = sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""
"""The converter knows the pre-tokenizers of published models by a checksum; this names that of any other one."""
SPLITS = {("ByteLevel",): "gpt-2", ("Digits", "ByteLevel"): "smollm"}
"""llama.cpp's names of pre-tokenizers, by the steps that do the same."""


def split_of(folder: str | Path) -> str:
    """llama.cpp's name of a folder's pre-tokenizer; empty where it has none."""
    core = read_model_json(Path(folder) / "tokenizer.json")
    steps = core.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    plain = all(step.get("use_regex", True) and step.get("individual_digits", True) for step in steps)
    if core.get("normalizer") or not plain or any(step.get("add_prefix_space") for step in steps):
        return ""
    return SPLITS.get(tuple(step.get("type", "") for step in steps), "")


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
    folder: str | Path, file: str | Path, kind: str = "f32", *, target: str | Path | None = None, write: bool = True
) -> Path:
    """Write a folder, of a model as transformers saves it or of a head of a target, as a GGUF file, atomically.

    `kind` is the number format: f32, f16, bf16 or q8_0. Without `write` everything is done but that. Returns the file.

    Raises:
        UserError: there is no converter, or it does not take the model.
    """
    folder, file = Path(folder), Path(file)
    script = find_converter()

    def made_by_converter(output: Path) -> None:
        command = [sys.executable, "-c", WITH_SPLIT, split_of(target or folder), str(script), str(folder)]
        command += ["--outfile", str(output), "--outtype", kind]
        command += [] if target is None else ["--target-model-dir", str(target)]
        command += [] if write else ["--dry-run"]
        paths = [str(script.parents[1] / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or (write and not output.is_file()):
            last = next((line.strip() for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
            raise UserError(
                f"llama.cpp's converter refuses {folder}: {last}; check that the folder holds config.json and a "
                "tokenizer of a family that llama.cpp supports (vLLM and transformers may take it as it is)"
            )

    if write:
        write_safely(file, made_by_converter)
    else:
        made_by_converter(file)
    return file
