"""How a row of each known data set becomes a prompt and a response: the entries of ``data_presets.yaml``."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined, Template, TemplateError

from decode.core.errors import UserError

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Preset:
    """One data set's templates, and where it lives; ``data_presets.yaml`` says what each of its keys means."""

    columns: Sequence[str]
    templates: Mapping[str, str]
    """Jinja templates of ``prompt``, ``response`` and ``said``, as far as there are any."""
    hub: str | None = None
    config: str | None = None
    splits: Mapping[str, str] = field(default_factory=lambda: {"train": "train", "test": "test"})
    kind: str = "pairs"
    scorer: str | None = None
    key: str = ""
    category: str = ""
    groups: Mapping[str, str] = field(default_factory=dict)
    several_turns: bool = False
    last_keys: Mapping[str, int] = field(default_factory=dict)

    def prompt(self, row: Row) -> str:
        """What a model continues.

        Raises:
            UserError: a row without its turns.
            ValueError: a row that does not fit the template.
        """
        return self._filled("prompt", row) if "prompt" in self.templates else self.turns(row)[0]

    def response(self, row: Row) -> str:
        """What the model should answer, as text to train on; raises as `prompt` does."""
        return self._filled("response", row)

    @property
    def said(self) -> Callable[[Row], str] | None:
        """What a user says to a chat model; None: the prompt."""
        return (lambda row: self._filled("said", row)) if "said" in self.templates else None

    def turns(self, row: Row) -> tuple[str, ...]:
        """What the user says, turn by turn, where a row has several; empty where it has one."""
        if not self.several_turns:
            return ()
        if self.kind == "chat":
            return tuple(message["content"] for message in row["messages"] if message["role"] == "user")
        turns = row.get("turns") or row.get("prompt")  # the Hub's copy of MT-Bench calls them prompt
        if not isinstance(turns, list | tuple) or not all(isinstance(turn, str) for turn in turns):
            raise UserError(
                f"a row needs its turns as a list of texts in the column turns; its columns: {', '.join(row)}"
            )
        return tuple(turns)

    def split_of(self, row: Row) -> str | None:
        """The official split of a row of a file that holds all splits; None where a file is one split."""
        return next((split for split, last in self.last_keys.items() if row[self.key] <= last), None)

    def _filled(self, name: str, row: Row) -> str:
        try:
            return _template(self.templates[name]).render(row)
        except TemplateError as error:
            raise ValueError(str(error)) from error


def held_out(prompt: str, fraction: float = 0.05) -> str:
    """The split (train, validation, test) of a row whose source has no such splits, by a hash of its prompt.

    ``fraction`` of all prompts validate, as many test, the rest train. Equal prompts are in one split.
    """
    place = int.from_bytes(hashlib.blake2b(prompt.encode(), digest_size=6).digest(), "big") / 2**48
    return "validation" if place < fraction else "test" if place < 2 * fraction else "train"


@cache
def _template(source: str) -> Template:
    environment = Environment(keep_trailing_newline=True, undefined=StrictUndefined)
    environment.filters["innermost"] = _innermost
    return environment.from_string(source)


def _innermost(value: Any) -> str:
    """The first text of a list, however deep a data set nests it; empty where there is none."""
    while isinstance(value, list):
        value = value[0] if value else ""
    return str(value or "")


def _presets() -> dict[str, Preset]:
    found = {}
    for name, entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")).items():
        templates = {key: entry.pop(key) for key in ("prompt", "response", "said") if key in entry}
        groups = {category: group for group, of in entry.pop("groups", {}).items() for category in of}
        found[name] = Preset(templates=templates, several_turns=entry.pop("turns", False), groups=groups, **entry)
    return found


PRESETS = _presets()  # every known data set by its name in ``data.source`` and ``--suite``
