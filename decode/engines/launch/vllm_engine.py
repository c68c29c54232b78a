"""vLLM: where it is, which versions are taken, and the command that starts it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from decode.core.errors import UserError
from decode.engines.launch.engine_settings import EngineSettings, answer_of, find

VLLM_PYTHON = Path(".venv-vllm/bin/python")
OLDEST_VLLM = (0, 32)
NO_CUTS: dict[str, float] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Part of a request that keeps vLLM from following the model's generation_config."""


def check_vllm(python: str) -> None:
    """Refuse an environment without vLLM, or with an older one than was tested."""
    asked = "import importlib.metadata as m; print('vLLM', m.version('vllm'))"
    found = re.search(r"^vLLM (\d+)\.(\d+)\S*", answer_of(python, "-c", asked), re.MULTILINE)
    if found is None:
        raise UserError(
            f"{python} has no vLLM; give the interpreter of an environment that has it, or run `make engines`"
        )
    if (int(found[1]), int(found[2])) < OLDEST_VLLM:
        raise UserError(
            f"{python} has {found[0]}; {'.'.join(map(str, OLDEST_VLLM))} or newer can be started: run `make engines`, "
            "or start the server yourself and give its address"
        )


def speculative_config(settings: EngineSettings, draft_length: int) -> str:
    """vLLM's --speculative-config, as the model card has it."""
    config: dict[str, object] = {"method": settings.method, "model": settings.draft}
    config["num_speculative_tokens"] = draft_length
    if settings.draft_sampling != "greedy":
        config["draft_sample_method"] = settings.draft_sampling
    return json.dumps(config | dict(settings.speculative))


def vllm_command(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts vLLM's server, and environment variables for it."""
    python = find(settings.python, VLLM_PYTHON, settings.python_option, "vLLM's environment (.venv-vllm/bin/python)")
    command = [python, "-m", "vllm.entrypoints.cli.main", "serve", settings.target, "--dtype", settings.dtype]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += ["--max-num-seqs", str(max(4, settings.batch))]
    command += ["--max-model-len", str(settings.context), *settings.arguments]
    if settings.exact:
        command += ["--enforce-eager", "--no-enable-prefix-caching"]
    if draft_length:
        command += ["--speculative-config", speculative_config(settings, draft_length)]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(settings.seconds)),
        "TOKENIZERS_PARALLELISM": "false",
    }
    if settings.threads:
        environment |= {"OMP_NUM_THREADS": str(settings.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if Path(settings.target).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    return command, environment
