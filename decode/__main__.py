"""``python -m decode``: generate, compare, profile, and build what retrieval drafts from."""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from decode.commands.command_line import parse, take_flag
from decode.commands.engines.settings import ServeCheckSettings, ServedSettings, WhatIfSettings
from decode.commands.exit_status import run_main
from decode.commands.settings import (
    BenchSettings,
    DemoSettings,
    GenerateSettings,
    PaperSettings,
    ProfileSettings,
    ReportSettings,
    StoreSettings,
    bench_settings,
)
from decode.core.errors import UserError, unknown


@dataclass(frozen=True)
class Command:
    """A subcommand.

    Attributes:
        settings: the dataclass of its options.
        about: what the help says above the options.
        examples: what the help says below them.
        run: the function that gets the settings, as ``module:name``, imported only when the command runs.
        positional: the option that values without a name belong to.
    """

    settings: type
    about: str
    examples: str
    run: str
    positional: str | None = None


COMMANDS = {
    "generate": Command(
        GenerateSettings,
        "Stream a text from a target, with any decoding method.",
        """\
  python -m decode generate --target runs/quickstart/target --draft runs/quickstart/export \\
      --prompt "Tom has 3 apples and buys 4 more. How many apples does he have?" --show
  python -m decode generate --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --method adasd --temperature 0.7 \\
      --chat --prompt "Why is the sky blue?"
  cat prompt.txt | python -m decode generate --target runs/quickstart/target --method prompt-lookup --json""",
        "decode.commands.generate:run",
    ),
    "demo": Command(
        DemoSettings,
        "Type prompts and watch each text being written without and with the draft, side by side, the tokens in the "
        "colours of who wrote them.",
        """\
  python -m decode demo --target runs/quickstart/target --draft runs/quickstart/export
  python -m decode demo --target runs/smollm2/target --draft runs/smollm2/export --method hybrid --temperature 0.7""",
        "decode.commands.demo:run",
    ),
    "bench": Command(
        BenchSettings,
        "Compare decoding methods with each other and with transformers: speed, acceptance, quality. Every prompt is "
        "given to all methods in turn; the table, report.json and an HTML page carry medians of paired ratios with "
        "bootstrap intervals. A run that was stopped goes on where it was. --dry-run does all of it in "
        "miniature, with tiny random models of the same families and no network, to find mistakes first. Grids of "
        "settings are swept by W&B: configs/sweeps/decode.yaml.",
        """\
  python -m decode bench --config configs/quickstart.yaml
  python -m decode bench --target T --draft D --methods vanilla,adasd,ears --suite gsm8k=test.jsonl --temperatures 0,1
  python -m decode bench --target T --draft before=A after=B --methods vanilla --draft-lengths 3,5,7 --limit 50""",
        "decode.commands.bench:run",
    ),
    "report": Command(
        ReportSettings,
        "One page for all runs: methods side by side with filters for suite, temperature and run, plots, and sample "
        "texts coloured by who wrote each token. One file, no server, nothing loaded from elsewhere.",
        """\
  python -m decode report runs/*
  python -m decode report runs/quickstart runs/bench --output methods.html""",
        "decode.report.all_runs:write_all_runs",
        positional="runs",
    ),
    "paper": Command(
        PaperSettings,
        "A paper's tables, ours beside theirs, and whether the orderings that it claims hold here, with their errors: "
        "adasd, adaptix, ears, adaspeed or adaspec. --scale quickstart uses the models of `make distill` and `make "
        "probe` on a CPU, gpu-small a pair of 39 M and 2 M parameters on one GPU (trained before by python -m distill "
        "--config configs/papers/gpu-small.yaml), full the paper's own models from the Hub. "
        "--dry-run does all of it in miniature, with tiny random models and no network.",
        """\
  python -m decode paper adasd --scale quickstart
  python -m decode paper adaptix --limit 4
  python -m decode paper ears --scale full --only qwen3-32b --dry-run""",
        "decode.papers.command:run",
        positional="paper",
    ),
    "profile": Command(
        ProfileSettings,
        "Can this draft make this target faster on this machine? Measures c (a draft forward), v(n) (an n-token target "
        "forward), bookkeeping and offline alpha, and predicts the speedup of every draft length.",
        """\
  python -m decode profile --target runs/quickstart/target --draft runs/quickstart/export
  python -m decode profile --target T --draft D --suite gsm8k=test.jsonl --temperature 1 --json""",
        "decode.commands.profile:run",
    ),
    "serve-check": Command(
        ServeCheckSettings,
        "Load an export in a real serving engine and compare what it accepts with what is predicted. Starts the engine "
        "on this machine, without and with the draft, greedy and sampled; names the cause where they differ. vLLM and "
        "llama.cpp are set up by make engines.",
        """\
  python -m decode serve-check --target runs/quickstart/target --draft runs/quickstart/export
  python -m decode serve-check --engine vllm --target T --draft D --suite arithmetic --draft-lengths 3,5,7
  python -m decode serve-check --engine llama.cpp --target T --draft D --gguf-type q8_0""",
        "decode.commands.engines.serve_check:run",
    ),
    "served": Command(
        ServedSettings,
        "Does a running server accept what the draft's profile says? Reads the metrics of vLLM, SGLang or llama.cpp "
        "and prints acceptance by position beside the profile's, a JSON line a reading, for a dashboard or a cron job.",
        """\
  python -m decode served --url http://127.0.0.1:8000 --profile runs/quickstart/export
  python -m decode served --url http://127.0.0.1:8000 --profile D --every 60 --wandb serving""",
        "decode.commands.engines.served:run",
    ),
    "what-if": Command(
        WhatIfSettings,
        "What would a draft of this shape bring in the engine, before it is trained? Times rounds with a draft of "
        "random weights beside the target alone, and says what they give at supposed acceptance rates.",
        """\
  python -m decode what-if --target runs/quickstart/target --draft-shape 64x2 --draft-lengths 3,5
  python -m decode what-if --target T --draft-shape 192x4 --acceptance 0.7,0.8 --json""",
        "decode.commands.engines.what_if:run",
    ),
    "datastore build": Command(
        StoreSettings,
        "Build REST's datastore (a suffix array over token ids) from texts. The folder also gets the tri-gram table.",
        """\
  python -m decode datastore build --tokenizer runs/quickstart/target --input train.jsonl notes.txt --output stores/own
  python -m decode datastore build --tokenizer runs/quickstart/target --input arithmetic --output stores/arithmetic""",
        "decode.commands.datastore:build_datastore",
    ),
    "trigrams build": Command(
        StoreSettings,
        "Build Adaptix's n-gram table from texts.",
        """\
  python -m decode trigrams build --tokenizer runs/quickstart/target --input train.jsonl --output stores/own""",
        "decode.commands.datastore:build_trigrams",
    ),
}


