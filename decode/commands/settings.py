"""Settings of ``python -m decode``: one dataclass a command; the texts below each key are its help."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt

from decode.commands.command_line import parse, read_config
from decode.commands.config_files import config_paths
from decode.core.errors import UserError
from decode.core.method_options import Checked, MethodOptions, NgramOrder, Seed, Share, Temperature


@dataclass
class LoadSettings(Checked):
    """Which models, and where they run."""

    target: str | None = None
    """Folder, hub name or GGUF file of the target. Required."""
    dtype: str = "auto"
    """Of weights and arithmetic: float32, bfloat16, float16, float64; auto is the checkpoint's own on a GPU and float32
    on a CPU. Only the wider two give greedy texts that are identical whatever the draft: in 16 bits lossless means the
    distribution up to rounding, and near ties fall either way."""
    device: str = "auto"
    """cpu, cuda, cuda:1; auto is the GPU where there is one."""
    device_map: str | None = None
    """Spread the target over several devices, such as auto (needs accelerate); overrides device."""
    trust_remote_code: bool = False
    """Run the Python code that a hub repository brings."""
    draft_vocabulary: Literal["same", "intersection"] = "same"
    """same refuses a draft whose tokenizer is not the target's; intersection lets it draft the tokens that both
    vocabularies have, which stays lossless (arXiv 2502.05202)."""
    compile: Literal["none", "default", "reduce-overhead"] = "none"
    """torch.compile for target and draft, with a cache of fixed size: none, default, or reduce-overhead, which replays
    CUDA graphs. For GPUs; on CPUs the plain forward is faster. Each length of input is compiled when it first occurs,
    which takes seconds to minutes; drafts by the target's own layers and feature heads stay as they are."""
    pack: Literal["off", "on", "auto"] = "auto"
    """On CPUs, weights in the order that the kernels read them, copied at loading: off, on, or auto, which measures
    each shape and packs where that is faster (models up to 1 GiB). Checking several tokens then costs little more than
    reading one."""
    threads: PositiveInt | None = None
    """Threads of torch; null measures one against all and takes the faster (small models are fastest on one)."""


@dataclass
class MethodSettings(MethodOptions):
    """Which stop rule and acceptance rule, and what retrieval drafts from."""

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
    """How tokens are drawn, the same for target and draft."""

    top_k: NonNegativeInt | None = None
    """Keep the k most probable tokens; 0 keeps all. Null, here and below: as the model's generation_config says."""
    top_p: Share | None = None
    """Keep the smallest set of tokens whose probability reaches this."""
    min_p: ClosedUnitInterval | None = None
    """Keep tokens at least this fraction as probable as the most probable one."""
    repetition_penalty: PositiveFloat | None = None
    """Above 1, tokens already in the text become less likely; at temperature 0 too."""


@dataclass
class ChatSettings(Checked):
    """Whether prompts are what a user says to a chat model."""

    chat: bool | None = None
    """Put prompts into the tokenizer's chat template; in suites with several turns, later ones follow the target's own
    greedy answers. Null: where the tokenizer has one; --chat false continues prompts as plain text."""
    system: str | None = None
    """System message of the chats; null: what the template writes by itself."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.system is not None and self.chat is False:
            raise UserError("a system message belongs to a chat; give --system without --chat false")


@dataclass
class SuiteSettings(Checked):
    """Which prompts are measured on."""

    suite: list[str] = field(default_factory=lambda: ["arithmetic"])
    """Prompts; see `python -m decode bench --help`."""
    split: str = "test"
    """Split of suites that have several."""
    seed: Seed = 0
    """Of prompts and everything random."""


@dataclass
class DemoSettings(ChatSettings, SamplingSettings, MethodSettings, LoadSettings):
    """Settings of python -m decode demo, and those that generate shares with it."""

    draft: str | None = None
    """Folder, hub name or GGUF file of the draft model."""
    method: str | None = None
    """Decoding method; null: vanilla with a draft (demo with a feature head: eagle), else autoregressive. See `python
    -m decode methods`."""
    prompt: str | None = None
    """Text to continue; null reads standard input."""
    max_new_tokens: PositiveInt = 256
    """Most tokens to generate."""
    temperature: Temperature = 0.0
    """0 is greedy; the smallest other value is 0.001."""
    seed: Seed | None = None
    """Of sampling; null draws one, and prints it with --json."""
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
class BenchSettings(SuiteSettings, ChatSettings, SamplingSettings, MethodSettings, LoadSettings):
    """Settings of python -m decode bench, and of the section bench of a configuration."""

    draft: list[str] = field(default_factory=list)
    """Draft models: folders, hub names or GGUF files, NAME=PATH to name them in the table. Several are compared."""
    methods: list[str] = field(default_factory=list)
    """Methods and peers to compare; empty: all that the given models and files allow. A method may carry options of its
    own, NAME:option=value:...: ears:beta=0.2, adaptix:order=2, adaspeed:exit_layer=4, vanilla:draft_length=5."""
    peers: bool = True
    """Also run transformers' own generation: plain, with the draft as assistant, with prompt lookup."""
    draft_lengths: list[PositiveInt] = field(default_factory=list)
    """Run the fixed-length methods once with each of these."""
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Decode so many texts at once, and compare the methods at each of these batch sizes instead of on one text: the
    loop without a draft, the fixed length methods (at --draft-lengths, else 1, 2, 4 and 8), cost-optimal, and
    transformers' generate on batches. Each batch size gets --limit prompts, or twice as many as it holds."""
    suite: list[str] = field(default_factory=lambda: ["arithmetic"])
    """Prompts: arithmetic, chat, gsm8k, humaneval, mbpp, mmlu, alpaca, mt_bench, spec_bench, cnn_dailymail, xsum, open;
    a local file, whose columns say what it is, or NAME=PATH; arithmetic:2 is a difficulty, chat:qa a category."""
    limit: PositiveInt | None = 20
    """Prompts of each suite (also --prompts), a sample chosen by the seed, evenly from its categories; null: all."""
    temperatures: list[Temperature] = field(default_factory=lambda: [0.0])
    """0 is greedy; the smallest other value is 0.001."""
    alpha_temperatures: list[Temperature] = field(default_factory=list)
    """Also measure the drafts' offline α at these temperatures, without top-k, top-p and min-p, on texts that the
    target writes for the prompts: the number that compares drafts."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of each text."""
    repeats: PositiveInt = 3
    """Times each prompt is given to each method; medians are taken."""
    ignore_eos: bool = False
    """Generate max_new_tokens always, so that all texts are equally long. Speed ratios of relaxed and sampled methods
    are then over equal lengths; accuracy means nothing."""
    corpus: list[str] = field(default_factory=list)
    """Text or .jsonl files, or suites (their training split), from which the stores of rest and adaptix are built
    where none is given."""
    corpus_texts: PositiveInt = 20_000
    """Texts taken from each suite of the corpus."""
    cost_turns: PositiveInt = 24
    """Measurements of c and v(n), spread over the prompts of each suite."""
    samples: NonNegativeInt = 1
    """Prompts of each suite whose texts are kept in the report, with marks on who wrote each token."""
    allow_code_execution: bool = False
    """Run generated programs to score humaneval and mbpp, each in a limited process."""
    output: str | None = None
    """Folder of report.json and the HTML page; null: runs/bench, with a configuration runs/<name>."""


