"""Settings of ``draftsmith decode``: one dataclass per command; the text below each key is its help."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt

from decode.commands.cli import config_paths, parse, read_config
from decode.errors import UserError
from decode.options import ChatSettings, MethodOptions, Seed, Share, Temperature


@dataclass
class LoadSettings:
    """Which models, and where they run."""

    target: str | None = None
    """Folder, hub name or GGUF file of the target. Required."""
    dtype: str = "auto"
    """Number format of weights and arithmetic: float32, bfloat16, float16, float64; auto is the checkpoint's own on a
    GPU and float32 on a CPU. In 16 bits greedy texts may depend on the draft at near ties, by rounding."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto is the GPU where there is one."""
    device_map: str | None = None
    """Spread the target over several devices, such as auto (needs accelerate); overrides device."""
    trust_remote_code: bool = False
    """Run the Python code of a hub repository."""
    pack: Literal["off", "on", "auto"] = "auto"
    """On CPUs, copy weights at loading into the order in which the kernels read them: off, on, or auto, which packs
    large weights, or holds them in float16, where that changes no token."""
    threads: PositiveInt | None = None
    """Threads of torch; null: one or all, whichever is measured to be faster."""


@dataclass
class PairSettings(LoadSettings):
    """A target with one draft."""

    draft: str | None = None
    """Folder, hub name or GGUF file of the draft model, or folder of a head; mtp: the target's own next-token
    layers."""
    json: bool = False
    """Print one JSON object."""


@dataclass
class MethodSettings(MethodOptions):
    """Options of methods, and stores of retrieval drafters."""

    datastore: str | None = None
    """Folder made by `draftsmith decode datastore build`, for rest and adaptix."""


@dataclass
class SamplingSettings:
    """Sampling settings of target and draft."""

    top_k: NonNegativeInt | None = None
    """Keep the k most probable tokens; 0 keeps all. null: the model's generation_config (also for top_p, min_p,
    repetition_penalty)."""
    top_p: Share | None = None
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: ClosedUnitInterval | None = None
    """Keep tokens at least this fraction as probable as the most probable one."""
    repetition_penalty: PositiveFloat | None = None
    """Above 1, tokens already in the text become less likely; at temperature 0 too."""


@dataclass
class OneTemperature(SamplingSettings):
    """Sampling settings with a temperature."""

    temperature: Temperature = 0.0
    """0 is greedy; the smallest other value is 0.001."""


@dataclass
class PromptSettings(ChatSettings):
    """How prompts become chats."""

    def __post_init__(self) -> None:
        if self.chat is False and (self.system is not None or self.template_args):
            raise UserError(
                "a system message and template_args belong to a chat; give --system and --template-args without "
                "--chat false"
            )

    @property
    def drafts(self) -> list[str]:
        """The paths of the drafts, but for the target's own layers."""
        draft = getattr(self, "draft", None)
        return [] if draft in (None, "mtp") else [draft]


@dataclass
class SuiteSettings:
    """Prompts of a measurement."""

    suite: list[str] = field(default_factory=list)
    """Prompts; empty: chat where the tokenizer has a chat template, else arithmetic. Others: arithmetic, chat, gsm8k,
    humaneval, math_500, livecodebench, mt_bench, spec_bench, speed_bench,
    mbpp, mmlu, alpaca, cnn_dailymail, xsum, open; NAME=PATH reads one of them from a local file, and PATH other prompts
    (a column prompt, turns, text or question); arithmetic:2 is a difficulty, chat:qa a category."""
    split: str = "test"
    """Split of suites that have several."""
    limit: PositiveInt | None = 16
    """Prompts of each suite."""
    seed: Seed = 0
    """Seed of the prompts and of all random choices."""
    max_new_tokens: PositiveInt = 128
    """Maximum number of new tokens of each text."""


