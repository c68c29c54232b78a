"""vLLM as an engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version
from typing_extensions import override

from decode.core.draft import Ids
from decode.engines.base import FOLLOWING, Engine, EngineKind
from decode.errors import UserError
from decode.files import Fields, read_json

OLDEST = Version("0.32")
# without compiled graphs and kept prefixes, so that texts can be compared
OPTIONS = (
    "-m vllm.entrypoints.cli.main serve {target} --host 127.0.0.1 --port {port} --dtype {dtype} --max-num-seqs {seats} "
    "--max-model-len {context} --disable-uvicorn-access-log --enforce-eager --no-enable-prefix-caching"
)


class Vllm(EngineKind):
    """vLLM, started by the interpreter of its environment."""

    installed = Path(".venv-vllm/bin/python")
    version = ("-c", "import importlib.metadata as m; print('version', m.version('vllm'))")

    @override
    def check(self, program: str, printed: str, head: Any) -> None:
        there = re.search(r"^version (\S+)", printed, re.MULTILINE)
        if there is None or Version(there[1]) < OLDEST:
            name = f"vLLM {there[1]}" if there else "no vLLM"
            raise UserError(f"{program} has {name}, expected {OLDEST} or newer; {FOLLOWING}")
        if head == "dspark" and there[1].endswith("+cpu"):
            raise UserError(
                f"vLLM {there[1]} ({program}) does not run DSpark: its CPU build has Model Runner V1 only "
                "(vllm/config/vllm.py); check it on a GPU, or with --engine llama.cpp"
            )

    @override
    def command(self, engine: Engine, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
        values = vars(engine) | {"port": port, "seats": max(4, engine.requests)}
        command = [str(engine.program), *(option.format_map(values) for option in OPTIONS.split())]
        if draft_length:
            drafting = {"method": engine.method, "model": engine.draft, "num_speculative_tokens": draft_length}
            if read_json(Path(engine.draft) / "config.json").get("pard_token") is not None:
                drafting["parallel_drafting"] = True
            command += ["--speculative-config", json.dumps(drafting)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ENGINE_READY_TIMEOUT_S": str(int(engine.seconds)),
            "TOKENIZERS_PARALLELISM": "false",
        }
        if engine.threads:
            environment |= {"OMP_NUM_THREADS": str(engine.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if Path(engine.target).is_dir():
            environment["HF_HUB_OFFLINE"] = "1"
        return [*command, *engine.arguments], environment

    @override
    def request(
        self, call: Callable[..., Any], ids: Ids, budget: int, stop_ids: Sequence[int], sampling: Fields
    ) -> tuple[str, Fields]:
        return "/v1/completions", sampling | {
            "prompt": ids, "max_tokens": budget, "stop_token_ids": list(stop_ids), "return_token_ids": True,
        }  # fmt: skip

    @override
    def answer(self, content: Fields) -> tuple[Ids | None, float | None, bool]:
        return content["choices"][0].get("token_ids"), None, False

    @override
    def tokenise(self, text: str) -> Fields:
        return {"prompt": text}
