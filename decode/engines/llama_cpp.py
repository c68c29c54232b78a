"""llama.cpp as an engine, and models as GGUF files, which its own converter writes (`make engines` installs it)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from decode.core.draft import Ids
from decode.engines.base import FOLLOWING, Engine, EngineKind, installed
from decode.errors import UserError
from decode.files import Fields, read_model_json, write_safely

# float32 throughout: float16 caches and flash attention decide near ties otherwise
OPTIONS = (
    "-m {target} --host 127.0.0.1 --port {port} --metrics --no-webui -np {requests} -c {room} -ctk f32 -ctv f32 -fa off"
)
# sampling in the backend mixes up the drafts of texts in one batch
DRAFTING = (
    " -md {draft} --spec-type draft-{kind} --spec-draft-n-max {length} --spec-draft-p-min 0 "
    "--spec-draft-sampling greedy -ctkd f32 -ctvd f32 --no-spec-draft-backend-sampling"
)


class LlamaCpp(EngineKind):
    """llama.cpp's server."""

    installed = Path(".engines/llama.cpp/build/bin/llama-server")
    version = ("--help",)
    drafts_past_end = False

    @override
    def check(self, program: str, printed: str, head: Any) -> None:
        if "--spec-draft-sampling" not in printed:
            older = f"{program} has no option --spec-draft-sampling, so it is older or another program"
            raise UserError(f"{older}; {FOLLOWING}")

    @override
    def prepare(self, engine: Engine, folder: Path, scratch: Path, numbers: str, *, head: bool) -> str:
        target = engine.target

        def converted(model: str, name: str, of: str | None = None) -> str:
            exported = folder / "gguf" / f"{name}-{numbers}.gguf"
            if model.endswith(".gguf"):
                return model
            return str(exported if exported.is_file() else convert(model, scratch / exported.name, numbers, target=of))

        engine.target, engine.draft = (
            converted(target, "target"),
            converted(str(folder), "draft", target if head else None),
        )
        return numbers

    @override
    def command(self, engine: Engine, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
        options = OPTIONS + " -t {threads} -tb {threads}" * bool(engine.threads) + DRAFTING * bool(draft_length)
        kind = {"draft_model": "simple"}.get(engine.method, engine.method)
        values = vars(engine) | {
            "port": port,
            "length": draft_length,
            "kind": kind,
            "room": (engine.context + 64) * engine.requests,
        }
        return [str(engine.program), *(option.format_map(values) for option in options.split())], {}

    @override
    def request(
        self, call: Callable[..., Any], ids: Ids, budget: int, stop_ids: Sequence[int], sampling: Fields
    ) -> tuple[str, Fields]:
        # it stops at strings, not at ids, and shows special tokens only where they are preserved
        texts = [call("/detokenize", {"tokens": [i]}).json()["content"] for i in stop_ids]
        stop = list(filter(None, texts))
        return "/completion", sampling | {
            "prompt": ids, "n_predict": budget, "top_k": 0, "samplers": ["temperature"], "return_tokens": True,
            "cache_prompt": False, "stop": stop, "preserved_tokens": stop,
        }  # fmt: skip

    @override
    def answer(self, content: Fields) -> tuple[Ids | None, float | None, bool]:
        return content["tokens"], content["timings"]["predicted_ms"] / 1e3, content.get("stop_type") == "eos"

    @override
    def tokenise(self, text: str) -> Fields:
        return {"content": text, "add_special": True}


# -- GGUF files --------------------------------------------------------------------------------------------------------

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
    if not (script := installed(CONVERTER)).is_file():
        raise UserError(
            "GGUF files are written by llama.cpp's converter, which is not installed here; run `make engines`"
        )
    return script


def convert(folder: str | Path, file: str | Path, kind: str = "f32", *, target: str | Path | None = None) -> Path:
    """Write a folder, of a model as transformers saves it or of a head of a target, as a GGUF file, atomically.

    `kind` is the number format: f32, f16, bf16 or q8_0. Returns the file.

    Raises:
        UserError: there is no converter, or it does not take the model.
    """
    folder, file = Path(folder), Path(file)
    script = find_converter()

    def made_by_converter(output: Path) -> None:
        command = [sys.executable, "-c", WITH_SPLIT, split_of(target or folder), str(script), str(folder)]
        command += ["--outfile", str(output), "--outtype", kind]
        command += [] if target is None else ["--target-model-dir", str(target)]
        paths = [str(script.parents[1] / "python"), os.environ.get("PYTHONPATH", "")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode or not output.is_file():
            last = done.stderr.strip().rpartition("\n")[2] or "no message"
            raise UserError(
                f"llama.cpp's converter refuses {folder}: {last}; check that the folder holds config.json and a "
                "tokenizer of a family that llama.cpp supports (vLLM and transformers may take it as it is)"
            )

    write_safely(file, made_by_converter)
    return file
