"""Who writes the responses that a draft is distilled on: people, the target, or the draft itself."""

from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from decode.core.errors import UserError
from decode.core.method_options import Share, Temperature
from distill.config.later_settings import LATER, decisive

Source = Literal["dataset", "target", "draft", "mixed"]


@dataclass
class ServerSettings:
    """A server that runs the target and answers by OpenAI's protocol (vLLM, SGLang, transformers serve, ...)."""

    url: str | None = None
    """Address up to the version, such as http://127.0.0.1:8000/v1. With it the target's responses come from the
    server; null: they are written here. vLLM adds what the target's generation_config says of sampling (top_k,
    repetition_penalty), unless it is started with --generation-config vllm."""
    urls: list[str] = field(default_factory=list)
    """In place of url several such servers with the same target (say one `vllm serve` a machine or GPU): requests go to
    whichever has room, and a server that fails for good leaves what it was asked to the others. They may be others when
    the run is continued: what was answered is kept."""
    engine: Literal["vllm"] | None = field(default=None, metadata=LATER)
    """In place of url: starts vLLM with the target, in the environment of `make engine-vllm`, and ends it when the
    answers are written. It gets prompts and gives answers as tokens, and follows nothing of the target's
    generation_config. For one machine, with several GPUs by arguments."""
    python: str | None = field(default=None, metadata=LATER)
    """Interpreter of an environment with vLLM; null: .venv-vllm/bin/python, which `make engine-vllm` makes."""
    arguments: list[str] = field(default_factory=list, metadata=LATER)
    """Further arguments of `vllm serve`, such as [--tensor-parallel-size=4]."""
    model: str | None = None
    """The target's name on the server; null: the only one that it lists."""
    endpoint: Literal["completions", "chat"] = "completions"
    """completions: the prompt as it is, chat template included. chat: the messages before the response, or a prompt
    that is no chat as a user's message, for servers that have nothing else; they apply the template themselves."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, where the server wants one. The key itself is written nowhere."""
    concurrency: PositiveInt = 32
    """Requests in flight at each server. An engine that batches wants many."""
    retries: NonNegativeInt = 6
    """Further tries of a request that failed, after 1, 2, 4, ... seconds (at most 30), or as the server says."""
    timeout: PositiveFloat = 300.0
    """Seconds until a request counts as failed."""

    @property
    def addresses(self) -> list[str]:
        """Those of all servers that run."""
        return self.urls or ([] if self.url is None else [self.url])

    @property
    def answers(self) -> bool:
        """Whether servers write the target's answers, not this process."""
        return bool(self.addresses or self.engine)


@dataclass
class ResponseSettings:
    """Who writes the responses, and how they are sampled."""

    source: Source = "dataset"
    """dataset: the responses of the data set. target: the target answers the training prompts once, before
    distillation, so the draft is trained on the distribution that it meets in decoding. draft: the draft answers
    them itself, again every refresh_every steps (on-policy, DistillSpec's D = q). mixed: each example is the
    draft's own with probability share, otherwise as fixed says."""
    fixed: Literal["dataset", "target"] = "dataset"
    """With draft and mixed: where the other examples and those for validation come from."""
    share: Share = 0.5
    """With mixed: chance of each example, not of each step, to be the draft's own."""
    temperature: Temperature = 1.0
    """Sampling temperature of the responses; 0 is greedy."""
    top_p: Share = 1.0
    """Sampling from the smallest set of tokens with this probability. 1 samples from the whole distribution."""
    max_new_tokens: PositiveInt = 256
    """Longest response; data.max_length holds for prompt and response together. A response that is cut has no
    end-of-text label."""
    batch_size: PositiveInt = 16
    """Prompts answered together here."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Number format in which the target writes responses, and prompts of its own; null: target.dtype. bfloat16 is
    faster on a GPU or a CPU with instructions for it (avx512_bf16, amx), several times slower on others, and the texts
    are then those of the rounded target; its signal is computed in target.dtype all the same. auto: bfloat16 where it
    is faster, else target.dtype."""
    refresh_every: PositiveInt = 100
    """Steps between rewritings of the draft's own texts. Small: closer to on-policy, but writing takes longer than
    training."""
    buffer: PositiveInt | None = None
    """Texts the draft writes each time; null: one for every example of the steps until the next time. Fewer are used
    several times each."""
    server: ServerSettings = field(default_factory=ServerSettings)
    """For the target's responses, where an engine writes faster than this process."""

    @property
    def from_draft(self) -> float:
        """Share of the training examples that the draft writes."""
        return {"draft": 1.0, "mixed": self.share}.get(self.source, 0.0)

    @property
    def from_target(self) -> bool:
        """Whether the target has to answer the prompts before distillation."""
        return self.source == "target" or (self.from_draft > 0 and self.fixed == "target")

    def key(self) -> dict[str, Any]:
        """What decides the texts, without settings that are not used."""
        if self.source == "dataset":
            return {"source": self.source}
        key = decisive(self)
        server = key.pop("server")
        if self.from_target and self.server.engine:
            key["server"] = {"engine": server["engine"]}
        elif self.from_target and self.server.addresses:
            key["server"] = {name: server[name] for name in ("url", "model", "endpoint")}
            if self.server.urls:
                key["server"]["urls"] = True  # whichever they are
        if self.dtype is None:  # texts written before there was this setting stay valid
            del key["dtype"]
        if not self.from_draft:
            for name in ("fixed", "share", "refresh_every", "buffer"):
                del key[name]
        return key

    def written(self) -> dict[str, Any]:
        """What decides texts that a target writes, whoever else writes some."""
        names = "temperature", "top_p", "max_new_tokens", "batch_size", "dtype"
        others: dict[str, Any] = {"url": self.server.url}
        if self.server.urls:
            others["urls"] = True  # whichever they are
        if self.server.addresses:
            given = {"model": self.server.model, "endpoint": self.server.endpoint}
            others |= {name: value for name, value in given.items() if value not in (None, "completions")}
        if self.server.engine:
            others["engine"] = self.server.engine
        return {name: getattr(self, name) for name in names} | others

    def validate(self, where: str) -> None:
        """Check the server's address, and that what is set is used."""
        url, urls = self.server.url, self.server.urls
        if url is not None and urls:
            raise UserError(f"{where}.server.url is {url!r} and {where}.server.urls {urls}: give one of the two")
        given = f"{where}.server.urls is {urls}" if urls else f"{where}.server.url is {url!r}"
        if self.server.engine and self.server.addresses:
            raise UserError(f"{where}.server.engine is {self.server.engine} and {given}: give one of the two")
        given = given if self.server.addresses else f"{where}.server.engine is {self.server.engine}"
        if self.server.engine and self.server.endpoint == "chat":
            raise UserError(f"{given} and {where}.server.endpoint chat: leave the endpoint out, the engine gets tokens")
        if self.server.answers and not self.from_target:
            raise UserError(
                f"{given}, but no response is the target's: set {where}.source to target, or {where}.fixed to target"
            )
        if not all(address.startswith(("http://", "https://")) for address in self.server.addresses):
            raise UserError(f"{given}, wanted an address such as http://127.0.0.1:8000/v1")
