"""Settings of a draft that is distilled after the reference: AdaSPEC, its variations, and drafts for comparison."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from jsonargparse.typing import (
    ClosedUnitInterval,
    NonNegativeFloat,
    NonNegativeInt,
    OpenUnitInterval,
    PositiveFloat,
    PositiveInt,
)

from decode.errors import UserError
from decode.method_options import Seed, Share, Temperature
from distill.config.data import LATER, ShareBelowOne, decisive
from distill.config.training import LoraSettings, TrainingSettings

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


DivergenceName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "kl_tv"]
"""Losses per token; `distill.losses.divergences` holds what they compute."""
Signal = Literal["auto", "hidden", "topk", "log_probs", "online"]


@dataclass
class DistillSettings:
    """DistillSpec: the draft learns the target's next-token distributions on response tokens.

    Its result is the baseline, and the reference by which AdaSPEC selects tokens.
    """

    examples: PositiveInt | None = None
    """Training examples used for distillation (the first ones); null: all. The target reads each once, whatever the
    number of passes. At equal steps, more examples can raise alpha more than the choice of the loss: a draft
    overfits a small set."""
    divergence: DivergenceName = "forward_kl"
    """Loss per token between target p and draft q; alpha = sum_x min(p(x), q(x)) is the acceptance rate. forward_kl:
    KL(p || q), as in the papers; the safe choice. reverse_kl: KL(q || p). jsd: Jensen-Shannon, see jsd_beta. tv:
    total variation 1 - alpha, the rejection rate; slow from a cold start. neg_log_alpha: -log alpha. lk_hybrid:
    w*KL + (1 - w)*tv with w = exp(-3*alpha). kl_tv: KL + tv_weight*tv. AdaSPEC's loss differences use the same
    divergence."""
    jsd_beta: OpenUnitInterval = 0.5
    """Of jsd: the target's share in the mixture it compares both with; near 0 it behaves as forward_kl."""
    tv_weight: NonNegativeFloat = 2.0
    """Of kl_tv: how much total variation counts beside the KL."""
    temperature: PositiveFloat = 1.0
    """Both models' logits are divided by it in the loss: the temperature at which the draft will be used. Training
    and validation alpha are those at this temperature."""
    signal: Signal = "auto"
    """What is kept of the target on disk, so that it runs over the examples once. auto: the first of hidden, topk and
    online that signal_limit_gb and the disk have room for; the run stays with it. hidden: its last hidden states at
    label positions (exact; hidden_size x 4 bytes a token). topk: its signal_k largest log-probabilities (8 bytes each a
    token; for targets whose hidden states would be larger, and exact but for the tail, which is printed). log_probs:
    all of them (exact; vocabulary x 4 bytes a token; for vocabularies of some thousand ids, where the product with the
    target's head takes longer than reading them). online: nothing; the target runs beside the draft, on its device or
    on target.devices, for the same losses. That costs a forward pass of the target every step instead of one for each
    example, two with draft.scope global and trainer.accumulate, and memory for its weights as long as the draft trains:
    for targets whose signal fits no disk, and examples read about once. The reference's losses, 4 bytes a token, are
    kept all the same."""
    signal_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of a hidden signal. bfloat16 halves the file; nothing is lost where the target itself runs in
    bfloat16 (target.dtype)."""
    signal_autocast: bool | Literal["auto"] = False
    """Compute the signal under bfloat16 autocast, in half the time on a CPU with AVX512-BF16 or AMX; auto: there and on
    GPUs. It then differs from the float32 target's: on SmolLM2-135M by 0.01 in total variation. The target decodes in
    its own format."""
    signal_k: PositiveInt = 64
    """Number of log-probabilities kept per token for signal topk; a larger k leaves less probability to the tail."""
    signal_limit_gb: PositiveFloat = 100.0
    """Largest size of the kept signal in GB. What it needs is told before it is made."""
    responses: ResponseSettings = field(default_factory=ResponseSettings)
    """Who writes the responses, for the reference and for AdaSPEC alike (but see draft.on_policy). What frozen models
    say of the draft's own texts, the reference's loss too, is computed anew each time they are written."""
    lora: LoraSettings | None = None
    """Train a low-rank adapter instead of all weights of the drafts, and merge it at the end: less memory for the
    optimiser, less forgetting, less to learn with. null: all weights."""
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Length, batches and optimiser of the reference; AdaSPEC's follow from them and draft.iso."""

    def validate(self) -> None:
        """Check the training and the responses."""
        self.training.validate("reference.training")
        self.responses.validate("reference.responses")


