"""The teacher's signal and responses, and the drafts that are distilled from it."""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    PositiveFloat,
    PositiveInt,
)

from decode.errors import UserError
from decode.method_options import Seed, Share, Temperature, check_numbers
from distill.config.data import ShareBelowOne
from distill.config.training import TrainingSettings


@dataclass
class ServerSettings:
    """Servers that run the target and speak OpenAI's protocol (vLLM, SGLang, ...), or a vLLM that the run starts."""

    urls: list[str] = field(default_factory=list)
    """Addresses up to the version, such as http://127.0.0.1:8000/v1, of servers with the same target, which share the
    prompts evenly; empty: this process writes the responses. The list may change when a run is continued: finished
    responses are kept. A key is read from OPENAI_API_KEY. vLLM adds the sampling settings of the target's
    generation_config (top_k, repetition_penalty) unless it is started with --generation-config vllm."""
    engine: Literal["vllm"] | None = None
    """In place of urls: start vLLM with the target, in the environment of `make engine-vllm`, and stop it after the
    last response. Prompts and responses are exchanged as token ids."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of `vllm serve`, such as [--tensor-parallel-size=4]."""
    model: str | None = None
    """The target's name on the server; null: the only model that it lists."""
    concurrency: PositiveInt = 32
    """Requests in flight at each server."""

    @property
    def answers(self) -> bool:
        """Whether servers write the target's responses instead of this process."""
        return bool(self.urls or self.engine)


@dataclass
class ResponseSettings:
    """Who writes the responses that drafts are trained on, and how they are sampled."""

    source: Literal["dataset", "target"] = "dataset"
    """dataset: the responses of the data set. target: the target answers the prompts once, before distillation, so that
    drafts are trained on the distribution that they meet in decoding. See also drafts[].on_policy."""
    temperature: Temperature = 1.0
    """Sampling temperature of written responses; 0 is greedy."""
    top_p: Share = 1.0
    """Probability mass of nucleus sampling; 1 samples from the whole distribution."""
    max_new_tokens: PositiveInt = 256
    """Largest number of tokens of a response. A response that is cut off has no end-of-text label."""
    batch_size: PositiveInt = 16
    """Prompts answered together by this process."""
    dtype: Literal["auto", "float32", "bfloat16"] | None = None
    """Number format of the target while it writes prompts and responses; null: target.dtype. auto: bfloat16 where the
    processor multiplies in it, else target.dtype. The signal is computed in target.dtype."""
    refresh_every: PositiveInt = 100
    """Of drafts with on_policy: steps between two rewritings of the draft's own texts."""
    server: ServerSettings = field(default_factory=ServerSettings)
    """Servers that write the target's responses."""

    @property
    def from_target(self) -> bool:
        """Whether the target answers the prompts before distillation."""
        return self.source == "target"

    def key(self) -> dict[str, Any]:
        """Return the settings that decide the fixed responses, for fingerprints."""
        return self.written() if self.from_target else {"source": self.source}

    def written(self) -> dict[str, Any]:
        """Return the settings that decide a response that the target writes; the servers' addresses do not."""
        key = {name: getattr(self, name) for name in ("temperature", "top_p", "max_new_tokens", "batch_size", "dtype")}
        if self.server.answers:
            key["server"] = self.server.engine or self.server.model or ""
        return key

    def validate(self, where: str) -> None:
        """Check the servers' addresses, and that they are used."""
        server = self.server
        if server.urls and server.engine:
            raise UserError(f"{where}.server has urls and engine: give one of them")
        if server.answers and not self.from_target:
            raise UserError(f"{where}.server is set and {where}.source is {self.source}: set it to target")
        if not all(address.startswith(("http://", "https://")) for address in server.urls):
            raise UserError(f"{where}.server.urls is {server.urls}: expected such as http://127.0.0.1:8000/v1")


Signal = Literal["auto", "hidden", "topk", "log_probs", "online"]


@dataclass
class TeacherSettings:
    """What the target gives to all drafts: its next-token distributions, and the texts that they are taken on."""

    examples: PositiveInt | None = None
    """Number of training examples used for distillation (the first ones); null: all. The target reads each once,
    whatever the number of epochs."""
    signal: Signal = "auto"
    """What is kept of the target on disk, so that it runs over the examples once. hidden: last hidden states at label
    positions (exact; hidden_size x 4 bytes a token, x 2 where target.dtype is bfloat16). topk: the signal_k largest
    log-probabilities (8 bytes each a token; exact but for the tail, whose mass is printed). log_probs: all
    log-probabilities (exact; vocabulary x 4 bytes a token; for vocabularies of some thousand ids). online: nothing;
    the target runs beside the draft at every step, on its device or on target.devices. auto: the
    first of hidden, topk and online that fits signal_limit_gb and the disk."""
    signal_autocast: bool | Literal["auto"] = False
    """Compute the signal under bfloat16 autocast, in half the time on a CPU with AVX512-BF16 or AMX; auto: there and on
    GPUs. The signal then differs from the float32 target's."""
    signal_k: PositiveInt = 64
    """Number of log-probabilities kept per token with signal topk."""
    signal_limit_gb: PositiveFloat = 100.0
    """Largest size of the kept signal in GB; a larger one is refused before it is made."""
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    """Who writes the responses that all drafts are trained on."""


