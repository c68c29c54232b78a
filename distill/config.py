"""All settings of ``python -m distill``: typed, with the trade-off beside each key (``--help`` prints the texts)."""

import copy
import inspect
import pkgutil
import re
from dataclasses import asdict, dataclass, field, fields, replace
from functools import reduce
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from jsonargparse.typing import ClosedUnitInterval, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from decode.errors import UserError
from decode.options import Seed, Share, Temperature, check_numbers

Values = dict[str, Any]
"""Plain data by name."""
Attention = Literal["auto", "eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]
DivergenceName = Literal[
    "forward_kl", "reverse_kl", "jsd", "tv", "neg_log_alpha", "lk_hybrid", "kl_tv", "cross_entropy", "dspark"
]  # fmt: skip
"""Losses per token, of `distill.losses.divergences`."""
Precision = Literal[
    "auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "transformer-engine",
    "transformer-engine-float16",
]  # fmt: skip
Signal = Literal["auto", "hidden", "topk", "online", "vllm"]
Split = Literal["train", "validation", "test"]
StudentKind = Literal[
    "scratch", "finetune", "lora", "as_is", "cut", "eagle", "eagle3", "dflash", "dspark", "dflash2", "mtp"
]  # fmt: skip

HEADS = ("eagle", "eagle3", "dflash", "dspark", "dflash2", "mtp")
"""Kinds of students that are heads on the target's hidden states."""
SHARDED = ("fsdp",)
"""Strategies that spread a model's weights over devices."""
START = "undistilled", "untrained", "untuned"
"""How reports name the student before distillation: a language model, a head, and a target's next-token layers."""
RESERVED = (
    "target", "initial", "export", "probes", "work", "wandb", "csv", *START,
    "report", "corpus", "signal", "signals", "responses", "prompts", "original", "ablation", "lock",
)  # fmt: skip
"""Folders of a run, names in reports and files under ``work/``, which no draft may have as its name."""


def refuse(settings: Any, *rules: tuple[object, str, str], where: str = "") -> None:
    """Raise a `UserError` for the first of the rules (is it broken, dotted key, what follows the key's value)."""
    for broken, key, message in rules:
        if broken:
            raise UserError(f"{where}{key} is {attrgetter(key)(settings)!r}, {message}")


def change(settings: Any, **values: Any) -> None:
    """Set values by their keys, in which ``__`` stands for a dot: ``trainer__devices=1``."""
    for key, value in values.items():
        *sections, name = key.split("__")
        setattr(reduce(getattr, sections, settings), name, value)


@dataclass
class PromptSettings:
    """How an instruct target writes prompts of its own (Magpie, arXiv 2406.08464)."""

    file: str | None = None
    """File of prompts for all splits (columns: question, prompt, messages, ...); the target writes the rest."""
    openings: list[str] = field(default_factory=list)
    """First words of every second prompt, in turn, such as "Translate German to English: Der", for small models."""

    def opening(self, number: int) -> str:
        """Return the beginning of the prompt of this number: every second one has an opening, in turn."""
        return self.openings[number // 2 % len(self.openings)] if self.openings and number % 2 else ""


@dataclass
class DataSettings:
    """The corpus: where its rows come from, how they become texts, how many there are and how long they may be."""

    source: str = "arithmetic"
    """`arithmetic` (built in), a preset (gsm8k, alpaca, ...), a file, a folder, a data set on the Hub (name@revision),
    or `target`: an instruct target writes the prompts. By its columns a row is a pair, a chat or a text."""
    files: dict[Split, str] = field(default_factory=dict)
    """Local files of the splits: {train: a.jsonl, test: b.csv}. A missing one is 5 % of the training rows."""
    prompts: PromptSettings = field(default_factory=PromptSettings)
    prompt_template: str | None = None
    """Format string over the columns, such as '{question}\\n'. null: the preset's, or the usual columns."""
    response_template: str | None = None
    """How a row becomes a response, such as '{answer}'. null: as for prompt_template."""
    chat_template: str | None = None
    """Jinja template of chats, or a file with one, for tokenizers that have none. null: the tokenizer's."""
    chat: Literal["auto"] | bool = "auto"
    """Whether pairs are put into the chat template, as instruct models are served. auto: if the tokenizer has one."""
    system: str | None = None
    """System message of chats without one, and of pairs in the chat template. null: what the template writes."""
    template_args: Values = field(default_factory=dict)
    """Further variables of the chat template, such as {enable_thinking: false}."""
    train_examples: PositiveInt | Literal["all"] | None = 20_000
    """Training examples at most, a sample chosen by the seed; all or null: every one."""
    validation_examples: PositiveInt = 512
    """Validation examples at most: they choose the best checkpoint."""
    test_examples: PositiveInt = 512
    """Test examples at most: they are measured once, at the end."""
    max_length: PositiveInt = 512
    """Longest example in tokens, prompt and response together. Memory and time of a step grow with it."""
    overlong: Literal["drop", "cut"] = "drop"
    """What happens to longer examples: they are dropped, or the end of the response is cut off."""
    tokenizer: str | None = None
    """Folder, Hub name or GGUF file of the tokenizer. null: the target's, or 1,024 ids trained on the texts."""
    loader_workers: NonNegativeInt = 0
    """Processes that prepare batches ahead of the steps, for slow disks or short steps. Not used with on_policy."""

    @property
    def from_target(self) -> bool:
        """Whether the rows are prompts that the target writes, or that a file holds, for the target to answer."""
        return self.source == "target"

    @property
    def limits(self) -> dict[str, int]:
        """Examples of each split at most; 0: all."""
        train = self.train_examples if isinstance(self.train_examples, int) else 0
        return {"train": train, "validation": self.validation_examples, "test": self.test_examples}

    def key(self) -> Values:
        """Return the settings that decide what the examples are, not how they are made and read."""
        return asdict(replace(self, chat_template=self.template(), loader_workers=0))

    def template(self) -> str | None:
        """Return the chat template, which may be in a file."""
        if self.chat_template is None or "{{" in self.chat_template or "{%" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            known = f"expected a Jinja template (with {{{{ or {{%) or a file that can be read ({error})"
            raise UserError(f"data.chat_template is {self.chat_template!r}, {known}") from error

    def templates(self) -> tuple[str, str] | None:
        """Return the templates of these settings, with line breaks and tabs that a shell or YAML left escaped."""
        given = [text for text in (self.prompt_template, self.response_template) if text is not None]
        plain = [re.sub(r"(?<!\\)\\([nt])", lambda escaped: {"n": "\n", "t": "\t"}[escaped[1]], text) for text in given]
        return (plain[0], plain[1]) if plain else None

    def validate(self) -> None:
        """Check every value that can be judged without reading data."""
        check_numbers(self, "data.")
        self.template()
        paths = {f"files.{split}": path for split, path in self.files.items()} | {"prompts.file": self.prompts.file}
        for key, path in paths.items():
            if path is not None and not Path(path).is_file():
                raise UserError(f"data.{key}: there is no file {path!r}; check the path (relative to {Path.cwd()})")
        endless = self.from_target or (self.source == "arithmetic" and "train" not in self.files)
        unpaired = (self.prompt_template is None) != (self.response_template is None)
        target = "and data.source is target"
        refuse(
            self,
            (endless and not self.limits["train"], "train_examples", f"and {self.source} has no end: give a number"),
            (unpaired, "prompt_template", "and goes with data.response_template: give both or neither"),
            (self.from_target and self.chat is False, "chat", f"{target}, whose prompts are chats: set it to auto"),
            (self.from_target and self.files, "files", f"{target}: give prompts with data.prompts.file, or name "
             "the file as data.source with teacher.responses.source target"),
            where="data.",
        )  # fmt: skip


@dataclass
class TrainingSettings:
    """How long, on what batches and with which optimiser a model is trained."""

    steps: PositiveInt | None = None
    """Optimiser steps; null: epochs decides. Give one of the two."""
    epochs: PositiveFloat | None = None
    """Passes over the training examples; null: steps decides."""
    batch_size: PositiveInt = 16
    """Examples per optimiser step, over all devices. Small batches learn more per example, large ones are faster."""
    optimizer: str | Values = "adamw"
    """adamw, or a class such as {class_path: bitsandbytes.optim.AdamW8bit, init_args: {percentile_clipping: 95}}."""
    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to 0 at the last step (linear, cosine), to end lower."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of matrices; vectors and a language model's embeddings and output head are not decayed."""
    beta2: ClosedUnitInterval = 0.999
    """Decay of AdamW's second moment: 0.999 as usual; 0.95 adapts faster in short runs."""
    length_bucket: PositiveInt = 16
    """Batches that are drawn together and cut from a list sorted by length, for less padding. 1: all are random."""

    def steps_for(self, examples: int) -> int:
        """Return the optimiser steps of a training on a number of examples."""
        return self.steps or max(1, round((self.epochs or 0) * examples / self.batch_size))

    def optimizer_class(self) -> tuple[Any, Values]:
        """Return the class of an optimiser other than adamw, and its arguments beside the learning rate."""
        chosen = cast(Values, self.optimizer)
        return pkgutil.resolve_name(chosen["class_path"]), chosen.get("init_args", {})

    def validate(self, where: str) -> None:
        """Check that the length of the training is given exactly once, and that the optimiser takes its arguments."""
        both = (self.steps is None) == (self.epochs is None)
        refuse(self, (both, "steps", f"and {where}.epochs {self.epochs}: give exactly one of them"), where=f"{where}.")
        try:
            if self.optimizer != "adamw":
                kind, arguments = self.optimizer_class()
                inspect.signature(kind).bind([], lr=self.lr, **arguments)
        except (ImportError, AttributeError, TypeError, KeyError, ValueError) as error:
            expected = f"expected adamw or {{class_path: torch.optim.Adafactor, init_args: {{d: 2.0}}}} ({error})"
            raise UserError(f"{where}.optimizer is {self.optimizer!r}, {expected}") from error


@dataclass
class Architecture:
    """Shape of a model that is trained from scratch, in terms that hold for every model family."""

    model_type: str = "llama"
    """Model family as transformers names it: llama, gpt_neox, phi, qwen3, ..."""
    hidden_size: PositiveInt = 64
    """Width."""
    layers: PositiveInt = 1
    """Depth. Decoding time grows with it, so a draft wants one or two and a target of a given size many."""
    heads: PositiveInt = 2
    """Attention heads; their number has to divide hidden_size."""
    intermediate_size: PositiveInt | None = None
    """Width inside the MLP. null: 8/3 of hidden_size, rounded up to a multiple of 32."""
    positions: PositiveInt = 512
    """Longest text that the model is made for, in tokens."""
    extra: Values = field(default_factory=dict)
    """Further fields of the family's configuration class, such as {num_key_value_heads: 2}."""


@dataclass
class LoraSettings:
    """Low-rank adaptation through peft; the adapter is merged into the weights at the end."""

    rank: PositiveInt = 16
    """Rank of the update of every linear layer but the head. Higher learns more and takes more memory."""


@dataclass
class LayerSkipSettings:
    """LayerSkip's recipe: it lets the model's first layers draft for the whole (see python -m probes)."""

    enabled: bool = False
    """Train the target with this recipe: a given one (finetune, lora) on its answers where it writes the responses."""
    dropout: ClosedUnitInterval = 0.1
    """Chance that a sample skips the last layer, falling exponentially to 0 at the first. The paper has 0.1 to 0.2."""
    early_exit_scale: NonNegativeFloat = 1.0
    """Weight of each early exit against the last layer. Higher makes drafts better and the model a little worse."""
    rotation: PositiveInt | None = None
    """Step t trains the exits t, t + rotation, ... null: the number of exits, so one a step. More costs less."""


@dataclass
class ModelSettings:
    """Where a model comes from and what is done to it before distillation."""

    kind: StudentKind = "scratch"
    """scratch (random weights, then trained), finetune, lora, as_is, or for the student cut: layers of the target."""
    model: str | None = None
    """Folder, GGUF file or Hub name (Qwen/Qwen3-8B@main: with a branch, tag or commit); not for scratch and cut."""
    architecture: Architecture = field(default_factory=Architecture)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Next-token training of the model; ignored for as_is."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Number format of a frozen model. auto: bfloat16 where the processor multiplies in it, else float32."""
    trust_remote_code: bool = False
    """Run Python code that a Hub repository brings along. Only for repositories that you have read."""

    @property
    def trained(self) -> bool:
        """Whether it is trained on next tokens."""
        return bool(self.training.steps or self.training.epochs) if self.kind == "cut" else self.kind != "as_is"


@dataclass
class TargetSettings(ModelSettings):
    """The target: the large model whose decoding is to become faster."""

    layerskip: LayerSkipSettings = field(default_factory=LayerSkipSettings)
    round_to: Literal["float16", "bfloat16"] | None = None
    """Round the weights of a target with kind as_is to 16 bits (float16 changes a weight by 0.05 % at most)."""
    device_map: Literal["auto"] | None = None
    """auto: spread the frozen target over all GPUs of the machine, for a training in one process. null: the draft's
    device. A target larger than a machine stands in an engine (teacher.signal vllm)."""
    quantization: Values | None = None
    """Weights of the frozen target in few bits, in training: {quant_method: bitsandbytes, load_in_4bit: true}."""

    @property
    def placed(self) -> bool:
        """Whether the frozen target has another place than the draft."""
        return bool(self.device_map or self.quantization)


@dataclass
class BlockSettings:
    """Shape and training of a block head (student.kind dflash, dspark or dflash2)."""

    layers: PositiveInt = 2
    """Decoder layers. Published heads have 5; they are read once a block, so that a few more cost little."""
    size: PositiveInt = 8
    """Slots of a block, the last verified token's included. Serve as many as were trained, or fewer."""
    target_layers: list[NonNegativeInt] = field(default_factory=list)
    """The target's layers, from 0, that the head reads. Empty: one for each of its layers, at least 3, as published."""
    anchors: PositiveInt = 32
    """Blocks of a text that are trained at a step, drawn anew each time. Published: 512 for long texts."""
    markov_rank: PositiveInt | None = None
    """dspark and dflash2: rank of the bias by the token before. null: 64. Published: 256."""
    window: PositiveInt | None = None
    """Tokens that a slot sees, itself included, at least a block. null: all. SGLang does not read it."""
    causal: bool = False
    """A slot sees those slots alone that stand before it (JetSpec). Published heads see the whole block."""


@dataclass
class StudentSettings(ModelSettings):
    """What every draft starts from: a language model of any kind, or a head on the target's hidden states.

    Of a head, model names one to start from, ours or a published one: of its kind, or dflash for dspark and dflash2.
    """

    kind: StudentKind = "scratch"
    """A language model (scratch to cut) or a head: eagle (on the target's last state), eagle3 (on three), dflash
    (drafts a block), dspark, dflash2 (a block whose tokens depend on each other; dflash2 chooses among 16 ids), mtp
    (the target's next-token layers)."""
    layers: PositiveInt | list[NonNegativeInt] = 1
    """cut: number of the target's layers that are kept, spread evenly, or a list of layers, from 0."""
    draft_vocab: PositiveInt | None = None
    """Heads: number of tokens that can be drafted, the most frequent labels (FR-Spec). null: all."""
    unroll: PositiveInt | None = None
    """Heads: drafting steps trained at once. null: as published, 1 for eagle, 7 for eagle3, 3 for mtp."""
    block: BlockSettings = field(default_factory=BlockSettings)
    noise: ClassVar[float] = 0.2  # EAGLE-1: width of the uniform noise on the features, times 512 / length
    ce_weight: ClassVar[float] = 0.1  # EAGLE-1: of the divergence from the target

    @property
    def is_head(self) -> bool:
        """Whether it is a head."""
        return self.kind in HEADS

    @property
    def is_block(self) -> bool:
        """Whether it is a block head."""
        return self.kind in ("dflash", "dspark", "dflash2")

    @property
    def decay(self) -> float:
        """Weight of each further drafting step's loss against the one before, as published (EAGLE-3, FastMTP)."""
        return 0.6 if self.kind == "mtp" else 0.8

    @property
    def version(self) -> int | str | None:
        """1 or 3 of EAGLE, dflash, dspark, dflash2 or mtp; None of a language model."""
        return {"eagle": 1, "eagle3": 3}.get(self.kind, self.kind) if self.is_head else None

    @property
    def steps(self) -> int:
        """Drafting steps trained at once, of a block head its drafted tokens; 1 of a language model."""
        if self.is_block:
            return self.block.size - (self.kind != "dspark")
        return (self.unroll or {"eagle3": 7, "mtp": 3}.get(self.kind, 1)) if self.is_head else 1

    @property
    def trained(self) -> bool:
        """Whether it is trained on next tokens before it is distilled."""
        return not self.is_head and super().trained


@dataclass
class EngineSettings:
    """The serving engine that the target stands in: it answers prompts, and as vLLM gives its hidden states away."""

    urls: list[str] = field(default_factory=list)
    """Addresses such as http://127.0.0.1:8000/v1 of servers of the target that return token ids (key: OPENAI_API_KEY),
    for answers, and with signal vllm for states (docs/engines.md has their command). Empty: with signal vllm the run
    starts vLLM itself."""
    arguments: list[str] = field(default_factory=list)
    """Further arguments of the vLLM that the run starts, such as [--tensor-parallel-size=4]."""
    in_flight: PositiveInt = 16
    """Requests in flight at each server. They bound the memory that states take on both sides; 256 answers faster."""
    folder: str = "/dev/shm"
    """Folder through which states pass, in memory or on a fast disk, which engine and trainers share."""
    keep: Literal["auto", "float32", "bfloat16", "float8", "topk", False] = "auto"
    """Of signal vllm, what is kept on disk: states in a number format (auto: the target's; float8: a scale for each
    token and layer), or topk: for language models signal_k log-probabilities. false: nothing, asked again each step."""


@dataclass
class ResponseSettings:
    """Who writes the responses that drafts are trained on, and how they are sampled."""

    source: Literal["dataset", "target"] = "dataset"
    """dataset: those of the data set. target: the target answers the prompts, once. See also drafts[].on_policy."""
    temperature: Temperature = 1.0
    """Sampling temperature of written responses; 0 is greedy."""
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

    def key(self) -> Values:
        """Return the settings that decide the fixed responses, for fingerprints."""
        return self.written() if self.from_target else {"source": self.source}

    def written(self) -> Values:
        """Return the settings that decide a response that the target writes."""
        return {name: getattr(self, name) for name in ("temperature", "top_p", "max_new_tokens", "batch_size")}


@dataclass
class TeacherSettings:
    """What the target gives to all drafts: its next-token distributions, and the texts that they are taken on."""

    examples: PositiveInt | None = None
    """Number of training examples used for distillation (the first ones); null: all."""
    signal: Signal = "auto"
    """What is kept of the target. hidden: last hidden states of response tokens (exact). topk: their signal_k largest
    log-probabilities. online: nothing; it runs beside the draft. auto: the first of these that the disk has room for.
    vllm: hidden states out of a serving engine, for targets of any size (see engine)."""
    signal_k: PositiveInt = 64
    """Number of log-probabilities kept per token with signal topk."""
    engine: EngineSettings = field(default_factory=EngineSettings)
    responses: ResponseSettings = field(default_factory=ResponseSettings)

    @property
    def served(self) -> bool:
        """Whether the target's answers come from an engine."""
        return self.responses.from_target and (self.signal == "vllm" or bool(self.engine.urls))

    @property
    def kept(self) -> Any:
        """The kind of signal as it is kept: hidden, topk or online; ``auto`` as it is."""
        if self.signal != "vllm":
            return self.signal
        return {"topk": "topk", False: "online"}.get(self.engine.keep, "hidden")

    def number_format(self, dtype: str) -> str:
        """The number format in which states of a target of this one are kept."""
        keep = str(self.engine.keep) if self.signal == "vllm" else "auto"
        return keep if keep in ("float32", "bfloat16", "float8") else "bfloat16" if dtype == "bfloat16" else "float32"


@dataclass
class DraftSettings:
    """A draft: the student, distilled from the target. With a reference it is AdaSPEC, without one DistillSpec."""

    name: str = ""
    """Name of the draft in the report, and of its folder in the run."""
    reference: str | None = None
    """Name of an earlier draft, to train tokens where its loss is lower by most (AdaSPEC). null: all (DistillSpec)."""
    k: Share = 0.4
    """With a reference: share of the response tokens of a device's batch that are selected. Paper: 0.2 to 0.4."""
    divergence: DivergenceName = "forward_kl"
    """Loss per token between target p and draft q, and what dL is measured in; alpha = sum_x min(p(x), q(x)).
    forward_kl: KL(p || q), as in the papers. reverse_kl: KL(q || p). jsd: Jensen-Shannon. tv: 1 - alpha (slow from a
    cold start: see kl_first). neg_log_alpha: -log alpha. lk_hybrid: w·KL + (1 - w)·tv, w = exp(-3·alpha). kl_tv: KL +
    2·tv. cross_entropy: of the next token (DFlash). dspark: 0.1·cross_entropy + 1.8·tv."""
    kl_first: ClosedUnitInterval = 0.0
    """Share of the steps, from the first, that use forward KL before divergence takes over."""
    on_policy: ClosedUnitInterval = 0.0
    """Share of training examples whose response the draft writes, rewritten every refresh_every steps (DistillSpec)."""
    accepted_only: bool = False
    """Feature heads of at least two steps: a further step is trained only after tokens that would be accepted."""
    seed: Seed | None = None
    """Seed of the order of examples; null: the run's seed."""
    training: Values = field(default_factory=dict)
    """Keys of the section training whose values differ for this draft, such as {epochs: 3}."""

    @property
    def selects(self) -> bool:
        """Whether a reference selects tokens."""
        return self.reference is not None and self.k < 1

    def training_of(self, shared: TrainingSettings) -> TrainingSettings:
        """Return the section ``training`` with this draft's values; steps replace epochs, and epochs steps."""
        if not self.training:
            return shared
        length: Values = {"steps": None, "epochs": None} if self.training.keys() & {"steps", "epochs"} else {}
        changed = replace(shared, **(length | self.training))
        check_numbers(changed, f"drafts.{self.name}.training.")
        return changed


@dataclass
class EvaluationSettings:
    """What is measured at the end, on test prompts."""

    prompts: PositiveInt = 128
    """Test prompts for offline alpha: the mean of sum_x min(p(x), q(x)) over responses sampled at temperature 1."""
    accuracy_prompts: PositiveInt = 200
    """Prompts on which the target's answers are scored, where the task has a score."""
    decode_prompts: PositiveInt = 24
    """Prompts decoded for speeds: each once per draft, temperature and draft length."""
    max_new_tokens: PositiveInt = 128
    """Longest generated response."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """Decoding modes: 0 is greedy."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [2, 4, 6, 8])
    """Draft lengths tried with the exported draft."""


@dataclass
class ExportSettings:
    """How the exported draft is written."""

    choose: str = "best"
    """Name of the exported draft, or best: by alpha (heads: accepted length) on the validation examples."""
    dtype: Literal["keep", "float32", "bfloat16", "float16"] = "keep"
    """Number format of the exported weights; keep: as trained."""
    gguf: list[Literal["f32", "f16", "bf16", "q8_0"]] = field(default_factory=list)
    """Number formats in which target and draft are also written for llama.cpp, by its converter (make engines)."""


@dataclass
class TrainerSettings:
    """How training runs on the machine; Lightning's trainer takes most of these as they are."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda"] = "auto"
    """auto: CUDA where PyTorch finds it, else the CPU. Apple's GPUs are refused: they add no losses in float64."""
    devices: int | str = "auto"
    """Devices per machine. auto: one CPU process, or every GPU of the machine."""
    num_nodes: PositiveInt = 1
    """Machines. The processes of several machines are started by torchrun or srun."""
    strategy: str = "auto"
    """auto; ddp: a model on every device; fsdp: weights and optimiser states spread; or a name of Lightning."""
    accumulate: PositiveInt = 1
    """Micro-batches per optimiser step, in less memory, with the same result but that AdaSPEC selects within each."""
    attention: Attention = "auto"
    """Attention by transformers' name. auto: sdpa where the model has it. flash_attention_2 needs bf16 on a GPU."""
    precision: Precision = "32-true"
    """Lightning's precision. auto: bf16-mixed where the processor multiplies in bfloat16, else 32-true."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: a fraction of the memory, a third more time. Not for heads."""
    validate_every: PositiveInt = 100
    """Steps between validations, each with a checkpoint, from which a killed run goes on; the best weights are kept."""
    validation_examples: PositiveInt = 128
    """Validation examples used at each validation during training."""
    callbacks: list[Values] = field(default_factory=list)
    """Further Lightning callbacks: [{class_path: EarlyStopping, init_args: {monitor: validation_loss}}]. Also logged:
    loss, validation_accuracy, and in distillation validation_alpha, _agreement and _accepted_length."""
    extra: Values = field(default_factory=dict)
    """Further arguments of lightning.Trainer, such as {gradient_clip_val: 0.5} (1.0 without it)."""

    def callback_instances(self) -> list[Any]:
        """Return new instances of the callbacks: a stage must not see what another one left in them."""
        from jsonargparse import ArgumentError, ArgumentParser
        from lightning.pytorch.callbacks import Callback

        parser = ArgumentParser(exit_on_error=False)
        parser.add_argument("--value", type=list[Callback])
        try:
            made = parser.instantiate_classes(parser.parse_object({"value": copy.deepcopy(self.callbacks)}))
        except (ArgumentError, ValueError, TypeError, ImportError) as error:
            raise UserError(f"trainer.callbacks is {self.callbacks}: {error}") from error
        return list(made.value)


@dataclass
class Settings:
    """All settings of a run: target, student, teacher -> drafts -> export, measurement and report."""

    name: str = "run"
    """Name of the run, and of its folder."""
    seed: Seed = 0
    """Seed of the data, the initial weights and the order of examples."""
    output_dir: str = "runs"
    """Folder of all runs."""
    threads: PositiveInt | None = None
    """CPU threads for training; null: PyTorch's choice (all cores)."""
    tracker: Literal["wandb", "csv", "none"] = "wandb"
    """Where settings, losses, tables and plots are recorded. W&B is offline unless you are logged in."""
    data: DataSettings = field(default_factory=DataSettings)
    target: TargetSettings = field(default_factory=TargetSettings)
    student: StudentSettings = field(default_factory=StudentSettings)
    """Shape and start of every draft."""
    teacher: TeacherSettings = field(default_factory=TeacherSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)
    """Distillation of every draft that does not say otherwise."""
    drafts: list[DraftSettings] = field(default_factory=list)
    """The drafts, in the order in which they are trained."""
    evaluation: EvaluationSettings | Literal[False] = field(default_factory=EvaluationSettings)
    """Measurements after the export; false: none."""
    export: ExportSettings = field(default_factory=ExportSettings)
    trainer: TrainerSettings = field(default_factory=TrainerSettings)

    @property
    def language_models(self) -> dict[str, ModelSettings]:
        """The target, and the student where it is no head."""
        return {"target": self.target} | ({} if self.student.is_head else {"student": self.student})

    def validate(self, *, drafts: bool = True) -> None:
        """Refuse what can be judged without models and data; without ``drafts`` not what only their training needs."""
        from lightning import Trainer

        check_numbers(self, nested=True)
        self.data.validate()
        self.trainer.callback_instances()
        target, student, responses = self.target, self.student, self.teacher.responses
        engine, prompts, head = self.teacher.engine, self.data.from_target, student.is_head
        early = target.trained and not (target.layerskip.enabled and target.kind != "scratch")
        strange = not all(re.match("https?://", url) for url in engine.urls)
        decided = {"self", "logger", "max_epochs", "max_steps", "plugins", "val_check_interval"}
        decided |= {"accumulate_grad_batches", *(each.name for each in fields(TrainerSettings))}
        arguments = inspect.signature(Trainer.__init__).parameters.keys() - decided
        unknown = self.trainer.extra.keys() - arguments
        rounded, stands = target.round_to and target.kind != "as_is", self.teacher.signal == "vllm"
        idle = engine.urls and not responses.from_target and not stands
        refuse(
            self,
            (not re.match(r"[^/.][^/]*$", self.name), "name", "expected a plain folder name"),
            (target.kind in ("cut", *HEADS), "target.kind", "expected scratch, finetune, lora or as_is"),
            (rounded, "target.round_to", f"for kind as_is, and target.kind is {target.kind}"),
            (stands and target.placed, "teacher.signal", "and the target stands in an engine: set target.device_map "
             "and target.quantization to null, and give such options as teacher.engine.arguments"),
            (stands and head and engine.keep == "topk", "teacher.engine.keep", "and heads learn from whole "
             "distributions here: set it to bfloat16 or float8"),
            (engine.arguments and (engine.urls or not stands), "teacher.engine.arguments", "for an engine that the run "
             "starts, with teacher.signal vllm and without urls"),
            (prompts and self.drafts and not responses.from_target, "data.source", "whose prompts have no answers: set "
             "teacher.responses.source to target"),
            (prompts and early, "target.kind", "which trains it on answers to data.source target that it has yet to "
             "write: set target.kind to as_is (or enable target.layerskip on a given target)"),
            (idle, "teacher.engine.urls", "which is asked for nothing: set teacher.responses.source to target, or "
             "teacher.signal to vllm"),
            (strange, "teacher.engine.urls", "expected addresses such as http://127.0.0.1:8000/v1"),
            (unknown, "trainer.extra", f"expected keys among {', '.join(sorted(arguments))}"),
        )  # fmt: skip
        for name, model in self.language_models.items():
            if name == "student" and not drafts:
                continue
            given, heads = model.kind not in ("scratch", "cut"), model.architecture.heads
            uneven = model.kind == "scratch" and model.architecture.hidden_size % heads
            refuse(
                model,
                (given == (model.model is None), "model", f"and kind is {model.kind}: scratch and cut take no model, "
                 "other kinds a folder, a Hub name or a GGUF file"),
                (uneven, "architecture.hidden_size", f"expected a multiple of the {heads} heads"),
                where=f"{name}.",
            )  # fmt: skip
            if model.trained:
                model.training.validate(f"{name}.training")
        if drafts:
            self._validate_drafts()

    def _validate_drafts(self) -> None:
        """Check the drafts, what they start from, and that no part needs weights in a single place that are spread."""
        target, student, measured = self.target, self.student, self.evaluation
        names, keys = [draft.name for draft in self.drafts], [each.name for each in fields(TrainingSettings)]
        for index, draft in enumerate(self.drafts):
            earlier, where = names[:index], f"drafts[{index}]."
            reserved = draft.name in RESERVED or draft.name.startswith("checkpoints-")
            refuse(
                draft,
                (not re.sub("[-_]", "", draft.name).isalnum(), "name", "expected letters, digits, '-' and '_'"),
                (reserved, "name", "which is a file or folder of every run: choose another"),
                (draft.name in earlier, "name", "which is used twice: give each draft another name"),
                (draft.reference not in (None, *earlier), "reference", f"expected an earlier draft, one of {earlier}"),
                (draft.kl_first == 1, "kl_first", f"which leaves no step for {draft.divergence}: lower it"),
                (draft.training.keys() - set(keys), "training", f"expected keys of the section training: {keys}"),
                (draft.accepted_only and draft.selects, "accepted_only", "and its reference selects too: remove one"),
                where=where,
            )
            draft.training_of(self.training).validate(f"{where}training" if draft.training else "training")
        kind, head, on_policy = student.kind, student.is_head, any(draft.on_policy for draft in self.drafts)
        single = any(draft.accepted_only for draft in self.drafts) and (student.steps == 1 or student.is_block)
        size = student.block.size
        uses = {
            "drafts[].on_policy": on_policy,
            "target.layerskip": target.layerskip.enabled,
            "target.kind lora": target.kind == "lora",
            f"student.kind {kind}": head or kind == "lora",
        }
        unsupported = [name for name, used in uses.items() if used and self.trainer.strategy in SHARDED]
        refuse(
            self,
            (not names, "drafts", "expected at least one, such as drafts: [{name: distillspec}]"),
            (self.export.choose not in ("best", *names), "export.choose", f"expected best or one of {names}"),
            (head and student.steps < 1, "student.block.size", "which leaves no token to draft: raise it to 2 or more"),
            (kind == "dflash" and student.block.markov_rank, "student.block.markov_rank", "and only dspark and "
             "dflash2 have a bias by the token before: set it to null"),
            (student.is_block and (student.block.window or size) < size, "student.block.window", f"and a block of "
             f"{size} slots has to fit into it"),
            (kind == "mtp" and student.draft_vocab, "student.draft_vocab", "and mtp drafts all tokens: set it to null"),
            (kind == "mtp" and (target.kind != "as_is" or target.round_to), "student.kind", "and reads the target's "
             "files: set target.kind to as_is, target.round_to to null"),
            (single, "student.kind", "and accepted_only needs an EAGLE head of two drafting steps (unroll) or more"),
            (measured and not (measured.temperatures and measured.draft_lengths), "evaluation", "expected at least one "
             "of temperatures and of draft_lengths"),
            (on_policy and head and (target.placed or self.teacher.signal == "vllm"), "student.kind", "and "
             "drafts[].on_policy needs the target beside a head: choose another teacher.signal, and set "
             "target.device_map and target.quantization to null"),
            (unsupported, "trainer.strategy", f"which shards the weights and does not support {unsupported}: set it to "
             "ddp, or change these settings"),
        )  # fmt: skip
