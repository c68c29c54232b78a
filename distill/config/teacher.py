"""Settings of what the target gives to drafts: texts, distributions and states."""

from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from jsonargparse.typing import PositiveInt

from decode.options import Share, Temperature
from distill.config.base import Signal

PLACES = (
    "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--gpu-memory-utilization",
)  # fmt: skip
"""Arguments of an engine that change no number but by rounding."""


@dataclass
class EngineSettings:
    """The serving engine that runs the target: it answers prompts, and vLLM also returns its hidden states."""

    urls: list[str] = field(default_factory=list)
    """Addresses such as http://127.0.0.1:8000/v1 of servers of the target (key: OPENAI_API_KEY), for answers, and with
    signal vllm for states (draftsmith distill check-engine prints their command)."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of the command that check-engine prints, such as [--quantization=fp8]: the servers are started
    with them, and what they change is made again."""
    in_flight: PositiveInt = 16
    """Requests in flight at each server. They bound the memory that states take on both sides; 256 answers faster."""
    keep: Literal["auto", "float32", "bfloat16", "float8", "topk"] | Literal[False] = "auto"
    """Of signal vllm, what is kept on disk: states in a number format (auto: the target's; float8: a scale for each
    token and layer), or topk: for language models signal_k log-probabilities. false: nothing, asked again each step."""

    @property
    def local(self) -> list[str]:
        """The addresses that are of this machine, whichever it is."""
        return [url for url in self.urls if urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")]


@dataclass
class ResponseSettings:
    """Who writes the responses that drafts are trained on, and how they are sampled."""

    source: Literal["dataset", "target"] = "dataset"
    """dataset: those of the data set. target: the target answers the prompts, once. See also drafts.NAME.on_policy."""
    temperature: Temperature | list[Temperature] = 1.0
    """Sampling temperature of written responses; 0 is greedy. Of a list, such as [0.6, 0.8, 1.0], each prompt takes
    one, in turn, and so does each rewriting of a draft's own texts; servers' answers are then not checked to be
    samples."""
    top_p: Share = 1.0
    """Probability mass of nucleus sampling; 1 samples from the whole distribution."""
    max_new_tokens: PositiveInt = 256
    """Longest response in tokens. One that is cut off has no end-of-text label."""
    batch_size: PositiveInt = 16
    """Prompts answered together by this process."""
    refresh_every: PositiveInt = 100
    """Of drafts with on_policy: steps between two rewritings of the texts that the draft writes."""

    @property
    def from_target(self) -> bool:
        """Whether the target answers the prompts before distillation."""
        return self.source == "target"


@dataclass
class TeacherSettings:
    """What the target gives to all drafts: its next-token distributions, and the texts that they are taken on."""

    examples: PositiveInt | None = None
    """Number of training examples used for distillation (the first ones); null: all."""
    signal: Signal = "hidden"
    """What is kept of the target. hidden: last hidden states of response tokens (exact). topk: their signal_k largest
    log-probabilities, for a small disk. online: nothing; it runs beside the draft.
    vllm: hidden states out of a serving engine, for targets of any size (see engine)."""
    signal_k: PositiveInt = 64
    """Number of log-probabilities kept per token with signal topk."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    responses: ResponseSettings = field(default_factory=ResponseSettings)

    @property
    def in_engine(self) -> bool:
        """Whether the target stands in an engine, which gives its states."""
        return self.signal == "vllm"

    @property
    def served(self) -> bool:
        """Whether the target's answers come from an engine."""
        return self.responses.from_target and (self.in_engine or bool(self.engine.urls))

    @property
    def arguments(self) -> list[str]:
        """The arguments of the run's engine, but for those that say where it computes."""
        return [each for each in self.engine.arguments if each.partition("=")[0] not in PLACES]

    @property
    def kept(self) -> Any:
        """The kind of signal as it is kept: hidden, topk or online."""
        if not self.in_engine:
            return self.signal
        return {"topk": "topk", False: "online"}.get(self.engine.keep, "hidden")

    def number_format(self, dtype: str) -> str:
        """The number format in which states of a target of this one are kept."""
        keep = str(self.engine.keep) if self.in_engine else "auto"
        return keep if keep in ("float32", "bfloat16", "float8") else "bfloat16" if dtype == "bfloat16" else "float32"