DivergenceName = Literal[
    "forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "kl_tv", "cross_entropy", "dspark"
]  # fmt: skip
"""Losses per token; `distill.losses.divergences` holds what they compute."""
Scope = Literal["microbatch", "global"]
Normalisation = Literal["paper", "official"]

START = "undistilled", "untrained", "untuned"
"""How reports name the student before distillation: a language model, a head, and a target's next-token layers."""
RESERVED = ("target", "initial", "export", "probes", "work", "wandb", "csv", "tensorboard", *START)
"""Folders of a run, and names in reports, that no draft may have."""
STAGE_FILES = ("report", "corpus", "signals", "responses", "prompts", "original", "ablation", "lock")
"""Names under ``work/`` that no draft's record may take."""


@dataclass
class DraftSettings:
    """A draft: the student, distilled from the target. With a reference it is AdaSPEC, without one DistillSpec."""

    name: str = ""
    """Name of the draft in the report, and of its folder in the run."""
    reference: str | None = None
    """Name of an earlier draft by which tokens are selected (AdaSPEC): those with the largest difference dL between the
    losses of this draft and of the reference. null: every token counts (DistillSpec)."""
    k: Share = 0.4
    """With a reference: share of the response tokens selected. The paper's best is 0.2 to 0.4; 1 selects all."""
    scope: Scope = "microbatch"
    """With a reference: among which tokens the largest dL are chosen. microbatch: all tokens of a device's batch
    (official code). global: all tokens of the optimiser step, over all devices and trainer.accumulate batches, so that
    the result does not depend on their number; with accumulate the draft reads every batch twice."""
    normalisation: Normalisation = "paper"
    """With a reference: the divisor of the loss summed over selected tokens. paper: the number of selected tokens.
    official: the number of all label tokens, as in the official code; the loss is then k times as large."""
    divergence: DivergenceName = "forward_kl"
    """Loss per token between target p and draft q; alpha = sum_x min(p(x), q(x)) is the acceptance rate. forward_kl:
    KL(p || q), as in the papers. reverse_kl: KL(q || p). jsd: Jensen-Shannon. tv: total variation
    1 - alpha, the rejection rate; slow from a cold start, see kl_first. neg_log_alpha: -log alpha. lk_hybrid:
    w·KL + (1 - w)·tv with w = exp(-3·alpha). kl_tv: KL + 2·tv. cross_entropy: of the text's own token, as DFlash is
    trained. dspark: 0.1·cross_entropy + 1.8·tv, as DSpark is. dL is measured in the same divergence."""
    kl_first: ShareBelowOne = 0.0
    """Share of the steps, from the first, that use forward KL before divergence takes over."""
    on_policy: ClosedUnitInterval = 0.0
    """Probability of each training example to have a response that the draft writes itself, sampled as in
    teacher.responses and rewritten every refresh_every steps (DistillSpec's on-policy data)."""
    accepted_only: bool = False
    """Feature heads of at least two drafting steps: a further step is trained only after tokens that would be accepted,
    drawn from the current acceptance rates, as in decoding."""
    seed: Seed | None = None
    """Seed of the order of examples; null: the run's seed."""
    training: dict[str, Any] = field(default_factory=dict)
    """Keys of the section training with values of this draft's own, such as {epochs: 3}."""

    @property
    def selects(self) -> bool:
        """Whether a reference selects tokens."""
        return self.reference is not None and self.k < 1

    def training_of(self, shared: TrainingSettings) -> TrainingSettings:
        """The section ``training`` with this draft's own values; steps replace epochs, and epochs steps."""
        if not self.training:
            return shared
        length = {"steps": None, "epochs": None} if self.training.keys() & {"steps", "epochs"} else {}
        own = replace(shared, **(length | self.training))
        check_numbers(own, f"drafts.{self.name}.training.")
        return own

    def key(self) -> dict[str, Any]:
        """The settings that decide the draft, for fingerprints; the reference and the training are added by callers."""
        unused = {"name", "reference", "training"} | (set() if self.selects else {"k", "scope", "normalisation"})
        return {name: value for name, value in asdict(self).items() if name not in unused}

    def validate(self, where: str, shared: TrainingSettings, earlier: list[str]) -> None:
        """Check the name, the reference and the training.

        Args:
            where: Place of the draft in the configuration.
            shared: The section ``training``.
            earlier: Names of the drafts before this one.
        """
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"{where}.name is {self.name!r}, expected letters, digits, '-' and '_'")
        if self.name in (*RESERVED, *STAGE_FILES) or self.name.startswith("checkpoints-"):
            raise UserError(f"{where}.name is {self.name!r}, which is a file or folder of every run: choose another")
        if self.name in earlier:
            raise UserError(f"{where}.name is {self.name!r}, which is used twice: give each draft its own name")
        if self.reference is not None and self.reference not in earlier:
            raise UserError(
                f"{where}.reference is {self.reference!r}, expected the name of an earlier draft: "
                f"{', '.join(earlier) or 'there is none'}"
            )
        known = [each.name for each in fields(TrainingSettings)]
        if unknown := [name for name in self.training if name not in known]:
            raise UserError(f"{where}.training.{unknown[0]} is no key of the section training: {', '.join(known)}")
        self.training_of(shared).validate(f"{where}.training" if self.training else "training")
        if self.accepted_only and self.selects:
            raise UserError(f"{where} has accepted_only and a reference, which both choose tokens: remove one")
