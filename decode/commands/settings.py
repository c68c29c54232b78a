"""Settings of ``python -m decode``: one dataclass per command; the text below each key is its help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt

from decode.bench.datasets import PRESETS
from decode.commands.parsing import config_paths, parse, read_config
from decode.errors import UserError
from decode.method_options import Checked, MethodOptions, NgramOrder, Seed, Share, Temperature


@dataclass
class LoadSettings(Checked):
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
    draft_vocabulary: Literal["same", "intersection"] = "same"
    """same refuses a draft whose tokenizer is not the target's; intersection lets it draft the tokens that both
    vocabularies have, which stays lossless (arXiv 2502.05202)."""
    pack: Literal["off", "on", "auto"] = "auto"
    """On CPUs, copy weights at loading into the order in which the kernels read them: off, on, or auto, which measures
    each shape and packs where that is faster (models up to 1 GiB)."""
    threads: PositiveInt | None = None
    """Threads of torch; null: one or all, whichever is measured to be faster."""


@dataclass
class MethodSettings(MethodOptions):
    """Stop rule, acceptance rule, and stores of retrieval drafters."""

    stop_rule: str | None = None
    """Another stop rule than the method's own: length, unsure, hf-dynamic, hf-constant, hf-heuristic, draft-verify,
    product, entropy, cost-optimal."""
    rule: str | None = None
    """Another acceptance rule than the method's own: exact, ears, adasd, adasd-a, adasd-b, adasd-c, fuzzy, typical.
    All but exact are relaxed: the output is no longer distributed as the target's."""
    datastore: str | None = None
    """Folder made by `python -m decode datastore build`, for rest; hybrid copies from it too."""
    trigrams: str | None = None
    """Folder made by `python -m decode trigrams build`, for adaptix; null: the datastore's folder."""


@dataclass
class SamplingSettings(Checked):
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
class ChatSettings(Checked):
    """Whether prompts are put into the chat template."""

    chat: bool | None = None
    """Put prompts into the tokenizer's chat template; in suites with several turns, later ones follow the target's own
    greedy answers. Null: where the tokenizer has one; --chat false continues prompts as plain text."""
    system: str | None = None
    """System message of the chats; null: the template's default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.system is not None and self.chat is False:
            raise UserError("a system message belongs to a chat; give --system without --chat false")


@dataclass
class SuiteSettings(Checked):
    """Prompts of a measurement."""

    suite: list[str] = field(default_factory=lambda: ["arithmetic"])
    """Prompts: arithmetic, chat, gsm8k, humaneval, math_500, livecodebench, mt_bench, spec_bench, speed_bench, mbpp,
    mmlu, alpaca, cnn_dailymail, xsum, open; a local file, whose columns say what it is, or NAME=PATH; arithmetic:2 is
    a difficulty, chat:qa a category, speed_bench:throughput_1k a configuration."""
    split: str = "test"
    """Split of suites that have several."""
    limit: PositiveInt | None = 16
    """Prompts of each suite."""
    seed: Seed = 0
    """Seed of the prompts and of all random choices."""


@dataclass
class DemoSettings(ChatSettings, SamplingSettings, MethodSettings, LoadSettings):
    """Settings of python -m decode demo, and those that generate shares with it."""

    draft: str | None = None
    """Folder, hub name or GGUF file of the draft model; mtp: the target's own next-token layers."""
    method: str | None = None
    """Decoding method; null: vanilla with a draft (demo with a feature head: eagle), else autoregressive. See `python
    -m decode methods`."""
    prompt: str | None = None
    """Text to continue; null reads standard input."""
    max_new_tokens: PositiveInt = 256
    """Maximum number of new tokens."""
    temperature: Temperature = 0.0
    """0 is greedy; the smallest other value is 0.001."""
    seed: Seed | None = None
    """Seed of sampling; null draws one, which --json prints."""
    stop: list[str] = field(default_factory=list)
    """Strings that end the text once it contains one; the string stays."""
    ignore_eos: bool = False
    """Go on after the end-of-text token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "" in self.stop:
            raise UserError("stop holds an empty text, which every text contains; give the words that end the text")


@dataclass
class GenerateSettings(DemoSettings):
    """Settings of python -m decode generate."""

    show: bool = False
    """Colour accepted, rejected and corrected tokens, and print the statistics of the rounds with their formulas."""
    json: bool = False
    """Print one JSON object instead of text: text, ids, metrics, who wrote each token, why it ended."""


@dataclass
class ProfileSettings(SuiteSettings, ChatSettings, SamplingSettings, LoadSettings):
    """Settings of python -m decode profile."""

    draft: str | None = None
    """Folder, hub name or GGUF file of the draft model. Required."""
    temperature: Temperature = 0.0
    """0 is greedy; the smallest other value is 0.001."""
    max_new_tokens: PositiveInt = 128
    """Maximum number of new tokens of each text that the target writes for measuring α."""
    longest: PositiveInt = 15
    """Longest draft to predict."""
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Also measure costs and predict speedup and goodput at each of these batch sizes. The best draft lengths are
    written into the speculation_profile.json of the draft's folder, if there is one, as vLLM takes them
    (num_speculative_tokens_per_batch_size)."""
    json: bool = False
    """Print one JSON object."""


