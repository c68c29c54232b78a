"""``python -m decode``: generate, compare, profile, check in engines, and build the stores of retrieval drafters."""

import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from decode.commands.parsing import parse, run_main
from decode.commands.settings import bench_settings
from decode.errors import choose

COMMANDS: dict[str, dict[str, str]] = yaml.safe_load(
    (Path(__file__).parent / "commands/commands.yaml").read_text("utf-8")
)
"""Every command has ``settings`` and ``run``, the dataclass of its options and the function that takes them, as
``module:name``; ``about`` and ``examples``, the help above and below the options; and optionally ``positional``, the
option that values without a name belong to."""


def _overview() -> str:
    lines = ["usage: python -m decode COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<16} {command['about'].split('. ')[0].rstrip('.')}." for name, command in COMMANDS.items()]
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
    words = 2 if " ".join(argv[:2]) in COMMANDS else 1
    name, rest = " ".join(argv[:words]), argv[words:]
    if name == "methods":
        return _list_methods()
    command = choose("command", name, COMMANDS | {"methods": {}})
    examples = indent(command["examples"], "  ")
    if "positional" in command and rest and not rest[0].startswith("-"):
        rest.insert(0, f"--{command['positional']}")
    if name == "bench":
        settings = bench_settings(rest, command["about"], examples)
    else:
        settings_class: type[Any] = pkgutil.resolve_name(command["settings"])
        prog = f"python -m decode {name}"
        settings = parse(settings_class, rest, prog=prog, description=command["about"], examples=examples)
    run = pkgutil.resolve_name(command["run"])
    run(**vars(settings)) if name == "report" else run(settings)


if __name__ == "__main__":
    sys.exit(main())
