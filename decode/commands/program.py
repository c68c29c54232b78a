"""``draftsmith``: the commands of the three packages as one program."""

import pkgutil
import sys
from importlib.metadata import version

from decode.commands.cli import run_main
from decode.errors import choose

PACKAGES = {
    "distill": ("distill", "train drafts for a target, measure and export them"),
    "probe": ("probes", "train acceptance probes, and compare early exits"),
    "decode": ("decode", "write texts with a draft, compare methods, check a draft in an engine"),
}
"""Every command with the package whose ``python -m`` it is, and what it does."""


def main() -> int:
    """Run the command that the arguments name; returns the exit status."""
    return run_main(lambda: _run(*sys.argv[1:] or ["--help"]))


def _run(first: str, *rest: str) -> None:
    if first == "--version":
        return print("draftsmith", version("draftsmith"))
    if first in ("-h", "--help"):
        print("usage: draftsmith COMMAND [options]", "", "commands:", sep="\n")
        print(*(f"  {name:<8} {about}" for name, (_, about) in PACKAGES.items()), sep="\n")
        return print("\ndraftsmith COMMAND --help lists a command's options. --version prints the version.")
    package, _ = choose("command", first, PACKAGES)
    raise SystemExit(pkgutil.resolve_name(f"{package}.__main__:main")(list(rest)))
