"""Settings of ``python -m decode``: one dataclass a command; the texts below each key are its help."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from jsonargparse.typing import ClosedUnitInterval, NonNegativeInt, PositiveFloat, PositiveInt

from decode.core.errors import UserError
from decode.core.method_options import Checked, MethodOptions, NgramOrder, Seed, Share, Temperature


@dataclass
class LoadSettings(Checked):
    """Which models, and where they run."""

    target: str | None = None
    """Folder, hub name or GGUF file of the target. Required."""
    dtype: str = "auto"
    """Number format of weights and arithmetic: float32, bfloat16, float16, float64; auto is the checkpoint's own on a
    GPU and float32 on a CPU. Only the wider two give greedy texts that are identical whatever the draft: in 16
    bits lossless means the distribution up to rounding, and near ties fall either way."""
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
    """Seed of the prompts and of all random choices."""


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
    limit: PositiveInt | None = 16
    """Prompts of each suite."""
    temperature: Temperature = 0.0
    """0 is greedy; the smallest other value is 0.001."""
    max_new_tokens: PositiveInt = 128
    """Maximum number of new tokens of each text that the target writes for measuring α."""
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


def required(settings: Any, *names: str) -> None:
    """Refuse settings that were left out."""
    for name in names:
        if not getattr(settings, name):
            what = next((f.type for f in dataclasses.fields(settings) if f.name == name), "")
            value = "PATH ..." if "list" in str(what) else "PATH"
            raise UserError(f"--{name.replace('_', '-')} is missing; give --{name.replace('_', '-')} {value}")