Iso = Literal["steps", "epochs", "teacher_tokens"]
Scope = Literal["microbatch", "global"]
Normalisation = Literal["paper", "response", "official"]
WeighBy = Literal["none", "accepted"]

PLAIN = "adaspec"  # the name of AdaSPEC as published; a variation has to bear another one

TAKEN = ("target", "initial", "reference", "draft", "undistilled", "distillspec", "untrained", "eagle", "eagle-adaspec")
"""Names of stages and of the other standard drafts in reports."""

FILES = ("signals", "responses", "prompts", "original", "corpus", "ablation", "probes", "report", "taken", "lock")
"""What else lies in ``work/``, where drafts for comparison have their folders."""

EVER = ("k", "scope", "normalisation", "iso", "epochs", "lr", "method")
"""Settings that are always part of a draft's fingerprint; the others are where they are not the defaults, so that
folders made before there were such settings stay valid."""


@dataclass
class AdaSpecSettings:
    """AdaSPEC: distillation on the share k of tokens where the draft can still learn most; and variations of it."""

    name: str = PLAIN
    """What reports call the draft. With any of divergence, kl_first, on_policy and weigh_by set it is not AdaSPEC as
    published any more and needs a name of its own."""
    k: Share = 0.4
    """Share of response tokens selected by the largest loss difference to the reference; the paper's best is 0.2
    to 0.4. 1.0 selects all, which is DistillSpec."""
    scope: Scope = "microbatch"
    """Where the top k are chosen. microbatch: among all tokens of a device's batch (official code). global: among
    all tokens of the optimiser step, over all devices and trainer.accumulate batches, so that the result does not
    depend on how many there are; with accumulate the draft reads every batch twice."""
    normalisation: Normalisation = "official"
    """What the sum over selected tokens is divided by. paper: the number of tokens selected in the step (their mean).
    response: k times each response's length, and the mean over the step's responses is taken: 1/(k*|y|) as in the
    paper's objective, so a long response counts no more than a short one. official: the number of all label tokens, so
    the loss, and under a plain optimiser the step, is k times as large. All three select exactly ceil(k*n) of n tokens;
    the official code's quantile was found to select one token more or less in 105 of 1,197 pairs of n and k."""
    iso: Iso = "steps"
    """What is held equal to the reference's training (S steps of B examples). steps: S steps of B/k examples, the
    official scripts' choice, with 1/k times the data and teacher tokens. epochs: S steps of B examples.
    teacher_tokens: k*S steps of B/k examples, the same data, the same selected tokens a step."""
    epochs: PositiveFloat | None = None
    """Length in epochs of the reference's batches, before iso is applied; null: as long as the reference."""
    lr: PositiveFloat | None = None
    """Peak learning rate; null: the reference's."""
    divergence: DivergenceName | None = None
    """Loss per token, as in reference.divergence; null: that one. dL is measured in it."""
    kl_first: ShareBelowOne = 0.0
    """Share of the steps, from the first, that use forward KL before divergence takes over: tv, neg_log_alpha and other
    acceptance losses have small gradients while p and q hardly overlap."""
    on_policy: ClosedUnitInterval | None = None
    """Chance of each training example to be one whose response the draft writes itself, by the sampling and at the
    intervals of reference.responses; null: as there. The reference's training stays as it is."""
    seed: Seed | None = None
    """Seed of the order of examples; null: the run's. The weights that training starts from do not depend on it."""

    weigh_by: WeighBy = "none"
    """none: every label token of every drafting step counts alike. accepted (feature heads only): a chain of drafting
    steps continues after a token with the probability that the token is accepted, as in decoding, in place of
    eagle.decay. Rejected chains cost nothing more, so a head far from its target trains about twice as fast."""

    @property
    def variations(self) -> list[str]:
        """The settings by which this is not AdaSPEC as published."""
        own = ("divergence", "kl_first", "on_policy", "weigh_by")
        return [name for name in own if getattr(self, name) != DEFAULTS[name]]

    @property
    def selects_all(self) -> bool:
        """Whether every token counts, so that no reference is asked."""
        return self.k == 1 and self.normalisation != "response"

    def key(self) -> dict[str, Any]:
        """What decides the draft, beside the reference."""
        return {n: value for n, value in asdict(self).items() if n in EVER or value != DEFAULTS[n]}

    def validate(self, where: str) -> None:
        """Check the name and the variations."""
        if not self.name or not self.name.replace("-", "").replace("_", "").isalnum():
            raise UserError(f"{where}.name is {self.name!r}, wanted letters, digits, '-' and '_'")
        if self.name == PLAIN and self.variations:
            raise UserError(
                f"{where}.name is {self.name!r}, but with {', '.join(self.variations)} set this is not AdaSPEC as "
                "published: give it a name of its own, such as tv-after-kl"
            )
        if self.weigh_by == "accepted" and not self.selects_all:
            raise UserError(
                f"{where}.weigh_by is accepted and {where}.k is {self.k}: acceptance decides which tokens count, not a "
                f"selection; set {where}.k to 1 and {where}.normalisation to paper, or weigh_by to none"
            )