@dataclass
class StoreSettings(Checked):
    """Settings of python -m decode datastore build and python -m decode trigrams build."""

    tokenizer: str | None = None
    """Folder, hub name or GGUF file of the target or its tokenizer. Required."""
    input: list[str] = field(default_factory=list)
    """Text or .jsonl files, or suites such as arithmetic and gsm8k=PATH (prompts and answers of the training split).
    Required."""
    output: str | None = None
    """Folder to write to. Required."""
    texts: PositiveInt = 20_000
    """Texts taken from each suite."""
    order: NgramOrder = 3
    """Trigrams only: n of the n-grams, 2 to 4."""
    trust_remote_code: bool = False
    """Run the Python code that a hub repository brings."""


@dataclass
class ReportSettings:
    """Settings of python -m decode report."""

    runs: list[str] = field(default_factory=list)
    """Folders of runs, given without an option: python -m decode report runs/*. Empty: runs."""


def required(settings: Any, *names: str) -> None:
    """Refuse missing settings."""
    for name in names:
        if not getattr(settings, name):
            raise UserError(f"--{name.replace('_', '-')} is missing; `--help` explains it")


@dataclass
class BenchSettings(SuiteSettings, ChatSettings, SamplingSettings, MethodSettings, LoadSettings):
    """Settings of python -m decode bench, and of the section bench of a configuration."""

    draft: list[str] = field(default_factory=list)
    """Draft models: folders, hub names or GGUF files, NAME=PATH to name them in the table. Several are compared."""
    methods: list[str] = field(default_factory=list)
    """Methods to compare, among them transformers' generate, generate-assistant, generate-assistant-dynamic and
    generate-prompt-lookup; empty: all that the given models and files allow. Options of one method follow its
    name, NAME:option=value:...: ears:beta=0.2, adaptix:order=2, adaspeed:exit_layer=4, vanilla:draft_length=5."""
    baselines: bool = True
    """Also run transformers' own generation: plain, with the draft as assistant, with prompt lookup."""
    draft_lengths: list[PositiveInt] = field(default_factory=list)
    """Run the fixed-length methods once with each of these."""
    batch_sizes: list[PositiveInt] = field(default_factory=lambda: [1])
    """Sequences decoded at once (also --concurrency); the methods are compared at each of these batch sizes. With one
    above 1 the default methods are: no draft, fixed draft lengths (--draft-lengths, else 1, 2, 4 and 8), cost-optimal,
    and transformers' generate on batches. Each batch size gets --limit prompts, but at least two for each place of the
    batch."""
    limit: PositiveInt | None = 20
    """Prompts of each suite (also --prompts), a sample chosen by the seed, evenly from its categories; null: all."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0])
    """0 is greedy; the smallest other value is 0.001."""
    max_new_tokens: PositiveInt = 128
    """Maximum number of new tokens per text."""
    repeats: PositiveInt = 3
    """Times each prompt is given to each method; medians are taken."""
    corpus: list[str] = field(default_factory=list)
    """Text or .jsonl files, or suites (their training split), from which the stores of rest and adaptix are built
    where none is given."""
    corpus_texts: PositiveInt = 20_000
    """Texts taken from each suite of the corpus."""
    output: str | None = None
    """Folder of report.json and the HTML page; null: runs/bench, with a configuration runs/<name>."""


def bench_settings(argv: Sequence[str], description: str = "", examples: str = "") -> BenchSettings:
    """Settings of ``bench``: the section ``bench`` of a configuration, and what follows from its other sections.

    A configuration names the run whose target and draft are measured, and the data they were made for.

    Raises:
        UserError: a file that is missing or not valid, or an unknown key.
    """
    settings = parse(
        BenchSettings,
        argv,
        prog="python -m decode bench",
        description=description,
        examples=examples,
        section="bench",
        aliases={"prompts": "limit", "concurrency": "batch_sizes"},
    )
    if not (paths := config_paths(argv)):
        return settings
    content = read_config(paths)
    run = Path(content.get("output_dir", "runs")) / content.get("name", "run")
    given = any(item.startswith("--suite") for item in argv) or "suite" in (content.get("bench") or {})
    if not given:
        settings.suite = default_suites(content.get("data"))
    settings.target = settings.target or str(run / "target")
    if not settings.draft and (found := next((f for f in (run / "export", run / "adaspec") if f.is_dir()), None)):
        settings.draft = [str(found)]
    settings.output = settings.output or str(run)
    return settings


def default_suites(data: Any) -> list[str]:
    """The suite of a configuration's ``data`` section; as in training, the name of a preset wins over a path."""
    if not isinstance(data, dict):
        return ["arithmetic"]
    source = str(data.get("source", "arithmetic"))
    if source == "target":  # whose own prompts have no suite
        return ["chat"]
    if source == "arithmetic":
        return [f"arithmetic:{data.get('difficulty', 1)}"]
    if data.get("test_file"):
        return [f"{source}={data['test_file']}"]
    return [source] if source in PRESETS or not Path(source).exists() else [f"prompts={source}"]


