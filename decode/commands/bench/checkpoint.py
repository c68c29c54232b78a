"""Finished blocks of a benchmark that was stopped, and the fingerprint of everything that a benchmark depends on."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from decode.commands.bench.settings import BenchSettings
from decode.core.atomic_files import read_json, write_text
from decode.core.errors import UserError
from decode.measure.bench.compare_methods import ResultBlock


def draft_names(given: Sequence[str]) -> dict[str, str]:
    """Names and paths of ``NAME=PATH`` or plain paths, which are called by their last parts.

    Raises:
        UserError: two drafts of one name.
    """
    named: dict[str, str] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not equals:
            parts, path = Path(item).parts, item
            name = parts[-1] if parts[-1] not in named else "/".join(parts[-2:])
        if name in named:
            raise UserError(f"two drafts are called {name!r}; name them: --draft one=PATH two=PATH")
        named[name] = path
    return named


class Checkpoint:
    """Finished blocks of a run that was stopped, kept as long as settings and weights are the same."""

    def __init__(self, path: Path, settings: BenchSettings) -> None:
        self.path = path
        self.key = fingerprint(settings)
        self.blocks: list[ResultBlock] = []

    def read(self) -> list[ResultBlock]:
        """Blocks that need not be measured again."""
        content = read_json(self.path)
        if content.get("key") == self.key:
            self.blocks = [ResultBlock(**block) for block in content["blocks"]]
        return list(self.blocks)

    def add(self, block: ResultBlock) -> None:
        """Keep a block that is complete."""
        self.blocks.append(block)
        content = {"key": self.key, "blocks": [dataclasses.asdict(block) for block in self.blocks]}
        write_text(self.path, json.dumps(content))

    def clear(self) -> None:
        """Everything is measured: the next run starts afresh."""
        self.path.unlink(missing_ok=True)


def fingerprint(settings: BenchSettings) -> str:
    """Of the settings, and of the weights that lie in the models' folders."""
    facts: dict[str, Any] = dataclasses.asdict(settings)
    for name in filter(None, (settings.target, *draft_names(settings.draft).values(), settings.probes)):
        path = Path(name)
        files = [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.gguf")])
        weights = {file: file.stat() for file in files}
        facts[f"weights of {name}"] = [(str(file), state.st_size, state.st_mtime_ns) for file, state in weights.items()]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
