"""``python -m decode``: generate, compare, profile, and build what retrieval drafts from."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decode.commands import settings as s
from decode.commands.arguments import tidy
from decode.commands.command_line import parse, run_main, take_flag
from decode.commands.configs import configured
from decode.core.errors import UserError, unknown


@dataclass(frozen=True)
class Command:
    """A subcommand: its settings, what the help says, and where its code is (imported only when it runs)."""

    settings: type
    about: str
    examples: str
    run: Callable[[Any], None]


def _generate(settings: s.GenerateSettings) -> None:
    from decode.commands.generate import run

    run(settings)


def _bench(settings: s.BenchSettings) -> None:
    from decode.commands.bench import run

    run(settings)


def _dry_bench(settings: s.BenchSettings) -> None:
    from decode.commands.bench import run
    from decode.commands.bench_dry_run import shrink

    run(shrink(settings))


def _profile(settings: s.ProfileSettings) -> None:
    from decode.commands.profile import run

    run(settings)


def _datastore(settings: s.StoreSettings) -> None:
    from decode.commands.datastore import build_datastore

    build_datastore(settings)


def _trigrams(settings: s.StoreSettings) -> None:
    from decode.commands.datastore import build_trigrams

    build_trigrams(settings)


def _paper(settings: s.PaperSettings) -> None:
    from decode.papers.command import run

    run(settings)


def _report(settings: s.ReportSettings) -> None:
    from decode.report.all_runs import write_overview

    write_overview(settings.runs, settings.output)


COMMANDS = {
    "generate": Command(
        s.GenerateSettings,
        "Stream a text from a target, with any decoding method.",
        """
  python -m decode generate --target runs/quickstart/target --draft runs/quickstart/draft \\
      --prompt "Tom has 3 apples and buys 4 more. How many apples does he have?" --show
  python -m decode generate --target Qwen/Qwen3-4B --draft Qwen/Qwen3-0.6B --method adasd --temperature 0.7 \\
      --chat --prompt "Why is the sky blue?"
  cat prompt.txt | python -m decode generate --target runs/quickstart/target --method prompt-lookup --json""",
        _generate,
    ),
    "bench": Command(
        s.BenchSettings,
        "Compare decoding methods with each other and with transformers: speed, acceptance, quality. Every prompt is "
        "given to all methods in turn; the table, report.json and an HTML page carry medians of paired ratios with "
        "bootstrap intervals. A run that was stopped goes on where it was. --dry-run does all of it in "
        "miniature, with tiny random models of the same families and no network, to find mistakes first. Grids of "
        "settings are swept by W&B: configs/sweeps/decode.yaml.",
        """
  python -m decode bench --config configs/quickstart.yaml
  python -m decode bench --target T --draft D --methods vanilla,adasd,ears --suite gsm8k=test.jsonl --temperatures 0,1
  python -m decode bench --target T --draft before=A after=B --methods vanilla --draft-lengths 3,5,7 --limit 50""",
        _bench,
    ),
    "report": Command(
        s.ReportSettings,
        "One page for all runs: methods side by side with filters for suite, temperature and run, plots, and sample "
        "texts coloured by who wrote each token. One file, no server, nothing loaded from elsewhere.",
        """
  python -m decode report runs/*
  python -m decode report runs/quickstart runs/bench --output methods.html""",
        _report,
    ),
    "paper": Command(
        s.PaperSettings,
        "A paper's tables, ours beside theirs, and whether the orderings that it claims hold here, with their errors: "
        "adasd, adaptix, ears, adaspeed or adaspec. --scale quickstart uses the models of `make distill` and `make "
        "probe` on a CPU, gpu-small trains a pair of 39 M and 2 M parameters on one GPU first, full takes the paper's "
        "own models from the Hub. --dry-run does all of it in miniature, with tiny random models and no network.",
        """
  python -m decode paper adasd --scale quickstart
  python -m decode paper adaptix --limit 4
  python -m decode paper ears --scale full --only qwen3-32b --dry-run""",
        _paper,
    ),
    "profile": Command(
        s.ProfileSettings,
        "Can this draft make this target faster on this machine? Measures c (a draft forward), v(n) (an n-token target "
        "forward), bookkeeping and offline alpha, and predicts the speedup of every draft length.",
        """
  python -m decode profile --target runs/quickstart/target --draft runs/quickstart/draft
  python -m decode profile --target T --draft D --suite gsm8k=test.jsonl --temperature 1 --json""",
        _profile,
    ),
    "datastore build": Command(
        s.StoreSettings,
        "Build REST's datastore (a suffix array over token ids) from texts. The folder also gets the tri-gram table.",
        """
  python -m decode datastore build --tokenizer runs/quickstart/target --input train.jsonl notes.txt --output stores/own
  python -m decode datastore build --tokenizer runs/quickstart/target --input arithmetic --output stores/arithmetic""",
        _datastore,
    ),
    "trigrams build": Command(
        s.StoreSettings,
        "Build Adaptix's n-gram table from texts.",
        """
  python -m decode trigrams build --tokenizer runs/quickstart/target --input train.jsonl --output stores/own""",
        _trigrams,
    ),
}


def _overview() -> str:
    lines = ["usage: python -m decode COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<16} {command.about.split('. ')[0].rstrip('.')}." for name, command in COMMANDS.items()]
    lines += [f"  {'methods':<16} List the decoding methods with their parts.", ""]
    lines.append("python -m decode COMMAND --help lists a command's options with their defaults and examples.")
    return "\n".join(lines)


def _methods() -> None:
    from rich.console import Console
    from rich.table import Table

    from decode.methods import METHODS, is_lossless

    table = Table("method", "who drafts", "when drafting stops", "what is kept", "output", box=None, pad_edge=False)
    for name, parts in METHODS.items():
        table.add_row(name, *parts, "[green]lossless" if is_lossless(name) else "[yellow]relaxed")
    Console().print(table)


def _help(name: str, command: Command) -> None:
    """The parser's help with hyphens in the options, followed by examples."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        parse(command.settings, ["--help"], prog=f"python -m decode {name}", description=command.about)
    hyphens = re.sub(r"--[a-z]\w*", lambda match: match[0].replace("_", "-"), shown.getvalue())
    hyphens = re.sub(r", --[a-z-]+\+ \[ITEM,...\]", "", hyphens)
    hyphens = re.sub(r"usage: .*?\n\n", f"usage: python -m decode {name} [options]\n\n", hyphens, count=1, flags=re.S)
    print(hyphens.rstrip() + f"\n\nexamples:{command.examples}")


def _bench_settings(argv: list[str], config: str | None) -> s.BenchSettings:
    if config is not None:
        return configured(argv, Path(config))
    tidied = tidy(argv, s.BenchSettings)
    return parse(s.BenchSettings, tidied, prog="python -m decode bench", description=COMMANDS["bench"].about)


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
        name += f" {rest[0]}" if rest and not rest[0].startswith("-") else " build"
        rest = rest[1:] if rest and not rest[0].startswith("-") else rest
    if name == "methods":
        _methods()
        return
    if name not in COMMANDS:
        raise UserError(unknown("command", name, [*COMMANDS, "methods"]))
    if name == "paper" and rest and not rest[0].startswith("-"):
        rest = ["--paper", *rest]
    command = COMMANDS[name]
    dry_run = name == "bench" and take_flag(rest, "--dry-run")
    if "-h" in rest or "--help" in rest:
        _help(name, command)
        return
    if name == "bench":
        configs = [after for item, after in zip(rest, [*rest[1:], ""]) if item == "--config"]
        configs += [item.partition("=")[2] for item in rest if item.startswith("--config=")]
        config = configs[-1] if configs else None
        (_dry_bench if dry_run else command.run)(_bench_settings(rest, config))
        return
    if name == "report":  # its runs need no option
        rest = rest if not rest or rest[0].startswith("--") else ["--runs", *rest]
    tidied = tidy(rest, command.settings)
    command.run(parse(command.settings, tidied, prog=f"python -m decode {name}", description=command.about))


if __name__ == "__main__":
    sys.exit(main())
