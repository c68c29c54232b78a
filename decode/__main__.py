"""``python -m decode``: generate, compare, profile, and build what retrieval drafts from."""

import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import yaml

from decode.commands.parsing import parse, run_main, take_flag
from decode.commands.settings import bench_settings
from decode.errors import choose


@dataclass(frozen=True)
class Command:
    """A subcommand: an entry of ``commands/commands.yaml``."""

    settings: str  # the dataclass of its options, as ``module:name``
    run: str  # the function that gets the settings, likewise, imported only when the command runs
    about: str  # what the help says above the options
    examples: str  # what the help says below them
    positional: str | None = None  # the option that values without a name belong to


COMMANDS = {
    name: Command(**entry)
    for name, entry in yaml.safe_load((Path(__file__).parent / "commands/commands.yaml").read_text("utf-8")).items()
}


def _overview() -> str:
    lines = ["usage: python -m decode COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<16} {command.about.split('. ')[0].rstrip('.')}." for name, command in COMMANDS.items()]
    lines += [f"  {'methods':<16} List the decoding methods with their components.", ""]
    lines.append("python -m decode COMMAND --help lists a command's options with their defaults and examples.")
    return "\n".join(lines)


def _list_methods() -> None:
    from rich.table import Table

    from decode.methods import METHODS, is_lossless
    from decode.progress import output_console

    table = Table("method", "drafter", "stop rule", "acceptance rule", "output", box=None, pad_edge=False)
    for name, components in METHODS.items():
        table.add_row(name, *components, "[green]lossless" if is_lossless(name) else "[yellow]relaxed")
    output_console().print(table)


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
    command = choose("command", name, COMMANDS | {"methods": COMMANDS["bench"]})
    examples = indent(command.examples, "  ")
    if name == "bench":
        dry_run = take_flag(rest, "--dry-run")
        settings = bench_settings(rest, command.about, examples)
        if dry_run:
            from decode.commands.dry_run import shrink

            settings = shrink(settings)
    else:
        settings = parse(
            pkgutil.resolve_name(command.settings),
            rest,
            prog=f"python -m decode {name}",
            description=command.about,
            examples=examples,
            positional=command.positional,
        )
    run = pkgutil.resolve_name(command.run)
    run(**vars(settings)) if name == "report" else run(settings)


if __name__ == "__main__":
    sys.exit(main())
