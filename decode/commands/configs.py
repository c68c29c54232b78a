"""Settings of ``bench`` from a configuration that also serves ``distill`` and ``probes``."""

from __future__ import annotations

import contextlib
import difflib
from pathlib import Path
from typing import Any

from decode.commands import settings as s
from decode.commands.arguments import tidy
from decode.commands.command_line import merge, parse, read_layers
from decode.core.errors import UserError


def configured(argv: list[str], config: Path) -> s.BenchSettings:
    """The section ``bench`` of a configuration, with what follows from its other sections.

    Args:
        argv: arguments of the command, the configuration among them.
        config: the file.

    Raises:
        UserError: a file that is missing or not valid, or an unknown key.
    """
    content: dict[str, Any] = {}
    with contextlib.suppress(UserError):  # the parser reads it again and says where it is wrong
        for _, layer in read_layers(config):
            content = merge(content, layer)
    own = {"bench", "name", "output_dir"}
    near = {key: difflib.get_close_matches(str(key), own, 1, 0.75) for key in content if key not in own}
    foreign = {key for key, match in near.items() if not match}
    tidied = tidy(argv, s.BenchSettings, "bench.")
    file = parse(s.BenchFile, tidied, prog="python -m decode bench", description="", foreign=foreign)
    settings, run = file.bench, Path(file.output_dir) / file.name
    given = content.get("bench") or {}
    if "suite" not in given and not any(item.startswith("--bench.suite") for item in tidied):
        settings.suite = s.default_suites(content.get("data"))
    settings.target = settings.target or str(run / "target")
    if not settings.draft and (run / "draft").is_dir():
        settings.draft = [str(run / "draft")]
    settings.output = settings.output or str(run)
    return settings