@dataclass
class ServeCheckSettings(SuiteSettings, ChatSettings, LoadSettings):
    """Settings of python -m decode serve-check."""

    engine: str = "vllm"
    """vllm or llama.cpp; `make engines` installs both."""
    draft: str | None = None
    """Folder of the draft model or feature head, as it is to be served. Required, unless draft_shape is given."""
    draft_shape: str | None = None
    """Time an untrained draft of this shape instead, width x layers x heads such as 192x2x3, and print the speedup
    that a draft of this shape would give at acceptance rates of 0.5 to 0.9."""
    draft_lengths: list[PositiveInt] = field(default_factory=lambda: [3, 5, 7])
    """Tokens drafted per round; the engine is started once for each."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0, 1.0])
    """0 is greedy; the smallest other value is 0.001."""
    max_new_tokens: PositiveInt = 64
    """Maximum number of new tokens per text."""
    python: str | None = None
    """Interpreter of an environment that has vLLM; null: .venv-vllm/bin/python."""
    binary: str | None = None
    """llama-server; null: .engines/llama.cpp/build/bin/llama-server."""
    url: str | None = None
    """Address of a running server with the draft, whose draft length is given by --draft-lengths. Its texts are
    compared with transformers', and no speedup is measured."""
    gguf_type: str = "f32"
    """Number format of what is converted for llama.cpp: f32, f16, bf16 or q8_0."""
    timeout: PositiveInt = 300
    """Seconds until the engine has to be ready, and for each text."""
    json: bool = False
    """Print one JSON object."""


@dataclass
class PaperSettings(Checked):
    """Settings of python -m decode paper."""

    paper: str | None = None
    """adaptix, adasd, adaspec, adaspeed or ears; may stand without --paper. Required."""
    scale: str = "quickstart"
    """Configuration to measure: the name of a file in configs/papers/PAPER, without .yaml."""
    configs: str = "configs/papers"
    """Folder of the papers' configurations."""
    setting: str = ""
    """Part of the name of the published setting to compare with, such as "7B"; empty: the paper's first one."""
    run: str | None = None
    """Folder with a report.json to print instead of measuring; for adaspec that of a training, default
    runs/quickstart."""
    output: str | None = None
    """Folder of the benchmark's report.json; null: runs/papers/<paper>-<scale>."""