@dataclass
class ProfileSettings(SuiteSettings, ChatSettings, SamplingSettings, LoadSettings):
    """Settings of python -m decode profile."""

    draft: str | None = None
    """Folder, hub name or GGUF file of the draft model. Required."""
    limit: PositiveInt | None = 16
    """Prompts of each suite."""
    temperature: Temperature = 0.0
    """0 is greedy; the smallest other value is 0.001."""
    max_new_tokens: PositiveInt = 128
    """Most tokens of each text that the target writes for measuring α."""
    longest: PositiveInt = 15
    """Longest draft to predict."""
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Also measure the costs of so many texts at once, and predict speedup and goodput at each of these batch sizes.
    The best draft lengths are written into the speculation_profile.json of the draft's folder, where there is one, as
    vLLM takes them (num_speculative_tokens_per_batch_size), and into its model card."""
    json: bool = False
    """Print one JSON object."""


@dataclass
class StoreSettings(Checked):
    """Settings of python -m decode datastore build and python -m decode trigrams build."""

    tokenizer: str | None = None
    """Folder, hub name or GGUF file of the target or its tokenizer. Required."""
    input: list[str] = field(default_factory=list)
    """Text or .jsonl files, or suites such as arithmetic and gsm8k=PATH (prompt and answer of the training split)."""
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
    """Folders of runs, given without an option: python -m decode report runs/*. Null: runs."""
    output: str | None = None
    """The page; null: index.html in the folder that holds the runs."""


@dataclass
class PaperSettings(Checked):
    """Settings of python -m decode paper."""

    paper: str | None = None
    """adasd, adaptix, ears, adaspeed or adaspec; may stand without --paper. Required."""
    scale: str = "quickstart"
    """quickstart, gpu-small or full."""
    run: str | None = None
    """Folder of the target, draft and probes; null: runs/quickstart, or runs/gpu-small. Not for full."""
    configs: str = "configs/papers"
    """Where the papers' configurations lie."""
    only: list[str] = field(default_factory=list)
    """At full scale: these configurations alone, by their files' names without .yaml."""
    limit: PositiveInt | None = None
    """Prompts of each suite; null: as in the configuration."""
    repeats: PositiveInt | None = None
    """Times each prompt is given to each method; null: as in the configuration."""
    again: bool = False
    """Measure anew what was measured with the same settings and weights."""
    output: str | None = None
    """Folder of report.json and table.md; null: runs/papers/<paper>-<scale>."""
    dry_run: bool = False
    """Everything in miniature: tiny random models of the same families, few prompts, no network."""


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
        aliases={"prompts": "limit"},
    )
    if not (paths := config_paths(argv)):
        return settings
    content = read_config(paths)
    run = Path(content.get("output_dir", "runs")) / content.get("name", "run")
    given = any(item.startswith("--suite") for item in argv) or "suite" in (content.get("bench") or {})
    if not given:
        settings.suite = default_suites(content.get("data"))
    settings.target = settings.target or str(run / "target")
    if not settings.draft and (found := next((f for f in (run / "export", run / "draft") if f.is_dir()), None)):
        settings.draft = [str(found)]
    settings.output = settings.output or str(run)
    return settings


def required(settings: Any, *names: str) -> None:
    """Refuse settings that were left out.

    Raises:
        UserError: naming the option.
    """
    for name in names:
        if not getattr(settings, name):
            what = next((f.type for f in dataclasses.fields(settings) if f.name == name), "")
            value = "PATH ..." if "list" in str(what) else "PATH"
            raise UserError(f"--{name.replace('_', '-')} is missing; give --{name.replace('_', '-')} {value}")


def default_suites(data: Any) -> list[str]:
    """The suite that belongs to a configuration's ``data`` section."""
    if not isinstance(data, dict):
        return ["arithmetic"]
    source = str(data.get("source", "arithmetic"))
    if source == "target":  # whose own prompts have no suite
        return ["chat"]
    if source == "arithmetic":
        return [f"arithmetic:{data.get('difficulty', 1)}"]
    if data.get("test_file"):
        return [f"{source}={data['test_file']}"]
    return [f"prompts={source}"] if Path(source).exists() else [source]
