"""Settings of the commands about serving engines; the texts below each key are their help."""

from dataclasses import dataclass, field
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveFloat, PositiveInt

from decode.commands.settings import ChatSettings, LoadSettings, SuiteSettings
from decode.core.method_options import Checked, Temperature


@dataclass
class ServeCheckSettings(SuiteSettings, ChatSettings, LoadSettings):
    """Settings of python -m decode serve-check."""

    engine: str = "transformers"
    """transformers, vllm or llama.cpp; `make engines` sets up the last two."""
    draft: str | None = None
    """Folder of the draft model or feature head, as it is to be served. Required."""
    limit: PositiveInt | None = 16
    """Prompts of each suite."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [3, 5, 7])
    """Tokens drafted a round; the engine is started once for each."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy; the smallest other value is 0.001."""
    max_new_tokens: PositiveInt = 64
    """Maximum number of new tokens per text."""
    batch_sizes: list[PositiveInt] = field(default_factory=lambda: [1])
    """Requests under way at a time, greedy, such as 1,4,8; what is accepted by position is measured one at a time."""
    draft_sampling: Literal["greedy", "probabilistic"] = "greedy"
    """What vLLM and llama.cpp draft above temperature 0: greedy, their default, or probabilistic."""
    draft_p_min: ClosedUnitInterval = 0.0
    """llama.cpp ends a draft before the first token whose probability, among the draft's ten most probable tokens, is
    below this. A weak draft that slows decoding down at 0 may be faster at 0.6. The speed is then not predicted."""
    python: str | None = None
    """Interpreter of an environment that has vLLM; null: .venv-vllm/bin/python."""
    binary: str | None = None
    """llama-server; null: .engines/llama.cpp/build/bin/llama-server."""
    url: str | None = None
    """Address of a server that runs already, with the draft; --draft-lengths has to be the one that it drafts. Its
    texts are compared with transformers', and no speedup is taken."""
    port: PositiveInt | None = None
    """Port to listen on; null: a free one."""
    engine_target: str | None = None
    """Another file of the target for the engine, such as a GGUF; null: the target itself, converted where needed."""
    engine_draft: str | None = None
    """Another file of the draft for the engine, such as a GGUF; null: the draft itself, converted where needed."""
    gguf_type: str = "f32"
    """Number format of what is converted for llama.cpp: f32, f16, bf16 or q8_0."""
    timeout: PositiveInt = 300
    """Seconds until the engine has to be ready."""
    request_timeout: PositiveInt = 120
    """Seconds for each text."""
    output: str | None = None
    """Folder of a run whose report.json gets the rows (key `served`), with a page served.html; null: none. The draft's
    speculation_profile.json and model card get them in any case."""
    json: bool = False
    """Print one JSON object."""


@dataclass
class ServedSettings(Checked):
    """Settings of python -m decode served."""

    url: str | None = None
    """Address of a running vLLM, SGLang or llama.cpp server, such as http://127.0.0.1:8000. Required."""
    profile: str | None = None
    """The draft's folder, or its speculation_profile.json. Required."""
    every: PositiveFloat | None = None
    """Seconds between readings, each compared with the one before; null: one reading, since the server's start."""
    readings: PositiveInt | None = None
    """Readings after which to stop; null: until stopped."""
    timeout: PositiveFloat = 30.0
    """Seconds for each answer."""
    wandb: str | None = None
    """W&B project that gets every reading too; null: none."""


@dataclass
class WhatIfSettings(SuiteSettings):
    """Settings of python -m decode what-if."""

    target: str | None = None
    """Folder of the target. Required."""
    draft_shape: str | None = None
    """Shape of the draft to suppose: width x layers, optionally x heads, such as 192x2 or 576x4x9. Required."""
    acceptance: list[ClosedUnitInterval] = field(default_factory=lambda: [0.6, 0.7, 0.8, 0.9])
    """Conditional acceptance rates to suppose, the same at every position."""
    profile: str | None = None
    """Take the rates of this speculation_profile.json (or the folder that holds it) instead."""
    engine: Literal["vllm"] = "vllm"
    """vllm."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [5])
    """Tokens drafted a round; the engine is started once for each length."""
    limit: PositiveInt | None = 8
    """Prompts of each suite."""
    max_new_tokens: PositiveInt = 64
    """Tokens of each text."""
    python: str | None = None
    """Interpreter of an environment that has vLLM; null: .venv-vllm/bin/python."""
    threads: PositiveInt | None = None
    """Threads of the engine; null: its own choice."""
    timeout: PositiveInt = 300
    """Seconds until the engine has to be ready."""
    request_timeout: PositiveInt = 120
    """Seconds for each text."""
    json: bool = False
    """Print one JSON object."""
