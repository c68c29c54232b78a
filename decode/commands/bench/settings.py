"""Settings of ``python -m decode bench``; the texts below each key are its help."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt

from decode.commands.parsing.command_line import parse, read_config
from decode.commands.parsing.config_files import config_paths
from decode.commands.settings import ChatSettings, LoadSettings, MethodSettings, SamplingSettings, SuiteSettings
from decode.core.method_options import Temperature


@dataclass
class BenchSettings(SuiteSettings, ChatSettings, SamplingSettings, MethodSettings, LoadSettings):
    """Settings of python -m decode bench, and of the section bench of a configuration."""

    draft: list[str] = field(default_factory=list)
    """Draft models: folders, hub names or GGUF files, NAME=PATH to name them in the table. Several are compared."""
    methods: list[str] = field(default_factory=list)
    """Methods to compare, among them transformers' generate, generate-assistant, generate-assistant-dynamic and
    generate-prompt-lookup; empty: all that the given models and files allow. Options of one method follow its
    name, NAME:option=value:...: ears:beta=0.2, adaptix:order=2, adaspeed:exit_layer=4, vanilla:draft_length=5."""
    peers: bool = True
    """Also run transformers' own generation: plain, with the draft as assistant, with prompt lookup."""
    draft_lengths: list[PositiveInt] = field(default_factory=list)
    """Run the fixed-length methods once with each of these."""
    batch_sizes: list[PositiveInt] = field(default_factory=list)
    """Decode this many texts at once; the methods are compared at each of these batch sizes instead of on one text.
    Default methods: no draft, fixed draft lengths (--draft-lengths, else 1, 2, 4 and 8), cost-optimal, and
    transformers' generate on batches. Each batch size gets --limit prompts, but at least two per place of the
    batch."""
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
    """Maximum number of new tokens per text."""
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