@dataclass
class GenerateSettings(PromptSettings, OneTemperature, MethodSettings, PairSettings):
    """Settings of draftsmith decode generate."""

    method: str | None = None
    """Decoding method; null: vanilla with a draft, else autoregressive. See `draftsmith decode methods`."""
    prompt: str | None = None
    """Text to continue; null reads standard input."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of new tokens."""
    seed: Seed | None = None
    """Seed of sampling; null draws one, which --json prints."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text once it contains one; the string stays."""
    ignore_eos: bool = False
    """Go on after the end-of-text token."""
    show: bool = False
    """Colour accepted, rejected and corrected tokens, and print the statistics of the rounds with their formulas."""
    compare: bool = False
    """Write the text without the draft, then with it, both as --show does, and print how much faster that is."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise UserError("stop holds an empty text, which every text contains; give the words that end the text")
        if self.compare and self.json:
            raise UserError("--compare prints two texts, and --json one as an object; give one of the two options")


@dataclass
class ProfileSettings(SuiteSettings, PromptSettings, OneTemperature, PairSettings):
    """Settings of draftsmith decode profile, which needs a draft."""

    longest: PositiveInt = 15
    """Longest draft to predict."""
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Also measure costs and predict the speedup at each of these batch sizes. The best draft lengths are
    written into the speculation_profile.json of the draft's folder, if there is one, as vLLM takes them
    (num_speculative_tokens_per_batch_size)."""


@dataclass
class StoreSettings:
    """Settings of draftsmith decode datastore build."""

    tokenizer: str | None = None
    """Folder, hub name or GGUF file of the target or its tokenizer. Required."""
    input: list[str] = field(default_factory=list)
    """Text or .jsonl files, or suites such as arithmetic and gsm8k=PATH (prompts and answers of the training split).
    Required."""
    output: str | None = None
    """Folder to write to. Required."""
    texts: PositiveInt = 20_000
    """Texts taken from each suite."""
    trust_remote_code: bool = False
    """Run the Python code that a hub repository brings."""


def required(settings: Any, *names: str) -> None:
    """Refuse missing settings."""
    for name in names:
        if not getattr(settings, name):
            raise UserError(f"--{name.replace('_', '-')} is missing; `--help` explains it")


@dataclass
class BenchSettings(SuiteSettings, PromptSettings, SamplingSettings, MethodSettings, LoadSettings):
    """Settings of draftsmith decode bench, and of the section bench of a configuration."""

    name: str | None = None
    """Name of the run whose target and export are measured; null: that of the configuration."""
    draft: list[str] = field(default_factory=list)
    """Draft models: folders, hub names or GGUF files, NAME=PATH to name them in the table. Several are compared."""
    methods: list[str] = field(default_factory=list)
    """Methods to compare, among them transformers' generate, generate-assistant and generate-prompt-lookup; empty: a
    chain of the draft and one with copied phrases, and what --datastore, --probes and --exit-layer are for. Options of
    one method follow its name, NAME:option=value:...: ears:beta=0.2, vanilla:draft_length=5, and
    vanilla:rule=ears,vanilla:rule=fuzzy compares acceptance rules. Plain generate is always there."""
    draft_lengths: list[PositiveInt] = field(default_factory=list)
    """Run the fixed-length methods once with each of these."""
    batch_sizes: list[PositiveInt] = field(default_factory=lambda: [1])
    """Sequences decoded at once; the methods are compared at each of these batch sizes. Transformers'
    assisted generation runs at 1 only. Each batch size gets --limit prompts, but at least two for each place of the
    batch."""
    limit: PositiveInt | None = 20
    """Prompts of each suite, a sample chosen by the seed, evenly from its categories; null: all."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0])
    """The methods are compared at each of these; 0 is greedy."""
    repeats: PositiveInt = 1
    """Times each prompt is given to each method; medians are taken."""
    corpus: list[str] = field(default_factory=list)
    """Text or .jsonl files, or suites (their training split), from which the stores of rest and adaptix are built
    where none is given."""
    corpus_texts: PositiveInt = 20_000
    """Texts taken from each suite of the corpus."""
    output: str | None = None
    """Folder of bench-DATE.json, .html and .csv; null: the run of the draft (without one of the target), else
    runs/bench."""

    @property
    def folder(self) -> str:
        """Where results go."""
        runs = set(self.runs)
        return self.output or (len(runs) == 1 and runs.pop()) or "runs/bench"

    @property
    def drafts(self) -> list[str]:
        """The paths of the drafts, but for the target's own layers."""
        return [item.partition("=")[2] or item for item in self.draft if item != "mtp"]

    @property
    def runs(self) -> list[str | None]:
        """The run of each draft, without any that of the target."""
        return [run_of(path) for path in self.drafts or filter(None, [self.target])]


