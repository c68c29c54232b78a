"""Texts that a model has written, kept one line each.

A file holds a JSON line for every finished text. A line counts if it is complete and agrees with its checksum, so a
kill costs no more than the line being written, and an altered line is written again. The manifest beside it says what
the file was made from; a file with another one is begun anew.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from decode.errors import write_safely
from distill.files import write_json


@dataclass(frozen=True)
class Response:
    """What was written for a prompt.

    Attributes:
        example: Number of the prompt.
        ids: Token ids, an end-of-text token included where the text ended by itself.
    """

    example: int
    ids: list[int]

    def line(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """Its line in the file; the text is for readers."""
        values = {"example": self.example, "ids": self.ids, "text": tokenizer.decode(self.ids)}
        return json.dumps(values | {"crc32": _checksum(self)}, ensure_ascii=False) + "\n"


def _checksum(response: Response) -> int:
    return zlib.crc32(json.dumps([response.example, response.ids]).encode())


@dataclass
class ResponseFile:
    """Texts of a model on disk: the responses to a split's prompts, or samples of prompts.

    Attributes:
        path: The file (``.jsonl``); its manifest is beside it (``.json``).
        made_from: Everything that decides what is in it.
        found: The sound lines that were there, by example.
    """

    path: Path
    made_from: dict[str, Any]
    found: dict[int, Response] = field(default_factory=dict)

    def open(self) -> None:
        """Reads what is there; drops lines that are torn or altered. A file made from something else is set aside."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._same():
            if self.path.exists():  # it may have taken hours
                self.path.replace(self.path.with_suffix(".old.jsonl"))
            write_json(self._manifest, self.made_from)
        sound, all_sound = self._read()
        if not all_sound:
            write_safely(self.path, lambda file: file.write_bytes(b"".join(sound)))

    def complete(self, count: int) -> bool:
        """Whether so many examples, or more, have a sound line, without changing anything."""
        return self._same() and self._read()[1] and len(self.found) >= count

    def read(self) -> dict[int, Response]:
        """The sound lines that are there, without changing anything; none of a file made from something else."""
        if not self._same():
            return {}
        self._read()
        return self.found

    def fill(self, responses: Iterable[Response], tokenizer: PreTrainedTokenizerBase) -> Iterator[Response]:
        """Writes a line for each response that has none yet, at once; returns those."""
        with self.path.open("a", encoding="utf-8") as file:
            for response in responses:
                if response.example in self.found:  # written again only because its batch was
                    continue
                file.write(response.line(tokenizer))
                file.flush()
                self.found[response.example] = response
                yield response

    def _read(self) -> tuple[list[bytes], bool]:
        """Fills `found`; returns the sound lines, and whether all are."""
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        sound = {line: response for line in lines if (response := _parse(line)) is not None}
        self.found = {response.example: response for response in sound.values()}
        return list(sound), len(self.found) == len(lines)

    @property
    def _manifest(self) -> Path:
        return self.path.with_suffix(".json")

    def _same(self) -> bool:
        try:
            return bool(json.loads(self._manifest.read_text(encoding="utf-8")) == self.made_from)
        except (OSError, ValueError):
            return False


def _parse(line: bytes) -> Response | None:
    try:
        values = json.loads(line)
        response = Response(int(values["example"]), [int(token) for token in values["ids"]])
        return response if line.endswith(b"\n") and values["crc32"] == _checksum(response) else None
    except (ValueError, KeyError, TypeError):
        return None
