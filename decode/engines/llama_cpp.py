"""llama.cpp as an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import override

from decode.core.draft import Ids
from decode.engines.base import FOLLOWING, Engine, EngineKind
from decode.engines.gguf import convert
from decode.errors import UserError
from decode.files import Fields

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
        texts = [call("POST", "/detokenize", json={"tokens": [i]}).json()["content"] for i in stop_ids]
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