DEFAULTS = {field.name: field.default for field in fields(AdaSpecSettings)}


@dataclass
class ComparisonSettings(AdaSpecSettings):
    """One more draft for the report, trained from the same initial draft."""

    name: str = ""
    """Its name in the report and of its folder under work/."""
    method: Literal["adaspec", "distillspec"] = "adaspec"
    """adaspec, or distillspec: the same batches and steps (k and iso decide them) without selection."""

    @property
    def selects_all(self) -> bool:
        """Whether every token counts."""
        return self.method == "distillspec" or super().selects_all


def check_names(draft: AdaSpecSettings, comparisons: Sequence[ComparisonSettings]) -> None:
    """Refuse names that would stand for two drafts, or for a folder that is something else."""
    if draft.name in TAKEN:
        raise UserError(f"draft.name is {draft.name!r}, which is taken: choose another, or {PLAIN} for AdaSPEC")
    names = [comparison.name for comparison in comparisons]
    for index, name in enumerate(names):
        if name in (*TAKEN, draft.name):
            raise UserError(f"comparisons[{index}].name is {name!r}, which names a standard draft: choose another")
        if name in FILES or name.startswith("checkpoints-"):
            raise UserError(f"comparisons[{index}].name is {name!r}, the name of a file under work/: choose another")
        if names.count(name) > 1:
            raise UserError(f"comparisons: the name {name!r} is used twice: give each comparison its own")


Kind = Literal["none", "eagle", "eagle3"]