def run_of(path: str) -> str | None:
    """The folder of the run that made a model; None of one that is in no run."""
    folder = Path(path).parent
    return str(folder) if (folder / "work").is_dir() or (folder / "settings.yaml").is_file() else None


def bench_settings(argv: Sequence[str], description: str = "", examples: str = "") -> BenchSettings:
    """Settings of ``bench``: the section ``bench`` of a configuration, and what follows from its other sections.

    A configuration, or `name`, is that of the run whose target and draft are measured, and where results go, unless the
    command line names other models; its threads; and the data they were made for.

    Raises:
        UserError: a file that is missing or not valid, or an unknown key.
    """
    settings = parse(BenchSettings, argv, "draftsmith decode bench", description, examples, section="bench")
    if not (paths := config_paths(argv)) and settings.name is None:
        return settings
    content = read_config(paths)
    run_folder = f"{content.get('output_dir', 'runs')}/{settings.name or content.get('name', 'run')}"
    run = next(filter(None, settings.runs), run_folder)
    if not (any(item.startswith("--suite") for item in argv) or "suite" in (content.get("bench") or {})):
        settings.suite = default_suites(content.get("data"))
    if not any(re.match("--(target|draft)(=|$)", item) for item in argv):
        settings.output = settings.output or run_folder
    settings.target = settings.target or f"{run}/target"
    settings.draft = settings.draft or [str(f) for f in [Path(run, "export")] if f.is_dir()]
    settings.threads = settings.threads or content.get("threads")
    return settings


def default_suites(data: Any) -> list[str]:
    """The suite of a configuration's ``data`` section; as in training, the name of a preset wins over a path."""
    from decode.measure.suites import PRESETS

    if not isinstance(data, dict):
        return []
    source = str(data.get("source", "arithmetic"))
    if source == "target":  # whose own prompts have no suite
        return ["chat"]
    if file := (data.get("files") or {}).get("test"):
        return [f"{source if source in PRESETS else 'prompts'}={file}"]
    return [source] if source in PRESETS or not Path(source).exists() else [f"prompts={source}"]


@dataclass
class ServeCheckSettings(SuiteSettings, PromptSettings, PairSettings):
    """Settings of draftsmith decode serve-check; the draft is a folder as it is to be served."""

    engine: str = "vllm"
    """The engine, vllm or llama.cpp; `make engines` installs both."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [3, 5, 7])
    """Tokens drafted per round; the engine is started once for each."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """Each is checked; 0 is greedy."""
    max_new_tokens: PositiveInt = 64
    program: str | None = None
    """Interpreter of an environment that has vLLM, or llama-server; null: as `make engines` installs them."""
    url: str | None = None
    """Address of a running server with the draft, whose draft length is given by --draft-lengths. Its texts are
    compared with transformers', and no speedup is measured."""
    gguf_type: Literal["f32", "f16", "bf16", "q8_0"] = "f32"
    """Number format of what is converted for llama.cpp."""
    concurrency: list[PositiveInt] = field(default_factory=list)
    """Also measure speed with so many requests at a time, such as 1,4,16, with and without the draft. The model card
    then says up to which load the draft pays."""
    timeout: PositiveInt = 300
    """Seconds until the engine has to be ready, and for each text."""


@dataclass
class PaperSettings:
    """Settings of draftsmith decode paper."""

    paper: str | None = None
    """adaptix, adasd, adaspec, adaspeed or ears; may stand without --paper. Required."""
    scale: str = "quickstart"
    """Configuration to measure: the name of a file in configs/papers/PAPER, without .yaml."""
    run: str | None = None
    """Folder whose last benchmark is printed instead of measuring; for adaspec that of a training, default
    runs/quickstart."""
    output: str | None = None
    """Folder of the benchmark's results; null: runs/papers/<paper>-<scale>."""