def _overview() -> str:
    lines = ["usage: python -m decode COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<16} {command.about.split('. ')[0].rstrip('.')}." for name, command in COMMANDS.items()]
    lines += [f"  {'methods':<16} List the decoding methods with their components.", ""]
    lines.append("python -m decode COMMAND --help lists a command's options with their defaults and examples.")
    return "\n".join(lines)


def _list_methods() -> None:
    from rich.console import Console
    from rich.table import Table

    from decode.methods import METHODS, is_lossless

    table = Table("method", "drafter", "stop rule", "acceptance rule", "output", box=None, pad_edge=False)
    for name, components in METHODS.items():
        table.add_row(name, *components, "[green]lossless" if is_lossless(name) else "[yellow]relaxed")
    Console().print(table)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_overview())
        return 0
    return run_main(lambda: _run(argv))


def _run(argv: list[str]) -> None:
    name, rest = argv[0], argv[1:]
    if name in ("datastore", "trigrams"):
        has_verb = rest and not rest[0].startswith("-")
        name, rest = f"{name} {rest[0] if has_verb else 'build'}", rest[1:] if has_verb else rest
    if name == "methods":
        return _list_methods()
    if name not in COMMANDS:
        raise UserError(unknown("command", name, [*COMMANDS, "methods"]))
    command = COMMANDS[name]
    if name == "bench":
        dry_run = take_flag(rest, "--dry-run")
        settings = bench_settings(rest, command.about, command.examples)
        if dry_run:
            from decode.commands.bench_dry_run import shrink

            settings = shrink(settings)
    else:
        settings = parse(
            command.settings,
            rest,
            prog=f"python -m decode {name}",
            description=command.about,
            examples=command.examples,
            positional=command.positional,
        )
    run = pkgutil.resolve_name(command.run)
    run(**vars(settings)) if name == "report" else run(settings)


if __name__ == "__main__":
    sys.exit(main())