@dataclass
class EagleSettings:
    """A feature head in place of a draft model: the sections reference, draft and comparisons then train heads.

    The section initial is not read; the reference is EAGLE, the draft EAGLE + AdaSPEC. Everything else in those
    sections means what it means for draft models: signals, divergences, selection, optimisers, texts of its own.
    """

    kind: Kind = "none"
    """none: the drafts are language models. eagle: EAGLE-1, one layer on the target's last hidden state, with the
    target's embedding and output head. eagle3: on a low, a middle and a high state, with an output head of its own."""
    init: Literal["target", "random"] = "target"
    """eagle3: weights that the head starts from. target: those of the target's last layer where the shapes agree, with
    fc passing the last captured state through. random: none but the output rows, which are the target's. EAGLE-1
    always starts at random: its states are behind the final norm, and that layer's weights are for states before it."""
    intermediate_size: PositiveInt | None = None
    """Width inside the layer's MLP; null: the target's. The layer's width is the target's."""
    heads: PositiveInt | None = None
    """Attention heads; null: as many as the target has."""
    kv_heads: PositiveInt | None = None
    """Key and value heads; null: the target's."""
    draft_vocab: PositiveInt | None = None
    """Tokens that the head can draft, the most frequent ones of the training labels (FR-Spec); null: all. Fewer make
    the output head cheaper and leave the rest to the target: 4,000 to 16,000 of some 50,000 are a good start."""
    layers: list[NonNegativeInt] = field(default_factory=list)
    """eagle3: the target's states that are fused (i enters layer i); empty: 2, L/2 and L - 3, which serving engines
    expect."""
    unroll: PositiveInt | None = None
    """Drafting steps trained at once on the head's own states (training-time test); null: 1 for eagle, 7 for
    eagle3, as published. More steps keep acceptance up deeper into a draft and cost as much again each."""
    decay: Share = 0.8
    """Weight of each further step's loss against the one before."""
    feature_weight: NonNegativeFloat = 1.0
    """eagle: weight of the smooth L1 distance between the head's state and the target's."""
    ce_weight: NonNegativeFloat = 0.1
    """eagle: weight of the divergence from the target, which AdaSPEC's selection applies to. (eagle3 has nothing
    else.)"""
    noise: NonNegativeFloat = 0.2
    """eagle: width of the uniform noise on the features, times 512 / length, as published; 0: none."""
    tree_widths: list[PositiveInt] = field(default_factory=lambda: [4])
    """Trees measured at the end: nodes expanded a level, one entry for each of tree_nodes."""
    tree_nodes: list[PositiveInt] = field(default_factory=lambda: [8])
    """Nodes of each tree (EAGLE-2: 60, for a machine on which checking 60 tokens costs little more than one)."""

    @property
    def enabled(self) -> bool:
        """Whether heads are trained."""
        return self.kind != "none"

    @property
    def version(self) -> int:
        """1 or 3."""
        return 3 if self.kind == "eagle3" else 1

    @property
    def steps(self) -> int:
        """Drafting steps trained at once."""
        return self.unroll or (7 if self.kind == "eagle3" else 1)

    def shape(self) -> dict[str, Any]:
        """What `decode.models.heads.head_config` takes."""
        names = ("intermediate_size", "heads", "kv_heads", "draft_vocab")
        return {name: getattr(self, name) for name in names} | {"captured_layers": tuple(self.layers) or None}

    def check_reference(self, reference: DistillSettings) -> None:
        """Refuse the one thing that draft models can be trained with and heads cannot."""
        if reference.lora is not None:
            raise UserError(
                "reference.lora is set, and a feature head has one layer, all of whose weights are trained: set it to "
                "null"
            )

    def validate(self) -> None:
        """Check that the settings fit together."""
        if self.kind == "eagle" and not self.ce_weight:
            raise UserError("eagle.ce_weight is 0: the divergence is what AdaSPEC selects by; wanted above 0")
        if len(self.tree_widths) != len(self.tree_nodes):
            raise UserError(
                f"eagle.tree_widths is {self.tree_widths} and eagle.tree_nodes {self.tree_nodes}: expected equal "
                "lengths"
            )
        if self.kind == "eagle3" and self.layers and len(set(self.layers)) != 3:
            raise UserError(f"eagle.layers is {self.layers}: expected three different layers, or none for the default")
        if self.kind == "eagle" and self.layers:
            raise UserError("eagle.layers is for kind eagle3; EAGLE-1 reads the target's last hidden state")
