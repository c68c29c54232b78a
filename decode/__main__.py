"""``draftsmith decode``: generate, compare, profile, check in engines, and build the stores of retrieval drafters."""

import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

import yaml

from decode.commands.cli import parse, run_main
from decode.commands.settings import bench_settings
from decode.errors import choose

COMMANDS: dict[str, dict[str, str]] = yaml.safe_load(
    (Path(__file__).parent / "commands/commands.yaml").read_text("utf-8")
)
"""Every command has ``settings`` and ``run``, the dataclass of its options and the function that takes them, as
``module:name``, and ``about`` and ``examples``, the help above and below the options."""


def _list_methods() -> None:
    from decode.methods import METHODS, PROBE_STOPS, RULES, STOPS, is_lossless
    from decode.progress import fitting_table, output_console

    rows = [((name, "lossless" if is_lossless(name) else "relaxed", *METHODS[name]), "") for name in METHODS]
    console = output_console(highlight=False)
    console.print(fitting_table(("method", "output", "drafter", "stop rule", "acceptance rule"), rows))
    console.print(f"\n--stop-rule takes {', '.join(STOPS | PROBE_STOPS)}", f"--rule takes {', '.join(RULES)}", sep="\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    return run_main(lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> None:
    name = " ".join(argv[:2])
    name, rest = (name, argv[2:]) if name in COMMANDS else (" ".join(argv[:1]), argv[1:])
    if name in ("", "-h", "--help", "help"):
        firsts = {key: command["about"].split(". ")[0].rstrip(".") for key, command in COMMANDS.items()}
        lines = [f"  {key:<16} {text}." for key, text in (firsts | {"methods": "List the decoding methods"}).items()]
        print("usage: draftsmith decode COMMAND [options]", "", "commands:", *lines, sep="\n")
        return print("\ndraftsmith decode COMMAND --help lists a command's options with their defaults and examples.")
    if name == "methods":
        return _list_methods()
    command = choose("command", name, COMMANDS | {"methods": {}})
    about, examples = command["about"], indent(command["examples"], "  ")
    if name == "paper" and rest and not rest[0].startswith("-"):
        rest.insert(0, "--paper")
    if name == "bench":
        settings = bench_settings(rest, about, examples)
    else:
        settings = parse(pkgutil.resolve_name(command["settings"]), rest, f"draftsmith decode {name}", about, examples)
    pkgutil.resolve_name(command["run"])(settings)


if __name__ == "__main__":
    sys.exit(main())
