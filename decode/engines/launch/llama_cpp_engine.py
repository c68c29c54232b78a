"""llama.cpp's server: where it is, what it must know, and the command that starts it."""

from __future__ import annotations

from pathlib import Path

from decode.core.errors import UserError
from decode.engines.launch.engine_settings import EngineSettings, answer_of, find

LLAMA_SERVER = Path(".engines/llama.cpp/build/bin/llama-server")


def check_llama(binary: str) -> None:
    """Refuse a llama-server that lacks the options of drafting."""
    wanted = "--spec-draft-sampling"
    if wanted not in answer_of(binary, "--help"):
        raise UserError(
            f"{binary} has no option {wanted}: it is older than the llama.cpp of `make engines`, or another program; "
            "run `make engines`, or give another program with --binary"
        )


def llama_command(settings: EngineSettings, draft_length: int | None, port: int) -> tuple[list[str], dict[str, str]]:
    """The command that starts llama-server, and environment variables for it."""
    binary = find(settings.binary, LLAMA_SERVER, "--binary", "llama-server")
    command = [binary, "-m", settings.target, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--no-webui"]
    command += ["-np", str(settings.batch), "-c", str(settings.batch * (settings.context + 64))]
    # float32 throughout, as vLLM is asked for; float16 in caches and flash attention decide close calls in another way
    command += ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
    if settings.threads:
        command += ["-t", str(settings.threads), "-tb", str(settings.threads)]
    if draft_length:
        kind = "draft-eagle3" if settings.method == "eagle3" else "draft-simple"
        command += ["-md", settings.draft, "--spec-type", kind, "--spec-draft-n-max", str(draft_length)]
        command += ["--spec-draft-p-min", f"{settings.draft_p_min:g}", "--spec-draft-sampling", settings.draft_sampling]
        command += ["-ctkd", "f32", "-ctvd", "f32"]
        command += ["--no-spec-draft-backend-sampling"]  # which mixes up the drafts of texts that are decoded together
    return command, {}
